//! Deferred coalescing: blocks that are freed, but not yet merged with their neighbours.
//!
//! Programs mostly ask for the size that they have just given back. So the coalescing of a block
//! that is given back is *deferred*: the next request, if it is for exactly this size and from the
//! same pool, gets it as it is, and nothing is cut, joined or indexed. Any other operation merges
//! it first, so at most one block is deferred, and all other decisions of the heap are made as if
//! none were.
//!
//! **In a heap of many small blocks several small ones are deferred**, because its records are not
//! in the processor's caches: the processor is asked for a block's record when the block is
//! deferred, and for those of its neighbours one pair of operations before the block is merged. It
//! works on the three pairs between meanwhile, instead of waiting. A search that fails merges them
//! all and starts again, so nothing is refused and nothing grows because of them. Large blocks, and
//! requests for them, find what they would find if none were deferred: small blocks never serve
//! these, and where large ones are taken decides how much memory a program needs.
//!
//! Invariants:
//! * the record of a deferred block is that of a live one. Others never see that, because a thread
//!   that holds every lock merges first;
//! * blocks are merged in the order in which they were given back, which is the order of their
//!   ticks.

use super::recent::Use;
use super::{Block, BlockId, Heap, State, moves};
use crate::size_class::SMALL_SIZE;

/// Blocks that may be deferred besides the newest in a heap of many small ones.
const OLDER: usize = 3;
/// From this many records on, a heap has many blocks: they take 256 KiB. Few in tests, so that
/// these get there.
const MANY: usize = if cfg!(test) { 64 } else { 4096 };

/// A deferred block, or none. Its words are read one by one: read together, as wider words than
/// were written, they would have the processor wait for the stores.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeferredBlock {
    /// 0 if there is none.
    size: u64,
    block: BlockId,
    /// The tick of the home stream until which the block was used.
    after: u64,
}

/// The deferred blocks.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// The one that came last.
    newest: DeferredBlock,
    /// True if small blocks stay deferred among the older ones. Otherwise there are no older ones.
    several: bool,
    /// Small blocks that came before, a ring.
    older: [DeferredBlock; OLDER],
    /// Where the oldest of them is, if there are as many as may be; the next one takes its place.
    oldest: usize,
}

impl Heap {
    /// Frees a live block of `size` bytes of the home stream and defers its coalescing; it is given
    /// back as by [`Heap::give`] before anything depends on that. The place of the newest must be
    /// vacant.
    #[inline]
    pub(crate) fn give_deferred(&mut self, block: BlockId, size: u64, after: u64) {
        debug_assert!(self.blocks[block].state == State::Live && self.blocks[block].owner == self.home);
        debug_assert_eq!(self.deferred.newest.size, 0);
        let newest = &mut self.deferred.newest;
        (newest.size, newest.block, newest.after) = (size, block, after);
        self.blocks.prefetch(block);
    }

    /// True if the place of the newest block is taken.
    #[inline]
    pub(crate) fn has_newest(&self) -> bool {
        self.deferred.newest.size != 0
    }

    /// True if the newest block may stay deferred among older ones.
    #[inline]
    pub(crate) fn defers_several(&self) -> bool {
        self.deferred.several
    }

    /// Takes out the newest block.
    #[inline(always)]
    pub(crate) fn take_newest(&mut self) -> DeferredBlock {
        let DeferredBlock { size, block, after } = self.deferred.newest;
        self.deferred.newest.size = 0;
        DeferredBlock { size, block, after }
    }

    /// True if the newest block is large, so that all must be merged now.
    pub(crate) fn newest_is_large(&self) -> bool {
        self.deferred.newest.size > SMALL_SIZE
    }

    /// Moves the newest block to the older ones. Takes out the one in whose place it is, if
    /// there is one.
    pub(crate) fn exchange_oldest(&mut self) -> Option<DeferredBlock> {
        let newest = self.take_newest();
        let Deferred { older, oldest, .. } = &mut self.deferred;
        let place = &mut older[*oldest];
        let before = DeferredBlock { size: place.size, block: place.block, after: place.after };
        (place.size, place.block, place.after) = (newest.size, newest.block, newest.after);
        *oldest = if *oldest + 1 < OLDER { *oldest + 1 } else { 0 };
        (before.size != 0).then_some(before)
    }

