//! Everything between host and device: page-locked memory, copies, staging, prefetching, and tensors with explicit placement.
//!
//! In the order in which data flows: a [`PinnedPool`] recycles page-locked memory, whose [`PinnedBuffer`]s know the copies that use them. A
//! [`Transfer`] copies: it returns before copies are done, with a [`Pending`] that can be waited for, awaited, or chained to a stream. What
//! cannot be copied by the device itself goes through the staging ring.
//!
//! **Soundness never depends on a destructor.** Who drops, forgets or leaks something here leaks memory at worst: what a copy uses is
//! owned by this crate, or carries the ticks of the copy before the call returns.
#![deny(unsafe_code)]

mod capture;
mod copy;
mod counters;
mod error;
mod host_vec;
mod job;
mod params;
mod pending;
mod pinned;
mod placement;
mod prefetch;
mod regular_file;
mod runtime;
mod spill;
mod staging;
mod streams;
mod sync;
mod tensor;
mod timer;
mod waiter;

pub use copy::{BatchResults, Downloaded, Region, Route, Scope, TransferBatch};
pub use counters::{Counters, Direction, Traffic};
pub use error::TransferError;
pub use params::{
    Checkpoint, CheckpointError, CheckpointFault, Load, OtherDTypes, Param, ParamKind, ParamSet, Progress, Relocate,
    Stray, TensorEntry,
};
pub use pending::{OnStreams, Pending};
pub use pinned::{
    HostMemoryStats, PinnedBuffer, PinnedConfig, PinnedPool, PinnedSlice, PinnedSliceMut, Returned, SlabSource,
    TimeStat,
};
pub use placement::{Candidate, Chosen, Fallback, NoDevice, Placement, Refused, Verdict};
pub use prefetch::{Batch, Prefetcher};
pub use runtime::{Transfer, TransferConfig};
pub use spill::{Resident, SpillStats, Spillable, Spiller};
pub use staging::{DirectIo, FileReport, ScheduleReport, StagingConfig, StagingStats, VirtualSchedule};
pub use tensor::{Layout, LayoutError, MAX_DIMENSIONS, OperandInfo, OperandsError, Place, Scalar, Tensor, To};
pub use timer::{Timer, Timing};
