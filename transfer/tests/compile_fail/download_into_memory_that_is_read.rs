//! A download into memory that the host is reading.

use aquifer_allocator::Buffer;
use aquifer_transfer::{PinnedBuffer, Transfer, TransferError};

fn wrong(
    transfer: &Transfer,
    device: &Buffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<f32, TransferError> {
    let values = host.read()?;
    transfer.download(device, &mut host)?.wait()?;
    Ok(values[0])
}

fn main() {}
