//! The raw interface: pointers instead of handles, for bindings to code that can only hold
//! pointers.
//!
//! A table says which block a pointer is (`table.rs`), for this interface alone; handles need no
//! look-up.

mod owner;
pub(crate) mod ready;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
pub(crate) mod table;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;

use std::panic::Location;

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::alloc::{grant_cached, grant_uncached};
use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::pools::capture::acting;
use crate::state::AllocatorState;
use crate::types::{BlockId, Granted, StreamId, UNKNOWN};

pub use owner::{RawOwner, owner_of};

impl AllocatorState {
    /// Looks at a live raw allocation, which no thread can free meanwhile.
    fn look_at_raw<R>(&self, ptr: DevicePtr, look: impl FnOnce(BlockId) -> R) -> Result<R, AllocError> {
        self.raw.look(ptr.0, look).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })
    }
}

impl Allocator {
    /// Allocates and returns the bare pointer, to be freed with [`Allocator::free_raw`]. Zero bytes
    /// give a null pointer.
    ///
    /// Free the pointer before the last handle of the allocator is dropped. Afterwards it can no
    /// longer be freed, and its memory and device stay in use until the process ends.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`].
    #[track_caller]
    #[inline]
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
        let at = Location::caller();
        let searched = match grant_cached(self, bytes, stream, at, true) {
            Ok(granted) => return Ok(DevicePtr(granted.addr)),
            Err(searched) => searched,
        };
        let Granted { block, addr } = grant_uncached(self, bytes, stream, searched, at)?;
        if block != BlockId::NONE {
            let guard = self.state().shared();
            guard.state.raw.insert(addr, block);
        }
        Ok(DevicePtr(addr))
    }

    /// Frees a pointer from [`Allocator::alloc_raw`]. A null pointer is ignored.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here: foreign, inside a block,
    /// or freed before.
    #[track_caller]
    #[inline]
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<(), AllocError> {
        fork::check(Operation::Free)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let state = self.state();
        let block = state.raw.remove(ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        if self.is_watched() {
            state.report_end(ptr, Some(Location::caller()));
        }
        state.free(block, StreamId::default(), None, UNKNOWN);
        Ok(())
    }

    /// Frees a raw allocation in the order of `stream`, as `cuMemFreeAsync(ptr, stream)`: work
    /// enqueued on `stream` until now may still use the memory. Nothing waits.
    ///
    /// The memory is reused once that work is done, or by streams that are ordered after it; also
    /// once the work is done that the streams noted by [`Allocator::record_stream_raw`] have until
    /// now. The stream of the allocation itself always counts, as of now. So `stream` need not be
    /// ordered after any other one. On the stream of the allocation, this is
    /// [`Allocator::free_raw`].
    ///
    /// # Errors
    /// As [`Allocator::free_raw`]; a stream of another device. The pointer is live afterwards.
    #[track_caller]
    pub fn free_raw_on(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Free)?;
        check_stream(self, stream)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let state = self.state();
        let block = state.raw.remove(ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        note_use(self, block, stream);
        if self.is_watched() {
            state.report_end(ptr, Some(Location::caller()));
        }
        state.free(block, StreamId::default(), None, UNKNOWN);
        Ok(())
    }

    /// Notes that `stream` uses a raw allocation too, as [`crate::Allocation::record_stream`].
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here; a stream of another
    /// device.
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        check_stream(self, stream)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        self.state().look_at_raw(ptr, |block| note_use(self, block, stream))
    }

    /// The size in bytes of a live raw allocation's block, rounding included.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    pub fn size_of_raw(&self, ptr: DevicePtr) -> Result<u64, AllocError> {
        fork::check(Operation::MemoryInfo)?;
        let state = self.state();
        state.look_at_raw(ptr, |block| state.shared().heap().block(block).size)
    }
}

fn check_stream(allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
    let (theirs, ours) = (stream.device_id(), allocator.device().id());
    if theirs == ours { Ok(()) } else { Err(AllocError::wrong_device("stream", theirs, ours)) }
}

/// Notes that a stream uses a live block, which no other thread can free meanwhile.
fn note_use(allocator: &Allocator, block: BlockId, stream: &Stream) {
    let stream = acting(stream);
    let mut shared = allocator.state().shared();
    let stream = shared.stream(&stream);
    shared.note_use(block, stream);
}
