//! Everything between host and device: page-locked memory, copies, staging, prefetching, and tensors with explicit placement.
#![deny(unsafe_code)]

mod error;
mod pinned;
mod placement;
mod tensor;
mod timer;

pub use error::TransferError;
pub use pinned::{
    HostMemoryStats, PinnedBuffer, PinnedConfig, PinnedPool, PinnedSlice, PinnedSliceMut, SlabSource, TimeStat,
};
pub use placement::{Candidate, Chosen, Fallback, NoDevice, Placement, Refused, Verdict};
pub use tensor::{Layout, LayoutError, MAX_DIMENSIONS};
pub use timer::{Timer, Timing};
