//! Borders: free neighbours that belong to different streams.
//!
//! Only one of the two streams may use each of them at once, so they cannot be one block. They
//! merge when both are known done, which is found out when a request finds no block: a bounded
//! number of borders is looked at each time. Programs of one stream have none.

use std::collections::VecDeque;

use super::members::Members;
use super::{BlockId, Heap, State};

/// The most borders that are looked at in one go.
const LOOKS: usize = 64;

/// Free blocks of which a neighbour may be a free block of another owner. Each border is noted by
/// one of its blocks at least.
#[derive(Debug, Default)]
pub(super) struct Borders {
    shares: bool,
    queue: VecDeque<BlockId>,
    noted: Members,
}

impl Borders {
    /// With `shares`, borders are noted: free blocks of different streams may become one.
    pub(super) fn new(shares: bool) -> Borders {
        Borders { shares, ..Borders::default() }
    }

    #[cold]
    pub(super) fn note(&mut self, id: BlockId) {
        if self.shares && !self.noted.contains(id) {
            self.noted.insert(id);
            self.queue.push_back(id);
        }
    }

    #[inline]
    pub(super) fn is_noted(&self, id: BlockId) -> bool {
        self.noted.contains(id)
    }

    fn take(&mut self) -> Option<BlockId> {
        let id = self.queue.pop_front()?;
        self.noted.remove(id);
        Some(id)
    }

    #[cfg(any(test, debug_assertions))]
    pub(super) fn must_note(&self) -> bool {
        self.shares
    }
}

impl Heap {
    /// Merges free neighbours of different owners that are both done, at most at [`LOOKS`] borders.
    /// The owner of the larger one gets the other. `done` gives the tick that a stream's timeline is
    /// known to have reached. Returns true if any merged.
    pub(crate) fn merge_at_borders(&mut self, done: impl Fn(u32) -> u64) -> bool {
        let mut merged = false;
        for _ in 0..self.borders.queue.len().min(LOOKS) {
            let Some(id) = self.borders.take() else { break };
            if !self.is_free(id) {
                continue;
            }
            let (prev, next) = (self.blocks[id].prev, self.blocks[id].next);
            let mut stays = false;
            for neighbour in [prev, next] {
                if !self.is_free(id) || !self.is_free(neighbour) || self.blocks[neighbour].owner == self.blocks[id].owner {
                    continue;
                }
                let is_done = |id: BlockId| self.blocks[id].after <= done(self.blocks[id].owner);
                if is_done(id) && is_done(neighbour) {
                    // It may be gone then, and the block that it is part of keeps the note.
                    self.borders.note(id);
                    self.merge_done(id, neighbour);
                    merged = true;
                } else {
                    stays = true;
                }
            }
            if stays && self.is_free(id) {
                self.borders.note(id);
            }
        }
        merged
    }

    /// The ticks of free blocks at some borders: owner, tick and pool.
    pub(crate) fn ticks_at_borders(&self) -> impl Iterator<Item = (u32, u64, u16)> + '_ {
        let ids = self.borders.queue.iter().take(LOOKS).filter(|id| self.is_free(**id));
        let sides = ids.flat_map(|&id| [self.blocks[id].prev, id, self.blocks[id].next]);
        sides.filter(|&id| self.is_free(id)).map(|id| {
            let block = &self.blocks[id];
            (block.owner, block.after, block.pool)
        })
    }

    /// True if any free block has a free neighbour of another owner, as far as is known.
    pub(crate) fn has_borders(&self) -> bool {
        !self.borders.queue.is_empty()
    }

    /// Merges two free neighbours that are done.
    fn merge_done(&mut self, one: BlockId, other: BlockId) {
        let stream = self.region_of(one).stream;
        let (goes, stays) = if self.blocks[one].owner == stream { (other, one) } else { (one, other) };
        self.blocks[stays].after = 0;
        self.unindex(goes);
        self.free -= self.blocks[goes].size;
        self.blocks[goes].state = State::Waiting;
        self.give(goes, self.blocks[stays].owner, 0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn neighbours_of_different_owners_merge_once_both_are_done() {
        let mut heap = Heap::new(true);
        heap.add_region(MIB, 3 * MIB, 0, 1);
        let blocks = [0, 1, 0].map(|_| heap.take_best(0, 1, MIB, MIB).unwrap());
        heap.give(blocks[0], 0, 5);
        heap.give(blocks[1], 1, 7);
        heap.give(blocks[2], 0, 6);
        assert_eq!(heap.check(), Ok(()));
        assert!(!heap.merge_at_borders(|stream| [4, 9][stream as usize]));
        assert!(heap.merge_at_borders(|stream| [5, 7][stream as usize]));
        let block = heap.all_blocks().next().unwrap().2;
        assert_eq!((block.size, block.after), (3 * MIB, 6), "the highest is not done");
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn neighbours_stay_apart_where_streams_do_not_share() {
        let mut heap = Heap::new(false);
        heap.add_region(MIB, 2 * MIB, 0, 1);
        let blocks = [0, 1].map(|_| heap.take_best(0, 1, MIB, MIB).unwrap());
        heap.give(blocks[0], 0, 1);
        heap.give(blocks[1], 1, 1);
        assert!(!heap.merge_at_borders(|_| 9));
        assert_eq!(heap.check(), Ok(()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        /// Blocks of several streams are taken, from any owner whose block is done, and given back; in
        /// the end, when all is done, each region is one free block.
        #[test]
        fn no_border_outlasts_its_streams(steps in prop::collection::vec((0..3u32, any::<bool>(), 1..9u64, any::<prop::sample::Index>()), 1..200)) {
            let mut heap = Heap::new(true);
            (0..3).for_each(|n| { heap.add_region((n + 1) << 30, 4 * MIB, u32::try_from(n).unwrap(), 1); });
            let (mut live, mut done) = (Vec::new(), 0);
            for (now, (stream, takes, units, which)) in (1..).zip(steps) {
                if takes {
                    let size = units * 128 << 10;
                    let own = heap.take_best(stream, 1, size, size);
                    let taken = own.or_else(|| {
                        let found = heap.best_of_others(stream, 1, size, |_| done)?;
                        Some(heap.take(found, stream, size, size))
                    });
                    live.extend(taken.map(|id| (id, stream)));
                } else if !live.is_empty() {
                    let (id, owner) = live.swap_remove(which.index(live.len()));
                    heap.give(id, owner, now);
                }
                if units == 1 {
                    done = now;
                    heap.merge_at_borders(|_| done);
                }
                prop_assert_eq!(heap.check(), Ok(()));
            }
            live.into_iter().for_each(|(id, owner)| { heap.give(id, owner, 1000); });
            while heap.merge_at_borders(|_| u64::MAX) {}
            prop_assert_eq!(heap.check(), Ok(()));
            prop_assert_eq!(heap.all_blocks().count(), 3);
        }
    }
}
