//! Deferred coalescing: blocks that are freed, but not yet merged with their neighbours.
//!
//! Programs mostly ask for the size that they have just given back. So the coalescing of a block
//! that is given back is *deferred*: the stream's next request, if it is for exactly this size and
//! from the same pool, gets it as it is, and nothing is cut, joined or indexed. Any other operation
//! of the stream merges it first, so at most one block of each stream is deferred.
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
//! * the record of a deferred block is that of a live one. Slow paths merge all first
//!   ([`Heap::coalesce_all`]);
//! * blocks of a stream are merged in the order in which they were given back, which is the order
//!   of their ticks.

use super::last_use::RecentUse;
use super::{Block, Heap, Owner, State, moves};
use crate::size_class::SMALL_SIZE;
use crate::types::{After, BlockId, PoolId, StreamId};

/// Blocks that may be deferred besides the newest in a heap of many small ones.
const OLDER: usize = 3;
/// From this many records on, a heap has many blocks: they take 256 KiB. Few in tests, so that
/// these get there.
const MANY: usize = if cfg!(test) { 64 } else { 4096 };

/// A deferred block, or none. Its words are read one by one: read together, as wider words than
/// were written, they would have the processor wait for the stores.
#[derive(Clone, Copy, Debug, Default)]
struct DeferredBlock {
    /// 0 if there is none.
    size: u64,
    block: BlockId,
    /// The tick of its stream until which the block was used.
    after: After,
}

/// The deferred blocks of a stream.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// The one that came last.
    newest: DeferredBlock,
    /// Small blocks that came before, a ring. There are none unless the heap defers several.
    older: [DeferredBlock; OLDER],
    /// Where the oldest of them is, if there are as many as may be; the next one takes its place.
    oldest: usize,
}

impl Deferred {
    /// Takes out the newest block.
    #[inline(always)]
    fn take_newest(&mut self) -> DeferredBlock {
        let DeferredBlock { size, block, after } = self.newest;
        self.newest.size = 0;
        DeferredBlock { size, block, after }
    }

    /// Moves the newest block to the older ones. Takes out the one in whose place it is, if there
    /// is one.
    fn exchange_oldest(&mut self) -> Option<DeferredBlock> {
        let newest = self.take_newest();
        let place = &mut self.older[self.oldest];
        let before = DeferredBlock { size: place.size, block: place.block, after: place.after };
        (place.size, place.block, place.after) = (newest.size, newest.block, newest.after);
        self.oldest = if self.oldest + 1 < OLDER { self.oldest + 1 } else { 0 };
        (before.size != 0).then_some(before)
    }

    /// Takes out the block that was deferred first.
    fn take_oldest(&mut self) -> Option<DeferredBlock> {
        let (second, first) = self.older.split_at_mut(self.oldest);
        let occupied = first.iter_mut().chain(second).chain([&mut self.newest]).find(|deferred| deferred.size != 0);
        occupied.map(std::mem::take)
    }

    /// True if there are any.
    pub(super) fn is_some(&self) -> bool {
        self.newest.size != 0 || self.older.iter().any(|deferred| deferred.size != 0)
    }
}

impl Heap {
    /// Frees a live block of `size` bytes that its stream alone used, until the tick `after`, and
    /// defers its coalescing; it is given back as by [`Heap::give`] before anything depends on
    /// that. Returns true if the stream's log of last uses has become long.
    #[inline]
    pub fn give_deferred(&mut self, stream: StreamId, block: BlockId, size: u64, after: After) -> bool {
        debug_assert!(self.blocks[block].state == State::Live && self.blocks[block].owner == stream);
        let is_log_long = self.make_room(stream);
        self.active_streams.insert(stream);
        let newest = &mut self.of_stream(stream).deferred.newest;
        (newest.size, newest.block, newest.after) = (size, block, after);
        self.blocks.prefetch(block);
        is_log_long
    }

