//! Copies, by their source and destination.
//!
//! * `direct`: between page-locked memory and the device, or within the device: enqueued by the caller, on one stream;
//! * `strided`: the same with gaps, in as many dimensions as needed (`region`); `staged_region`: those of ordinary memory, which have no gaps
//!   on their way (`packed`);
//! * `peer`, `peer_region`: between devices;
//! * `on_host`: between host memory, by threads;
//! * `owned`: memory of any kind that is passed in or returned as a whole;
//! * `file`: files straight to the device;
//! * `scope`: borrowed memory, with a wait until the copy is done;
//! * `batch`: many small copies as one, where that pays (`crossover`) and nothing written is used by another one (`touched`).
//!
//! Copies by the driver are sound by the invariants of page-locked memory (`pinned/memory.rs`), copies by threads by that of `memory`.

mod batch;
mod crossover;
mod direct;
mod file;
mod memory;
mod on_host;
mod owned;
mod packed;
mod peer;
mod peer_region;
mod region;
mod scope;
mod staged_region;
mod strided;
mod touched;

pub use batch::{BatchResults, Downloaded, TransferBatch};
pub(crate) use direct::check_lengths;
pub(crate) use memory::Owned;
pub(crate) use owned::UNSTAGED_BYTES;
pub use peer::Route;
pub use region::Region;
pub use scope::Scope;
