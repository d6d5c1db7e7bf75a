//! Page-locked host memory.
//!
//! A [`PinnedPool`] rounds a request (`class`) and takes an unused block of its slabs (`slabs`). If there is none, it gets more memory
//! from the system (`ladder`, `source`), or from those who keep some (`keeper`). The block is held by a [`PinnedBuffer`], whose views
//! ([`PinnedSlice`], [`PinnedSliceMut`]) copies take. The memory itself (`memory`) knows the ticks of those copies (`uses`), and goes
//! back to the pool with them (`waiting`).

mod buffer;
mod claimed;
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
pub(crate) mod tests;
mod uses;
mod waiting;

pub use buffer::PinnedBuffer;
pub(crate) use claimed::Claimed;
pub(crate) use keeper::Keeper;
pub(crate) use memory::HostPart;
pub use pool::{PinnedConfig, PinnedPool};
pub use register::Returned;
pub use slices::{PinnedSlice, PinnedSliceMut};
pub use source::SlabSource;
pub use stats::{HostMemoryStats, TimeStat};
pub(crate) use uses::HostTurn;
