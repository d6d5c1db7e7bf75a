//! Raw memory that no work uses any more when it is given out.

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::raw::{alloc_raw, free_raw};
use crate::types::{After, StreamId, Use};

/// See [`Allocator::alloc_raw_ready`].
#[track_caller]
pub(crate) fn alloc_raw_ready(allocator: &Allocator, bytes: u64) -> Result<DevicePtr, AllocError> {
    fork::check(Operation::Alloc)?;
    let stream = allocator.ready_stream()?;
    let ptr = alloc_raw(allocator, bytes, stream)?;
    if let Err(error) = wait_for_all_before(allocator, stream) {
        free_raw(allocator, ptr)?;
        return Err(error);
    }
    Ok(ptr)
}

/// Waits on the host until all is done that the later work of a stream is ordered after. Mostly all
/// is known done.
fn wait_for_all_before(allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
    let clock = stream.timeline().clock();
    let shared = allocator.state().shared();
    let others = shared.streams.ids().filter(|&other| other != StreamId::of(stream));
    let pending =
        shared.streams.not_done(others.map(|other| Use { stream: other, after: After::ordered(&clock, other) }));
    drop(shared);
    for (timeline, after) in pending {
        timeline.synchronize(after.last_tick())?;
    }
    Ok(())
}
