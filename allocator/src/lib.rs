//! A caching allocator for GPU memory, with PyTorch's options, statistics and snapshots.
//!
//! The allocator is *stream-ordered*: memory allocated for a stream may be used by work enqueued
//! there from then on, and freed memory may be reused by later work of the same stream without
//! waiting for the device. Memory that is freed is cached and reused rather than given back to the
//! device.
//!
//! * An [`Allocator`] serves one device and is configured by a [`Config`]. It rounds a request
//!   ([`size_class`]) and takes a free block of the request's stream.
//! * Where there is none it climbs a ladder: other streams' blocks, more memory from the device,
//!   release of unused memory, waits, reclaimers. The ladder ends in an [`OomReport`], which says
//!   what is in the way and what helps.
//! * The caller gets an [`Allocation`], or a [`Storage`], which several handles share. An
//!   [`AccessGuard`] orders a stream's work with a storage after other streams' work.
//! * [`PrivatePool`]s serve a thread or a graph capture separately; [`Growable`] memory grows in
//!   place.
//!
//! By default memory is *mapped* ([`Backing::Paged`](config::Backing::Paged)): physical memory
//! moves between addresses, so that free memory serves a request although it is in pieces. With
//! [`Backing::Segments`](config::Backing::Segments), or where the device cannot map memory, it
//! comes in plain driver allocations, as in PyTorch.
//!
//! # Testing
//!
//! Blocks lie side by side in memory that the allocator keeps, so the device itself sees neither
//! their bounds nor their end. The allocator tells the device's witness
//! ([`aquifer_device::Witness`]), which a simulated device has unless it was opened with
//! `checks=off`. Violations are then
//! * work beyond the requested bytes of a block; one range that work touches lies in one block, and
//!   rounding is not part of it;
//! * work that was enqueued after a block was dropped; work enqueued before may still run, on
//!   recorded streams, too;
//! * a kernel or a download that reads bytes which no work has written since the block was
//!   allocated. Copies within the device carry such bytes along.
//!
//! A graph may use memory of its private pool after it was dropped, and needs all other blocks to
//! be live whenever it is launched. A real device is not notified.
//!
//! ```
//! use aquifer::prelude::*;
//! let device = aquifer::open("sim:24GiB,violations=panic")?; // where they happen, or in the next wait
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let block = memory.alloc_bytes(500, &stream)?;
//! stream.fill(block.ptr(), 0, 500)?; // 501 would panic, and name this line and that of the allocation
//! device.synchronize()?;
//! device.assert_no_violations(); // for devices without `violations=panic`
//! # Ok::<(), aquifer::Error>(())
//! ```
#![deny(unsafe_code)]

mod accounting;
mod alloc;
mod allocation;
mod allocator;
mod backing;
pub mod config;
mod core;
mod cross_stream;
mod error;
mod format;
mod history;
mod open;
mod pools;
mod raw;
mod recovery;
pub mod replace_file;
pub mod size_class;
mod sleep;
pub mod snapshot;
mod state;
mod storage;
mod sync;
mod tags;
mod types;

pub use crate::core::pools::PoolOptions;
pub use accounting::{Attribution, Fragmentation, FreeSizes, MemoryStats, PoolStats, Stat};
pub use allocation::Allocation;
pub use allocator::{ALIGNMENT, Allocator};
pub use backing::{Exportable, Growable, PinnedMapping, Refusal};
pub use config::Config;
pub use error::{AllocError, KeptAwakeBy, WhySegments};
pub use format::Bytes;
pub use history::{Action, HistoryOptions};
pub use open::empty_caches;
pub use pools::private_pool::{CaptureRoute, PoolRoute, PrivatePool};
pub use raw::{RawOwner, owner_of};
pub use recovery::{Advice, MappingChange, OomReport, ReclaimRequest, Reclaimed, Registration};
pub use sleep::{Contents, KeptBy, Part, SleepOptions, StayingAwake, WakeLock};
pub use snapshot::Snapshot;
pub use state::close_abandoned;
pub use storage::{AccessGuard, GraphUses, Reservation, Storage};
pub use tags::TagScope;

/// For the other crates of Aquifer. It may change in any release.
#[doc(hidden)]
pub mod internal {
    pub use crate::core::heap::{Block, Heap, Region};
    pub use crate::pools::private_pool::Busy;
    pub use crate::storage::record::AccessRecord;
    pub use crate::storage::{Outlived, Pass};
    pub use crate::types::{After, BlockId, PoolId, StreamId};
}
