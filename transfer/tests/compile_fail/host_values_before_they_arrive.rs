//! Use of values on the host without waiting for them.

use aquifer_allocator::Buffer;
use aquifer_device::Stream;
use aquifer_transfer::{Transfer, TransferError};

fn wrong(transfer: &Transfer, stream: &Stream, device: &Buffer<f32>) -> Result<f32, TransferError> {
    transfer.to_vec(device)?.then(stream, |_, values| values[0])
}

fn main() {}
