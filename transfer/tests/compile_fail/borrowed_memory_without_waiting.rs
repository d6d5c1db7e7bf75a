//! A copy that does not wait from memory that is only borrowed. A scope waits at its end.

use aquifer_allocator::DeviceBuffer;
use aquifer_device::Stream;
use aquifer_transfer::{Pending, Transfer, TransferError};

fn wrong(
    transfer: &Transfer,
    stream: &Stream,
    values: &[f32],
) -> Result<Pending<DeviceBuffer<f32>>, TransferError> {
    transfer.to_device(values, stream)
}

fn main() {}
