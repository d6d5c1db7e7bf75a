//! When each granule of a region was last used.
//!
//! A free block has one tick, the latest of all blocks that were merged into it. Whether memory may
//! be unmapped depends on the memory's own last use, so the last use of each granule is noted after
//! a block in it was given back ([`RecentUses`]), as a tick of the region's stream. A block may
//! cover thousands of granules, so ticks are kept in a tree of three levels, whose nodes cover 1,
//! 16 and 256 granules. A note raises the fewest nodes that make up its range, about 90 for 16 GiB
//! in granules of 2 MiB. A granule's last use is the latest of the three nodes that cover it.
//!
//! Noting a use writes all over a region's tree, and mostly the device is done with the block
//! before the host needs to know. So uses are first appended to a log, [`RecentUses`]. They are
//! noted when a slow path needs them, or when there are many, and only those that are not known
//! done yet.
//!
//! Invariants of the log:
//! * uses are in the order of their ticks, because a stream's ticks ascend;
//! * when granules are looked at, moved or forgotten, all logs are empty;
//! * the regions of uses in the log exist.

use std::ops::Range;

use crate::types::After;

/// Nodes that one of the next level covers.
const FANOUT: usize = 16;
const LEVELS: usize = 3;

/// The granules of a region.
#[derive(Clone, Debug, Default)]
pub(crate) struct Granules {
    /// Binary logarithm of a granule's size in bytes.
    shift: u32,
    /// For each node, the work of the region's stream that must be done before other streams may
    /// use all that the node covers, as far as this node says. The level of single granules comes
    /// first. A level ends with the last node that was ever raised: a region has room for all
    /// memory of the device, and most of it is never used.
    levels: [Vec<After>; LEVELS],
    /// The latest tick ever noted.
    latest: After,
}

impl Granules {
    /// The granules of a region of `bytes` bytes. `granule` is a power of two.
    pub(super) fn new(bytes: u64, granule: u64) -> Granules {
        let shift = granule.trailing_zeros();
        let mut nodes = usize::try_from(bytes >> shift).unwrap_or(0);
        let levels = std::array::from_fn(|_| {
            let level = Vec::with_capacity(nodes);
            nodes = nodes.div_ceil(FANOUT);
            level
        });
        Granules { shift, levels, latest: After::NOTHING }
    }

    /// The size of a granule in bytes.
    pub(super) fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// True if there are no granules.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.shift == 0
    }

    /// Numbers of the granules that a range touches, given relative to the region.
    #[inline]
    fn touched(&self, from: u64, bytes: u64) -> Range<usize> {
        let number = |at: u64| usize::try_from(at >> self.shift).unwrap_or(usize::MAX);
        number(from)..number(from + bytes - 1) + 1
    }

    /// Notes that a range, given relative to the region, is used until the tick `after`.
    #[inline]
    pub(super) fn note(&mut self, from: u64, bytes: u64, after: After) {
        let touched = self.touched(from, bytes);
        // Ticks come in ascending order, except those of blocks that had to wait.
        let is_latest = after >= self.latest;
        self.latest = after.max(self.latest);
        if whole_parents(&touched).is_empty() {
            raise(&mut self.levels[0], touched, after, is_latest);
        } else {
            self.note_many(touched, after, is_latest);
        }
    }

    #[inline(never)]
    fn note_many(&mut self, mut range: Range<usize>, after: After, is_latest: bool) {
        let (top, lower) = self.levels.split_last_mut().unwrap_or_else(|| unreachable!("there are three levels"));
        for level in lower {
            let parents = whole_parents(&range);
            if parents.is_empty() {
                return raise(level, range, after, is_latest);
            }
            raise(level, range.start..parents.start * FANOUT, after, is_latest);
            raise(level, parents.end * FANOUT..range.end, after, is_latest);
            range = parents;
        }
        raise(top, range, after, is_latest);
    }

    /// Notes that every stream may use a range, given relative to the region.
    pub(super) fn forget(&mut self, from: u64, bytes: u64) {
        let touched = self.touched(from, bytes);
        // Ticks of upper nodes that also concern other granules move down to the nodes below.
        for level in (1..LEVELS).rev() {
            let covered = FANOUT.pow(u32::try_from(level).unwrap_or(0));
            let (lower, upper) = self.levels.split_at_mut(level);
            let nodes = touched.start / covered..touched.end.div_ceil(covered);
            for (node, tick) in upper[0].iter_mut().enumerate().take(nodes.end).skip(nodes.start) {
                if *tick > After::NOTHING {
                    raise(&mut lower[level - 1], node * FANOUT..(node + 1) * FANOUT, std::mem::take(tick), false);
                }
            }
        }
        let end = touched.end.min(self.levels[0].len());
        self.levels[0].get_mut(touched.start..end).unwrap_or_default().fill(After::NOTHING);
    }

    /// The last use of a granule, by its number.
    fn of(&self, mut number: usize) -> After {
        let mut latest = After::NOTHING;
        for level in &self.levels {
            latest = level.get(number).map_or(latest, |&tick| tick.max(latest));
            number /= FANOUT;
        }
        latest
    }
}

