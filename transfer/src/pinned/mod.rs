//! Pinned host memory.
//!
//! A [`PinnedPool`] rounds a request (`class`) and takes an unused block of its heap (`state`). If
//! there is none, it gets more memory from the system or from the staging ring (`ladder`,
//! `source`). A [`PinnedBuffer`] owns the block, and copies take parts of it
//! ([`PinnedSlice`], [`PinnedSliceMut`]). The memory itself (`memory`) knows the ticks of those
//! copies and the borrows of the host (`uses`, `borrow`), and goes back to the pool with the ticks
//! (`deferred`).

mod borrow;
mod buffer;
mod class;
mod deferred;
mod ladder;
mod memory;
mod pool;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod slices;
mod source;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod uses;

pub use borrow::{PinnedRead, PinnedWrite};
pub use buffer::{PinnedBuffer, Returned};
pub(crate) use memory::{HostPart, PinnedMemory};
pub use pool::PinnedPool;
pub use slices::{PinnedSlice, PinnedSliceMut};
pub use stats::{HostMemoryStats, TimeStat};
pub(crate) use uses::HostAccess;
