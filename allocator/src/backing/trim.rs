//! Giving unused memory back to the device, of either backing: whole segments (`segments.rs`), then granules (`paged/trim.rs`). If that
//! does not suffice, the host waits for the streams that still use memory which was given back here, after which more may go.

use std::cmp::Reverse;

use aquifer_device::{Operation, fork};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::pools::table::Which;
use crate::shell::core::Place;
use crate::shell::whole::Whole;

impl Allocator {
    /// Gives unused memory back to the device and returns how many bytes that was: whole unused segments, or where memory is mapped the
    /// granules that lie in free blocks. Memory of open private pools stays. Waits for blocks that other streams still use.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        self.trim_to(0)
    }

    /// As [`Allocator::empty_cache`], but only until at most `bytes` are held from the device, the largest segments first. Returns
    /// how many bytes went back. Waits for blocks that other streams still use only if unused memory does not suffice.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, AllocError> {
        fork::check(Operation::Free)?;
        self.device().settle();
        self.poll_launches()?;
        let first = self.trim_done(bytes)?;
        // Addresses without memory may wait to be given back, too.
        let is_enough = bytes > 0 || self.shell().core().paged.as_ref().is_none_or(|paged| paged.retired.is_empty());
        if self.memory_reserved() <= bytes && is_enough {
            return Ok(first);
        }
        let waited = self.synchronize_pending(Which::All)?;
        if !self.synchronize_free(Which::All)? && !waited {
            return Ok(first);
        }
        Ok(first + self.trim_done(bytes)?)
    }

    /// As [`Allocator::trim_to`], of what is known done.
    fn trim_done(&self, bytes: u64) -> Result<u64, AllocError> {
        self.shell().core().pools.forget_those_over();
        let segments = self.release_where(|whole| whole.excess(bytes))?;
        Ok(segments + self.trim_paged(bytes)?)
    }
}

impl Whole {
    /// Unused segments to release, largest first, for at most `bytes` to stay reserved.
    fn excess(&mut self, bytes: u64) -> Vec<Place> {
        let mut segments = self.releasable();
        let size = |place: &Place| self.block(*place).size;
        segments.sort_by_key(|place| (Reverse(size(place)), self.block(*place).addr));
        let mut left = self.reserved;
        segments.retain(|place| {
            let take = left > bytes;
            left -= if take { size(place) } else { 0 };
            take
        });
        segments
    }
}