    /// Merges the blocks of a stream that may not be deferred any longer when another one is to be,
    /// or when one is searched for. Returns true if the stream's log of last uses has become long.
    #[inline(always)]
    pub(crate) fn make_room(&mut self, stream: StreamId) -> bool {
        let Some(of_stream) = self.streams.get_mut(stream.index()) else { return false };
        if of_stream.deferred.newest.size == 0 {
            return false;
        }
        if self.defers_several {
            self.make_room_among_several(stream);
        } else {
            let newest = of_stream.deferred.take_newest();
            self.merge(stream, newest);
        }
        self.streams[stream.index()].recent.are_many()
    }

    #[inline(never)]
    fn make_room_among_several(&mut self, stream: StreamId) {
        let deferred = &mut self.streams[stream.index()].deferred;
        if deferred.newest.size > SMALL_SIZE {
            self.coalesce(stream);
        } else if let Some(oldest) = deferred.exchange_oldest() {
            // Its own record is in the cache by now. A free neighbour's will be read, and where one
            // is free, the other is written, too.
            let next = deferred.older[deferred.oldest];
            if next.size != 0 {
                let Block { prev, next, .. } = self.blocks[next.block];
                self.blocks.prefetch(prev);
                self.blocks.prefetch(next);
            }
            self.merge(stream, oldest);
        }
    }

    /// Merges all deferred blocks of a stream. Returns false if there were none.
    pub fn coalesce(&mut self, stream: StreamId) -> bool {
        let mut any = false;
        while let Some(deferred) = self.of_stream(stream).deferred.take_oldest() {
            self.merge(stream, deferred);
            any = true;
        }
        any
    }

    /// Merges all deferred blocks, and decides whether several may be deferred from now on.
    pub(crate) fn coalesce_all(&mut self) {
        for stream in self.active_streams.iter().map(StreamId).collect::<Vec<_>>() {
            self.coalesce(stream);
        }
        self.end_quarantine_of_whole_granules();
        let records = self.blocks.records_count();
        self.defers_several = records >= MANY && self.total - self.hole_bytes < records as u64 * SMALL_SIZE;
        self.pools.forget_empty();
    }

    /// True if any block is deferred.
    pub(crate) fn has_deferred(&self) -> bool {
        self.streams.iter().any(|of_stream| of_stream.deferred.is_some())
    }

    /// Takes the block that the stream deferred last, if that is the block that the request gets.
    #[inline(always)]
    pub fn reuse_last_freed(&mut self, stream: StreamId, pool: PoolId, size: u64, requested: u64) -> Option<BlockId> {
        let of_stream = self.streams.get_mut(stream.index())?;
        let id = of_stream.deferred.newest.block;
        if of_stream.deferred.newest.size != size || self.blocks[id].pool != pool {
            return None;
        }
        of_stream.deferred.newest.size = 0;
        self.blocks[id].requested = requested;
        Some(id)
    }

    /// Merges a block that deferred with its neighbours.
    #[inline(always)]
    fn merge(&mut self, stream: StreamId, DeferredBlock { size, block, after }: DeferredBlock) {
        // In registers.
        self.merge_words(stream, block, size, after);
    }

    #[inline(never)]
    fn merge_words(&mut self, stream: StreamId, id: BlockId, bytes: u64, after: After) {
        let Block { addr, region, pool, .. } = self.blocks[id];
        let of_region = self.region(region);
        let owner = Owner::in_region_of(stream, of_region.stream);
        if after > After::NOTHING && of_region.notes_uses_of(stream) {
            self.streams[stream.index()].recent.push(RecentUse { addr, bytes, region, after });
        }
        let index = self.pools[pool].index_mut(owner);
        let joined = moves::join(index, &mut self.blocks.records(), &mut self.free_blocks, id, stream, after);
        self.gave(&joined);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::{StreamId, ticks};

    /// A heap of mapped memory that is full of blocks of 4 KiB.
    fn full_heap(blocks: u64) -> (Heap, Vec<BlockId>) {
        let (base, granule) = (1 << 30, 4096);
        let mut heap = Heap::new(true);
        heap.add_reservation(base, blocks * granule, StreamId(0), PoolId::SMALL, granule);
        let hole = heap.hole_blocks().next().unwrap().0;
        let held = heap.hold(hole, base, base + blocks * granule);
        heap.unhold_as_free(held.id);
        let live = (0..blocks)
            .map(|_| heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, granule, granule).unwrap())
            .collect();
        heap.coalesce_all();
        (heap, live)
    }

