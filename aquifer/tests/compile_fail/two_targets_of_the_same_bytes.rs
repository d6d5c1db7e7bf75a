//! Two parts to download into, which may overlap. `split_at` returns two that do not.

use aquifer::{Error, PinnedBuffer};

fn wrong(mut host: PinnedBuffer<u8>) -> Result<(), Error> {
    let mut head = host.slice_mut(0..5);
    let mut tail = host.slice_mut(4..8);
    head.write()?[4] = tail.write()?[0];
    Ok(())
}

fn main() {}
