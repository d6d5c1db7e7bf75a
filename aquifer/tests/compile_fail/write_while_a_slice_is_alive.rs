//! Writing to a buffer of which a part is still to be uploaded.

use aquifer::{Error, PinnedBuffer};

fn wrong(mut host: PinnedBuffer<u8>) -> Result<u8, Error> {
    let part = host.slice(4..8);
    host.write()?[5] = 1;
    Ok(part.read()?[1])
}

fn main() {}
