//! Values of a dropped buffer, whose memory may have another owner.

use aquifer::{Error, PinnedBuffer};

fn wrong(host: PinnedBuffer<u8>) -> Result<u8, Error> {
    let values = host.read()?;
    drop(host);
    Ok(values[0])
}

fn main() {}
