//! Device and host addresses, and the handles of a driver's objects.

use std::fmt;
use std::ops::Range;

/// An address in a device's virtual address space, in bytes. Zero is never a valid allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` bytes above this one, or the highest of all where that would be beyond
    /// it: calls refuse that one.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0.saturating_add(bytes))
    }

    /// The range of `bytes` bytes that starts here, cut off at the highest address.
    pub const fn range(self, bytes: u64) -> Range<u64> {
        self.0..self.0.saturating_add(bytes)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The address of pinned host memory. It is a number, not a pointer, so that handles stay
/// `Send`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPtr(pub usize);

impl HostPtr {
    /// The address as a pointer. Dereferencing it follows the usual rules of raw pointers.
    pub const fn as_ptr(self) -> *mut u8 {
        self.0 as *mut u8
    }
}

macro_rules! raw_handles {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        ///
        /// The driver may give the same value to a new object once the old one is destroyed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);
    )*};
}

raw_handles! {
    /// The driver's handle of a stream.
    RawStream,
    /// The driver's handle of an event.
    RawEvent,
    /// The driver's handle of a piece of physical memory.
    RawPhysical,
    /// The driver's handle of a captured graph.
    RawGraph,
    /// The driver's handle of a loaded module of kernels.
    RawModule,
}

impl RawStream {
    /// The legacy default stream: it waits for every blocking stream of the device, and every
    /// blocking stream waits for it. Handle 0 means the same.
    pub const LEGACY: RawStream = RawStream(1);
    /// The per-thread default stream: each calling thread has a blocking stream of its own behind
    /// this handle.
    pub const PER_THREAD: RawStream = RawStream(2);

    /// Whether it stands for the legacy default stream.
    pub fn is_legacy(self) -> bool {
        matches!(self, RawStream(0) | RawStream::LEGACY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_end_at_the_highest() {
        let high = DevicePtr(u64::MAX - 1);
        assert_eq!((high.offset(1), high.offset(5)), (DevicePtr(u64::MAX), DevicePtr(u64::MAX)));
        assert_eq!(high.range(5), u64::MAX - 1..u64::MAX);
    }
}
