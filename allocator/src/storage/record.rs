//! The record of accesses to a piece of memory: the ticks of the last ones, and the reservations.
//!
//! It is pure data: it neither locks nor waits. [`crate::Storage`] keeps one for device memory, the
//! transfer runtime one for pinned host memory.
//!
//! Invariant: an access that writes comes after all accesses recorded before it; one that reads
//! comes after the last one that writes (A8).

use aquifer_device::{AccessKind, Tick};

/// The last accesses to a piece of memory, and the reservations for accesses to come.
#[derive(Debug, Default)]
pub struct AccessRecord {
    /// The last access that writes. All earlier accesses come before it.
    written: Option<Tick>,
    /// Further ticks that all later accesses come after, at most one for each stream.
    also: Vec<Tick>,
    /// For each stream, the last access that reads what was written.
    read: Vec<Tick>,
    /// Number of reservations for reading.
    reserved_to_read: u32,
    /// True while there is a reservation for writing.
    reserved_to_write: bool,
}

impl AccessRecord {
    /// The record of memory that was last written by `tick`.
    #[inline]
    pub fn new(tick: Tick) -> AccessRecord {
        AccessRecord { written: Some(tick), ..AccessRecord::default() }
    }

    /// The ticks that come before an access of this kind.
    pub fn before(&self, kind: AccessKind) -> impl Iterator<Item = &Tick> {
        let readers = if kind == AccessKind::Write { self.read.as_slice() } else { &[] };
        self.written.iter().chain(&self.also).chain(readers)
    }

    /// Notes an access that was ordered after [`AccessRecord::before`] and is done with `tick`.
    pub fn note(&mut self, tick: Tick, kind: AccessKind) {
        if kind == AccessKind::Write {
            self.also.clear();
            self.read.clear();
            self.written = Some(tick);
        } else {
            replace(&mut self.read, tick);
        }
    }

    /// Adds accesses of one stream that were kept elsewhere: the last access that writes, if it is
    /// the last of all, and the last one that reads what was written.
    pub(crate) fn note_home(&mut self, written: Option<Tick>, read: Option<Tick>) {
        self.written = written.or(self.written.take());
        read.into_iter().for_each(|read| replace(&mut self.read, read));
    }

    /// True if there are neither accesses nor reservations.
    pub(crate) fn is_empty(&self) -> bool {
        let AccessRecord { written, also, read, reserved_to_read, reserved_to_write } = self;
        written.is_none() && also.is_empty() && read.is_empty() && *reserved_to_read == 0 && !reserved_to_write
    }

    /// Forgets all accesses, for one that writes and is kept elsewhere.
    pub(crate) fn forget(&mut self) {
        self.written = None;
        self.also.clear();
        self.read.clear();
    }

    /// Notes a tick that all later accesses come after.
    pub fn note_also(&mut self, tick: Tick) {
        replace(&mut self.also, tick);
    }

    /// Forgets the accesses that are known to be done. Asks no driver.
    pub fn forget_done(&mut self) {
        self.written.take_if(|tick| tick.is_known_done());
        self.also.retain(|tick| !tick.is_known_done());
        self.read.retain(|tick| !tick.is_known_done());
    }

    /// True if a reservation conflicts with an access of this kind.
    pub fn is_reserved_against(&self, kind: AccessKind) -> bool {
        self.reserved_to_write || (kind == AccessKind::Write && self.reserved_to_read > 0)
    }

    /// Adds a reservation. None may conflict.
    pub fn reserve(&mut self, kind: AccessKind) {
        match kind {
            AccessKind::Read => self.reserved_to_read += 1,
            AccessKind::Write => self.reserved_to_write = true,
        }
    }

    /// Removes a reservation.
    pub fn end_reservation(&mut self, kind: AccessKind) {
        match kind {
            AccessKind::Read => self.reserved_to_read -= 1,
            AccessKind::Write => self.reserved_to_write = false,
        }
    }
}

/// Puts a tick in the place of an earlier one of the same stream.
fn replace(ticks: &mut Vec<Tick>, tick: Tick) {
    let stream = |tick: &Tick| (tick.timeline().id(), tick.timeline().device_id());
    ticks.retain(|earlier| stream(earlier) != stream(&tick) && !earlier.is_known_done());
    ticks.push(tick);
}
