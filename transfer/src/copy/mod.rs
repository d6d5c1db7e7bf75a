//! Copies, by what their ends are.
//!
//! * `direct`: page-locked memory and the device, or within the device: enqueued by the caller, on one stream;
//! * `region`: the same with gaps, in as many dimensions as needed;
//! * `peer`: between devices;
//! * `owned`: memory of any kind that goes in or comes out whole;
//! * `file`: files straight to the device;
//! * `scope`: borrowed memory, waiting until it is done;
//! * `batch`: many small copies as one, where that pays (`crossover`).
//!
//! What the driver is told to copy rests on the invariants of page-locked memory (`pinned/memory.rs`), what threads copy on that of `memory`.

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
