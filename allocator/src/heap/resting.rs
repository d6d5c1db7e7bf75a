//! The resting block: freed, but not yet merged with its neighbours.
//!
//! Programs mostly ask for the size that they have just given back. So a block that is given back *rests*: the next request, if it is
//! for exactly this size and from the same pool, gets it as it is, and nothing is cut, joined or indexed. Any other operation
//! merges it first, so at most one block rests, and all other decisions of the heap are made as if none did.
//!
//! With [`IndexKind::Exact`] this decision, too, agrees with best fit. The request gets the block only if, merged with its
//! free neighbours, it would be the smallest that is large enough, at the lowest address, and if cutting it would leave these
//! neighbours as they are. Finding out costs a search, and saves putting the block into the index and taking it out again.
//!
//! A resting block is in [`State::Waiting`], and counts as waiting in the identities. Others never see it so, because a thread that
//! holds every lock merges it first. Pieces of regions are counted when it is merged; reading that count takes every lock.

use super::index::{Bins, Exact, FreeIndex};
use super::recent::Use;
use super::{Block, BlockId, Heap, IndexKind, SplitChange, State, moves, signed};
use crate::size_class::{MIN_BLOCK, SizeClasses};

impl Heap {
    /// Frees a live block of the home stream and lets it rest; it is given back as by [`Heap::give`] before anything depends on that. There
    /// must be no resting block.
    #[inline]
    pub(crate) fn give_to_rest(&mut self, id: BlockId, after: u64) {
        debug_assert_eq!(self.resting, BlockId::NONE);
        self.resting = id;
        let block = &mut self.blocks[id];
        debug_assert!(block.state == State::Live && block.owner == self.home);
        (block.state, block.after) = (State::Waiting, after);
    }

    /// The resting block, if there is one.
    #[inline]
    pub(crate) fn resting(&self) -> Option<BlockId> {
        self.resting.some()
    }

    /// Merges the resting block, if there is one.
    #[inline]
    pub(crate) fn merge_resting(&mut self) -> SplitChange {
        match std::mem::take(&mut self.resting) {
            BlockId::NONE => SplitChange::default(),
            id => self.merge(id),
        }
    }

    /// Takes the resting block, if that is the block that the request gets. Also returns by how much merging it would have changed the
    /// count of pieces; taking it again would have undone that.
    #[inline(always)]
    pub(crate) fn retake(
        &mut self,
        classes: &SizeClasses,
        pool: u16,
        size: u64,
        requested: u64,
    ) -> Option<(BlockId, SplitChange)> {
        let id = self.resting;
        let block = &self.blocks[id];
        if block.size != size || block.pool != pool {
            return None;
        }
        let change = match self.index_kind {
            IndexKind::Bins => SplitChange::default(),
            IndexKind::Exact => self.best_is(classes, id)?,
        };
        self.resting = BlockId::NONE;
        let block = &mut self.blocks[id];
        (block.state, block.requested) = (State::Live, requested);
        self.pools[usize::from(pool)].searches += 1;
        self.retaken += size;
        Some((id, change))
    }

    /// If best fit for the resting block's size would choose this very block, returns by how much merging it would change the count of
    /// pieces.
    #[inline(never)]
    fn best_is(&self, classes: &SizeClasses, id: BlockId) -> Option<SplitChange> {
        let Block { addr, size, prev, next, pool, .. } = self.blocks[id];
        if self.is_free_of(prev, self.home) {
            return None;
        }
        let pool = &self.pools[usize::from(pool)];
        let FreeIndex::Exact(index) = &pool.own else { return None };
        let above = self.is_free_of(next, self.home).then(|| &self.blocks[next]);
        let whole = size + above.map_or(0, |above| above.size);
        let cut_off = above.is_none() || !pool.no_split && classes.should_split(pool.kind, whole, size);
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

    #[inline(never)]
    fn merge(&mut self, id: BlockId) -> SplitChange {
        let Block { addr, size: bytes, after, region, pool, .. } = self.blocks[id];
        let (home, pool) = (self.home, usize::from(pool));
        match &mut self.pools[pool].own {
            FreeIndex::Bins(index) if after != 0 => {
                self.recent.push(Use { addr, bytes, region, after });
                let joined = moves::join(index, &mut self.blocks.records(), id, home, after);
                self.gave::<Bins>(&joined, pool)
            }
            FreeIndex::Exact(index) if after != 0 => {
                let joined = moves::join(index, &mut self.blocks.records(), id, home, after);
                self.gave::<Exact>(&joined, pool)
            }
            _ => self.give(id, home, after).1,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Config;

    const MIB: u64 = 1 << 20;

    /// A heap of three segments in each pool, and the pieces that were counted: value, peak, and sum of increases.
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
                heap.pools[usize::from(pool)].no_split = no_split;
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
            let change = self.heap.merge_resting();
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
        fn best_fit_decides_as_if_no_block_rested(
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
                    rests.merge();
                    rests.heap.give_to_rest(one, after);
                    let (_, change) = merges.heap.give(other, 0, after);
                    merges.note(change);
                }
                if rests.heap.resting().is_none() {
                    prop_assert_eq!((rests.count, rests.bytes), (merges.count, merges.bytes));
                }
                prop_assert_eq!(rests.heap.check(), Ok(()));
            }
            rests.merge();
            prop_assert_eq!((rests.count, rests.bytes), (merges.count, merges.bytes));
            prop_assert_eq!(rests.heap.check(), Ok(()));
            let ages = |heap: &Heap| heap.regions().map(|region| region.age_base).collect::<Vec<_>>();
            let whole = |heap: &Heap| heap.regions().map(|region| !heap.blocks[region.first].is_split()).collect::<Vec<_>>();
            prop_assert_eq!(whole(&rests.heap), whole(&merges.heap));
            prop_assert_eq!(rests.heap.free, merges.heap.free);
            if live.is_empty() {
                prop_assert_eq!(ages(&rests.heap), ages(&merges.heap));
            }
        }
    }
}
