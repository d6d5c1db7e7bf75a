//! Accounting: an allocator's counters, and the statistics made of them.
//!
//! `core/counters.rs` has the counters. The files here present them: PyTorch's statistics, the
//! summary table, measures of fragmentation, and the holders of a device's memory.

pub(crate) mod attribution;
pub(crate) mod fragmentation;
pub(crate) mod memory_stats;

pub use crate::core::counters::{MemoryStats, PoolStats, Stat};
pub use attribution::Attribution;
pub use fragmentation::{Fragmentation, FreeSizes};
