//! Pinned host memory, and copies between the host and GPUs, on untyped memory.
//!
//! * A [`Transfer`] copies. Its calls return before copies are done, with a [`Completion`].
//! * A [`PinnedPool`] recycles pinned memory. Its [`PinnedBuffer`]s know the copies that use
//!   them, so the host waits where it has to.
//! * A *staging ring* of pinned memory ([`TransferConfig`]) stages ordinary memory and files,
//!   which the device cannot copy from by itself.
//!
//! Ends of copies are parts of memory: [`DevicePart`], [`PinnedSlice`], [`PinnedSliceMut`], [`Owned`]
//! and borrowed bytes. [`Elements`] says how large their elements are, and which of them to copy.
//! The crate `aquifer` has types for the elements.
//!
//! **Soundness never depends on a destructor.** Dropping, forgetting or leaking a value of this
//! crate leaks memory at worst: this crate owns the memory that a copy uses, or the memory carries
//! the copy's ticks before the call returns.
//!
//! ```
//! use aquifer::prelude::*;
//! use aquifer_transfer::{DevicePart, Elements, Runtime, TransferConfig};
//! let device = aquifer::open("sim:24GiB")?;
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let transfer = Runtime::new(&device, TransferConfig::default())?.transfer(&memory)?;
//!
//! let host = transfer.pinned().alloc_from(&[7; 1000])?;
//! let x = memory.alloc::<u8>(1000, &stream)?;
//! let elements = Elements { size: 1, from: 1000, to: 1000, region: None };
//! let upload = transfer.upload_pinned(host.as_slice(), DevicePart::all(x.storage()), &elements)?; // returns at once
//! upload.wait()?;
//! # Ok::<(), aquifer::Error>(())
//! ```
#![deny(unsafe_code)]

mod captured;
mod completion;
mod config;
mod copy;
mod counters;
mod enqueue;
mod error;
mod foreign_code;
mod host_memory;
mod in_flight;
mod job;
mod pinned;
mod ranges;
mod regular_file;
mod rows;
mod runtime;
mod staging;
mod streams;
mod sync;
mod timer;
mod waiter;

pub use captured::HostUses;
pub use completion::Completion;
pub use config::{StagingStats, TransferConfig};
pub use copy::{Arrival, Batch, BatchResults, DevicePart, Elements, InRegion, Owned, Region, Route};
pub use counters::{Counters, Direction, Traffic};
pub use error::TransferError;
pub use pinned::{
    HostMemoryStats, PinnedBuffer, PinnedPool, PinnedRead, PinnedSlice, PinnedSliceMut, PinnedWrite, Returned, TimeStat,
};
pub use runtime::{Runtime, Transfer};
pub use staging::HostSource;
pub use timer::{Timer, Timing};

/// Helpers for the crate `aquifer`. Not covered by any promise of stability.
#[doc(hidden)]
pub mod internal {
    pub use crate::enqueue::covered_tick;
    pub use crate::foreign_code::guarded;
    pub use crate::host_memory::{bytes_of, copied, len_of, zeroed};
    pub use crate::ranges::resolve;
    pub use crate::regular_file::open as open_regular;
    pub use crate::rows::{Dimension, RowBlock, Rows, merge, place_of};
    pub use crate::staging::FileSource;
}
