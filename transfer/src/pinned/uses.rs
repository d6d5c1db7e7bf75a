//! The record of the accesses to a piece of host memory: ticks and access guards, as
//! [`aquifer_allocator::Storage`] has them for device memory.
//!
//! Invariants:
//! * a copy into the memory comes after all copies noted before it; a copy out of it comes after
//!   the last copy into it;
//! * a thread that enqueues a copy holds an access guard, which notes the stream's tick when it
//!   ends, whether or not the driver accepted the copy: a call may fail after the driver took the
//!   copy;
//! * a borrow by the host is counted before it waits for the copies that conflict, and a launch of
//!   a graph looks at the counts while it holds its access guards. So one of the two sees the
//!   other.

use std::sync::atomic::Ordering;

use aquifer_allocator::internal::AccessRecord;
use aquifer_device::{AccessKind, DeviceError, Stream, Tick};

use super::borrow::HostBorrow;
use crate::error::TransferError;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};

/// The copies that use some memory.
#[derive(Debug, Default)]
pub(super) struct Uses {
    record: Mutex<AccessRecord>,
    /// Borrows by the host that read, and that write.
    borrows: [AtomicUsize; 2],
}

impl Uses {
    /// The copies that must be done before a use of this kind.
    pub(super) fn before(&self, kind: AccessKind) -> Vec<Tick> {
        let mut record = self.record.lock();
        record.forget_done();
        record.before(kind).cloned().collect()
    }

    /// All copies that use the memory, for its release.
    pub(super) fn take(&mut self) -> Vec<Tick> {
        std::mem::take(self.record.get_mut()).before(AccessKind::Write).cloned().collect()
    }

    /// Whether no copy uses the memory. Asks the driver about copies that are not known to be done.
    pub(super) fn are_over(&self) -> Result<bool, TransferError> {
        for tick in self.before(AccessKind::Write) {
            if !tick.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// An access guard for a stream, which waits for the copies that must come before.
    pub(super) fn access<'a>(&'a self, stream: &'a Stream, kind: AccessKind) -> Result<HostAccess<'a>, DeviceError> {
        let record = self.record.lock();
        for tick in record.before(kind) {
            stream.wait_for(tick)?;
        }
        Ok(HostAccess { stream, kind, record })
    }

    /// Counts a borrow by the host, which then waits for [`Uses::before`]. The lock that this takes
    /// makes the count known to launches that come after.
    pub(super) fn borrow(&self, kind: AccessKind) -> HostBorrow<'_> {
        let count = &self.borrows[kind as usize];
        count.fetch_add(1, Ordering::Relaxed);
        HostBorrow(count)
    }

    /// The kind of a borrow by the host that conflicts with such a use.
    pub(super) fn borrowed_against(&self, kind: AccessKind) -> Option<AccessKind> {
        let is_held = |borrow: AccessKind| self.borrows[borrow as usize].load(Ordering::Acquire) > 0;
        let mut conflicts = [AccessKind::Write, AccessKind::Read].into_iter();
        conflicts.find(|&borrow| borrow.max(kind) == AccessKind::Write && is_held(borrow))
    }
}

/// A stream's access to host memory: work enqueued on the stream while it is held comes after the
/// copies that must come before. Hold it only while enqueuing.
#[derive(Debug)]
#[must_use = "the access ends when it is dropped"]
pub(crate) struct HostAccess<'a> {
    stream: &'a Stream,
    kind: AccessKind,
    record: MutexGuard<'a, AccessRecord>,
}

impl Drop for HostAccess<'_> {
    fn drop(&mut self) {
        self.record.note(self.stream.tick(), self.kind);
    }
}
