//! Transfers between host and device: page-locked memory, copies, staging, prefetching, and tensors
//! with explicit placement.
//!
//! * A [`Transfer`] copies. Its calls return before copies are done, with a [`Pending`] to wait
//!   for, await, or chain to a stream.
//! * A [`PinnedPool`] recycles page-locked memory. Its [`PinnedBuffer`]s know the copies that use
//!   them, so the host waits where it has to.
//! * A *staging ring* of page-locked memory ([`StagingConfig`]) stages ordinary memory and files,
//!   which the device cannot copy from by itself.
//! * A [`Tensor`] has a dtype, a shape and a [`Place`], which never changes silently. A
//!   [`ParamSet`] moves named tensors together, and loads safetensors files ([`Checkpoint`]).
//! * A [`Prefetcher`] brings batches to the device ahead of their use. A [`Spiller`] moves buffers
//!   to the host when device memory runs out.
//!
//! **Soundness never depends on a destructor.** Dropping, forgetting or leaking a value of this
//! crate leaks memory at worst: this crate owns the memory that a copy uses, or the memory carries
//! the copy's ticks before the call returns.
#![deny(unsafe_code)]

mod copy;
mod counters;
mod enqueue;
mod error;
mod foreign_code;
mod host_memory;
mod in_flight;
mod job;
mod layout;
mod methods;
mod params;
mod pending;
mod pinned;
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

pub use copy::{
    BatchResults, DeviceSource, Downloaded, FilePart, HostCopySource, InRegion, Owner, Region, Route, Source, Target,
    TransferBatch,
};
pub use counters::{Counters, Direction, Traffic};
pub use error::TransferError;
pub use layout::{Layout, LayoutError, MAX_DIMENSIONS};
pub use methods::{AllocatorTransfers, BufferTransfers, DeviceTransfers};
pub use params::{
    Checkpoint, CheckpointError, CheckpointFault, DifferentTensor, Load, OtherDTypes, Param, ParamKind, ParamSet,
    Progress, Relocate, SetMismatch, Stray, TensorEntry,
};
pub use pending::{OnStreams, Pending};
pub use pinned::{
    HostMemoryStats, PinnedBuffer, PinnedConfig, PinnedPool, PinnedSlice, PinnedSliceMut, Returned, SlabSource,
    TimeStat,
};
pub use prefetch::{Batch, Prefetcher};
pub use runtime::{Transfer, TransferConfig};
pub use spill::{Resident, SpillStats, Spillable, Spiller};
pub use staging::{DirectIo, FileReport, StagingConfig, StagingStats};
pub use tensor::{Fallback, OperandInfo, OperandsError, Place, Scalar, Tensor, To};
pub use timer::{Timer, Timing};
