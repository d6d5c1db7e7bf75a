//! Taking blocks from an arena whose lock is held.

use super::{ArenaGuard, Granted};
use crate::heap::{BlockId, kind_of};
use crate::history::Action;
use crate::request::Request;

impl ArenaGuard {
    /// Serves a request of the arena's stream from the free blocks that it may reuse at once, those
    /// in the queue included.
    pub(crate) fn take_own(&mut self, request: &Request) -> Option<Granted> {
        self.drain();
        self.take_own_hot(request)
    }

    /// As [`ArenaGuard::take_own`], without applying the remote frees first. Inlined so that
    /// request and result stay in registers.
    #[inline(always)]
    pub(crate) fn take_own_hot(&mut self, request: &Request) -> Option<Granted> {
        let inner = &mut *self.inner;
        inner.milestones.searches += 1;
        let block = match inner.heap.retake(request.pool, request.size, request.requested) {
            Some(block) => block,
            None => {
                self.make_room();
                match self.inner.heap.take_best(request.pool, request.size, request.requested) {
                    Some(block) => block,
                    None => self.take_uncoalesced(request.pool, request.size, request.requested)?,
                }
            }
        };
        if !request.is_regular {
            self.inner.heap.make_irregular(block);
        }
        Some(self.taken(request, block))
    }

    /// Takes the request's bytes from a free block that its stream may use.
    pub(crate) fn take(&mut self, request: &Request, free: BlockId) -> Granted {
        let inner = &mut *self.inner;
        let block = inner.heap.take(free, request.slot, request.size, request.requested);
        if !request.is_regular || request.slot != inner.heap.home {
            inner.heap.make_irregular(block);
        }
        self.taken(request, block)
    }

    /// Accounts for a block that became live.
    #[inline(always)]
    fn taken(&mut self, request: &Request, id: BlockId) -> Granted {
        let block = &mut self.inner.heap.blocks[id];
        block.tag = request.tag.0;
        let (addr, size, kind) = (block.addr, block.size, kind_of(block.pool));
        self.inner.live += 1;
        self.counter_target().allocated(kind, size, request.requested);
        self.note(Action::Alloc, id);
        self.debug_check();
        Granted { arena: self.arena, block: id, addr }
    }
}
