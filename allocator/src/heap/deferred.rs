//! Deferred coalescing: blocks that are freed, but not yet merged with their neighbours.
//!
//! Programs mostly ask for the size that they have just given back. So the coalescing of a block
//! that is given back is *deferred*: the next request, if it is for exactly this size and from the
//! same pool, gets it as it is, and nothing is cut, joined or indexed. Any other operation merges
//! it first, so at most one block is deferred, and all other decisions of the heap are made as if
//! none were.
//!
//! With [`IndexKind::Exact`] this decision, too, agrees with best fit. The request gets the block
//! only if, merged with its free neighbours, it would be the smallest that is large enough, at the
//! lowest address, and if cutting it would leave these neighbours as they are. Finding out costs a
//! search, and saves putting the block into the index and taking it out again.
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
//!   ticks;
//! * pieces of regions are counted when a block is merged; reading that count takes every lock.

use super::index::{Bins, Exact, FreeIndex};
use super::recent::Use;
use super::{Block, BlockId, Heap, IndexKind, SplitChange, State, moves, signed};
use crate::size_class::{MIN_BLOCK, SMALL_SIZE, SizeClasses};

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

impl DeferredBlock {
    #[inline]
    pub(crate) fn block(self) -> BlockId {
        self.block
    }
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
        self.deferred.several = self.index_kind == IndexKind::Bins && records >= MANY && are_small;
    }

    /// Takes the block that was deferred last, if that is the block that the request gets. Also
    /// returns by how much merging it would have changed the count of pieces; taking it again would
    /// have undone that.
    #[inline(always)]
    pub(crate) fn retake(
        &mut self,
        classes: &SizeClasses,
        pool: u16,
        size: u64,
        requested: u64,
    ) -> Option<(BlockId, SplitChange)> {
        let id = self.deferred.newest.block;
        if self.deferred.newest.size != size || self.blocks[id].pool != pool {
            return None;
        }
        let change = match self.index_kind {
            IndexKind::Bins => SplitChange::default(),
            IndexKind::Exact => self.best_is(classes, id)?,
        };
        self.deferred.newest.size = 0;
        self.blocks[id].requested = requested;
        self.retaken += size;
        Some((id, change))
    }

    /// If best fit for the deferred block's size would choose this very block, returns by how much
    /// merging it would change the count of pieces.
    #[inline(never)]
    fn best_is(&self, classes: &SizeClasses, id: BlockId) -> Option<SplitChange> {
        let Block { addr, size, prev, next, pool, .. } = self.blocks[id];
        if self.is_free_of(prev, self.home) {
            return None;
        }
        let pool = &self.pools[pool];
        let FreeIndex::Exact(index) = &pool.own else { return None };
        let above = self.is_free_of(next, self.home).then(|| &self.blocks[next]);
        let whole = size + above.map_or(0, |above| above.size);
        let cut_off = above.is_none() || !pool.options.no_split && classes.should_split(pool.kind, whole, size);
        if !cut_off || !classes.fits(whole, size) {
            return None;
        }
        let mut best = index.best_from(size);
        if let Some(held) = best.filter(|held| above.is_some() && held.block == next) {
            if index.has_others(held) {
                return None;
            }
            best = index.best_from(held.size + MIN_BLOCK);
        }
        if best.is_some_and(|best| (best.size, self.blocks[best.block].addr) < (whole, addr)) {
            return None;
        }
        let beyond = above.map_or(next, |above| above.next);
        let whole_region = prev == BlockId::NONE && beyond == BlockId::NONE;
        let count = 1 - i64::from(above.is_some()) - i64::from(whole_region);
        Some(SplitChange { count, bytes: signed(size) - (signed(whole) & -i64::from(whole_region)) })
    }

    /// Merges a block that deferred with its neighbours. Returns by how much that changed the count
    /// of pieces.
    #[inline(always)]
    pub(crate) fn merge(&mut self, DeferredBlock { size, block, after }: DeferredBlock) -> SplitChange {
        // In registers.
        self.merge_words(block, size, after)
    }

    #[inline(never)]
    fn merge_words(&mut self, id: BlockId, bytes: u64, after: u64) -> SplitChange {
        let Block { addr, region, pool, .. } = self.blocks[id];
        let home = self.home;
        match &mut self.pools[pool].own {
            FreeIndex::Bins(index) if after != 0 => {
                self.recent.push(Use { addr, bytes, region, after });
                let joined = moves::join(index, &mut self.blocks.records(), id, home, after);
                self.gave::<Bins>(&joined)
            }
            FreeIndex::Exact(index) if after != 0 => {
                let joined = moves::join(index, &mut self.blocks.records(), id, home, after);
                self.gave::<Exact>(&joined)
            }
            _ => self.give(id, home, after).1,
        }
    }
}

