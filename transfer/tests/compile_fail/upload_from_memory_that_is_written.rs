//! An upload from memory that the host is writing.

use aquifer_allocator::Buffer;
use aquifer_transfer::{PinnedBuffer, Transfer, TransferError};

fn wrong(
    transfer: &Transfer,
    device: &mut Buffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<(), TransferError> {
    let values = host.write()?;
    let pending = transfer.upload(&host, device)?;
    values[0] = 1.0;
    pending.wait()
}

fn main() {}
