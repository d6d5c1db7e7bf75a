//! Page-locked host memory.
//!
//! In the order in which data flows: a [`PinnedPool`] rounds a request (`class`) and takes an unused block of its slabs
//! (`slabs`), or gets more from the system (`ladder`, `source`), or what
//! others keep (`keeper`). Its holder is a [`PinnedBuffer`], whose views ([`PinnedSlice`],
//! [`PinnedSliceMut`]) copies take; the memory below (`memory`) knows the ticks of those copies
//! (`uses`), and goes back to the pool with them
//! (`waiting`).

mod buffer;
mod class;
mod keeper;
mod ladder;
mod memory;
mod pool;
mod register;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod slabs;
mod slices;
mod source;
mod staged;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod uses;
mod waiting;

pub use buffer::PinnedBuffer;
pub(crate) use keeper::Keeper;
pub(crate) use memory::HostPart;
pub use pool::{PinnedConfig, PinnedPool};
pub use register::Returned;
pub use slices::{PinnedSlice, PinnedSliceMut};
pub use source::SlabSource;
pub use stats::{HostMemoryStats, TimeStat};
pub(crate) use uses::HostTurn;
