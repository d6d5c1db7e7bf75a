//! When blocks that rest are merged (`heap/resting.rs` says why they rest): before another rests or a search, before a
//! slow path looks into the arena, and when a search fails.

use super::Guard;
use crate::heap::{BlockId, Rested, SplitChange, kind_of};

impl Guard {
    /// Makes room for another block to rest, and for a search: merges what may not rest any longer (`heap/resting.rs`).
    #[inline(always)]
    pub(super) fn make_room(&mut self) {
        if !self.desk.heap.has_newest() {
            return;
        }
        if self.desk.heap.lets_several_rest() {
            return self.make_room_among_several();
        }
        let newest = self.desk.heap.take_newest();
        self.merge(newest);
    }

    #[inline(never)]
    fn make_room_among_several(&mut self) {
        if self.desk.heap.newest_is_large() {
            self.merge_resting();
        } else if let Some(oldest) = self.desk.heap.exchange_oldest() {
            self.desk.heap.prefetch_around_oldest();
            self.merge(oldest);
        }
    }

    /// Merges all blocks that rest with their neighbours.
    #[inline(never)]
    pub(crate) fn merge_resting(&mut self) {
        while let Some(rested) = self.desk.heap.take_oldest_resting() {
            self.merge(rested);
        }
        self.desk.heap.set_room_to_rest();
    }

    #[inline(always)]
    fn merge(&mut self, rested: Rested) {
        let kind = kind_of(self.desk.heap.blocks[rested.block()].pool);
        let change = self.desk.heap.merge(rested);
        self.split_changed(kind, change);
        if self.desk.heap.has_many_recent_uses() {
            self.thin_recent_uses();
        }
    }

    #[cold]
    #[inline(never)]
    fn thin_recent_uses(&mut self) {
        let done = self.done();
        self.desk.heap.thin_recent_uses(done);
    }

    /// Serves a request that no free block serves after merging the blocks that rest, if there are any. The ladder would do so, too, but under
    /// all locks.
    #[cold]
    #[inline(never)]
    pub(super) fn take_what_rests(&mut self, pool: u16, size: u64, requested: u64) -> Option<(BlockId, SplitChange)> {
        if !self.desk.heap.has_resting() {
            return None;
        }
        self.merge_resting();
        let desk = &mut *self.desk;
        desk.heap.take_best(&desk.classes, pool, size, requested)
    }
}