    /// Defers a block of the first stream.
    fn defer(heap: &mut Heap, id: BlockId, after: After) {
        let size = heap.blocks[id].size;
        heap.give_deferred(StreamId(0), id, size, after);
    }

    #[test]
    fn several_small_blocks_are_deferred_in_a_heap_of_many() {
        let (mut heap, live) = full_heap(MANY as u64 / 2);
        defer(&mut heap, live[1], ticks(1));
        defer(&mut heap, live[3], ticks(2));
        assert_eq!(heap.free, 4096, "in a heap of few the first is merged");
        let (mut heap, live) = full_heap(2 * MANY as u64);
        for n in 0..=OLDER {
            defer(&mut heap, live[2 * n + 1], ticks(n as u64 + 1));
        }
        assert_eq!(heap.free, 0);
        assert!(
            heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, 4096, 4096).is_none(),
            "deferred blocks are in no index"
        );
        let newest = heap.reuse_last_freed(StreamId(0), PoolId::SMALL, 4096, 100).unwrap();
        assert_eq!((newest, heap.blocks[newest].requested), (live[2 * OLDER + 1], 100));
        defer(&mut heap, newest, ticks(5));
        defer(&mut heap, live[20], ticks(6));
        assert_eq!(heap.free, 4096, "the oldest is merged for it");
        assert_eq!(heap.check(), Ok(()));
        heap.coalesce_all();
        assert_eq!(heap.free, 4096 * (OLDER as u64 + 2));
        assert!(!heap.has_deferred());
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn a_large_block_is_not_deferred_among_older_ones() {
        let (mut heap, live) = full_heap(2 * MANY as u64);
        let large = 2 * SMALL_SIZE;
        heap.add_reservation(1 << 40, large, StreamId(0), PoolId::LARGE, large);
        let hole = heap.hole_blocks().next().unwrap().0;
        let held = heap.hold(hole, 1 << 40, (1 << 40) + large);
        heap.unhold_as_free(held.id);
        let block = heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::LARGE, large, large).unwrap();
        defer(&mut heap, live[1], ticks(1));
        defer(&mut heap, block, ticks(2));
        assert_eq!(heap.free, 0);
        heap.make_room(StreamId(0));
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
                    let taken = heap.reuse_last_freed(StreamId(0), PoolId::SMALL, size, size).or_else(|| {
                        heap.make_room(StreamId(0));
                        heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, size, size)
                    });
                    let taken = taken.or_else(|| {
                        heap.coalesce_all();
                        heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, size, size)
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
                    defer(&mut heap, id, ticks(after));
                }
                prop_assert_eq!(heap.check(), Ok(()));
                let in_use: u64 = live.iter().map(|id| heap.blocks[*id].size).sum();
                let Deferred { newest, older, .. } = &heap.of_stream(StreamId(0)).deferred;
                let deferred = std::iter::once(newest).chain(older);
                let deferred: u64 = deferred.map(|deferred| deferred.size).sum();
                prop_assert_eq!(in_use + deferred + heap.free, total);
            }
            heap.coalesce_all();
            let in_use: u64 = live.iter().map(|id| heap.blocks[*id].size).sum();
            prop_assert_eq!(in_use + heap.free, total);
            prop_assert!(live.iter().all(|id| heap.blocks[*id].state == State::Live));
        }
    }
}