/// As an arena does it (`state/arena/coalesce.rs`).
#[cfg(test)]
impl Heap {
    /// Defers a block, after merging those that must be merged before.
    pub(crate) fn defer(&mut self, id: BlockId, after: u64) -> SplitChange {
        let size = self.blocks[id].size;
        let change = self.make_room();
        self.give_deferred(id, size, after);
        change
    }

    /// Merges what must be merged before a block is deferred or searched for.
    fn make_room(&mut self) -> SplitChange {
        let merged = match () {
            () if !self.has_newest() => None,
            () if !self.defers_several() => Some(self.take_newest()),
            () if self.newest_is_large() => return self.coalesce_deferred(),
            () => self.exchange_oldest(),
        };
        merged.map_or_else(SplitChange::default, |deferred| self.merge(deferred))
    }

    /// Merges all deferred blocks, and returns by how much that changed the count of pieces.
    pub(crate) fn coalesce_deferred(&mut self) -> SplitChange {
        let mut change = SplitChange::default();
        while let Some(deferred) = self.take_oldest_deferred() {
            let SplitChange { count, bytes } = self.merge(deferred);
            (change.count, change.bytes) = (change.count + count, change.bytes + bytes);
        }
        self.set_deferred_limit();
        change
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

    const MIB: u64 = 1 << 20;

    /// A heap of three segments in each pool, and the pieces that were counted: value, peak, and
    /// sum of increases.
    struct Counted {
        heap: Heap,
        count: [i64; 3],
        bytes: [i64; 3],
    }

    impl Counted {
        fn new(no_split: bool) -> Counted {
            let mut heap = Heap::new(0, IndexKind::Exact);
            heap.add_pools();
            for pool in [0, 1] {
                heap.pools[pool].options.no_split = no_split;
                let bytes = [2, 20][usize::from(pool)] * MIB;
                for at in 0..3 {
                    heap.add_region((1 + u64::from(pool) * 8 + at) << 30, bytes, pool);
                }
            }
            Counted { heap, count: [0; 3], bytes: [0; 3] }
        }

        fn note(&mut self, change: SplitChange) {
            for (counter, n) in [(&mut self.count, change.count), (&mut self.bytes, change.bytes)] {
                let [value, peak, increases] = *counter;
                *counter = [value + n, peak.max(value + n), increases + n.max(0)];
            }
        }

        fn merge(&mut self) {
            let change = self.heap.coalesce_deferred();
            self.note(change);
        }

        fn take(&mut self, classes: &SizeClasses, pool: u16, size: u64) -> Option<(u64, BlockId)> {
            if let Some((id, given)) = self.heap.retake(classes, pool, size, size) {
                self.note(given);
                self.note(SplitChange { count: -given.count, bytes: -given.bytes });
                return Some((self.heap.blocks[id].addr, id));
            }
            self.merge();
            let (id, change) = self.heap.take_best(classes, pool, size, size)?;
            self.note(change);
            Some((self.heap.blocks[id].addr, id))
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        #[test]
        fn best_fit_decides_as_if_no_block_were_deferred(
            steps in prop::collection::vec((any::<bool>(), 0..2u16, 1..5u64, 0..64usize), 1..150),
            options in prop::sample::select(vec!["", "max_split_size_mb:20", "large_segment_size_mb:32"]),
            no_split in any::<bool>(),
        ) {
            let classes = SizeClasses::new(&Config::parse(options).unwrap());
            let (mut rests, mut merges) = (Counted::new(no_split), Counted::new(no_split));
            let mut live = Vec::new();
            for (after, (take, pool, units, which)) in (1..).zip(steps) {
                if take || live.is_empty() {
                    let size = if pool == 0 { units * 4096 } else { units * 2 * MIB };
                    let (one, other) = (rests.take(&classes, pool, size), merges.take(&classes, pool, size));
                    prop_assert_eq!(one.map(|(addr, _)| addr), other.map(|(addr, _)| addr));
                    live.extend(one.zip(other).map(|((_, one), (_, other))| (one, other)));
                } else {
                    let (one, other) = live.swap_remove(which % live.len());
                    let change = rests.heap.defer(one, after);
                    rests.note(change);
                    let (_, change) = merges.heap.give(other, 0, after);
                    merges.note(change);
                }
                if !rests.heap.has_deferred() {
                    prop_assert_eq!((rests.count, rests.bytes), (merges.count, merges.bytes));
                }
                prop_assert_eq!(rests.heap.check(), Ok(()));
            }
            rests.merge();
            prop_assert_eq!((rests.count, rests.bytes), (merges.count, merges.bytes));
            prop_assert_eq!(rests.heap.check(), Ok(()));
            let is_whole = |heap: &Heap, first| !heap.blocks[first].is_split();
            let whole = |heap: &Heap| heap.regions().map(|region| is_whole(heap, region.first)).collect::<Vec<_>>();
            prop_assert_eq!(whole(&rests.heap), whole(&merges.heap));
            prop_assert_eq!(rests.heap.free, merges.heap.free);
        }
    }

    /// A heap of mapped memory that is full of blocks of 4 KiB.
    fn full_heap(blocks: u64) -> (Heap, Vec<BlockId>) {
        let (base, granule) = (1 << 30, 4096);
        let mut heap = Heap::new(0, IndexKind::Bins);
        heap.add_pools();
        heap.add_reservation(base, blocks * granule, 0, granule);
        let hole = heap.holes().next().unwrap().0;
        let held = heap.hold(hole, base, base + blocks * granule);
        heap.unhold_as_free(held.id);
        let classes = SizeClasses::new(&Config::default());
        let live = (0..blocks).map(|_| heap.take_best(&classes, 0, granule, granule).unwrap().0).collect();
        heap.set_deferred_limit();
        (heap, live)
    }

    #[test]
    fn several_small_blocks_are_deferred_in_a_heap_of_many() {
        let classes = SizeClasses::new(&Config::default());
        let (mut heap, live) = full_heap(MANY as u64 / 2);
        heap.defer(live[1], 1);
        heap.defer(live[3], 2);
        assert_eq!(heap.free, 4096, "in a heap of few the first is merged");
        let (mut heap, live) = full_heap(2 * MANY as u64);
        for n in 0..=OLDER {
            heap.defer(live[2 * n + 1], n as u64 + 1);
        }
        assert_eq!(heap.free, 0);
        assert!(heap.take_best(&classes, 0, 4096, 4096).is_none(), "deferred blocks are in no index");
        let (newest, _) = heap.retake(&classes, 0, 4096, 100).unwrap();
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
        let (block, _) = heap.take_best(&SizeClasses::new(&Config::default()), 1, large, large).unwrap();
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
            let classes = SizeClasses::new(&Config::default());
            let (mut heap, mut live) = full_heap(2 * MANY as u64);
            let total = heap.total;
            for (after, (take, units, which)) in (1..).zip(steps) {
                if take {
                    let size = units * 512;
                    let taken = heap.retake(&classes, 0, size, size).or_else(|| {
                        heap.make_room();
                        heap.take_best(&classes, 0, size, size)
                    });
                    let taken = taken.or_else(|| {
                        heap.coalesce_deferred();
                        heap.take_best(&classes, 0, size, size)
                    });
                    match taken {
                        Some((id, _)) => live.push(id),
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