    /// Asks for the records of the neighbours of the older block that will be merged next. Its own
    /// record is in the cache by now.
    #[inline(always)]
    pub(crate) fn prefetch_around_oldest(&self) {
        let deferred = &self.deferred.older[self.deferred.oldest];
        if deferred.size != 0 {
            // A free one will be read, and where one is free, the other is written, too.
            let Block { prev, next, .. } = self.blocks[deferred.block];
            self.blocks.prefetch(prev);
            self.blocks.prefetch(next);
        }
    }

    /// Takes out the block whose coalescing was deferred first.
    pub(crate) fn take_oldest_deferred(&mut self) -> Option<DeferredBlock> {
        let Deferred { newest, older, oldest, .. } = &mut self.deferred;
        let (second, first) = older.split_at_mut(*oldest);
        let occupied = first.iter_mut().chain(second).chain([newest]).find(|deferred| deferred.size != 0);
        occupied.map(std::mem::take)
    }

    /// True if any block is deferred.
    pub(crate) fn has_deferred(&self) -> bool {
        self.deferred.newest.size != 0 || self.deferred.older.iter().any(|deferred| deferred.size != 0)
    }

    /// Decides whether several blocks may be deferred. None is when this is called.
    pub(crate) fn set_deferred_limit(&mut self) {
        debug_assert!(!self.has_deferred());
        let records = self.blocks.records_count();
        let are_small = self.total - self.hole_bytes < records as u64 * SMALL_SIZE;
        self.deferred.several = records >= MANY && are_small;
    }

    /// Takes the block that was deferred last, if it is of exactly this size and of this pool.
    #[inline(always)]
    pub(crate) fn retake(&mut self, pool: u16, size: u64, requested: u64) -> Option<BlockId> {
        let id = self.deferred.newest.block;
        if self.deferred.newest.size != size || self.blocks[id].pool != pool {
            return None;
        }
        self.deferred.newest.size = 0;
        self.blocks[id].requested = requested;
        self.retaken += size;
        Some(id)
    }

    /// Merges a block that deferred with its neighbours.
    #[inline(always)]
    pub(crate) fn merge(&mut self, DeferredBlock { size, block, after }: DeferredBlock) {
        // In registers.
        self.merge_words(block, size, after);
    }

    #[inline(never)]
    fn merge_words(&mut self, id: BlockId, bytes: u64, after: u64) {
        if after == 0 {
            self.give(id, self.home, after);
            return;
        }
        let Block { addr, region, pool, .. } = self.blocks[id];
        let home = self.home;
        self.recent.push(Use { addr, bytes, region, after });
        let joined = moves::join(&mut self.pools[pool].own, &mut self.blocks.records(), id, home, after);
        self.gave(&joined);
    }
}

/// As an arena does it (`state/arena/coalesce.rs`).
#[cfg(test)]
impl Heap {
    /// Defers a block, after merging those that must be merged before.
    pub(crate) fn defer(&mut self, id: BlockId, after: u64) {
        let size = self.blocks[id].size;
        self.make_room();
        self.give_deferred(id, size, after);
    }

    /// Merges what must be merged before a block is deferred or searched for.
    fn make_room(&mut self) {
        let merged = match () {
            () if !self.has_newest() => None,
            () if !self.defers_several() => Some(self.take_newest()),
            () if self.newest_is_large() => return self.coalesce_deferred(),
            () => self.exchange_oldest(),
        };
        if let Some(deferred) = merged {
            self.merge(deferred);
        }
    }

