//! Pinned host memory.
//!
//! A [`PinnedPool`] rounds a request (`class`) and takes an unused block of its heap (`state`). If
//! there is none, it gets more memory from the system or from the staging ring (`ladder`,
//! `source`). A [`PinnedBlock`] owns the block, and copies take parts of it
//! ([`PinnedPart`], [`PinnedPartMut`]). The memory itself (`memory`) knows the ticks of those
//! copies and the borrows of the host (`uses`, `borrow`), and goes back to the pool with the ticks
//! (`deferred`).

mod block;
mod borrow;
mod class;
mod config;
mod deferred;
mod ladder;
mod memory;
mod part;
mod pool;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod source;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod uses;

pub use block::PinnedBlock;
pub use borrow::{PinnedRead, PinnedWrite};
pub use config::PinnedConfig;
pub(crate) use memory::{HostPart, PinnedMemory};
pub use part::{PinnedPart, PinnedPartMut};
pub use pool::PinnedPool;
pub use stats::{HostMemoryStats, TimeStat};
pub(crate) use uses::HostAccess;
