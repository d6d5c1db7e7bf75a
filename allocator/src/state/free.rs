//! Giving blocks back. A drop makes no driver call, and while the allocator is open it waits for no
//! lock, unless the queue is full: it tries the lock a few times, and else puts the block into a
//! queue, which the next thread that allocates empties, and every slow path. Blocks in the queue
//! are live until they are taken out, so a queued block never causes a refusal or growth.

use aquifer_device::fork;

use crate::allocation::{KEEPS_OPEN, stream_of};
use crate::core::Core;
use crate::core::free::Then;
use crate::state::{AllocatorState, StateGuard};
use crate::sync::atomic::{Ordering, fence};
use crate::types::{BlockId, Freed, StreamId};

/// How often a free tries the lock, which is mostly held for tens of nanoseconds.
const TRIES: u32 = 16;

/// A block that is given back, and the marks of its handle.
#[derive(Debug)]
pub(super) struct MarkedFree {
    freed: Freed,
    marked: u32,
}

impl AllocatorState {
    /// Gives a block back.
    ///
    /// Not inlined, so that only these words of a handle are read, into registers: `marked` is
    /// that of the stream and the handle's marks.
    #[inline(never)]
    pub(crate) fn free(&'static self, block: BlockId, marked: u32, on: Option<StreamId>, bytes: u64) {
        let freed = MarkedFree { freed: Freed { block, stream: stream_of(marked), on, bytes }, marked };
        match self.try_shared() {
            Some(guard) => self.free_in(guard, freed),
            None => self.free_with_retries(freed),
        }
    }

    #[inline(always)]
    fn free_in(&'static self, mut guard: StateGuard, freed: MarkedFree) {
        let was_last = guard.free(freed);
        drop(guard);
        if was_last && !self.has_handles() && !fork::is_child() {
            self.release_if_unused();
        }
    }

    #[cold]
    fn free_with_retries(&'static self, mut freed: MarkedFree) {
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
        // Either this sees that no handle is left, or the last one's `end_handle` sees the entry.
        fence(Ordering::SeqCst);
        if !self.has_handles() {
            self.release_if_unused();
        }
    }

    #[cfg(all(test, aquifer_shuttle))]
    pub(crate) fn is_empty(&'static self) -> bool {
        self.freed.0.is_empty() && self.shared().live() == 0
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

    /// Frees a live block. True if the allocator may be unused then.
    #[inline(always)]
    fn free(&mut self, MarkedFree { freed, marked }: MarkedFree) -> bool {
        if let Then::Waits = Core::free(self, freed) {
            self.show_waiting();
        }
        let kept_open = marked & KEEPS_OPEN != 0;
        self.locked.keeping_open -= u64::from(kept_open);
        self.live() == 0 || (kept_open && self.locked.keeping_open == 0)
    }
}
