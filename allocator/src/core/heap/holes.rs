//! Holes: address space without memory behind it, in regions whose memory comes in granules.
//!
//! A hole is a block like any other, so that a region is tiled without gaps, but it is in no index.
//! While the driver changes the mapping of some addresses, they are *held*: they are blocks of
//! their own that nothing else takes or merges with, in [`State::Held`] if they are free memory,
//! and in [`State::Filling`] if they are holes. Every hole starts and ends at a border between
//! granules.
//!
//! The last use of each granule is noted ([`super::last_use`]) when a block is given back that
//! belongs to the region's stream. A block of another owner merges with those only once it is done;
//! until then its own tick counts for all of it.

use super::last_use::{Granules, LastUses, RecentUse};
use super::{Block, Heap, HoleIndex, Region, State};
use crate::types::{After, BlockId, PoolId, StreamId};

/// The parts of a block of which one part is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holding {
    /// The part that is held.
    pub(crate) id: BlockId,
    /// The remainders below and above it, in their earlier state.
    pub(crate) below: Option<BlockId>,
    pub(crate) above: Option<BlockId>,
}

impl Region {
    /// True if the memory of the region comes in granules.
    #[inline]
    pub(crate) fn is_paged(&self) -> bool {
        !self.granules.is_empty()
    }

    /// True if the last uses by a stream are noted for each granule.
    #[inline]
    pub(super) fn notes_uses_of(&self, stream: StreamId) -> bool {
        self.stream == stream && self.is_paged()
    }
}

impl Heap {
    /// Adds a region of addresses of a stream without memory, which is one hole. `granule` is a
    /// power of two that divides address and length.
    pub(crate) fn add_reservation(&mut self, addr: u64, bytes: u64, stream: StreamId, pool: PoolId, granule: u64) {
        let number = self.add_region_record(addr, bytes, stream, pool);
        let state = State::Hole;
        let hole = Block { addr, size: bytes, region: number, owner: stream, pool, state, ..Block::default() };
        let first = self.blocks.insert(hole);
        let region = self.region_mut(number);
        (region.first, region.granules) = (first, Granules::new(bytes, granule));
        self.holes.insert(pool, stream, addr, first);
        self.empty_reservations.insert(first);
        self.hole_bytes += bytes;
    }

    /// Removes a region that is one hole, and returns it.
    pub(crate) fn remove_reservation(&mut self, hole: BlockId) -> Region {
        debug_assert!(self.blocks[hole].state == State::Hole && !self.blocks[hole].is_split());
        let Block { addr, size, pool, region, .. } = self.blocks[hole];
        self.holes.remove(pool, self.region(region).stream, addr);
        self.empty_reservations.remove(&hole);
        self.hole_bytes -= size;
        self.remove_region_record(hole)
    }

    /// Notes that the memory of a block, which its owner gives back now, is used until the tick
    /// `after`.
    #[inline]
    pub(crate) fn note_last_use(&mut self, id: BlockId, owner: StreamId, after: After) {
        let Block { addr, size, region, .. } = self.blocks[id];
        let region = self.region_mut(region);
        if region.notes_uses_of(owner) {
            region.granules.note(addr - region.addr, size, after);
        }
    }

    /// Empties the logs of last uses into the granules' ticks. Uses that are done are dropped:
    /// `done` gives the tick that a stream's timeline has reached.
    pub(crate) fn note_recent_uses(&mut self, done: impl Fn(StreamId) -> After) {
        for stream in self.active_streams.iter().map(StreamId).collect::<Vec<_>>() {
            self.note_recent_uses_of(stream, done(stream));
            if !self.of_stream(stream).deferred.is_some() {
                self.active_streams.remove(stream);
            }
        }
    }

    fn note_recent_uses_of(&mut self, stream: StreamId, done: After) {
        let mut recent = std::mem::take(&mut self.of_stream(stream).recent);
        recent.drop_done(done);
        recent.note_all(|RecentUse { addr, bytes, region, after }| {
            let region = self.region_mut(region);
            region.granules.note(addr - region.addr, bytes, after);
        });
        self.of_stream(stream).recent = recent;
    }

    /// Makes room in a stream's log of last uses: drops the uses that are done, and notes the
    /// others in the granules' ticks if that is not enough.
    pub(crate) fn thin_recent_uses(&mut self, stream: StreamId, done: After) {
        if !self.of_stream(stream).recent.drop_done(done) {
            self.note_recent_uses_of(stream, done);
        }
    }

