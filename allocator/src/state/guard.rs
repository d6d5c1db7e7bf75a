//! The lock of an allocator's state, held, and the operations that every allocation and free makes
//! under it.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::ops::{Deref, DerefMut};

use crate::heap::{BlockId, Owner};
use crate::history::{Action, Actions, Subject};
use crate::state::AllocatorState;
use crate::state::shared::SharedState;
use crate::sync::MutexGuard;
#[cfg(debug_assertions)]
use crate::sync::{atomic::Ordering, this_thread};
use crate::tags::Tag;
use crate::types::{Request, StreamId};

/// The lock, held. Two words, which stay in registers from where the lock is taken to where it is
/// released: copying it, and handles, through memory cost about 40 ns a hot pair.
#[derive(Debug)]
pub(crate) struct StateGuard {
    pub(crate) state: &'static AllocatorState,
    shared: MutexGuard<'static, SharedState>,
}

impl Deref for StateGuard {
    type Target = SharedState;

    #[inline]
    fn deref(&self) -> &SharedState {
        &self.shared
    }
}

impl DerefMut for StateGuard {
    #[inline]
    fn deref_mut(&mut self) -> &mut SharedState {
        &mut self.shared
    }
}

#[cfg(debug_assertions)]
impl Drop for StateGuard {
    fn drop(&mut self) {
        self.state.holder.store(0, Ordering::Relaxed);
    }
}

/// The data of a block that an allocation needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
}

impl StateGuard {
    #[inline]
    pub(super) fn new(state: &'static AllocatorState, shared: MutexGuard<'static, SharedState>) -> StateGuard {
        #[cfg(debug_assertions)]
        state.holder.store(this_thread(), Ordering::Relaxed);
        StateGuard { state, shared }
    }

    /// Serves a request from its stream's free blocks. `None` also if the stream is not known yet.
    /// Inlined so that request and result stay in registers.
    #[inline(always)]
    pub(crate) fn take_own(&mut self, request: &Request) -> Option<Granted> {
        let &Request { stream, pool, size, requested, .. } = request;
        let SharedState { heap, streams, .. } = &mut *self.shared;
        let progress = streams.progress_mut(stream)?;
        progress.searches += 1;
        let block = match heap.retake(stream, pool, size, requested) {
            Some(block) => {
                progress.freed -= size;
                block
            }
            None => {
                if heap.make_room(stream) {
                    self.thin_recent_uses(stream);
                }
                match self.heap.take_best(Owner::in_own_regions(stream), pool, size, requested) {
                    Some(block) => block,
                    None => self.take_further(request)?,
                }
            }
        };
        Some(self.taken(request, block))
    }

    /// Serves a request that no free block in its stream's regions serves: after merging the stream's
    /// deferred blocks, and from its strays.
    #[cold]
    #[inline(never)]
    fn take_further(&mut self, request: &Request) -> Option<BlockId> {
        let &Request { stream, pool, size, requested, .. } = request;
        let own = Owner::in_own_regions(stream);
        let merged = self.heap.coalesce(stream).then(|| self.heap.take_best(own, pool, size, requested)).flatten();
        merged.or_else(|| self.heap.take_best(Owner { has_strays: true, ..own }, pool, size, requested))
    }

    /// Takes the request's bytes from a free block that its stream may use.
    pub(crate) fn take(&mut self, request: &Request, free: BlockId) -> Granted {
        let block = self.heap.take(free, request.stream, request.size, request.requested);
        self.taken(request, block)
    }

    /// Accounts for a block that became live.
    #[inline(always)]
    fn taken(&mut self, request: &Request, id: BlockId) -> Granted {
        let shared = &mut *self.shared;
        if !request.is_regular {
            shared.heap.make_irregular(id);
        }
        let block = &mut shared.heap.blocks[id];
        block.tag = request.tag.0;
        let (addr, size, kind) = (block.addr, block.size, block.pool.kind());
        shared.live += 1;
        shared.counters.allocated(kind, size, request.requested);
        self.note(Action::Alloc, id);
        self.debug_check();
        Granted { block: id, addr }
    }

    /// True if an event is to be recorded on a stream now, so that the host learns how far it gets.
    /// The caller must then record it; it is counted as recorded here.
    #[inline]
    pub(crate) fn is_progress_event_due(&mut self, stream: StreamId) -> bool {
        let SharedState { streams, reserved, .. } = &mut *self.shared;
        streams.progress_mut(stream).is_some_and(|progress| progress.is_due(*reserved))
    }

    /// Notes in the history, if that is on, what happened to a live or waiting block.
    #[inline]
    pub(crate) fn note(&mut self, actions: impl Into<Actions>, id: BlockId) {
        if self.history.is_on() {
            self.note_always(actions.into(), id);
        }
    }

    #[inline(never)]
    fn note_always(&mut self, actions: Actions, id: BlockId) {
        let block = &self.heap.blocks[id];
        let pool = self.heap.pools[block.pool].options.history_id;
        let subject =
            Subject { addr: block.addr, size: block.requested, stream: block.owner, tag: Tag(block.tag), pool };
        self.history.note(actions, subject);
    }

    /// Notes the last uses of granules in the logs that are not known done.
    pub(crate) fn note_recent_uses(&mut self) {
        let SharedState { heap, streams, .. } = &mut *self.shared;
        heap.note_recent_uses(|stream| streams.known_done(stream));
    }

    /// Gives strays that are done to the streams of their regions. Returns true if there were any.
    pub(crate) fn return_strays(&mut self) -> bool {
        let SharedState { heap, streams, .. } = &mut *self.shared;
        heap.return_strays(|stream| streams.known_done(stream))
    }

    /// Checks the heap's identities now and then, in debug builds. The cost of a check grows with the
    /// number of blocks, so as many operations pass between two checks.
    #[inline]
    pub(super) fn debug_check(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.unchecked += 1;
            if self.unchecked > 64 + self.heap.blocks.records_count() {
                self.unchecked = 0;
                debug_assert_eq!(self.heap.check(), Ok(()));
            }
        }
    }

    /// Makes room in a stream's log of last uses.
    #[cold]
    #[inline(never)]
    pub(super) fn thin_recent_uses(&mut self, stream: StreamId) {
        let done = self.streams.known_done(stream);
        self.heap.thin_recent_uses(stream, done);
    }
}
