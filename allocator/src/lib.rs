//! A caching allocator for GPU memory, with PyTorch's options, statistics and snapshots.
//!
//! In the order in which data flows: an [`Allocator`] rounds a request ([`size_class`]) and takes a free block of the request's
//! stream from the heap; where there is none it climbs a ladder (other streams' blocks, a new segment, release, waits,
//! reclaimers) that ends in an [`OomReport`]. The holder gets an [`Allocation`] or a [`DeviceBuffer`].
#![deny(unsafe_code)]

mod accounting;
mod allocation;
mod allocator;
mod backing;
mod buffer;
pub mod config;
mod cross_stream;
mod error;
mod format;
mod heap;
mod history;
mod pools;
mod raw;
mod recovery;
mod shell;
pub mod size_class;
pub mod snapshot;
mod sync;
mod tags;

pub use accounting::{Fragmentation, FreeSizes, MemoryStats, PoolStats, Stat, unusable_index};
pub use allocation::Allocation;
pub use allocator::{ALIGNMENT, Allocator};
pub use backing::{Contents, Exportable, Growable, PinnedMapping, Refusal, WhySegments};
pub use buffer::{Claim, DeviceBuffer, Storage, Turn};
pub use config::Config;
pub use error::AllocError;
pub use format::Bytes;
pub use history::{Action, HistoryOptions};
pub use pools::{CaptureRoute, PoolOptions, PoolRoute, PrivatePool};
pub use recovery::{Advice, MappingChange, OomReport, ReclaimRequest, Registration};
pub use shell::awake::Awake;
pub use shell::close_abandoned;
pub use snapshot::Snapshot;
pub use tags::TagScope;
