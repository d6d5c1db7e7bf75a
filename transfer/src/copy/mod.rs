//! Copies, by their source and destination.
//!
//! * `ends`: what copies read and write;
//! * `upload`, `download`: between the host and the device;
//! * `on_device`: within the device, and between devices (`peer`, `peer_region`);
//! * `region`: elements with gaps, in as many dimensions as needed, which have none on their way (`packed`);
//! * `on_host`: between host memory, by threads;
//! * `batch`: many small copies as one, where that pays (`crossover`) and nothing written is used by another one (`touched`).
//!
//! Copies by the driver are sound by the invariants of page-locked memory (`pinned/memory.rs`), copies by threads by that of `memory`.

mod batch;
mod crossover;
mod download;
mod ends;
mod memory;
mod on_device;
mod on_host;
mod packed;
mod peer;
mod peer_region;
mod region;
mod touched;
mod upload;

pub use batch::{BatchResults, Downloaded, TransferBatch};
pub use ends::{DeviceSource, FilePart, HostEnd, InRegion, Owner, Source, Target};
pub(crate) use memory::Owned;
pub use peer::Route;
pub use region::Region;
pub(crate) use upload::UNSTAGED_BYTES;