    /// Merges all deferred blocks.
    pub(crate) fn coalesce_deferred(&mut self) {
        while let Some(deferred) = self.take_oldest_deferred() {
            self.merge(deferred);
        }
        self.set_deferred_limit();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A heap of mapped memory that is full of blocks of 4 KiB.
    fn full_heap(blocks: u64) -> (Heap, Vec<BlockId>) {
        let (base, granule) = (1 << 30, 4096);
        let mut heap = Heap::new(0);
        heap.add_pools();
        heap.add_reservation(base, blocks * granule, 0, granule);
        let hole = heap.holes().next().unwrap().0;
        let held = heap.hold(hole, base, base + blocks * granule);
        heap.unhold_as_free(held.id);
        let live = (0..blocks).map(|_| heap.take_best(0, granule, granule).unwrap()).collect();
        heap.set_deferred_limit();
        (heap, live)
    }

    #[test]
    fn several_small_blocks_are_deferred_in_a_heap_of_many() {
        let (mut heap, live) = full_heap(MANY as u64 / 2);
        heap.defer(live[1], 1);
        heap.defer(live[3], 2);
        assert_eq!(heap.free, 4096, "in a heap of few the first is merged");
        let (mut heap, live) = full_heap(2 * MANY as u64);
        for n in 0..=OLDER {
            heap.defer(live[2 * n + 1], n as u64 + 1);
        }
        assert_eq!(heap.free, 0);
        assert!(heap.take_best(0, 4096, 4096).is_none(), "deferred blocks are in no index");
        let newest = heap.retake(0, 4096, 100).unwrap();
        assert_eq!((newest, heap.blocks[newest].requested), (live[2 * OLDER + 1], 100));
        heap.defer(newest, 5);
        heap.defer(live[20], 6);
        assert_eq!(heap.free, 4096, "the oldest is merged for it");
        assert_eq!(heap.check(), Ok(()));
        heap.coalesce_deferred();
        assert_eq!(heap.free, 4096 * (OLDER as u64 + 2));
        assert!(!heap.has_deferred());
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn a_large_block_is_not_deferred_among_older_ones() {
        let (mut heap, live) = full_heap(2 * MANY as u64);
        let large = 2 * SMALL_SIZE;
        heap.add_reservation(1 << 40, large, 1, large);
        let hole = heap.holes().next().unwrap().0;
        let held = heap.hold(hole, 1 << 40, (1 << 40) + large);
        heap.unhold_as_free(held.id);
        let block = heap.take_best(1, large, large).unwrap();
        heap.defer(live[1], 1);
        heap.defer(block, 2);
        assert_eq!(heap.free, 0);
        heap.make_room();
        assert_eq!(heap.free, 4096 + large, "all are merged, so that ticks are noted in their order");
        assert_eq!(heap.check(), Ok(()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
        #[test]
        fn no_request_is_refused_because_of_deferred_blocks(
            steps in prop::collection::vec((any::<bool>(), 1..9u64, any::<prop::sample::Index>()), 1..400),
        ) {
            let (mut heap, mut live) = full_heap(2 * MANY as u64);
            let total = heap.total;
            for (after, (take, units, which)) in (1..).zip(steps) {
                if take {
                    let size = units * 512;
                    let taken = heap.retake(0, size, size).or_else(|| {
                        heap.make_room();
                        heap.take_best(0, size, size)
                    });
                    let taken = taken.or_else(|| {
                        heap.coalesce_deferred();
                        heap.take_best(0, size, size)
                    });
                    match taken {
                        Some(id) => live.push(id),
                        None => {
                            let free = heap.blocks.iter().filter(|(_, block)| block.state == State::Free);
                            prop_assert!(free.map(|(_, block)| block.size).max() < Some(size));
                        }
                    }
                } else if !live.is_empty() {
                    let id = live.swap_remove(which.index(live.len()));
                    heap.defer(id, after);
                }
                prop_assert_eq!(heap.check(), Ok(()));
                let in_use: u64 = live.iter().map(|id| heap.blocks[*id].size).sum();
                let deferred = [heap.deferred.newest].into_iter().chain(heap.deferred.older);
                let deferred: u64 = deferred.map(|deferred| deferred.size).sum();
                prop_assert_eq!(in_use + deferred + heap.free, total);
            }
            heap.coalesce_deferred();
            let in_use: u64 = live.iter().map(|id| heap.blocks[*id].size).sum();
            prop_assert_eq!(in_use + heap.free, total);
            prop_assert!(live.iter().all(|id| heap.blocks[*id].state == State::Live));
        }
    }
}
