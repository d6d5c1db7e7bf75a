//! Everything between host and device: page-locked memory, copies, staging, prefetching, and tensors with explicit placement.
#![deny(unsafe_code)]

mod error;
mod pinned;

pub use error::TransferError;
pub use pinned::{
    HostMemoryStats, PinnedBuffer, PinnedConfig, PinnedPool, PinnedSlice, PinnedSliceMut, SlabSource, TimeStat,
};
