//! Giving blocks back. A drop makes no driver call, and while the allocator is open it waits for no
//! lock, unless the queue is full: it tries the lock a few times, and else puts the block into a
//! queue, which the next thread that allocates empties, and every slow path. Blocks in the queue are
//! live until they are taken out, so a queued block never causes a refusal or growth.

use aquifer_device::fork;
use crossbeam_queue::ArrayQueue;

use crate::cross_stream::waiting_list::Waiting;
use crate::heap::{BlockId, State};
use crate::history::{Action, Actions};
use crate::size_class::{self, PoolKind};
use crate::state::guard::StateGuard;
use crate::state::{AllocatorState, special};
use crate::sync::atomic::{Ordering, fence};
use crate::types::{After, StreamId};

/// An unknown number of bytes.
pub(crate) const UNKNOWN: u64 = u64::MAX;

/// Blocks that the queue holds. Few in models, so that they meet a full queue.
const CAPACITY: usize = if cfg!(aquifer_shuttle) { 2 } else { 1024 };
/// How often a free tries the lock, which is mostly held for tens of nanoseconds.
const TRIES: u32 = 16;

/// A block that its holder gives back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) block: BlockId,
    /// The stream that it was allocated for.
    pub(crate) stream: StreamId,
    /// The stream whose later work gets the memory, if it is another one.
    pub(crate) on: Option<StreamId>,
    /// Requested bytes; [`UNKNOWN`] if the caller does not know.
    pub(crate) bytes: u64,
}

/// Blocks that were given back while another thread had the lock.
#[derive(Debug)]
pub(super) struct FreedBlocks(ArrayQueue<Freed>);

impl Default for FreedBlocks {
    fn default() -> FreedBlocks {
        FreedBlocks(ArrayQueue::new(CAPACITY))
    }
}

impl FreedBlocks {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl AllocatorState {
    /// Gives a block back.
    ///
    /// Not inlined, so that only these words of a handle are read, into registers.
    #[inline(never)]
    pub(crate) fn free(&'static self, block: BlockId, stream: StreamId, on: Option<StreamId>, bytes: u64) {
        let freed = Freed { block, stream, on, bytes };
        match self.try_shared() {
            Some(guard) => self.free_in(guard, freed),
            None => self.free_with_retries(freed),
        }
    }

    #[inline(always)]
    fn free_in(&'static self, mut guard: StateGuard, freed: Freed) {
        guard.free(freed);
        let was_last = guard.live == 0;
        drop(guard);
        if was_last && self.is_closed() && !fork::is_child() {
            self.recycle_if_unused();
        }
    }

    #[cold]
    fn free_with_retries(&'static self, mut freed: Freed) {
        // In a forked child, the thread that has the lock may be gone.
        if fork::is_child() {
            return;
        }
        for _ in 0..TRIES {
            std::hint::spin_loop();
            if let Some(guard) = self.try_shared() {
                return self.free_in(guard, freed);
            }
        }
        while let Err(back) = self.freed.0.push(freed) {
            self.shared().apply_queued_frees();
            freed = back;
        }
        // Either this sees that the allocator state closed, or `close` sees the entry.
        fence(Ordering::SeqCst);
        if self.is_closed() {
            self.recycle_if_unused();
        }
    }

    #[cfg(all(test, aquifer_shuttle))]
    pub(crate) fn is_empty(&'static self) -> bool {
        self.freed.is_empty() && self.shared().live == 0
    }
}

impl StateGuard {
    /// Applies the frees queued so far.
    #[cold]
    #[inline(never)]
    pub(crate) fn apply_queued_frees(&mut self) {
        while let Some(freed) = self.state.freed.0.pop() {
            self.free(freed);
        }
    }

    /// Frees a live block.
    #[inline(always)]
    fn free(&mut self, Freed { block: id, stream, on, bytes }: Freed) {
        if bytes != UNKNOWN && on.is_none() && self.heap.is_regular(id) {
            let size = size_class::round(bytes);
            let kind = PoolKind::of(size);
            debug_assert!(self.is_as_requested(id, stream, kind, size, bytes), "{:?}", self.heap.blocks[id]);
            return self.free_own(id, stream, kind, size, bytes);
        }
        self.free_by_record(id, on);
    }

    /// Frees a live block that may not be what its handle says.
    #[inline(never)]
    fn free_by_record(&mut self, id: BlockId, on: Option<StreamId>) {
        let block = &self.heap.blocks[id];
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
            on => self.begin_wait(id, on),
        }
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
    /// and by others after the tick `after`. Its memory itself was used until `last_use`.
    pub(crate) fn complete(&mut self, id: BlockId, owner: StreamId, after: After, last_use: After) {
        self.heap.coalesce(owner);
        self.heap.note_last_use(id, owner, last_use);
        self.heap.give(id, owner, after);
        self.debug_check();
    }

    /// Enters a block in the list of waiting blocks, as it is freed and other streams used it, too.
    #[cold]
    fn begin_wait(&mut self, id: BlockId, on: Option<StreamId>) {
        let block = &self.heap.blocks[id];
        let (owner, kind, size) = (block.owner, block.pool.kind(), block.size);
        self.note(Action::FreeRequested, id);
        self.given_back(owner, kind, size, 0);
        self.heap.set_waiting(id);
        self.counters.waits(kind, size);
        let block = self.heap.blocks[id];
        // A block that only sleeps has an empty list.
        let mut streams = self.other_users.remove(&id).unwrap_or_default();
        streams.extend(on.filter(|on| !streams.contains(on)));
        let uses = streams.iter().map(|&stream| self.streams.use_so_far(stream)).collect();
        let own_use = self.streams.enqueued(owner);
        let waiting = Waiting { id, block, uses, own_use };
        match &mut self.paged {
            // Until its memory wakes up.
            Some(paged) if paged.sleeps(&block.range()) => return paged.cordon.freed.push(waiting),
            _ => {}
        }
        self.waiting.push(waiting);
        self.state.special().fetch_or(special::WAITING, Ordering::Relaxed);
    }

    /// True if the record of a live block says what its handle does: what
    /// [`crate::heap::Heap::is_regular`] promises.
    fn is_as_requested(&self, id: BlockId, stream: StreamId, kind: PoolKind, size: u64, requested: u64) -> bool {
        let block = &self.heap.blocks[id];
        let is_own = block.state == State::Live && block.owner == stream && !block.used_elsewhere;
        is_own && (block.pool.kind(), block.size, block.requested) == (kind, size, requested)
    }
}
