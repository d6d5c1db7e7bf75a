//! Learning what the device is done with, without a wait or, before a request is refused, by one.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::internal::Timeline;

use crate::allocator::Allocator;
use crate::cross_stream::progress::{Pending, cannot_be_asked};
use crate::error::AllocError;
use crate::state::guard::StateGuard;

/// The latest of these ticks of each stream.
pub(crate) fn latest(guard: &StateGuard, not_done: &BTreeMap<(u32, u64), u64>) -> Pending {
    let latest: BTreeMap<u32, u64> = not_done.keys().copied().collect();
    latest.into_iter().filter_map(|(slot, after)| Some((guard.timeline(slot)?.clone(), after))).collect()
}

/// Chooses the stream that can free the most granules, counting up to `granules`, and the earliest
/// tick by which it does.
pub(crate) fn first_enough(
    guard: &StateGuard,
    not_done: &BTreeMap<(u32, u64), u64>,
    granules: u64,
) -> Option<(Arc<Timeline>, u64)> {
    let mut sums: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (&(slot, after), &count) in not_done {
        let (sum, latest) = sums.entry(slot).or_default();
        if *sum < granules {
            (*sum, *latest) = (*sum + count, after);
        }
    }
    let (&slot, &(_, after)) = sums.iter().max_by_key(|(_, (sum, _))| *sum)?;
    Some((guard.timeline(slot)?.clone(), after))
}

/// Waits on the host until the timeline has got this far. Returns false if that cannot be done now.
pub(crate) fn stall_for(allocator: &Allocator, timeline: &Timeline, after: u64) -> Result<bool, AllocError> {
    tracing::debug!(target: "aquifer::wait", stream = timeline.id(), "the host waits so that memory can move");
    allocator.state().shared().counters.num_sync_all_streams.add(1);
    match timeline.synchronize(after.saturating_sub(1)) {
        Ok(()) => Ok(true),
        Err(error) if cannot_be_asked(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
