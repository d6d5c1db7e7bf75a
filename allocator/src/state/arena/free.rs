//! The ways in which a block is given back.
//!
//! A thread that allocates from the arena frees directly, under the arena's lock. Every other thread puts the block into the arena's queue
//! (`remote.rs`), unless streams besides their own use blocks of the arena, or another stream inherits this one; then it frees
//! directly, too. A thread that finds the lock taken uses the queue in any case. A block that other streams use goes from the arena to
//! the allocator state, because it needs the shared state's lock.

use super::remote::RemoteFree;
use super::{Arena, ArenaGuard, Shared};
use crate::heap::BlockId;
use crate::state::DeferredFree;
use crate::sync::atomic::Ordering;

/// How often a free tries the lock, which is held for tens of nanoseconds.
const TRIES: u32 = 16;

impl Arena {
    /// Frees a block of `bytes` requested bytes ([`super::UNKNOWN`] if the caller does not know). Makes no driver call. Does not wait for a
    /// lock while the allocator is open, unless the queue is full.
    ///
    /// Not inlined, so that only these words of a handle are read, into registers.
    #[inline(never)]
    pub(crate) fn free(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        if !self.remote.has_direct_thread() {
            return self.free_elsewhere(block, on, bytes);
        }
        match self.inner.try_lock() {
            Some(inner) => match self.admit(inner) {
                Some(locked) => self.free_in(locked, block, on, bytes),
                None => self.free_as_stranger(block, on, bytes),
            },
            None => self.free_contended(block, on, bytes),
        }
    }

    /// Frees a block for a thread that does not allocate here.
    #[cold]
    fn free_elsewhere(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        if on.is_some() || self.has_shared_blocks() {
            self.free_contended(block, on, bytes);
        } else {
            self.free_remotely(RemoteFree { block, on, bytes }, false);
        }
    }

    /// Tries the lock a few times.
    #[cold]
    fn free_contended(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        for _ in 0..TRIES {
            match self.inner.try_lock().map(|inner| self.admit(inner)) {
                Some(Some(locked)) => return self.free_in(locked, block, on, bytes),
                Some(None) => return self.free_as_stranger(block, on, bytes),
                None => std::hint::spin_loop(),
            }
        }
        self.free_remotely(RemoteFree { block, on, bytes }, true);
    }

    /// True if streams besides its own use any live block. Such blocks are not queued if that can be helped: they wait for these streams as
    /// of when they are taken out.
    fn has_shared_blocks(&self) -> bool {
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
            Err(Shared) => {
                drop(locked);
                self.state.free_deferred(DeferredFree { arena: self, block, on });
            }
        }
    }

    /// Frees a block directly for a thread that is not known to be at work here.
    #[cold]
    fn free_as_stranger(&'static self, block: BlockId, on: Option<u32>, bytes: u64) {
        if self.state.try_admit_thread()
            && let Some(locked) = self.inner.try_lock().and_then(|inner| self.admit(inner))
        {
            return self.free_in(locked, block, on, bytes);
        }
        self.free_remotely(RemoteFree { block, on, bytes }, true);
    }

    #[cold]
    fn free_remotely(&'static self, mut free: RemoteFree, hurries: bool) {
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
