//! An upload from memory that the host is writing.

use aquifer::{Buffer, Error, PinnedBuffer};
use aquifer::transfer::Transfer;

fn wrong(
    transfer: &Transfer,
    device: &mut Buffer<f32>,
    mut host: PinnedBuffer<f32>,
) -> Result<(), Error> {
    let mut values = host.write()?;
    let pending = transfer.upload(&host, device)?;
    values[0] = 1.0;
    pending.wait()
}

fn main() {}
