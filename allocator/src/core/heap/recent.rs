//! Last uses that are yet to be noted: a log in front of the granules' ticks ([`super::last_use`]).
//!
//! A freed block was used until some tick, which must be noted for its granules. Noting it writes
//! all over a region's tree, which took a tenth of the time of the traces; and mostly the device is
//! done with the block before the host needs to know. So uses are appended to a log. They are noted
//! when a slow path needs them, or when there are many, and only those that are
//! not known done yet.
//!
//! Invariants:
//! * uses are in the order of their ticks, because a stream's ticks ascend;
//! * when granules are looked at, moved or forgotten, all logs are empty;
//! * the regions of uses in the log exist.

use crate::types::After;

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
        let hole = heap.holes().next().unwrap().0;
        let held = heap.hold(hole, BASE, BASE + GRANULES as u64 * GRANULE);
        heap.unhold_as_free(held.id);
        heap
    }

    /// Numbers of the granules that a block touches.
    fn granules(heap: &Heap, id: BlockId) -> std::ops::Range<usize> {
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
