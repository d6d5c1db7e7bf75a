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
use crate::heap::BlockId;
use crate::pools::capture::poll_launches;
use crate::pools::table::Which;
use crate::state::shared::SharedState;

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
    let segments = release_where(allocator, |shared| excess(shared, bytes, Which::Unpromised))?;
    Ok(segments + trim_paged(allocator, bytes)?)
}

/// Gives free memory back that private pools keep although no graph may use it, until at most
/// `bytes` are held from the device. Waits for the last launches of graphs that were dropped.
pub(crate) fn trim_idle_pools(allocator: &Allocator, bytes: u64) -> Result<u64, AllocError> {
    let last: Vec<_> = allocator.state().shared().pools.iter().flat_map(|pool| pool.graphs.last_launches()).collect();
    synchronize_all(&last)?;
    let segments = release_where(allocator, |shared| excess(shared, bytes, Which::Idle))?;
    Ok(segments + trim_pools(allocator, bytes, Which::Idle)?)
}

/// Unused segments of some pools to release, largest first, for at most `bytes` to stay reserved.
fn excess(shared: &SharedState, bytes: u64, which: Which) -> Vec<BlockId> {
    let mut segments = whole_segments(shared, which);
    let block = |id: &BlockId| &shared.heap.blocks[*id];
    segments.sort_by_key(|id| (Reverse(block(id).size), block(id).addr));
    let mut left = shared.reserved;
    segments.retain(|id| {
        let take = left > bytes;
        left -= if take { block(id).size } else { 0 };
        take
    });
    segments
}
