//! What an allocator counts, and the views of it that people read.
//!
//! `counter.rs` is one quantity, `counters.rs` all that an allocator counts, and `tally.rs` says who writes to which. The other
//! files put them together: PyTorch's statistics, the table for people, and measures of fragmentation.

pub(crate) mod counter;
pub(crate) mod counters;
mod fragmentation;
mod memory_stats;
mod stat;
mod summary;
pub(crate) mod tally;

pub use fragmentation::{Fragmentation, FreeSizes, unusable_index};
pub use memory_stats::MemoryStats;
pub use stat::{PoolStats, Stat};
