//! Giving unused memory back to the device, of either backing: whole segments (`segments.rs`), then
//! granules (`paged/trim.rs`). If that does not suffice, the host waits for the streams that still
//! use memory which was given back here, after which more may go.

use std::cmp::Reverse;

use aquifer_device::{Operation, fork};

use crate::allocator::Allocator;
use crate::backing::paged::trim::{synchronize_free, trim_paged, trim_pools};
use crate::backing::segments::{release_where, whole_segments};
use crate::cross_stream::progress::synchronize_all;
use crate::cross_stream::waiting::synchronize_pending;
use crate::error::AllocError;
use crate::pools::capture::poll_launches;
use crate::pools::table::Which;
use crate::request::Place;
use crate::state::guard::StateGuard;

/// See [`Allocator::trim_to`].
pub(crate) fn trim_to(allocator: &Allocator, bytes: u64) -> Result<u64, AllocError> {
    fork::check(Operation::Free)?;
    allocator.device().settle();
    poll_launches(allocator)?;
    let first = trim_done(allocator, bytes)?;
    // Addresses without memory may wait to be given back, too.
    let is_enough =
        bytes > 0 || allocator.state().shared().paged.as_ref().is_none_or(|paged| paged.deferred_release.is_empty());
    if allocator.memory_reserved() <= bytes && is_enough {
        return Ok(first);
    }
    let waited = synchronize_pending(allocator, Which::All)?;
    if !synchronize_free(allocator, Which::All)? && !waited {
        return Ok(first);
    }
    Ok(first + trim_done(allocator, bytes)?)
}

/// As [`Allocator::trim_to`], of what is known done.
fn trim_done(allocator: &Allocator, bytes: u64) -> Result<u64, AllocError> {
    allocator.state().shared().pools.forget_those_over();
    let segments = release_where(allocator, |guard| excess(guard, bytes, Which::Unpromised))?;
    Ok(segments + trim_paged(allocator, bytes)?)
}

/// Gives free memory back that private pools keep although no graph may use it, until at most
/// `bytes` are held from the device. Waits for the last launches of graphs that were dropped.
pub(crate) fn trim_idle_pools(allocator: &Allocator, bytes: u64) -> Result<u64, AllocError> {
    let last: Vec<_> = allocator.state().shared().pools.iter().flat_map(|pool| pool.graphs.last_launches()).collect();
    synchronize_all(&last)?;
    let segments = release_where(allocator, |guard| excess(guard, bytes, Which::Idle))?;
    Ok(segments + trim_pools(allocator, bytes, Which::Idle)?)
}

/// Unused segments of some pools to release, largest first, for at most `bytes` to stay reserved.
fn excess(guard: &mut StateGuard, bytes: u64, which: Which) -> Vec<Place> {
    let mut segments = whole_segments(guard, which);
    let size = |place: &Place| guard.block(*place).size;
    segments.sort_by_key(|place| (Reverse(size(place)), guard.block(*place).addr));
    let mut left = guard.reserved;
    segments.retain(|place| {
        let take = left > bytes;
        left -= if take { size(place) } else { 0 };
        take
    });
    segments
}
