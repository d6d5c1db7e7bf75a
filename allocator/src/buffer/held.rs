//! The lock on the uses of a storage ([`Uses`]), and the record of the thread that holds it.
//!
//! A thread that holds the lock and takes it again would wait for itself. So a thread that takes
//! the lock leaves its mark. The mark is read only if the lock is not free, and a thread that finds
//! its own mark gets an error instead of waiting.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use aquifer_device::AccessKind;
use parking_lot::MutexGuard;

use crate::accounting::writer::CounterWriter;
use crate::buffer::storage::{Storage, Uses};
use crate::error::AllocError;

/// The thread that holds the lock, and the claims to be ended when it releases the lock.
///
/// Only the thread that holds the lock writes these values, and it removes its mark before it
/// releases the lock. So a thread that finds its own mark holds the lock, and the accesses need no
/// order among threads.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    /// The mark of the thread that holds the lock, or 0.
    thread: AtomicUsize,
    /// Number of claims that the thread ended while it held the lock.
    ended: AtomicU32,
}

impl Holder {
    fn mark(&self) {
        self.thread.store(CounterWriter::this_thread().number(), Ordering::Relaxed);
    }

    fn unmark(&self) {
        self.thread.store(CounterWriter::NOBODY.number(), Ordering::Relaxed);
    }

    fn is_this_thread(&self) -> bool {
        self.thread.load(Ordering::Relaxed) == CounterWriter::this_thread().number()
    }
}

/// The uses of a storage, locked.
#[derive(Debug)]
pub(crate) struct LockedUses<'a> {
    storage: &'a Storage,
    uses: MutexGuard<'a, Uses>,
}

impl Storage {
    /// Locks the uses of the memory.
    ///
    /// # Errors
    /// [`AllocError::TurnHeld`] if this very thread holds the lock, as it does during a turn.
    pub(crate) fn hold(&self) -> Result<LockedUses<'_>, AllocError> {
        let uses = match self.uses.try_lock() {
            Some(uses) => uses,
            None if self.holder.is_this_thread() => return Err(AllocError::TurnHeld),
            None => self.uses.lock(),
        };
        self.holder.mark();
        Ok(LockedUses { storage: self, uses })
    }

    /// Waits until no claim conflicts with an access of this kind, and locks the uses of the
    /// memory.
    ///
    /// # Errors
    /// As [`Storage::hold`].
    pub(crate) fn hold_unclaimed(&self, kind: AccessKind) -> Result<LockedUses<'_>, AllocError> {
        let mut held = self.hold()?;
        held.wait_unclaimed(kind);
        Ok(held)
    }

    /// Ends a claim: now or, if this very thread has a turn with the memory, at the end of that
    /// turn.
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
    /// Whether these are the uses of the given storage.
    pub(crate) fn is_of(&self, storage: &Storage) -> bool {
        std::ptr::eq(self.storage, storage)
    }

    /// Waits until no claim conflicts with an access of this kind. The lock is released meanwhile.
    pub(crate) fn wait_unclaimed(&mut self, kind: AccessKind) {
        while self.uses.is_claimed_against(kind) {
            self.storage.holder.unmark();
            self.storage.unclaimed.wait(&mut self.uses);
            self.storage.holder.mark();
        }
    }

    /// Ends the claims that were dropped during the turn. Claims that hold at the same time are all
    /// of one kind.
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
