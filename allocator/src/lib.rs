//! A caching allocator for GPU memory, with PyTorch's options, statistics and snapshots.
//!
//! In the order in which data flows: an [`Allocator`] rounds a request ([`size_class`]) and takes a free block of the request's
//! stream from the heap; where there is none it climbs a ladder (other streams' blocks, a new segment, release, waits,
//! reclaimers) that ends in an [`OomReport`]. The holder gets an [`Allocation`] or a [`DeviceBuffer`].
#![deny(unsafe_code)]

mod allocation;
mod allocator;
mod arena;
mod backing;
mod buffer;
mod capture;
mod claim;
mod clock;
pub mod config;
mod core;
mod cross_stream;
mod error;
mod format;
mod fragmentation;
mod gc;
mod heap;
mod held;
mod history;
mod hooks;
mod ladder;
#[cfg(not(aquifer_shuttle))]
mod lock;
mod memory_stats;
mod oom;
mod paged;
mod pools;
mod raw;
mod reclaim;
mod segments;
mod shell;
pub mod size_class;
pub mod snapshot;
mod stats;
mod storage;
mod summary;
mod sync;
mod table;
mod tags;
mod tally;
mod turn;
mod waiting;
mod whole;

pub use allocation::Allocation;
pub use allocator::{ALIGNMENT, Allocator};
pub use backing::WhySegments;
pub use buffer::DeviceBuffer;
pub use capture::CaptureRoute;
pub use claim::Claim;
pub use config::Config;
pub use error::AllocError;
pub use format::Bytes;
pub use fragmentation::{Fragmentation, FreeSizes, unusable_index};
pub use history::{Action, HistoryOptions};
pub use hooks::{MappingChange, Registration};
pub use memory_stats::MemoryStats;
pub use oom::{Advice, OomReport};
pub use paged::{Contents, Exportable, Growable, PinnedMapping};
pub use pools::{PoolOptions, PoolRoute, PrivatePool};
pub use reclaim::ReclaimRequest;
pub use segments::Refusal;
pub use snapshot::Snapshot;
pub use stats::{PoolStats, Stat};
pub use storage::Storage;
pub use tags::TagScope;
pub use turn::Turn;
