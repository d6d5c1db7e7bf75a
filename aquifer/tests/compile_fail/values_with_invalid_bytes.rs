//! Values that a device could turn into something invalid.

use aquifer::PinnedBuffer;
use aquifer::transfer::{PinnedPool, TransferError};

fn wrong(pool: &PinnedPool) -> Result<PinnedBuffer<char>, TransferError> {
    pool.alloc(10)
}

fn main() {}
