//! Learning what the device is done with, without a wait or, before a request is refused, by one.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::internal::Timeline;

use crate::allocator::Allocator;
use crate::cross_stream::progress::cannot_be_asked;
use crate::error::AllocError;
use crate::state::guard::StateGuard;
use crate::types::{After, StreamId, Use};

/// Chooses the stream that can free the most granules, counting up to `granules`, and the earliest
/// tick by which it does.
pub(crate) fn first_enough(
    guard: &StateGuard,
    not_done: &BTreeMap<Use, u64>,
    granules: u64,
) -> Option<(Arc<Timeline>, After)> {
    let mut sums: BTreeMap<StreamId, (u64, After)> = BTreeMap::new();
    for (&Use { stream, after }, &count) in not_done {
        let (sum, latest) = sums.entry(stream).or_default();
        if *sum < granules {
            (*sum, *latest) = (*sum + count, after);
        }
    }
    let (&stream, &(_, after)) = sums.iter().max_by_key(|(_, (sum, _))| *sum)?;
    Some((guard.streams.timeline(stream)?.clone(), after))
}

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
