//! Quarantine: freed blocks that serve no request for a while, so that work which still uses them
//! is found.
//!
//! A driver that checks programs finds the use of a stale address only while no other block has it.
//! So a freed block is kept from requests. The oldest leaves first, when there are too many, or
//! when no other block of its pool serves a request. Each slow path ends the quarantine of blocks
//! without which a granule, or a segment, would be wholly free ([`Heap::coalesce_all`]). So nothing
//! is bought, refused or kept from the device because of the quarantine.
//!
//! A quarantined block is free memory: it counts as free, and has the owner and the tick of a free
//! block. It is in no index, and its neighbours do not merge with it.

use std::collections::VecDeque;
use std::ops::Range;

use super::{Block, Heap, State};
use crate::types::{After, BlockId, StreamId};

/// The most blocks in quarantine. They are looked at one by one.
const BLOCKS_MAX: usize = 1024;

/// The blocks in quarantine.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// In the order in which they were freed.
    blocks: VecDeque<BlockId>,
    bytes: u64,
    /// The most bytes. 0 if there is no quarantine.
    bytes_max: u64,
}

impl Heap {
    /// Keeps freed blocks in quarantine from now on, of so many bytes together.
    pub(crate) fn set_quarantine(&mut self, bytes_max: u64) {
        self.quarantine.bytes_max = bytes_max;
    }

    /// True if freed blocks of this size are quarantined.
    #[inline(always)]
    pub(crate) fn quarantines(&self, size: u64) -> bool {
        size <= self.quarantine.bytes_max
    }

    /// Frees a live or waiting block as [`Heap::give`] does, and quarantines it unless it is too
    /// large.
    pub(crate) fn give_quarantined(&mut self, id: BlockId, owner: StreamId, after: After) {
        if !self.quarantines(self.blocks[id].size) {
            self.give(id, owner, after);
            return;
        }
        let block = &mut self.blocks[id];
        debug_assert!(matches!(block.state, State::Live | State::Waiting));
        (block.state, block.owner, block.after, block.used_elsewhere) = (State::Quarantined, owner, after, false);
        self.free += block.size;
        self.quarantine.bytes += block.size;
        self.quarantine.blocks.push_back(id);
        while self.quarantine.bytes > self.quarantine.bytes_max || self.quarantine.blocks.len() > BLOCKS_MAX {
            self.end_quarantine_at(0);
        }
    }

    /// Lets requests have a block in quarantine, by its place there.
    fn end_quarantine_at(&mut self, place: usize) {
        let Some(id) = self.quarantine.blocks.remove(place) else { return };
        let Block { size, owner, after, .. } = self.blocks[id];
        self.quarantine.bytes -= size;
        self.free -= size;
        self.give(id, owner, after);
    }

    /// Lets requests have the oldest block in quarantine that a condition is true of. Returns false
    /// if there is none.
    pub(crate) fn end_oldest_quarantine(&mut self, condition: impl Fn(&Block) -> bool) -> bool {
        let place = self.quarantine.blocks.iter().position(|&id| condition(&self.blocks[id]));
        place.inspect(|&place| self.end_quarantine_at(place)).is_some()
    }

    /// Ends the quarantine of all blocks that a condition is true of.
    pub(crate) fn end_quarantine(&mut self, condition: impl Fn(&Block) -> bool) {
        while self.end_oldest_quarantine(&condition) {}
    }

    /// Ends the quarantine of blocks without which a granule, or a segment, would be wholly free.
    pub(super) fn end_quarantine_of_whole_granules(&mut self) {
        let (mut place, mut stretch) = (0, 0..0);
        while let Some(&id) = self.quarantine.blocks.get(place) {
            let Block { addr, size, region, .. } = self.blocks[id];
            if !stretch.contains(&addr) {
                stretch = self.free_stretch(id);
            }
            let region = self.region(region);
            let granule = if region.is_paged() { region.granules.granule() } else { region.bytes };
            // The granules that the block touches, as far as they are free, from the region's
            // start.
            let from = ((addr - region.addr) / granule * granule).max(stretch.start - region.addr);
            let to = (addr + size - region.addr).next_multiple_of(granule).min(stretch.end - region.addr);
            if from.next_multiple_of(granule) + granule <= to {
                self.end_quarantine_at(place);
            } else {
                place += 1;
            }
        }
    }

    /// The addresses of the free and quarantined blocks around a quarantined one.
    fn free_stretch(&self, id: BlockId) -> Range<u64> {
        let is_free = |&id: &BlockId| id.some().is_some_and(|id| self.blocks[id].state.is_free());
        let below = std::iter::successors(Some(id), |&id| Some(self.blocks[id].prev).filter(is_free)).last();
        let above = std::iter::successors(Some(id), |&id| Some(self.blocks[id].next).filter(is_free)).last();
        self.blocks[below.unwrap_or(id)].addr..self.blocks[above.unwrap_or(id)].range().end
    }
}

