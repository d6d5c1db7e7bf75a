//! A second owner, which could write while the first reads.

use aquifer::PinnedBuffer;

fn wrong(host: &PinnedBuffer<u8>) -> PinnedBuffer<u8> {
    host.clone()
}

fn main() {}
