//! Copies, by their source and destination.
//!
//! * `direct`: between page-locked memory and the device, or within the device: enqueued by the caller, on one stream;
//! * `region`: the same with gaps, in as many dimensions as needed;
//! * `peer`: between devices;
//! * `owned`: memory of any kind that is passed in or returned as a whole;
//! * `file`: files straight to the device;
//! * `scope`: borrowed memory, with a wait until the copy is done;
//! * `batch`: many small copies as one, where that pays (`crossover`).
//!
//! Copies by the driver are sound by the invariants of page-locked memory (`pinned/memory.rs`), copies by threads by that of `memory`.

mod batch;
mod crossover;
mod direct;
mod file;
mod memory;
mod owned;
mod peer;
mod region;
mod scope;

pub use batch::{BatchResults, Downloaded, TransferBatch};
pub(crate) use direct::check_lengths;
pub(crate) use owned::UNSTAGED_BYTES;
pub use peer::Route;
pub use region::Region;
pub use scope::Scope;
