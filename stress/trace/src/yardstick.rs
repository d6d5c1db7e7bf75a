//! The yardstick: the crate `offset-allocator`, a bare index over one range of numbers, without
//! accounting, locks, streams or a device. Benchmarks measure it together with the allocator, in
//! the same loop.

use std::fmt;

use offset_allocator::{Allocation, Allocator};

use crate::subject::{Refused, Subject};

/// Bytes of a unit of the index.
const UNIT: u64 = 512;

/// The yardstick as a [`Subject`].
pub struct Yardstick(Allocator<u32>);

impl fmt::Debug for Yardstick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Yardstick").field(&self.0.storage_report()).finish()
    }
}

impl Yardstick {
    /// A yardstick with space for `live` blocks of `bytes` bytes in all: four times the bytes, and
    /// the minimum of each block, up to its limit of 2 TiB.
    pub fn new(bytes: u64, live: u32) -> Yardstick {
        // A block needs a node, and at most one for the gap after it.
        let nodes = live.saturating_mul(2).saturating_add(64).min(u32::MAX - 2);
        let room = units(bytes.saturating_mul(4)).unwrap_or(u32::MAX);
        Yardstick(Allocator::with_max_allocs(room.saturating_add(nodes), nodes))
    }
}

/// The number of units for `bytes`, at least one; `None` if it is too large.
fn units(bytes: u64) -> Option<u32> {
    u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()
}

impl Subject for Yardstick {
    type Handle = Allocation<u32>;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Result<Allocation<u32>, Refused> {
        units(bytes).and_then(|units| self.0.allocate(units)).ok_or(Refused::OutOfMemory(None))
    }

    #[inline]
    fn free(&mut self, handle: Allocation<u32>) {
        self.0.free(handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_serves_and_refuses() {
        let mut yardstick = Yardstick::new(4 << 20, 4);
        let blocks: Vec<_> = (0..4).map(|_| yardstick.alloc(1 << 20, 0).unwrap()).collect();
        blocks.into_iter().for_each(|block| yardstick.free(block));
        assert!(yardstick.alloc(0, 0).is_ok());
        assert!(matches!(yardstick.alloc(u64::MAX, 0), Err(Refused::OutOfMemory(_))));
        let mut yardstick = Yardstick::new(0, 1000);
        let empty: Result<Vec<_>, _> = (0..1000).map(|_| yardstick.alloc(0, 0)).collect();
        assert!(empty.is_ok(), "blocks without bytes take space, too");
        let _counts_to_its_limit = Yardstick::new(u64::MAX, 4);
    }
}
