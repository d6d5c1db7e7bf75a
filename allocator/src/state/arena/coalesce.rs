//! When deferred blocks are merged (`heap/deferred.rs`): before another one is deferred, before
//! a search, before a slow path looks into the arena, and when a search fails.

use super::ArenaGuard;
use crate::heap::{BlockId, DeferredBlock};

impl ArenaGuard {
    /// Makes room to defer another block, and for a search: merges the blocks that may not be
    /// deferred any longer (`heap/deferred.rs`).
    #[inline(always)]
    pub(super) fn make_room(&mut self) {
        if !self.inner.heap.has_newest() {
            return;
        }
        if self.inner.heap.defers_several() {
            return self.make_room_among_several();
        }
        let newest = self.inner.heap.take_newest();
        self.merge(newest);
    }

    #[inline(never)]
    fn make_room_among_several(&mut self) {
        if self.inner.heap.newest_is_large() {
            self.coalesce_deferred();
        } else if let Some(oldest) = self.inner.heap.exchange_oldest() {
            self.inner.heap.prefetch_around_oldest();
            self.merge(oldest);
        }
    }

    /// Merges all deferred blocks with their neighbours.
    #[inline(never)]
    pub(crate) fn coalesce_deferred(&mut self) {
        while let Some(deferred) = self.inner.heap.take_oldest_deferred() {
            self.merge(deferred);
        }
        self.inner.heap.set_deferred_limit();
    }

    #[inline(always)]
    fn merge(&mut self, deferred: DeferredBlock) {
        self.inner.heap.merge(deferred);
        if self.inner.heap.has_many_recent_uses() {
            self.thin_recent_uses();
        }
    }

    #[cold]
    #[inline(never)]
    fn thin_recent_uses(&mut self) {
        let done = self.done();
        self.inner.heap.thin_recent_uses(done);
    }

    /// Serves a request that no free block serves after merging the deferred blocks, if there are
    /// any. The ladder would do so, too, but under all locks.
    #[cold]
    #[inline(never)]
    pub(super) fn take_uncoalesced(&mut self, pool: u16, size: u64, requested: u64) -> Option<BlockId> {
        if !self.inner.heap.has_deferred() {
            return None;
        }
        self.coalesce_deferred();
        self.inner.heap.take_best(pool, size, requested)
    }
}
