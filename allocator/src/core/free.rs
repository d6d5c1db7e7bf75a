//! Giving blocks back.

use crate::core::Core;
use crate::core::heap::State;
use crate::core::waiting::Waiting;
use crate::history::{Action, Actions};
use crate::size_class::{self, PoolKind};
use crate::types::{After, BlockId, Freed, StreamId, UNKNOWN};

/// What became of a block that was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Its owner may use it again.
    Free,
    /// It waits for other streams.
    Waits,
}

impl Core {
    /// Frees a live block.
    #[inline(always)]
    pub(crate) fn free(&mut self, Freed { block: id, stream, on, bytes }: Freed) -> Then {
        if bytes != UNKNOWN && on.is_none() && self.heap.is_regular(id) {
            let size = size_class::round(bytes);
            let kind = PoolKind::of(size);
            debug_assert!(self.is_as_requested(id, stream, kind, size, bytes), "{:?}", self.heap.block(id));
            self.free_own(id, stream, kind, size, bytes);
            return Then::Free;
        }
        self.free_by_record(id, on)
    }

    /// Frees a live block that may not be what its handle says.
    #[inline(never)]
    fn free_by_record(&mut self, id: BlockId, on: Option<StreamId>) -> Then {
        let block = self.heap.block(id);
        debug_assert_eq!(block.state, State::Live);
        let (size, requested, owner, pool, shared) =
            (block.size, block.requested, block.owner, block.pool, block.used_elsewhere);
        self.heap.forget_irregular(id);
        match on.filter(|&on| on != owner) {
            None if !shared => self.free_own(id, owner, pool.kind(), size, requested),
            Some(on) if !shared && self.crosses_streams => {
                self.note(Actions::FREE, id);
                self.given_back(owner, pool.kind(), size, requested);
                let after = self.streams.enqueued(on);
                self.complete(id, on, after, after);
            }
            on => {
                self.begin_wait(id, on);
                return Then::Waits;
            }
        }
        Then::Free
    }

    /// Frees a live block that its own stream alone used.
    #[inline(always)]
    fn free_own(&mut self, id: BlockId, stream: StreamId, kind: PoolKind, size: u64, requested: u64) {
        self.note(Actions::FREE, id);
        self.given_back(stream, kind, size, requested);
        let after = self.streams.enqueued(stream);
        if self.heap.give_deferred(stream, id, size, after) {
            self.thin_recent_uses(stream);
        }
        self.debug_check();
    }

    /// Accounts for a live block of a stream that was freed.
    #[inline]
    fn given_back(&mut self, stream: StreamId, kind: PoolKind, size: u64, requested: u64) {
        self.live -= 1;
        self.counters.freed(kind, size, requested);
        if let Some(progress) = self.streams.progress_mut(stream) {
            progress.freed += size;
        }
    }

    /// Makes a block free that was given back and is accounted for: reusable by `owner` at once,
    /// and by others after the work `after`. Its memory itself was used until `last_use`.
    pub(super) fn complete(&mut self, id: BlockId, owner: StreamId, after: After, last_use: After) {
        self.heap.coalesce(owner);
        self.heap.note_last_use(id, owner, last_use);
        self.heap.give(id, owner, after);
        self.debug_check();
    }

    /// Enters a block in the list of waiting blocks, as it is freed and other streams used it, too.
    #[cold]
    fn begin_wait(&mut self, id: BlockId, on: Option<StreamId>) {
        let block = self.heap.block(id);
        let (owner, kind, size) = (block.owner, block.pool.kind(), block.size);
        self.note(Action::FreeRequested, id);
        self.given_back(owner, kind, size, 0);
        self.heap.set_waiting(id);
        self.counters.waits(kind, size);
        let block = *self.heap.block(id);
        // A block that only sleeps has an empty list.
        let mut streams = self.other_users.remove(&id).unwrap_or_default();
        streams.extend(on.filter(|on| !streams.contains(on)));
        let uses = streams.iter().map(|&stream| self.streams.use_so_far(stream)).collect();
        let own_use = self.streams.enqueued(owner);
        let waiting = Waiting { id, block, uses, own_use };
        match &mut self.paged {
            // Until its memory wakes up.
            Some(paged) if paged.sleeps(&block.range()) => paged.cordon.freed.push(waiting),
            _ => self.waiting.push(waiting),
        }
    }

    /// True if the record of a live block says what its handle does: what
    /// [`crate::core::heap::Heap::is_regular`] promises.
    fn is_as_requested(&self, id: BlockId, stream: StreamId, kind: PoolKind, size: u64, requested: u64) -> bool {
        let block = self.heap.block(id);
        let is_own = block.state == State::Live && block.owner == stream && !block.used_elsewhere;
        is_own && (block.pool.kind(), block.size, block.requested) == (kind, size, requested)
    }
}
