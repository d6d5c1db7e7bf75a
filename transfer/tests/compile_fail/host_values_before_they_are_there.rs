//! Going on with values on the host that were not waited for.

use aquifer_allocator::Buffer;
use aquifer_device::Stream;
use aquifer_transfer::{Transfer, TransferError};

fn wrong(transfer: &Transfer, stream: &Stream, device: &Buffer<f32>) -> Result<f32, TransferError> {
    transfer.to_vec(device)?.then(stream, |_, values| values[0])
}

fn main() {}