/// The nodes of the next level that cover only nodes of a range.
#[inline]
fn whole_parents(range: &Range<usize>) -> Range<usize> {
    range.start.div_ceil(FANOUT)..range.end / FANOUT
}

/// Raises the ticks of a range of nodes to `after`. If `is_latest`, none of them is later. It is
/// false for blocks that had to wait, which are noted after blocks that were used for longer.
#[inline]
fn raise(level: &mut Vec<After>, range: Range<usize>, after: After, is_latest: bool) {
    if level.len() < range.end {
        level.resize(range.end, After::NOTHING);
    }
    let Some(ticks) = level.get_mut(range) else { return };
    if is_latest {
        ticks.fill(after);
    } else {
        ticks.iter_mut().for_each(|tick| *tick = after.max(*tick));
    }
}

/// The last uses of a free block's granules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastUses<'a> {
    /// First address of the region.
    pub(super) start: u64,
    /// The region's granules; `None` if the block's own tick counts for all of it.
    pub(super) granules: Option<&'a Granules>,
    /// The block's own tick.
    pub(super) latest: After,
}

impl LastUses<'_> {
    /// The longest run of granules at the high end of the range that share one last use. Returns
    /// the tick that the owner's timeline must reach for them to be done, and the first address of
    /// the lowest of them.
    pub(crate) fn highest_run(&self, range: &Range<u64>) -> (After, u64) {
        let Some(granules) = self.granules else { return (self.latest, range.start) };
        let number = |at: u64| usize::try_from((at - self.start) >> granules.shift).unwrap_or(usize::MAX);
        let numbers = number(range.start)..number(range.end);
        let mut last_uses = numbers.rev().map(|number| granules.of(number).min(self.latest));
        let Some(last_use) = last_uses.next() else { return (self.latest, range.start) };
        let more = last_uses.take_while(|&other| other == last_use).count() as u64;
        (last_use, range.end - ((more + 1) << granules.shift))
    }
}

/// From this many uses on, they should be noted. They take 32 KiB, and there are some hundred
/// between two progress events.
const MANY: usize = 1024;

/// The last use of memory that was freed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecentUse {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) region: u32,
    /// The tick of its stream until which it was used.
    pub(super) after: After,
}

#[derive(Debug, Default)]
pub(super) struct RecentUses(Vec<RecentUse>);

