//! The lock on what uses some memory, and which thread has it.
//!
//! A thread that has the lock and asks for it again would wait for itself. So whoever gets it leaves the thread's mark,
//! which is looked at only where the lock is not free.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use aquifer_device::AccessKind;
use parking_lot::MutexGuard;

use crate::accounting::tally::Writer;
use crate::buffer::storage::{Storage, Uses};
use crate::error::AllocError;

/// Which thread has the lock, and what it left to be done when it lets go.
///
/// Each value is written by the thread that has the lock alone. A thread which finds its own mark left it there and
/// still has the lock, as it takes the mark back before; so no order among threads is needed.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    /// The thread's mark, or 0.
    thread: AtomicUsize,
    /// Claims that the thread ended while it had the lock.
    ended: AtomicU32,
}

impl Holder {
    fn mark(&self) {
        self.thread.store(Writer::this_thread().number(), Ordering::Relaxed);
    }

    fn unmark(&self) {
        self.thread.store(Writer::NOBODY.number(), Ordering::Relaxed);
    }

    fn is_this_thread(&self) -> bool {
        self.thread.load(Ordering::Relaxed) == Writer::this_thread().number()
    }
}

/// What uses some memory, locked.
#[derive(Debug)]
pub(crate) struct LockedUses<'a> {
    storage: &'a Storage,
    uses: MutexGuard<'a, Uses>,
}

impl Storage {
    /// Locks what uses the memory.
    ///
    /// # Errors
    /// [`AllocError::TurnHeld`] where this very thread has the lock, as it has while it has a turn.
    pub(crate) fn hold(&self) -> Result<LockedUses<'_>, AllocError> {
        let uses = match self.uses.try_lock() {
            Some(uses) => uses,
            None if self.holder.is_this_thread() => return Err(AllocError::TurnHeld),
            None => self.uses.lock(),
        };
        self.holder.mark();
        Ok(LockedUses { storage: self, uses })
    }

    /// Locks what uses the memory once nothing is claimed that conflicts.
    ///
    /// # Errors
    /// As [`Storage::hold`].
    pub(crate) fn hold_unclaimed(&self, kind: AccessKind) -> Result<LockedUses<'_>, AllocError> {
        let mut held = self.hold()?;
        held.wait_unclaimed(kind);
        Ok(held)
    }

    /// Ends a claim: now, or where this very thread has a turn with the memory, at the end of that.
    pub(crate) fn unclaim(&self, kind: AccessKind) {
        match self.hold() {
            Ok(mut held) => held.unclaim(kind),
            Err(_) => {
                self.holder.ended.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        self.unclaimed.notify_all();
    }
}

impl LockedUses<'_> {
    /// Waits until nothing is claimed that conflicts, and lets go meanwhile.
    pub(crate) fn wait_unclaimed(&mut self, kind: AccessKind) {
        while self.uses.is_claimed_against(kind) {
            self.storage.holder.unmark();
            self.storage.unclaimed.wait(&mut self.uses);
            self.storage.holder.mark();
        }
    }

    /// Ends the claims that could not end before. Claims that hold at a time are all of one kind.
    #[cold]
    fn end_claims(&mut self) {
        for _ in 0..self.storage.holder.ended.swap(0, Ordering::Relaxed) {
            let kind =
                if self.uses.is_claimed_against(AccessKind::Read) { AccessKind::Write } else { AccessKind::Read };
            self.uses.unclaim(kind);
        }
        self.storage.unclaimed.notify_all();
    }
}

impl Deref for LockedUses<'_> {
    type Target = Uses;

    fn deref(&self) -> &Uses {
        &self.uses
    }
}

impl DerefMut for LockedUses<'_> {
    fn deref_mut(&mut self) -> &mut Uses {
        &mut self.uses
    }
}

impl Drop for LockedUses<'_> {
    fn drop(&mut self) {
        if self.storage.holder.ended.load(Ordering::Relaxed) > 0 {
            self.end_claims();
        }
        self.storage.holder.unmark();
    }
}
