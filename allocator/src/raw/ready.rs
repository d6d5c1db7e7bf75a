//! Raw memory that no work uses any more when it is given out.

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocator::Allocator;
use crate::cross_stream::waiting::unknown;
use crate::error::AllocError;
use crate::raw::{alloc_raw, free_raw};

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
    let slots = 0..u32::try_from(shared.streams.len()).unwrap_or(u32::MAX);
    let others = slots.filter(|&slot| slot != stream.id());
    let pending = unknown(&shared, others.map(|slot| (slot, clock.of(slot))));
    drop(shared);
    for (timeline, after) in pending {
        timeline.synchronize(after.saturating_sub(1))?;
    }
    Ok(())
}
