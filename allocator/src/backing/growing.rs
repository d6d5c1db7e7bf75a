//! Memory that threads are about to take from the device, and what may refuse it.

/// What refused a growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The device has no such piece of memory.
    Device,
    /// The limit on the bytes held from the device.
    Limit,
    /// The bytes to be left free for libraries.
    Headroom,
    /// The device's address space.
    Addresses,
}

/// Bytes that threads take from the device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growing {
    /// By those that are about to.
    pub(crate) now: u64,
    /// By all, those included that are done.
    pub(crate) begun: u64,
}

impl Growing {
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    pub(crate) fn begin(&mut self, bytes: u64) {
        self.now += bytes;
        self.begun = self.begun.wrapping_add(bytes);
    }

    /// Ends an attempt, successful or not; `reserved` now includes what was taken.
    pub(crate) fn end(&mut self, bytes: u64) {
        self.now -= bytes;
    }
}