    /// For each granule of a free block, the tick that the owner's timeline must reach for the
    /// granule to be done. The logs of last uses must be empty.
    pub(crate) fn last_uses_of(&self, block: &Block) -> LastUses<'_> {
        debug_assert!(self.streams.iter().all(|of_stream| of_stream.recent.is_empty()));
        let region = self.region(block.region);
        let granules = region.notes_uses_of(block.owner).then_some(&region.granules);
        LastUses { start: region.addr, granules, latest: block.after }
    }

    /// The holes that are a whole region and not held.
    pub(crate) fn empty_reservations(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.empty_reservations.iter().copied()
    }

    /// The holes that are not held.
    pub(crate) fn holes(&self) -> &HoleIndex {
        &self.holes
    }

    /// Every hole that is not held, pool by pool.
    #[cfg(test)]
    pub(crate) fn hole_blocks(&self) -> impl Iterator<Item = (BlockId, &Block)> + '_ {
        self.holes.iter().map(|id| (id, &self.blocks[id]))
    }

    /// Holds `from..to`, which lies in one free block or one hole. The remainders on either side
    /// stay what they are.
    pub(crate) fn hold(&mut self, id: BlockId, from: u64, to: u64) -> Holding {
        self.note_recent_uses(|_| After::NOTHING);
        let block = self.blocks[id];
        debug_assert!(block.addr <= from && from < to && to <= block.addr + block.size);
        let held = if block.state == State::Free {
            self.unindex(id);
            self.free -= block.size;
            self.held_bytes += to - from;
            State::Held
        } else {
            debug_assert_eq!(block.state, State::Hole);
            self.holes.remove(block.pool, self.region(block.region).stream, block.addr);
            self.empty_reservations.remove(&id);
            State::Filling
        };
        self.blocks[id].state = held;
        let below = (from > block.addr).then(|| self.cut(id, from - block.addr));
        let whole = Holding { id, below, above: None };
        let holding = if to < block.addr + block.size {
            Holding { id: self.cut(id, to - from), above: Some(id), ..whole }
        } else {
            whole
        };
        holding.below.into_iter().chain(holding.above).for_each(|id| self.back(id, block.state));
        holding
    }

    /// Returns a piece beside the held part to its earlier state. Its other neighbours are
    /// unchanged, so nothing merges.
    fn back(&mut self, id: BlockId, state: State) {
        let Block { addr, size, pool, region, .. } = self.blocks[id];
        self.blocks[id].state = state;
        if state == State::Free {
            self.free += size;
            self.index_alone(id);
        } else {
            self.holes.insert(pool, self.region(region).stream, addr, id);
        }
    }

    /// Cuts `size` bytes off the low end of a block that is in no index, and returns the new block
    /// that they form.
    fn cut(&mut self, id: BlockId, size: u64) -> BlockId {
        let block = self.blocks[id];
        let low = self.blocks.insert(Block { size, next: id, ..block });
        let rest = &mut self.blocks[id];
        (rest.addr, rest.size, rest.prev) = (block.addr + size, block.size - size, low);
        match block.prev.some() {
            Some(prev) => self.blocks[prev].next = low,
            None => self.region_mut(block.region).first = low,
        }
        low
    }

    /// Ends the holding of a block that has memory now, or still: it becomes free and merges.
    /// Memory that was a hole is done for every stream.
    pub(crate) fn unhold_as_free(&mut self, id: BlockId) -> BlockId {
        self.unhold_as_used(id, After::NOTHING)
    }

    /// As [`Heap::unhold_as_free`]. Memory that was a hole was used by the region's stream until
    /// the tick `until`, at other addresses; 0 if it is done for every stream.
    pub(crate) fn unhold_as_used(&mut self, id: BlockId, until: After) -> BlockId {
        let Block { state, owner, after, addr, size, region, .. } = self.blocks[id];
        let (owner, after) = if state == State::Filling {
            self.hole_bytes -= size;
            let region = self.region_mut(region);
            region.granules.forget(addr - region.addr, size);
            if until > After::NOTHING {
                region.granules.note(addr - region.addr, size, until);
            }
            (region.stream, until)
        } else {
            debug_assert_eq!(state, State::Held);
            self.held_bytes -= size;
            (owner, after)
        };
        self.blocks[id].state = State::Waiting;
        self.give(id, owner, after)
    }

    /// Has a held block count as one without memory: the driver is about to take it away, or it
    /// moved before its uses were done.
    pub(crate) fn empty_held(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, State::Held);
        block.state = State::Filling;
        self.held_bytes -= block.size;
        self.hole_bytes += block.size;
    }

    /// Ends the holding of a block that has no memory any more, or still none: it becomes a hole
    /// and merges with holes beside it.
    pub(crate) fn unhold_as_hole(&mut self, id: BlockId) -> BlockId {
        let Block { state, size, addr, pool, region, .. } = self.blocks[id];
        let stream = self.region(region).stream;
        if state == State::Held {
            self.held_bytes -= size;
            self.hole_bytes += size;
        }
        let block = &mut self.blocks[id];
        (block.state, block.owner, block.after) = (State::Hole, stream, After::NOTHING);
        let prev = block.prev.some().filter(|&prev| self.blocks[prev].state == State::Hole);
        let next = self.blocks[id].next.some().filter(|&next| self.blocks[next].state == State::Hole);
        if let Some(next) = next {
            let at = self.blocks[next].addr;
            self.holes.remove(pool, stream, at);
            self.absorb_next(id, next);
        }
        let hole = match prev {
            Some(prev) => {
                self.absorb_next(prev, id);
                prev
            }
            None => {
                self.holes.insert(pool, stream, addr, id);
                id
            }
        };
        if !self.blocks[hole].is_split() {
            self.empty_reservations.insert(hole);
        }
        hole
    }

    /// Grows a block that is in no index by its neighbour above, whose record becomes vacant.
    fn absorb_next(&mut self, id: BlockId, next: BlockId) {
        let (size, beyond) = (self.blocks[next].size, self.blocks[next].next);
        let block = &mut self.blocks[id];
        block.size += size;
        block.next = beyond;
        if let Some(beyond) = beyond.some() {
            self.blocks[beyond].prev = id;
        }
        self.blocks.remove(next);
    }

    /// Bytes at which memory is mapped.
    pub(crate) fn memory(&self) -> u64 {
        self.total - self.hole_bytes
    }

    /// Bytes in blocks that are live or waiting.
    pub(crate) fn in_use(&self) -> u64 {
        self.memory() - self.free - self.held_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::heap::Owner;
    use crate::types::{StreamId, ticks};

    const GRANULE: u64 = 4096;
    const BASE: u64 = 1 << 20;

    fn heap(granules: u64) -> Heap {
        let mut heap = Heap::new(true);
        heap.add_reservation(BASE, granules * GRANULE, StreamId(0), PoolId::SMALL, GRANULE);
        heap
    }

    #[test]
    fn memory_that_was_used_elsewhere_keeps_its_last_use() {
        let mut heap = heap(4);
        let held = heap.hold(hole_at(&heap, BASE), BASE, BASE + 2 * GRANULE).id;
        let free = heap.unhold_as_used(held, ticks(7));
        assert_eq!((heap.blocks[free].after, heap.blocks[free].owner), (ticks(7), StreamId(0)));
        let uses = heap.last_uses_of(&heap.blocks[free]);
        assert_eq!(uses.highest_run(&(BASE..BASE + 2 * GRANULE)), (ticks(7), BASE));
        assert_eq!(heap.check(), Ok(()));
    }

    fn hole_at(heap: &Heap, addr: u64) -> BlockId {
        let found = heap.hole_blocks().find(|(_, block)| block.addr <= addr && addr < block.addr + block.size);
        found.map(|(id, _)| id).unwrap()
    }

    fn fill(heap: &mut Heap, from: u64, granules: u64) -> BlockId {
        let at = BASE + from * GRANULE;
        let held = heap.hold(hole_at(heap, at), at, at + granules * GRANULE);
        heap.unhold_as_free(held.id)
    }

    #[test]
    fn memory_comes_and_goes_by_granules() {
        let mut heap = heap(8);
        assert_eq!((heap.memory(), heap.hole_blocks().count()), (0, 1));
        let block = fill(&mut heap, 2, 3);
        assert_eq!((heap.memory(), heap.free, heap.hole_blocks().count()), (3 * GRANULE, 3 * GRANULE, 2));
        assert_eq!(heap.check(), Ok(()));
        let at = BASE + 3 * GRANULE;
        let held = heap.hold(block, at, at + GRANULE).id;
        assert_eq!((heap.free, heap.held_bytes, heap.in_use()), (2 * GRANULE, GRANULE, 0));
        assert_eq!(heap.check(), Ok(()));
        heap.unhold_as_hole(held);
        assert_eq!((heap.memory(), heap.hole_blocks().count()), (2 * GRANULE, 3));
        fill(&mut heap, 3, 1);
        assert_eq!((heap.memory(), heap.hole_blocks().count()), (3 * GRANULE, 2));
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn a_granule_has_a_last_use_of_its_own() {
        let mut heap = heap(4);
        fill(&mut heap, 0, 4);
        let one = heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, 2 * GRANULE, 1).unwrap();
        let two = heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, 2 * GRANULE, 1).unwrap();
        for (id, after) in [(one, 5), (two, 9)] {
            heap.note_last_use(id, StreamId(0), ticks(after));
            heap.give(id, StreamId(0), ticks(after));
        }
        let (id, block) = heap.blocks.iter().find(|(_, block)| block.state == State::Free).unwrap();
        assert_eq!((block.size, block.after), (4 * GRANULE, ticks(9)));
        let run = |from: u64, to: u64| {
            let (last_use, start) = heap.last_uses_of(block).highest_run(&(BASE + from * GRANULE..BASE + to * GRANULE));
            (last_use, (start - BASE) / GRANULE)
        };
        assert_eq!(
            [run(0, 4), run(3, 4), run(0, 3), run(0, 2), run(1, 2)],
            [(9, 2), (9, 3), (9, 2), (5, 0), (5, 1)].map(|(last, from)| (ticks(last), from))
        );
        let held = heap.hold(id, BASE, BASE + GRANULE).id;
        heap.unhold_as_hole(held);
        fill(&mut heap, 0, 1);
        let (_, block) = heap.blocks.iter().find(|(_, block)| block.state == State::Free).unwrap();
        assert_eq!(heap.last_uses_of(block).highest_run(&(BASE..BASE + GRANULE)), (After::NOTHING, BASE));
    }

    #[test]
    fn what_was_held_is_not_done_before_what_it_merges_with() {
        let mut heap = heap(4);
        fill(&mut heap, 0, 4);
        let [one, two] = [(); 2]
            .map(|()| heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, 2 * GRANULE, 1).unwrap());
        heap.give(one, StreamId(0), ticks(5));
        let held = heap.hold(one, BASE, BASE + 2 * GRANULE).id;
        // Used for longer, and given back while the other is in the hands of the driver.
        heap.note_last_use(two, StreamId(0), ticks(9));
        heap.give(two, StreamId(0), ticks(9));
        let whole = heap.unhold_as_free(held);
        let block = &heap.blocks[whole];
        assert_eq!((block.size, block.after), (4 * GRANULE, ticks(9)));
        let end = BASE + 4 * GRANULE;
        assert_eq!(heap.last_uses_of(block).highest_run(&(BASE..end)), (ticks(9), BASE + 2 * GRANULE));
    }

    #[test]
    fn what_rested_is_not_done_before_what_it_merges_with() {
        let mut heap = heap(4);
        fill(&mut heap, 0, 4);
        let [one, two] = [(); 2]
            .map(|()| heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, 2 * GRANULE, 1).unwrap());
        heap.give_deferred(StreamId(0), one, 2 * GRANULE, ticks(5));
        // As memory that was lent comes back, by a way on which nothing rests.
        heap.give(two, StreamId(0), ticks(9));
        heap.coalesce_all();
        let (_, block) = heap.blocks.iter().find(|(_, block)| block.state == State::Free).unwrap();
        assert_eq!((block.size, block.after), (4 * GRANULE, ticks(9)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
        #[test]
        fn regions_stay_tiled(steps in prop::collection::vec((0..5u8, 0..16u64, 1..6u64, any::<bool>()), 1..120)) {
            let mut heap = heap(16);
                let mut live = Vec::new();
            for (what, at, n, as_free) in steps {
                let (from, to) = (BASE + at * GRANULE, (BASE + (at + n) * GRANULE).min(BASE + 16 * GRANULE));
                match what {
                    0 | 1 => {
                        let wanted = if what == 0 { State::Hole } else { State::Free };
                        let covers = |block: &Block| block.addr <= from && to <= block.addr + block.size;
                        let found = heap.blocks.iter().find(|(_, block)| block.state == wanted && covers(block));
                        if let Some((id, _)) = found {
                            let held = heap.hold(id, from, to).id;
                            prop_assert_eq!(heap.check(), Ok(()));
                            if as_free { heap.unhold_as_free(held); } else { heap.unhold_as_hole(held); }
                        }
                    }
                    2 | 3 => live.extend(heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, n * 1024, n)),
                    _ if !live.is_empty() => {
                        let id = live.swap_remove(usize::try_from(at).unwrap() % live.len());
                        heap.note_last_use(id, StreamId(0), ticks(n));
                        heap.give(id, StreamId(0), ticks(1000 + n));
                    }
                    _ => {}
                }
                prop_assert_eq!(heap.check(), Ok(()));
                let in_use: u64 = live.iter().map(|id| heap.blocks[*id].size).sum();
                prop_assert_eq!(heap.in_use(), in_use);
            }
        }
    }
}
