//! A walk over all blocks of the heap in steps, between which other threads may work with the heap.
//!
//! A walk goes region by region, in order of address. What it passes on tiles every region: a block
//! that begins below the address where the walk goes on counts with its part above that address. So
//! no byte counts twice and none is missed, each as it was at some moment during the walk; and
//! where nothing changes meanwhile, every block is passed on whole.
//!
//! To go on, a walk needs a block at or below its address. It remembers the last block of each
//! step. Of these, some may be gone when the walk goes on, and it takes the latest that is not. A
//! step takes a bounded time even if that block is far below.

use super::{Block, Heap, State};
use crate::types::BlockId;

/// How many blocks a step looks at.
const STEP: usize = if cfg!(test) { 3 } else { 64 };

/// Where a walk has got to.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    /// The number of the region, and its first address; 0 before the first block.
    region: usize,
    start: u64,
    /// The next address.
    at: u64,
    /// The last block of each step in the region.
    passed: Vec<BlockId>,
    /// True if there is memory below the next address.
    has_memory: bool,
}

/// A block, or the part of it that a walk has not passed yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Passed {
    pub(crate) block: Block,
    /// True if it is the first of its region.
    pub(crate) is_first: bool,
    /// True if it has memory, and what lies below it in its region has none.
    pub(crate) begins_range: bool,
}

impl Walk {
    fn next_region(&mut self) {
        *self = Walk { region: self.region + 1, ..Walk::default() };
    }
}

impl Heap {
    /// Passes the next blocks on. Returns false once there are no more. No block may be deferred.
    pub(crate) fn step(&self, walk: &mut Walk, mut pass: impl FnMut(&Passed)) -> bool {
        debug_assert!(!self.has_deferred());
        let mut left = STEP;
        while left > 0 {
            let Some(region) = self.regions.get(walk.region) else { return false };
            left -= 1;
            let Some(region) = region else {
                walk.next_region();
                continue;
            };
            if walk.start != region.addr {
                *walk = Walk { region: walk.region, start: region.addr, at: region.addr, ..Walk::default() };
            }
            let is_below = |id: &BlockId| {
                let block = &self.blocks[*id];
                block.state != State::Vacant && block.region as usize == walk.region && block.addr <= walk.at
            };
            while walk.passed.pop_if(|id| !is_below(id)).is_some() {}
            let mut id = walk.passed.last().copied().unwrap_or(region.first);
            while let Some(block) = self.blocks.get(id) {
                let end = block.addr + block.size;
                if end > walk.at {
                    pass(&walk.pass(block, region.addr));
                    walk.at = end;
                }
                left = left.saturating_sub(1);
                if left == 0 {
                    walk.passed.push(id);
                    break;
                }
                id = block.next;
            }
            if walk.at == region.addr + region.bytes {
                walk.next_region();
            }
        }
        true
    }

    /// Passes all blocks on.
    pub(crate) fn walk(&self, mut pass: impl FnMut(&Passed)) {
        let mut walk = Walk::default();
        while self.step(&mut walk, &mut pass) {}
    }
}

impl Walk {
    /// The part of a block that was not passed yet.
    fn pass(&mut self, block: &Block, start: u64) -> Passed {
        let mut block = *block;
        let below = self.at.saturating_sub(block.addr);
        (block.addr, block.size) = (block.addr + below, block.size - below);
        block.requested = block.requested.min(if below > 0 { block.size } else { u64::MAX });
        let had_memory = std::mem::replace(&mut self.has_memory, block.state.has_memory());
        Passed { block, is_first: block.addr == start, begins_range: self.has_memory && !had_memory }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::heap::Owner;
    use crate::types::{PoolId, StreamId, ticks};

    const G: u64 = 4096;
    const BASE: u64 = 1 << 20;

    fn is_whole(heap: &Heap, passed: &Passed) -> bool {
        let what = |block: &Block| (block.addr, block.size, block.state);
        heap.blocks.iter().any(|(_, block)| what(block) == what(&passed.block))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        /// Between steps, blocks are taken and freed; in the end, after as many steps as it takes,
        /// every byte was passed once.
        #[test]
        fn every_byte_is_passed_once_whatever_happens_between_steps(
            before in prop::collection::vec(1..6u64, 1..40),
            between in prop::collection::vec((any::<bool>(), 1..12u64, any::<prop::sample::Index>()), 0..80),
        ) {
            let mut heap = Heap::new(true);
            (0..3).for_each(|n| {
                heap.add_region(BASE + n * (64 << 20), 1 << 20, StreamId(0), PoolId::SMALL);
            });
            let owner = Owner::in_own_regions(StreamId(0));
            let taken = before.iter().filter_map(|n| heap.take_best(owner, PoolId::SMALL, n * 512, 1));
            let mut live: Vec<BlockId> = taken.collect();
            let mut changes = between.chunks(4);
            let (mut walk, mut passed) = (Walk::default(), Vec::new());
            while heap.step(&mut walk, |one| passed.push(*one)) {
                for (takes, n, which) in changes.next().into_iter().flatten() {
                    if *takes {
                        live.extend(heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, n * 512, 1));
                    } else if !live.is_empty() {
                        let id = live.swap_remove(which.index(live.len()));
                        heap.give(id, StreamId(0), ticks(1));
                    }
                }
            }
            passed.sort_by_key(|one| one.block.addr);
            for n in 0..3 {
                let (start, end) = (BASE + n * (64 << 20), BASE + n * (64 << 20) + (1 << 20));
                let inside: Vec<_> = passed.iter().filter(|one| (start..end).contains(&one.block.addr)).collect();
                let mut at = start;
                for one in &inside {
                    prop_assert_eq!(one.block.addr, at);
                    prop_assert_eq!((one.is_first, one.begins_range), (at == start, at == start));
                    at += one.block.size;
                }
                prop_assert_eq!(at, end);
            }
            if between.is_empty() {
                prop_assert!(passed.iter().all(|one| is_whole(&heap, one)));
                prop_assert_eq!(passed.len(), heap.blocks.iter().count());
            }
        }
    }

    #[test]
    fn ranges_with_memory_begin_behind_holes() {
        let mut heap = Heap::new(true);
        heap.add_reservation(BASE, 8 * G, StreamId(0), PoolId::SMALL, G);
        for at in [1, 2, 5] {
            let addr = BASE + at * G;
            let hole = heap.hole_blocks().find(|(_, hole)| hole.range().contains(&addr)).map(|(id, _)| id).unwrap();
            let held = heap.hold(hole, addr, addr + G).id;
            heap.unhold_as_free(held);
        }
        let mut begins = Vec::new();
        heap.walk(|one| begins.extend(one.begins_range.then_some((one.block.addr - BASE) / G)));
        assert_eq!(begins, [1, 5]);
    }
}
