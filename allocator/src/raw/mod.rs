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

use crate::alloc::grant_cached;
use crate::alloc::grant_uncached;
use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::heap::BlockId;
use crate::state::AllocatorState;
use crate::state::free::UNKNOWN;
use crate::state::guard::Granted;
use crate::types::StreamId;

pub use owner::{RawOwner, owner_of};

impl AllocatorState {
    /// Looks at a live raw allocation, which no thread can free meanwhile.
    fn look_at_raw<R>(&self, ptr: DevicePtr, look: impl FnOnce(BlockId) -> R) -> Result<R, AllocError> {
        self.raw.look(ptr.0, look).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })
    }
}

/// See [`Allocator::alloc_raw`].
#[track_caller]
#[inline]
pub(crate) fn alloc_raw(allocator: &Allocator, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
    let at = Location::caller();
    let searched = match grant_cached(allocator, bytes, stream, at, true) {
        Ok(granted) => return Ok(DevicePtr(granted.addr)),
        Err(searched) => searched,
    };
    let Granted { block, addr } = grant_uncached(allocator, bytes, stream, searched, at)?;
    if block != BlockId::NONE {
        let guard = allocator.state().shared();
        guard.state.raw.insert(addr, block);
    }
    Ok(DevicePtr(addr))
}

/// See [`Allocator::free_raw`].
#[track_caller]
#[inline]
pub(crate) fn free_raw(allocator: &Allocator, ptr: DevicePtr) -> Result<(), AllocError> {
    fork::check(Operation::Free)?;
    if ptr.0 == 0 {
        return Ok(());
    }
    let state = allocator.state();
    let block = state.raw.remove(ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
    if allocator.is_watched() {
        state.report_end(ptr, Some(Location::caller()));
    }
    state.free(block, StreamId::default(), None, UNKNOWN);
    Ok(())
}

/// See [`Allocator::free_raw_on`].
#[track_caller]
pub(crate) fn free_raw_on(allocator: &Allocator, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
    fork::check(Operation::Free)?;
    check_stream(allocator, stream)?;
    if ptr.0 == 0 {
        return Ok(());
    }
    let state = allocator.state();
    let block = state.raw.remove(ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
    note_use(allocator, block, stream);
    if allocator.is_watched() {
        state.report_end(ptr, Some(Location::caller()));
    }
    state.free(block, StreamId::default(), None, UNKNOWN);
    Ok(())
}

/// See [`Allocator::record_stream_raw`].
pub(crate) fn record_stream_raw(allocator: &Allocator, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
    fork::check(Operation::Record)?;
    check_stream(allocator, stream)?;
    if ptr.0 == 0 {
        return Ok(());
    }
    allocator.state().look_at_raw(ptr, |block| note_use(allocator, block, stream))
}

/// See [`Allocator::size_of_raw`].
pub(crate) fn size_of_raw(allocator: &Allocator, ptr: DevicePtr) -> Result<u64, AllocError> {
    fork::check(Operation::MemoryInfo)?;
    let state = allocator.state();
    state.look_at_raw(ptr, |block| state.shared().heap.blocks[block].size)
}

fn check_stream(allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
    let (theirs, ours) = (stream.device_id(), allocator.device().id());
    if theirs == ours { Ok(()) } else { Err(AllocError::wrong_device("stream", theirs, ours)) }
}

/// Notes that a stream uses a live block, which no other thread can free meanwhile.
fn note_use(allocator: &Allocator, block: BlockId, stream: &Stream) {
    let mut shared = allocator.state().shared();
    let stream = shared.stream(stream);
    shared.note_use(block, stream);
}
