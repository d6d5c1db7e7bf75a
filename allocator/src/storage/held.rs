//! The lock on the uses of a storage ([`Uses`]), and the record of the thread that holds it.
//!
//! A thread that holds the lock and takes it again would wait for itself. So a thread that takes
//! the lock leaves its mark. The mark is read only if the lock is not free, and a thread that finds
//! its own mark gets an error instead of waiting.

use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::Ordering;

use aquifer_device::AccessKind;
use parking_lot::MutexGuard;

use crate::error::AllocError;
use crate::storage::{Storage, Uses};

/// The uses of a storage, locked.
#[derive(Debug)]
pub(crate) struct LockedUses<'a> {
    storage: &'a Storage,
    uses: MutexGuard<'a, Uses>,
}

// Uses are changed after the driver calls that may panic.
impl UnwindSafe for LockedUses<'_> {}
impl RefUnwindSafe for LockedUses<'_> {}

impl Storage {
    /// Locks the uses of the memory.
    ///
    /// # Errors
    /// [`AllocError::AccessHeld`] if this very thread holds the lock, as it does during an access
    /// guard.
    pub(crate) fn hold(&self) -> Result<LockedUses<'_>, AllocError> {
        let uses = match self.uses.try_lock() {
            Some(uses) => uses,
            None if self.holder.is_this_thread() => return Err(AllocError::AccessHeld),
            None => self.uses.lock(),
        };
        self.holder.mark();
        Ok(LockedUses { storage: self, uses })
    }

    /// Waits until no reservation conflicts with an access of this kind, and locks the uses of the
    /// memory.
    ///
    /// # Errors
    /// As [`Storage::hold`].
    pub(crate) fn lock_unreserved(&self, kind: AccessKind) -> Result<LockedUses<'_>, AllocError> {
        let mut held = self.hold()?;
        held.wait_unreserved(kind);
        Ok(held)
    }

    /// Ends a reservation: now or, if this very thread has an access guard on the memory, at the
    /// end of that guard.
    pub(crate) fn end_reservation(&self, kind: AccessKind) {
        match self.hold() {
            Ok(mut held) => held.record.end_reservation(kind),
            Err(_) => {
                self.holder.ended.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        self.unreserved.notify_all();
    }
}

impl LockedUses<'_> {
    /// Whether these are the uses of the given storage.
    pub(crate) fn is_of(&self, storage: &Storage) -> bool {
        std::ptr::eq(self.storage, storage)
    }

    /// Waits until no reservation conflicts with an access of this kind. The lock is released
    /// meanwhile.
    pub(crate) fn wait_unreserved(&mut self, kind: AccessKind) {
        while self.uses.record.is_reserved_against(kind) {
            self.storage.holder.unmark();
            self.storage.unreserved.wait(&mut self.uses);
            self.storage.holder.mark();
        }
    }

    /// Ends the reservations that were dropped during the access guard. Reservations that hold at
    /// the same time are all of one kind.
    #[cold]
    fn end_reservations(&mut self) {
        for _ in 0..self.storage.holder.ended.swap(0, Ordering::Relaxed) {
            let kind = if self.uses.record.is_reserved_against(AccessKind::Read) {
                AccessKind::Write
            } else {
                AccessKind::Read
            };
            self.uses.record.end_reservation(kind);
        }
        self.storage.unreserved.notify_all();
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
            self.end_reservations();
        }
        self.storage.holder.unmark();
    }
}
