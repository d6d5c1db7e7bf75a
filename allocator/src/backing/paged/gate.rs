//! The gate: a lock that operations on a few mappings hold shared, and operations on all mappings
//! hold exclusively.
//!
//! A remap holds it from its decision to its accounting, across the driver's calls and observers,
//! so that an operation which needs all mappings at once finds none of them held by another
//! (invariant A6). It comes before every other lock. A segment that is taken where memory is
//! mapped, too, is under it, so that nothing grows while the allocator sleeps. While the gate is
//! held shared, the device is waited for only where memory is given back, or where the driver does
//! so to give a segment.

use std::time::Duration;

use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// About as long as a driver call takes.
const MOMENT: Duration = Duration::from_micros(50);

#[derive(Debug, Default)]
pub(crate) struct Gate {
    mappings: RwLock,
    sleep: RwLock,
}

impl Gate {
    /// For an operation that changes mappings which no other operation uses.
    pub(crate) fn shared(&self) -> RwLockReadGuard<'_> {
        self.mappings.read()
    }

    /// Waits until the operations that are on their way now have ended, and a moment for threads
    /// that give back segments, which do not hold the gate.
    pub(crate) fn wait(&self) {
        drop(self.mappings.write());
        aquifer_device::executor::pause(MOMENT);
    }

    /// For an operation on all mappings.
    pub(crate) fn exclusive(&self) -> RwLockWriteGuard<'_> {
        self.mappings.write()
    }

    /// The same, if no operation is under way.
    pub(crate) fn try_exclusive(&self) -> Option<RwLockWriteGuard<'_>> {
        self.mappings.try_write()
    }

    /// For falling asleep and waking up, one at a time. It is held across driver calls, and not
    /// while a thread waits for access guards to end.
    pub(crate) fn sleep(&self) -> RwLockWriteGuard<'_> {
        self.sleep.write()
    }
}
