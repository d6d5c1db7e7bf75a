//! Free blocks of other streams; and strays: free blocks in a region of another stream than their
//! owner.
//!
//! A stream that was served from another one's region may use that memory again at once. Once it is
//! known done, it belongs to the region's stream, so that free neighbours become one block again.
//! That is found out when a request finds no block: a bounded number of strays is looked at each
//! time. Programs of one stream have none.

use super::{Heap, State};
use crate::types::{After, BlockId, PoolId, StreamId, Use, latest_by_stream};

/// The most strays that are looked at in one go where the host does not wait.
pub(crate) const LOOKS: usize = 64;

impl Heap {
    fn is_stray(&self, id: BlockId) -> bool {
        self.is_free(id) && self.blocks[id].owner != self.region_of(id).stream
    }

    /// Gives strays that are done to the streams of their regions, after a look at no more than
    /// `looks` of them. `done` gives the tick that a stream's timeline is known to have reached.
    /// Returns true if fewer are noted now.
    pub(crate) fn return_strays(&mut self, looks: usize, done: impl Fn(StreamId) -> After) -> bool {
        let noted = self.noted_strays();
        for _ in 0..self.strays.queue.len().min(looks) {
            let Some(id) = self.strays.take() else { break };
            if !self.is_stray(id) {
                continue;
            }
            if self.blocks[id].after > done(self.blocks[id].owner) {
                self.strays.note(id);
                continue;
            }
            self.unindex(id);
            self.free -= self.blocks[id].size;
            self.blocks[id].state = State::Waiting;
            self.give(id, self.region_of(id).stream, After::NOTHING);
        }
        self.noted_strays() < noted
    }

    /// The last uses of no more than `looks` strays, each with its pool.
    pub(crate) fn ticks_of_strays(&self, looks: usize) -> impl Iterator<Item = (Use, PoolId)> + '_ {
        let strays = self.strays.queue.iter().take(looks).filter(|id| self.is_stray(**id));
        strays.map(|&id| (self.blocks[id].last_use(), self.blocks[id].pool))
    }

    /// The number of strays, and of blocks that were when they were last looked at.
    pub(crate) fn noted_strays(&self) -> usize {
        self.strays.queue.len()
    }
}

/// How many blocks of one owner are considered, smallest first.
const CANDIDATES: usize = 32;

impl Heap {
    /// The smallest block of a pool that has at least `size` bytes, belongs to another stream, and
    /// has a tick that is at most the result of `until` for its owner.
    pub(crate) fn best_of_others(
        &self,
        stream: StreamId,
        pool: PoolId,
        size: u64,
        until: impl Fn(StreamId) -> After,
    ) -> Option<BlockId> {
        let others = self.indexes(pool).filter(|(owner, _)| owner.stream != stream);
        let best = others.filter_map(|(owner, index)| {
            let mut candidates = index.iter_from_first_fit(size).take(CANDIDATES).peekable();
            candidates.peek()?;
            let until = until(owner.stream);
            candidates.find(|key| key.size >= size && self.blocks[key.block].after <= until)
        });
        Some(best.min()?.block)
    }

