//! Giving unused memory back to the device, of either backing: whole segments (`segments.rs`), then
//! granules (`paged/trim.rs`). If that does not suffice, the host waits for the streams that still
//! use memory which was given back here, after which more may go.

use std::cmp::Reverse;

use aquifer_device::{Operation, fork};

use crate::allocator::Allocator;
use crate::backing::paged::trim::{synchronize_free, trim_paged, trim_pools};
use crate::backing::segments::release_where;
use crate::core::Core;
use crate::core::pools::Which;
use crate::cross_stream::{synchronize_all, synchronize_pending};
use crate::error::AllocError;
use crate::pools::poll_launches;
use crate::types::BlockId;

impl Allocator {
    /// Gives unused memory back to the device and returns how many bytes that was: whole unused
    /// segments, or where memory is mapped the granules that lie in free blocks. Memory of open
    /// private pools stays. Waits for blocks that other streams still use.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        let released = self.trim_to(0)?;
        drop(self.state().shared().take_host_buffers());
        Ok(released)
    }

    /// As [`Allocator::empty_cache`], but only until at most `bytes` are held from the device, the
    /// largest segments first. Returns how many bytes went back. Waits for blocks that other
    /// streams still use only if unused memory does not suffice.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, AllocError> {
        fork::check(Operation::Free)?;
        self.device().settle();
        poll_launches(self)?;
        let first = trim_done(self, bytes)?;
        // Addresses without memory may wait to be given back, too.
        let is_enough =
            bytes > 0 || self.state().shared().paged().is_none_or(|paged| paged.deferred_release.is_empty());
        if self.memory_reserved() <= bytes && is_enough {
            return Ok(first);
        }
        let waited = synchronize_pending(self, Which::All)?;
        if !synchronize_free(self, Which::All)? && !waited {
            return Ok(first);
        }
        Ok(first + trim_done(self, bytes)?)
    }
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
fn excess(core: &Core, bytes: u64, which: Which) -> Vec<BlockId> {
    let mut segments = core.whole_segments(which);
    let block = |id: &BlockId| core.heap().block(*id);
    segments.sort_by_key(|id| (Reverse(block(id).size), block(id).addr));
    let mut left = core.reserved();
    segments.retain(|id| {
        let take = left > bytes;
        left -= if take { block(id).size } else { 0 };
        take
    });
    segments
}
