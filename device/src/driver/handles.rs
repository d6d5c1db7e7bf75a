//! Addresses and handles, as a driver gives them out and takes them.

use std::fmt;
use std::ops::Range;

/// An address in a device's virtual address space, in bytes. Zero is never a valid allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }

    /// The addresses of the `bytes` bytes that start here.
    pub const fn range(self, bytes: u64) -> Range<u64> {
        self.0..self.0 + bytes
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

/// The address of page-locked host memory, as a number so that handles stay `Send`.
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
        /// The driver may give the same value to a new object once this one is destroyed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);
    )*};
}

raw_handles! {
    /// A stream, by the driver's handle.
    RawStream,
    /// An event, by the driver's handle.
    RawEvent,
    /// A piece of physical memory, by the driver's handle.
    RawPhysical,
    /// A captured graph, by the driver's handle.
    RawGraph,
    /// A loaded module of kernels, by the driver's handle.
    RawModule,
}

impl RawStream {
    /// The legacy default stream: it waits for, and is waited for by, every blocking stream of the device.
    /// Handle 0 means the same.
    pub const LEGACY: RawStream = RawStream(1);
    /// The per-thread default stream: a blocking stream of its own for each calling thread.
    pub const PER_THREAD: RawStream = RawStream(2);
}
