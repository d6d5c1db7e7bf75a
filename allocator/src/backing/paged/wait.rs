//! Learning what the device is done with, without a wait or, before a request is refused, by one.

use aquifer_device::internal::Timeline;

use crate::allocator::Allocator;
use crate::cross_stream::progress::cannot_be_asked;
use crate::error::AllocError;
use crate::types::After;

/// Waits on the host until the timeline has got this far. Returns false if that cannot be done now.
pub(crate) fn stall_for(allocator: &Allocator, timeline: &Timeline, after: After) -> Result<bool, AllocError> {
    tracing::debug!(target: "aquifer::wait", stream = timeline.id(), "the host waits so that memory can move");
    allocator.state().shared().counters.num_sync_all_streams.add(1);
    match timeline.synchronize(after.last_tick()) {
        Ok(()) => Ok(true),
        Err(error) if cannot_be_asked(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
