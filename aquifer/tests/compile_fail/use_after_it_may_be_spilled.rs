//! Device memory that outlives the access that keeps it on the device.

use aquifer::{Buffer, Error};
use aquifer_device::Stream;
use aquifer::transfer::Spillable;

fn wrong<'a>(cache: &'a Spillable<f32>, stream: &Stream) -> Result<&'a Buffer<f32>, Error> {
    let access = cache.access(stream)?;
    Ok(&access)
}

fn main() {}
