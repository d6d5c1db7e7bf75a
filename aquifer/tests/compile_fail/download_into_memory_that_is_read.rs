//! A download into memory that the host is reading.

use aquifer::{Buffer, Error, PinnedBuffer};
use aquifer::transfer::Transfer;

fn wrong(
    transfer: &Transfer,
    device: &Buffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<f32, Error> {
    let values = host.read()?;
    transfer.download(device, &mut host)?.wait()?;
    Ok(values[0])
}

fn main() {}