    /// The latest tick of each other stream that has blocks of a pool which are large enough; and
    /// of the owners of strays.
    pub(crate) fn ticks_of_others(&self, stream: StreamId, pool: PoolId, size: u64) -> Vec<Use> {
        let others = self.indexes(pool).filter(|(owner, _)| owner.stream != stream);
        let uses = others.flat_map(|(_, index)| {
            let keys = index.iter_from_first_fit(size).take(CANDIDATES).filter(|key| key.size >= size);
            keys.map(|key| self.blocks[key.block].last_use()).collect::<Vec<_>>()
        });
        let of_strays = self.ticks_of_strays(LOOKS).filter(|&(_, of)| of == pool).map(|(last_use, _)| last_use);
        latest_by_stream(uses.chain(of_strays)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::heap::Owner;
    use crate::types::{StreamId, ticks};

    const MIB: u64 = 1 << 20;

    #[test]
    fn strays_go_to_the_stream_of_their_region_once_they_are_done() {
        let mut heap = Heap::new(true);
        heap.add_region(MIB, 3 * MIB, StreamId(0), PoolId::LARGE);
        let blocks =
            [0, 1, 2].map(|_| heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::LARGE, MIB, MIB).unwrap());
        heap.give(blocks[0], StreamId(0), ticks(5));
        heap.give(blocks[1], StreamId(1), ticks(7));
        heap.give(blocks[2], StreamId(0), ticks(6));
        assert_eq!(heap.check(), Ok(()));
        assert!(!heap.return_strays(LOOKS, |stream| ticks([9, 6][stream.index()])));
        assert!(heap.return_strays(LOOKS, |stream| ticks([0, 7][stream.index()])));
        let block = heap.all_blocks().next().unwrap().2;
        assert_eq!((block.size, block.after, block.owner), (3 * MIB, ticks(6), StreamId(0)));
        assert_eq!(heap.noted_strays(), 0);
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn blocks_that_were_strays_hold_up_no_stray() {
        let mut heap = Heap::new(true);
        let count = 2 * LOOKS as u64;
        heap.add_region(MIB, count * MIB, StreamId(0), PoolId::LARGE);
        let mut take = |owner| heap.take_best(owner, PoolId::LARGE, MIB, MIB).unwrap();
        let blocks: Vec<_> = (0..count).map(|_| take(Owner::in_own_regions(StreamId(0)))).collect();
        let last = blocks[blocks.len() - 1];
        for &block in &blocks {
            heap.give(block, StreamId(1), ticks(1));
            if block != last {
                heap.take_best(Owner { stream: StreamId(1), has_strays: true }, PoolId::LARGE, MIB, MIB).unwrap();
            }
        }
        while heap.return_strays(LOOKS, |_| ticks(1)) {}
        assert_eq!((heap.noted_strays(), heap.block(last).owner), (0, StreamId(0)));
        assert_eq!(heap.check(), Ok(()));
    }

    #[test]
    fn memory_stays_where_streams_do_not_share() {
        let mut heap = Heap::new(false);
        heap.add_region(MIB, 2 * MIB, StreamId(0), PoolId::LARGE);
        let blocks =
            [0, 1].map(|_| heap.take_best(Owner::in_own_regions(StreamId(0)), PoolId::LARGE, MIB, MIB).unwrap());
        heap.give(blocks[0], StreamId(0), ticks(1));
        heap.give(blocks[1], StreamId(1), ticks(1));
        assert!(!heap.return_strays(LOOKS, |_| ticks(9)));
        assert_eq!(heap.check(), Ok(()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        /// Blocks of several streams are taken, from any owner whose block is done, and given back;
        /// in the end, when all is done, each region is one free block.
        #[test]
        fn regions_are_whole_again_in_the_end(
            steps in prop::collection::vec((0..3u32, any::<bool>(), 1..9u64, any::<prop::sample::Index>()), 1..200),
        ) {
            let mut heap = Heap::new(true);
            for stream in 0..3 {
                heap.add_region((u64::from(stream) + 1) << 30, 4 * MIB, StreamId(stream), PoolId::LARGE);
            }
            let (mut live, mut done) = (Vec::new(), 0);
            for (now, (stream, takes, units, which)) in (1..).zip(steps) {
                if takes {
                    let size = units * (128 << 10);
                    let own = heap.take_best(Owner::in_own_regions(StreamId(stream)), PoolId::LARGE, size, size);
                    let taken = own.or_else(|| {
                        let found = heap.best_of_others(StreamId(stream), PoolId::LARGE, size, |_| ticks(done))?;
                        Some(heap.take(found, StreamId(stream), size, size))
                    });
                    live.extend(taken.map(|id| (id, stream)));
                } else if !live.is_empty() {
                    let (id, owner) = live.swap_remove(which.index(live.len()));
                    heap.give(id, StreamId(owner), ticks(now));
                }
                if units == 1 {
                    done = now;
                    heap.return_strays(LOOKS, |_| ticks(done));
                }
                prop_assert_eq!(heap.check(), Ok(()));
            }
            for (id, owner) in live {
                heap.give(id, StreamId(owner), ticks(1000));
            }
            while heap.return_strays(LOOKS, |_| ticks(u64::MAX)) {}
            prop_assert_eq!(heap.check(), Ok(()));
            prop_assert_eq!(heap.all_blocks().count(), 3);
        }
    }
}
