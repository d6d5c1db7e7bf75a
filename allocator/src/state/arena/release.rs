//! Making blocks free in an arena whose lock is held.

use super::{ArenaGuard, ArenaInner, UNKNOWN, UsedElsewhere};
use crate::heap::{BlockId, State, kind_of};
use crate::history::Actions;
use crate::size_class::{self, PoolKind};

impl ArenaGuard {
    /// Frees a live block of `bytes` requested bytes ([`UNKNOWN`] if the caller does not know).
    /// `on` is the stream that gets its memory, if that is not its own.
    #[inline(always)]
    pub(super) fn free(&mut self, id: BlockId, on: Option<u32>, bytes: u64) -> Result<(), UsedElsewhere> {
        if self.inner.is_paged && bytes != UNKNOWN && on.is_none() && self.inner.heap.is_regular(id) {
            let size = size_class::round(bytes);
            let kind = PoolKind::of(size);
            debug_assert!(self.inner.is_as_requested(id, kind, size, bytes), "{:?}", self.inner.heap.blocks[id]);
            self.free_at_home(id, kind, size, bytes);
            return Ok(());
        }
        let block = &self.inner.heap.blocks[id];
        debug_assert_eq!(block.state, State::Live);
        let (size, requested, owner, shared) = (block.size, block.requested, block.owner, block.used_elsewhere);
        let kind = kind_of(block.pool);
        self.inner.heap.forget_irregular(id);
        let heir = match on.filter(|&on| on != owner) {
            None if !shared => owner,
            Some(on) if !shared && self.inner.crosses_streams => on,
            _ => return Err(UsedElsewhere),
        };
        if heir == self.inner.heap.home && owner == heir {
            self.free_at_home(id, kind, size, requested);
        } else {
            self.note(Actions::FREE, id);
            self.given_back(size);
            self.counter_target().freed(kind, size, requested);
            let after = self.inner.tick_of(heir);
            self.complete(id, heir, after, after);
        }
        Ok(())
    }

    /// Frees a live block of the home stream that no other stream uses.
    #[inline(always)]
    fn free_at_home(&mut self, id: BlockId, kind: PoolKind, size: u64, requested: u64) {
        self.note(Actions::FREE, id);
        self.given_back(size);
        self.counter_target().freed(kind, size, requested);
        let after = self.inner.tick_of(self.inner.heap.home);
        self.make_room();
        self.inner.heap.give_deferred(id, size, after);
        self.debug_check();
    }

    /// Accounts for a live block of `size` bytes that was freed.
    #[inline]
    pub(crate) fn given_back(&mut self, size: u64) {
        self.inner.live -= 1;
        self.inner.milestones.freed += size;
    }

    /// Makes a block free that was given back and is accounted for: reusable by `owner` at once,
    /// and by others after the tick `after`. Its memory itself was used until `last_use`.
    #[inline]
    pub(crate) fn complete(&mut self, id: BlockId, owner: u32, after: u64, last_use: u64) {
        if self.inner.heap.has_deferred() {
            self.coalesce_deferred();
        }
        if self.inner.is_paged {
            self.inner.heap.note_last_use(id, owner, last_use);
        }
        let id = self.inner.heap.give(id, owner, after);
        if owner != self.inner.heap.home
            && self.inner.lends()
            && let Some(borrower) = self.arena.state.arenas.get(owner)
        {
            borrower.lenders.note(self.arena.slot, self.inner.heap.blocks[id].pool);
        }
        self.debug_check();
    }
}

impl ArenaInner {
    /// True if the record of a live block says what its handle does: what [`Heap::is_regular`]
    /// promises.
    fn is_as_requested(&self, id: BlockId, kind: PoolKind, size: u64, requested: u64) -> bool {
        let block = &self.heap.blocks[id];
        let is_own = block.state == State::Live && block.owner == self.heap.home && !block.used_elsewhere;
        is_own && (kind_of(block.pool), block.size, block.requested) == (kind, size, requested)
    }
}
