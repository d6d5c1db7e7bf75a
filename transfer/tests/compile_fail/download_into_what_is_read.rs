//! A download into memory that the host is reading.

use aquifer_allocator::DeviceBuffer;
use aquifer_transfer::{PinnedBuffer, Transfer, TransferError};

fn wrong(
    transfer: &Transfer,
    device: &DeviceBuffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<f32, TransferError> {
    let values = host.read()?;
    transfer.download(device, &mut host)?.wait()?;
    Ok(values[0])
}

fn main() {}
