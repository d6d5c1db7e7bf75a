//! Freeing a block. While the allocator is open, a free waits for a lock only if the queue is full.
//!
//! * A thread that allocates from the arena frees the block under its lock ([`Arena::free_in`]). If
//!   the lock is taken, it is tried a few times, and then the block is queued.
//! * Another thread queues the block (`remote.rs`, [`Arena::queue_free`]). If other streams use
//!   blocks of the arena, or if the free is in another stream's order, it tries the lock first
//!   ([`Arena::free_with_retries`]).
//! * A thread that the allocator's counters do not know yet is made known if no lock is taken.
//!   Otherwise the block is queued.
//!
//! A block that streams besides its own use goes from the arena to the allocator state, because it
//! needs the shared state's lock ([`crate::state::AllocatorState::free_used_elsewhere`]).

use super::remote::RemoteFree;
use super::{Arena, ArenaGuard, UsedElsewhere};
use crate::heap::BlockId;
use crate::state::DeferredFree;
use crate::sync::atomic::Ordering;

/// How often a free tries the lock, which is held for tens of nanoseconds.
const TRIES: u32 = 16;

impl Arena {
    /// Frees a block of `bytes` requested bytes ([`super::UNKNOWN`] if the caller does not know).
    /// Makes no driver call. Does not wait for a lock while the allocator is open, unless the queue
    /// is full.
    ///
    /// Not inlined, so that only these words of a handle are read, into registers.
    #[inline(never)]
    pub(crate) fn free(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        if !self.remote.is_this_thread_direct() {
            return self.free_from_other_thread(block, on, bytes);
        }
        match self.inner.try_lock() {
            Some(inner) => match self.admit(inner) {
                Some(locked) => self.free_in(locked, block, on, bytes),
                None => self.free_unadmitted(block, on, bytes),
            },
            None => self.free_with_retries(block, on, bytes),
        }
    }

    /// Frees a block for a thread that does not allocate here.
    #[cold]
    fn free_from_other_thread(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        if on.is_some() || self.has_blocks_used_elsewhere() {
            self.free_with_retries(block, on, bytes);
        } else {
            self.queue_free(RemoteFree { block, on, bytes }, false);
        }
    }

    /// Tries the lock a few times.
    #[cold]
    fn free_with_retries(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        for _ in 0..TRIES {
            match self.inner.try_lock().map(|inner| self.admit(inner)) {
                Some(Some(locked)) => return self.free_in(locked, block, on, bytes),
                Some(None) => return self.free_unadmitted(block, on, bytes),
                None => std::hint::spin_loop(),
            }
        }
        self.queue_free(RemoteFree { block, on, bytes }, true);
    }

    /// True if other streams use any live block. Frees of such blocks avoid the queue, because
    /// their ticks are taken only when they leave it.
    fn has_blocks_used_elsewhere(&self) -> bool {
        self.blocks_used_elsewhere.load(Ordering::Relaxed) > 0
    }

    #[inline(always)]
    fn free_in(&'static self, mut locked: ArenaGuard, block: BlockId, on: Option<u32>, bytes: u64) {
        match locked.free(block, on, bytes) {
            Ok(()) => {
                let last = locked.live == 0;
                drop(locked);
                if last && self.state.is_closed() && !aquifer_device::fork::is_child() {
                    self.state.recycle_if_unused();
                }
            }
            Err(UsedElsewhere) => {
                drop(locked);
                self.state.free_used_elsewhere(DeferredFree { arena: self, block, on });
            }
        }
    }

    /// Frees a block directly for a thread that is not known to be at work here.
    #[cold]
    fn free_unadmitted(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        if self.state.try_admit_thread()
            && let Some(locked) = self.inner.try_lock().and_then(|inner| self.admit(inner))
        {
            return self.free_in(locked, block, on, bytes);
        }
        self.queue_free(RemoteFree { block, on, bytes }, true);
    }

    #[cold]
    fn queue_free(&'static self, mut free: RemoteFree, hurries: bool) {
        // In a forked child, the thread that empties the queue may be gone.
        if aquifer_device::fork::is_child() {
            return;
        }
        while let Err(back) = self.remote.push(free, hurries) {
            // The queue's arena is not settled, or is not any more, so this empties it.
            self.unsettle();
            drop(self.state.lock(None));
            free = back;
        }
        self.unsettle();
        // Either this sees that the allocator state closed, or `close` sees the entry.
        if self.state.is_closed() {
            self.state.recycle_if_unused();
        }
    }
}
