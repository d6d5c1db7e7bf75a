//! Copies: pinned memory, sources and targets, prefetching, spilling.
//!
//! * A [`Transfer`] copies. Its calls return before copies are done, with a [`Pending`] to wait
//!   for, await, or chain to a stream.
//! * A [`PinnedPool`] recycles pinned memory. Its [`PinnedBuffer`]s know the copies that use
//!   them, so the host waits where it has to.
//! * A *staging ring* of pinned memory ([`StagingConfig`]) stages ordinary memory and files,
//!   which the device cannot copy from by itself.
//!
//! The crate `aquifer-transfer` makes the copies. This module has the types of elements.

mod api;
mod batch;
mod endpoints;
mod pending;

pub use aquifer_transfer::{
    Counters, DirectIo, Direction, FileReport, HostMemoryStats, InRegion, PinnedConfig, PinnedRead, PinnedWrite,
    Region, Route, StagingConfig, StagingStats, Timer, Timing, TransferConfig, TransferError,
};

pub use api::Transfer;
pub use batch::{Downloaded, TransferBatch};
pub use endpoints::{DeviceSource, FilePart, Owner, Source, Target};
pub(crate) use endpoints::{bytes_of_mut, elements};
pub use pending::{OnStreams, Pending};

pub use crate::pinned::{PinnedBuffer, PinnedPool, PinnedSlice, PinnedSliceMut, Returned};
pub use crate::prefetch::{Batch, Prefetcher};
pub use crate::spill::{Resident, SpillStats, Spillable, Spiller};
