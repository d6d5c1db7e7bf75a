//! Copies.
//!
//! * `api`: the methods of [`crate::transfer::Transfer`];
//! * `endpoints`: sources and targets;
//! * `host`: between the host and the device;
//! * `on_device`, `peer`: within the device, and between devices;
//! * `region`: elements with gaps between them, and their order in page-locked memory (`packed`);
//! * `batch`: many small copies as one, where that pays (`crossover`);
//! * `memory`: host memory that threads of the staging ring access.
//!
//! Copies by the driver are sound by the invariants of page-locked memory (`pinned/memory.rs`),
//! copies by threads by that of `memory`.

mod api;
mod batch;
mod crossover;
mod endpoints;
mod host;
mod memory;
mod on_device;
#[cfg(test)]
mod on_host_tests;
mod packed;
mod peer;
mod region;

pub use batch::{BatchResults, Downloaded, TransferBatch};
pub use endpoints::{DeviceSource, FilePart, HostCopySource, InRegion, Owner, Source, Target};
pub(crate) use host::{stage_upload, upload_owned};
pub(crate) use memory::Owned;
pub use peer::Route;
pub(crate) use peer::copy_from as copy_from_peer;
pub use region::Region;
