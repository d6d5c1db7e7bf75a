//! Copies.
//!
//! * `api`: the methods of [`crate::Transfer`];
//! * `endpoints`: sources and targets;
//! * `upload`, `download`: between the host and the device;
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
mod download;
mod endpoints;
mod memory;
mod on_device;
#[cfg(test)]
mod on_host_tests;
mod packed;
mod peer;
mod region;
mod route;
mod upload;

pub use batch::{BatchResults, Downloaded, TransferBatch};
pub use endpoints::{DeviceSource, FilePart, HostCopySource, InRegion, Owner, Source, Target};
pub(crate) use memory::Owned;
pub(crate) use peer::copy_from as copy_from_peer;
pub use region::Region;
pub use route::Route;
pub(crate) use upload::{owned as upload_owned, stage as stage_upload};
