//! Values that a device could turn into something invalid.

use aquifer::{Error, PinnedBuffer};
use aquifer::transfer::PinnedPool;

fn wrong(pool: &PinnedPool) -> Result<PinnedBuffer<char>, Error> {
    pool.alloc(10)
}

fn main() {}
