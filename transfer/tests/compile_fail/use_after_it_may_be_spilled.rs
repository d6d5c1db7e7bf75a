//! Device memory that outlives the access that keeps it on the device.

use aquifer_allocator::Buffer;
use aquifer_device::Stream;
use aquifer_transfer::{Spillable, TransferError};

fn wrong<'a>(cache: &'a Spillable<f32>, stream: &Stream) -> Result<&'a Buffer<f32>, TransferError> {
    let access = cache.access(stream)?;
    Ok(&access)
}

fn main() {}
