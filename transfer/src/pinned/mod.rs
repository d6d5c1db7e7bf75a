//! Page-locked host memory.
//!
//! In the order in which data flows: a [`PinnedPool`] rounds a request (`class`) and takes an unused block of its slabs
//! (`slabs`), or gets more from the system (`source`). Its holder is a [`PinnedBuffer`], whose views ([`PinnedSlice`],
//! [`PinnedSliceMut`]) copies take; the memory below (`memory`) knows the ticks of those copies
//! (`uses`), and goes back to the pool with them
//! (`waiting`).

mod buffer;
mod class;
mod memory;
mod pool;
mod register;
mod slabs;
mod slices;
mod source;
mod stats;
#[cfg(test)]
mod tests;
mod uses;
mod waiting;

pub use buffer::PinnedBuffer;
pub(crate) use memory::{HostPart, PinnedMemory};
pub use pool::{PinnedConfig, PinnedPool};
pub use register::Returned;
pub use slices::{PinnedSlice, PinnedSliceMut};
pub use source::SlabSource;
pub use stats::{HostMemoryStats, TimeStat};
pub(crate) use uses::{HostClaim, HostTurn};
