//! Private pools: memory that is kept separate from all other memory, as in PyTorch's `MemPool` and
//! graph pools.
//!
//! The two default pools have numbers 0 (small) and 1 (large) in the heap. A private pool has four
//! numbers of its own. Two of them serve captures, and other requests as long as no graph may use
//! what is free in them; the other two serve other requests from then on. A closed pool (its handle
//! was dropped) serves no request. Its blocks are given back to the device as they become free, at
//! the next release, but not before the launches of graphs whose captures allocated from it are
//! done (invariant A7).

pub(crate) mod capture;
pub(crate) mod lookup;
pub(crate) mod private_pool;

pub use crate::core::pools::PoolOptions;
pub use private_pool::{CaptureRoute, PoolRoute, PrivatePool};

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;
