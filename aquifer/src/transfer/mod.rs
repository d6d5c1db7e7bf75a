//! Copies: pinned memory, sources and targets, prefetching, spilling.
//!
//! * Copies are methods of buffers, which return before they are done, with a [`Pending`] to wait
//!   for, await, or chain to a stream. A stream or a [`Transfer`] runs them ([`RunsCopies`]).
//! * A [`PinnedPool`] recycles pinned memory. Its [`PinnedBuffer`]s know the copies that use
//!   them, so the host waits where it has to.
//! * A *staging ring* of pinned memory ([`TransferConfig`]) stages ordinary memory and files,
//!   which the device cannot copy from by itself.
//!
//! The crate `aquifer-transfer` makes the copies. This module has the types of elements.

mod api;
mod batch;
mod endpoints;
mod pending;
#[cfg(test)]
pub(crate) mod tests;

pub use aquifer_transfer::{
    Counters, Direction, HostMemoryStats, InRegion, PinnedBuffer, PinnedPool, PinnedRead, PinnedSlice, PinnedSliceMut,
    PinnedWrite, Region, Returned, Route, StagingStats, Timer, Timing, TransferConfig, TransferError,
};

pub use api::Transfer;
pub use batch::{Downloaded, TransferBatch};
pub use endpoints::{DeviceSource, FilePart, Owner, RunsCopies, Source, Target};
pub(crate) use endpoints::{bytes_of_mut, elements};
pub use pending::{OnStreams, Pending};

pub use crate::prefetch::{Batch, Prefetcher};
pub use crate::spill::{Resident, SpillStats, Spillable, Spiller};
