//! Page-locked host memory.
//!
//! A [`PinnedPool`] rounds a request (`class`) and takes an unused block of its slabs (`slabs`). If
//! there is none, it gets more memory from the system or from reclaimable caches (`ladder`,
//! `source`). A [`PinnedBuffer`] holds the block, and copies take views of it
//! ([`PinnedSlice`], [`PinnedSliceMut`]). The memory itself (`memory`) knows the ticks of those
//! copies (`uses`), and goes back to the pool with them (`deferred`).

mod buffer;
mod class;
mod config;
mod deferred;
mod ladder;
mod memory;
mod pool;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod slabs;
mod slices;
mod source;
mod state;
mod stats;
#[cfg(test)]
pub(crate) mod tests;
mod uses;

pub use buffer::{PinnedBuffer, Returned};
pub use config::{PinnedConfig, SlabSource};
pub(crate) use ladder::ReclaimableCache;
pub(crate) use memory::{HostPart, PinnedMemory, Reserved};
pub use pool::PinnedPool;
pub use slices::{PinnedSlice, PinnedSliceMut};
pub use stats::{HostMemoryStats, TimeStat};
pub(crate) use uses::HostAccess;
