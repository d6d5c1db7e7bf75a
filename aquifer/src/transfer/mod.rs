//! Copies: page-locked memory, sources and targets, prefetching, spilling.
//!
//! * A [`Transfer`] copies. Its calls return before copies are done, with a [`Pending`] to wait
//!   for, await, or chain to a stream.
//! * A [`PinnedPool`] recycles page-locked memory. Its [`PinnedBuffer`]s know the copies that use
//!   them, so the host waits where it has to.
//! * A *staging ring* of page-locked memory ([`StagingConfig`]) stages ordinary memory and files,
//!   which the device cannot copy from by itself.
//!
//! **Soundness never depends on a destructor.** Dropping, forgetting or leaking a value of this
//! module leaks memory at worst: this crate owns the memory that a copy uses, or the memory carries
//! the copy's ticks before the call returns.

pub(crate) mod captured;
pub(crate) mod copy;
pub(crate) mod counters;
pub(crate) mod enqueue;
pub(crate) mod foreign_code;
pub(crate) mod host_memory;
pub(crate) mod in_flight;
pub(crate) mod job;
pub(crate) mod pending;
pub(crate) mod pinned;
pub(crate) mod regular_file;
pub(crate) mod runtime;
pub(crate) mod staging;
pub(crate) mod streams;
pub(crate) mod sync;
pub(crate) mod timer;
pub(crate) mod waiter;

pub use copy::{
    BatchResults, DeviceSource, Downloaded, FilePart, HostCopySource, InRegion, Owner, Region, Route, Source, Target,
    TransferBatch,
};
pub use counters::{Counters, Direction, Traffic};
pub use pending::{OnStreams, Pending};
pub use pinned::{
    HostMemoryStats, PinnedBuffer, PinnedConfig, PinnedPool, PinnedSlice, PinnedSliceMut, Returned, SlabSource,
    TimeStat,
};
pub use runtime::{Transfer, TransferConfig};
pub use staging::{DirectIo, FileReport, StagingConfig, StagingStats};
pub use timer::{Timer, Timing};

pub use crate::prefetch::{Batch, Prefetcher};
pub use crate::spill::{Resident, SpillStats, Spillable, Spiller};