impl RecentUses {
    #[inline]
    pub(super) fn push(&mut self, one: RecentUse) {
        debug_assert!(self.0.last().is_none_or(|last| last.after <= one.after));
        self.0.push(one);
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    #[inline]
    pub(super) fn are_many(&self) -> bool {
        self.0.len() >= MANY
    }

    /// Drops the uses that are done, as the stream's timeline has reached `done`. Returns true
    /// if the log has room for many more now.
    pub(super) fn drop_done(&mut self, done: After) -> bool {
        let not_done = self.0.partition_point(|one| one.after <= done);
        self.0.drain(..not_done);
        self.0.len() <= MANY / 2
    }

    /// Passes all uses to `note` and empties the log, whose storage stays.
    pub(super) fn note_all(&mut self, note: impl FnMut(RecentUse)) {
        self.0.drain(..).for_each(note);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::ticks;

    const GRANULE: u64 = 4096;

    #[test]
    fn a_long_range_raises_few_nodes() {
        let mut granules = Granules::new(9000 * GRANULE, GRANULE);
        granules.note(5 * GRANULE, 8192 * GRANULE, ticks(7));
        let raised = granules.levels.iter().flatten().filter(|&&tick| tick == ticks(7)).count();
        assert!(raised <= 32 + 4 * (FANOUT - 1), "{raised}");
        assert_eq!([4, 5, 8196, 8197].map(|number| granules.of(number)), [0, 7, 7, 0].map(ticks));
    }

    proptest! {
        #[test]
        fn behaves_like_a_tick_for_each_granule(
            count in 1..1200usize,
            steps in prop::collection::vec((any::<bool>(), 0..1200usize, 1..1200usize, 1..100u64), 1..40),
        ) {
            let mut granules = Granules::new(count as u64 * GRANULE, GRANULE);
            let mut model = vec![After::NOTHING; count];
            for (forget, from, length, after) in steps {
                let after = ticks(after);
                let from = from % count;
                let range = from..(from + length).min(count);
                // Blocks may begin and end within granules, holes do not.
                let (start, end) = (range.start as u64 * GRANULE, range.end as u64 * GRANULE);
                if forget {
                    granules.forget(start, end - start);
                    model[range].fill(After::NOTHING);
                } else {
                    granules.note(start + 512, end - start - 1024, after);
                    model[range].iter_mut().for_each(|tick: &mut After| *tick = after.max(*tick));
                }
                prop_assert_eq!((0..count).map(|number| granules.of(number)).collect::<Vec<_>>(), &model[..]);
            }
            let last_uses = LastUses { start: 0, granules: Some(&granules), latest: ticks(50) };
            let (last_use, start) = last_uses.highest_run(&(0..count as u64 * GRANULE));
            let runs = model.iter().map(|&tick| tick.min(ticks(50))).rev();
            prop_assert_eq!(last_use, model[count - 1].min(ticks(50)));
            prop_assert_eq!(start, (count - runs.take_while(|&tick| tick == last_use).count()) as u64 * GRANULE);
        }
    }
}

#[cfg(test)]
mod recent_tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::heap::Owner;
    use crate::core::heap::{Heap, State};
    use crate::types::BlockId;
    use crate::types::{PoolId, StreamId, ticks};

    const GRANULE: u64 = 4096;
    const BASE: u64 = 1 << 20;
    const GRANULES: usize = 32;

    fn heap() -> Heap {
        let mut heap = Heap::new(true);
        heap.add_reservation(BASE, GRANULES as u64 * GRANULE, StreamId(0), PoolId::SMALL, GRANULE);
        let hole = heap.hole_blocks().next().unwrap().0;
        let held = heap.hold(hole, BASE, BASE + GRANULES as u64 * GRANULE);
        heap.unhold_as_free(held.id);
        heap
    }

    /// Numbers of the granules that a block touches.
    fn granules(heap: &Heap, id: BlockId) -> Range<usize> {
        let block = &heap.blocks[id];
        let number = |at: u64| usize::try_from((at - BASE) / GRANULE).unwrap();
        number(block.addr)..number(block.addr + block.size - 1) + 1
    }

    #[test]
    fn room_is_made_by_what_is_done_if_that_is_enough() {
        let log = |uses: u64| {
            let mut recent = RecentUses::default();
            (1..=uses).for_each(|after| {
                recent.push(RecentUse { addr: BASE, bytes: GRANULE, region: 0, after: ticks(after) })
            });
            recent
        };
        let many = MANY as u64;
        assert!(log(many).are_many() && !log(many - 1).are_many());
        for (done, is_enough) in [(0, false), (many / 2 - 1, false), (many / 2, true), (many, true)] {
            let mut recent = log(many);
            assert_eq!(recent.drop_done(ticks(done)), is_enough);
            let mut left = Vec::new();
            recent.note_all(|one| left.push(one.after));
            assert_eq!(left, (done + 1..=many).map(ticks).collect::<Vec<_>>());
            assert!(recent.is_empty());
        }
        let mut heap = heap();
        let end = BASE + GRANULES as u64 * GRANULE;
        heap.of_stream(StreamId(0)).recent = log(many);
        heap.thin_recent_uses(StreamId(0), ticks(many / 4));
        let (_, block) = heap.blocks.iter().find(|(_, block)| block.state == State::Free).unwrap();
        let block = crate::core::heap::Block { after: ticks(many), ..*block };
        assert_eq!(heap.last_uses_of(&block).highest_run(&(BASE..end)), (After::NOTHING, BASE + GRANULE));
        assert_eq!(heap.last_uses_of(&block).highest_run(&(BASE..BASE + GRANULE)), (ticks(many), BASE));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        /// A question about a granule has the same answer as if every use had been noted at once.
        #[test]
        fn uses_that_are_not_done_are_noted_in_time(
            steps in prop::collection::vec((0..7u8, 1..40u64, 0..64usize), 1..200),
        ) {
            let (mut heap, mut model, mut live, mut done) = (heap(), vec![After::NOTHING; GRANULES], Vec::new(), 0);
            for (now, (what, n, which)) in (1..).zip(steps) {
                match what {
                    0..3 => live.extend(heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::SMALL, n * 512, n)),
                    3..5 if !live.is_empty() => {
                        let id = live.swap_remove(which % live.len());
                        model[granules(&heap, id)].fill(ticks(now));
                        let size = heap.blocks[id].size;
                        heap.give_deferred(StreamId(0), id, size, ticks(now));
                        heap.coalesce_all();
                    }
                    5 => {
                        // Its memory moves away, and other memory comes.
                        let at = BASE + which as u64 % GRANULES as u64 * GRANULE;
                        let covers = |block: &crate::core::heap::Block| {
                            block.state == State::Free && block.addr <= at && at + GRANULE <= block.addr + block.size
                        };
                        let found = heap.blocks.iter().find(|(_, block)| covers(block)).map(|(id, _)| id);
                        if let Some(id) = found {
                            let held = heap.hold(id, at, at + GRANULE).id;
                            let hole = heap.unhold_as_hole(held);
                            let held = heap.hold(hole, at, at + GRANULE).id;
                            heap.unhold_as_free(held);
                            model[usize::try_from((at - BASE) / GRANULE).unwrap()] = After::NOTHING;
                        }
                    }
                    _ => {
                        done = done.max(now.saturating_sub(n));
                        heap.thin_recent_uses(StreamId(0), ticks(done));
                        heap.note_recent_uses(|_| ticks(done));
                        let free = heap.blocks.iter().filter(|(_, block)| block.state == State::Free);
                        for (_, block) in free {
                            let end = (block.addr + block.size) / GRANULE * GRANULE;
                            let whole = block.addr.next_multiple_of(GRANULE)..end;
                            for at in whole.step_by(4096) {
                                let (last_use, _) = heap.last_uses_of(block).highest_run(&(at..at + GRANULE));
                                let expected = model[usize::try_from((at - BASE) / GRANULE).unwrap()].min(block.after);
                                prop_assert_eq!(last_use.max(ticks(done)), expected.max(ticks(done)));
                            }
                        }
                    }
                }
                prop_assert_eq!(heap.check(), Ok(()));
            }
        }
    }
}