#[cfg(test)]
impl Heap {
    /// Number of blocks of a pool that are in quarantine.
    pub(crate) fn quarantined(&self, pool: crate::types::PoolId) -> usize {
        self.quarantine.blocks.iter().filter(|&&id| self.blocks[id].pool == pool).count()
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::{Device, Stream};
    use aquifer_sim::{SimConfig, SimDriver};
    use proptest::prelude::*;

    use super::*;
    use crate::allocator::Allocator;
    use crate::core::heap::Owner;
    use crate::size_class::{PoolKind, round};
    use crate::types::{PoolId, ticks};

    const MIB: u64 = 1 << 20;

    /// A heap with a segment of four blocks, which are live, and a quarantine of two.
    fn heap() -> (Heap, [BlockId; 4]) {
        let mut heap = Heap::new(true);
        heap.set_quarantine(2 * MIB);
        heap.add_region(MIB, 4 * MIB, StreamId(0), PoolId::LARGE);
        let take = |_| heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::LARGE, MIB, MIB).unwrap();
        let blocks = std::array::from_fn(take);
        (heap, blocks)
    }

    #[test]
    fn the_oldest_blocks_leave_first_and_keep_owner_and_tick() {
        let (mut heap, blocks) = heap();
        assert!(heap.quarantines(2 * MIB) && !heap.quarantines(2 * MIB + 1));
        for (tick, &block) in (5..).zip(&blocks[..3]) {
            heap.give_quarantined(block, StreamId(1), ticks(tick));
        }
        let states = blocks.map(|id| heap.block(id).state);
        assert_eq!(states, [State::Free, State::Quarantined, State::Quarantined, State::Live]);
        let Block { owner, after, .. } = *heap.block(blocks[0]);
        assert_eq!((owner, after, heap.free_bytes()), (StreamId(1), ticks(5), 3 * MIB));
        assert!(!heap.end_oldest_quarantine(|block| block.pool == PoolId::SMALL));
        assert!(!heap.end_oldest_quarantine(|block| block.owner == StreamId(0)));
        heap.end_quarantine(|block| block.pool == PoolId::LARGE);
        assert_eq!((heap.block(blocks[0]).size, heap.block(blocks[0]).after), (3 * MIB, ticks(7)));
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn a_segment_that_is_free_but_for_quarantined_blocks_is_free() {
        let (mut heap, blocks) = heap();
        blocks[..3].iter().for_each(|&block| heap.give_quarantined(block, StreamId(0), ticks(1)));
        heap.coalesce_all();
        assert_eq!(heap.quarantined(PoolId::LARGE), 2, "the fourth is live");
        heap.give_quarantined(blocks[3], StreamId(0), ticks(2));
        heap.coalesce_all();
        assert_eq!((heap.quarantined(PoolId::LARGE), heap.all_blocks().count()), (0, 1));
        assert_eq!(heap.check(), Ok(()));
    }

    struct World {
        allocator: Allocator,
        streams: [Stream; 2],
    }

    fn world(options: &str) -> World {
        let device = Device::new(SimDriver::new(SimConfig::new(256 * MIB)));
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        World { allocator: Allocator::new(&device, options).unwrap(), streams }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
        /// Memory is bought only when no quarantined block would serve the request, alone or
        /// merged, and when no quarantined block keeps a granule or a segment from being used
        /// elsewhere.
        #[test]
        fn nothing_is_bought_or_refused_because_of_the_quarantine(
            options in prop::sample::select(vec!["", "backing:segments", "granule_mb:4", "cross_stream:wait"]),
            steps in prop::collection::vec((0..5u8, 1..24u64, any::<prop::sample::Index>()), 1..120),
        ) {
            let World { allocator, streams } = world(options);
            let mut live = Vec::new();
            for (what, n, which) in steps {
                if what > 2 && !live.is_empty() {
                    drop(live.swap_remove(which.index(live.len())));
                    continue;
                }
                let bytes = if what == 0 { n * MIB } else { n * 40_000 };
                let before = allocator.memory_reserved();
                let served = allocator.alloc_bytes(bytes, &streams[which.index(2)]);
                if allocator.memory_reserved() > before || served.is_err() {
                    let pool = PoolId::default_of(PoolKind::of(round(bytes)));
                    let mut shared = allocator.state().shared();
                    prop_assert_eq!(shared.heap().quarantined(pool), 0);
                    let other = PoolId::default_of(PoolKind::of(if what == 0 { 1 } else { 2 * MIB }));
                    let kept = shared.heap().quarantined(other);
                    shared.coalesce_all();
                    prop_assert_eq!(shared.heap().quarantined(other), kept);
                    prop_assert_eq!(shared.heap().check(), Ok(()));
                }
                live.extend(served);
            }
        }

        /// Where all blocks have one size, it does not matter which of them serves a request.
        #[test]
        fn programs_of_one_size_hold_as_much_as_without_a_quarantine(
            backing in prop::sample::select(vec!["paged", "segments"]),
            bytes in prop::sample::select(vec![500, 4000, 300_000, MIB, 3 * MIB, 10 * MIB]),
            steps in prop::collection::vec((0..2u8, any::<prop::sample::Index>()), 1..150),
        ) {
            let run = |quarantine_mb: u64| -> Vec<u64> {
                let World { allocator, streams: [stream, _] } =
                    world(&format!("backing:{backing},quarantine_mb:{quarantine_mb}"));
                let mut live = Vec::new();
                let held = steps.iter().map(|(frees, which)| {
                    if *frees > 0 && !live.is_empty() {
                        drop(live.swap_remove(which.index(live.len())));
                    } else {
                        live.extend(allocator.alloc_bytes(bytes, &stream));
                    }
                    allocator.memory_reserved()
                });
                held.collect()
            };
            prop_assert_eq!(run(64), run(0));
        }
    }
}
