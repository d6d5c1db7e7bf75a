//! Writing to a buffer of which a part is still to be uploaded.

use aquifer_transfer::{PinnedBuffer, TransferError};

fn wrong(mut host: PinnedBuffer<u8>) -> Result<u8, TransferError> {
    let part = host.slice(4..8);
    host.write()?[5] = 1;
    Ok(part.read()?[1])
}

fn main() {}
