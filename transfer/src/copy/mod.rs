//! Copies, as methods of [`crate::Transfer`].
//!
//! * `host`: between the host and the device;
//! * `on_device`, `peer`: within the device, and between devices;
//! * `region`: elements with gaps between them, and their order in pinned memory (`packed`);
//! * `batch`: many small copies as one, where that pays;
//! * `memory`: host memory that threads of the staging ring access.
//!
//! Copies by the driver are sound by the invariants of pinned memory (`pinned/memory.rs`),
//! copies by threads by that of `memory`.

use std::sync::Arc;

use aquifer_allocator::Storage;
use aquifer_device::DevicePtr;

mod batch;
mod host;
mod memory;
mod on_device;
mod packed;
mod peer;
mod region;

pub use batch::{Batch, BatchResults};
pub use host::Arrival;
pub use memory::Owned;
pub use peer::Route;
pub use region::{Elements, InRegion, Region};

/// Device memory at one end of a copy: a part of a storage.
#[derive(Clone, Copy, Debug)]
pub struct DevicePart<'a> {
    /// The memory that it is a part of, which knows the work that uses it.
    pub storage: &'a Arc<Storage>,
    /// Its first address.
    pub ptr: DevicePtr,
    /// Its size in bytes.
    pub bytes: u64,
}

impl<'a> DevicePart<'a> {
    /// All of a storage.
    pub fn all(storage: &'a Arc<Storage>) -> DevicePart<'a> {
        DevicePart { storage, ptr: storage.ptr(), bytes: storage.bytes() }
    }
}
