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
//!   other;
//! * memory is lent to a stream while its buffer is borrowed, and a use that conflicts needs a
//!   borrow that conflicts. So all work of the loan is enqueued before such a use, and the stream's
//!   tick at that moment covers it.

use std::sync::atomic::Ordering;

use aquifer_allocator::internal::AccessRecord;
use aquifer_device::{AccessKind, DeviceError, Stream, Tick};

use super::borrow::HostBorrow;
use crate::error::TransferError;
use crate::sync::{AtomicUsize, Mutex, MutexGuard};

/// The copies that use some memory.
#[derive(Debug, Default)]
pub(super) struct Uses {
    noted: Mutex<Noted>,
    /// Borrows by the host that read, and that write.
    borrows: [AtomicUsize; 2],
}

#[derive(Debug, Default)]
struct Noted {
    record: AccessRecord,
    /// Streams on which the caller enqueues copies: several that read, or one that writes.
    lent: Vec<(Stream, AccessKind)>,
}

impl Uses {
    /// The copies that must be done before a use of this kind.
    pub(super) fn before(&self, kind: AccessKind) -> Vec<Tick> {
        let mut noted = self.noted.lock();
        noted.note_lent(kind);
        noted.record.forget_done();
        noted.record.before(kind).cloned().collect()
    }

    /// All copies that use the memory, for its release.
    pub(super) fn take(&mut self) -> Vec<Tick> {
        let noted = self.noted.get_mut();
        noted.note_lent(AccessKind::Write);
        std::mem::take(&mut noted.record).before(AccessKind::Write).cloned().collect()
    }

    /// Whether nothing uses the memory, nor is going to. Asks the driver about copies that are not
    /// known to be done.
    pub(super) fn are_over(&self) -> Result<bool, TransferError> {
        let ticks: Vec<Tick> = {
            let mut noted = self.noted.lock();
            noted.note_lent(AccessKind::Read);
            noted.record.forget_done();
            let lent = noted.lent.iter().map(|(stream, _)| stream.tick());
            noted.record.before(AccessKind::Write).cloned().chain(lent).collect()
        };
        for tick in ticks {
            if !tick.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// An access guard for a stream, which waits for the copies that must come before.
    pub(super) fn access<'a>(&'a self, stream: &'a Stream, kind: AccessKind) -> Result<HostAccess<'a>, DeviceError> {
        let mut noted = self.noted.lock();
        noted.note_lent(kind);
        for tick in noted.record.before(kind) {
            stream.wait_for(tick)?;
        }
        Ok(HostAccess { stream, kind, noted })
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

impl Noted {
    /// Notes the work of loans that conflict with such a use. All of it is enqueued.
    fn note_lent(&mut self, kind: AccessKind) {
        let conflicts = |lent: &mut (Stream, AccessKind)| kind == AccessKind::Write || lent.1 == AccessKind::Write;
        let lent: Vec<_> = self.lent.extract_if(.., conflicts).collect();
        lent.iter().for_each(|(stream, kind)| self.record.note(stream.tick(), *kind));
    }
}

/// A stream's access to host memory: work enqueued on the stream while it is held comes after the
/// copies that must come before. Hold it only while enqueuing.
#[derive(Debug)]
#[must_use = "the access ends when it is dropped"]
pub(crate) struct HostAccess<'a> {
    stream: &'a Stream,
    kind: AccessKind,
    noted: MutexGuard<'a, Noted>,
}

impl HostAccess<'_> {
    /// Lends the memory to the stream: later uses that conflict come after the work that is
    /// enqueued on the stream before them.
    pub(super) fn lend(mut self) {
        let lent = &mut self.noted.lent;
        if !lent.iter().any(|(known, _)| known.id() == self.stream.id()) {
            lent.push((self.stream.clone(), self.kind));
        }
    }
}

impl Drop for HostAccess<'_> {
    fn drop(&mut self) {
        self.noted.record.note(self.stream.tick(), self.kind);
    }
}
