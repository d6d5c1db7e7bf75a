//! Accounting: an allocator's counters, and the statistics made of them.
//!
//! `counter.rs` counts one quantity, and `counters.rs` has all of an allocator's counters. The other
//! files present them: PyTorch's statistics, the summary table, and measures of
//! fragmentation.

pub(crate) mod attribute;
pub(crate) mod attribution;
pub(crate) mod fragmentation;
pub(crate) mod memory_stats;
pub(crate) mod stat;
pub(crate) mod summary;

pub use attribution::Attribution;
pub use fragmentation::{Fragmentation, FreeSizes, unusable_index};
pub use memory_stats::MemoryStats;
pub use stat::{PoolStats, Stat};
