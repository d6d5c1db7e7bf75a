//! Giving unused memory back to the device, of either backing: whole segments (`segments.rs`), then
//! free frames and empty reservations. If that does not suffice, the host waits for the streams
//! that still use memory which was given back here, after which more may go.
//!
//! Frames on their way back are not counted as reserved, because another thread may get their
//! memory from the device, and count it, before this one has the lock again. The limit counts them
//! until they are gone (`Core::being_released`).
//!
//! **Memory that moved before the device was done with it.** A stream may use its own free memory
//! again at once, because its later work runs after the last use. Only the addresses have to wait:
//! they may be unmapped once the host knows that the last use is done (P1). So where a request
//! lacks memory and its own stream has free frames that are not done, these are mapped at the
//! window in addition. Their *old mappings* stay: the addresses are held in the heap, and
//! later operations unmap them. Neither the host nor a stream waits, and nothing is taken from the
//! device. The frames carry the tick of their last use to the new addresses, so they become free
//! for other streams, or move once more, no earlier than before. Captures get the free memory of
//! their pool in the same way, and the old mappings stay until no graph of the pool may run.

use std::cmp::Reverse;

use aquifer_device::{DeviceError, DevicePtr, Operation, fork};

use crate::allocator::Allocator;
use crate::backing::paged::carry_out::{unless_capturing, unmap_range, unreserve};
use crate::backing::paged::dedicated::recycle_deferred_releases;
use crate::backing::segments::release_where;
use crate::core::Core;
use crate::core::paged::frames::LooseFrames;
use crate::core::pools::Which;
use crate::core::remap::donors::BATCH;
use crate::core::remap::trim::Trim;
use crate::cross_stream::{synchronize_all, synchronize_pending};
use crate::error::AllocError;
use crate::pools::{awaited_launches, poll_launches, wait_for_launched};
use crate::types::BlockId;

impl Allocator {
    /// Gives unused memory back to the device and returns how many bytes that was: whole unused
    /// segments, or where memory is mapped the granules that lie in free blocks; also those of
    /// private pools, whether the calling thread is routed to one or not, except memory that a
    /// graph may use, and the reserve ([`crate::Config::reserve`]). Waits for blocks that other
    /// streams still use.
    ///
    /// ```
    /// use aquifer::memory::PoolOptions;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let pool = memory.create_pool(PoolOptions::default())?;
    /// drop(pool.alloc_bytes(32 << 20, &stream)?);
    /// assert_eq!(memory.empty_cache()?, 32 << 20);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        let released = self.trim_to(0)?;
        drop(self.state().shared().take_host_buffers());
        Ok(released)
    }

    /// As [`Allocator::empty_cache`], but only until at most `bytes` are held from the device, the
    /// largest segments first, and private pools last. Returns how many bytes went back. Waits for
    /// blocks that other streams still use only if unused memory outside of private pools does not
    /// suffice.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, AllocError> {
        fork::check(Operation::Free)?;
        self.device().settle();
        poll_launches(self)?;
        let mut released = trim_done(self, bytes)?;
        // Addresses without memory may wait to be given back, too.
        let is_enough = bytes > 0 || self.state().shared().paged().deferred_release.is_empty();
        if self.memory_reserved() <= bytes && is_enough {
            return Ok(released);
        }
        let waited = synchronize_pending(self, Which::All)?;
        if synchronize_free(self, Which::All)? || waited {
            released += trim_done(self, bytes)?;
        }
        Ok(released + trim_idle_pools(self, bytes)?)
    }
}

/// As [`Allocator::trim_to`], of what is known done and no private pool keeps.
fn trim_done(allocator: &Allocator, bytes: u64) -> Result<u64, AllocError> {
    allocator.state().shared().pools.forget_those_over();
    let segments = release_where(allocator, |shared| excess(shared, bytes, Which::NotForGraphs))?;
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

/// Gives free frames that no pool keeps back to the device, spare ones first, until at
/// most `target` bytes are held from it or none is left. Returns how many bytes went back. Frames
/// that are not known done stay.
pub(crate) fn trim_paged(allocator: &Allocator, target: u64) -> Result<u64, AllocError> {
    let recycled = recycle_deferred_releases(allocator, true)?;
    Ok(recycled + trim_pools(allocator, target, Which::NotForGraphs)?)
}

/// Gives free frames of some pools back to the device, until at most `target` bytes are held from
/// it or none is left: spare ones first if the default pools are among them. Returns how many bytes
/// went back. Dedicated memory stays.
pub(crate) fn trim_pools(allocator: &Allocator, target: u64, which: Which) -> Result<u64, AllocError> {
    let stuck = take_stuck_back(allocator);
    let _gate = allocator.gate()?.shared();
    let shared = allocator.state().shared();
    let Some(granule) = shared.granule() else { return Ok(0) };
    if shared.is_asleep() {
        return Ok(0);
    }
    drop(shared);
    let mut trim = Trim::default();
    let mut below = Some(u64::MAX);
    while below.is_some() {
        below = allocator.state().lock().begin_trim(&mut trim, below, target, which);
    }
    if target > 0 {
        // A frame that is larger than what is still too much, if there is one.
        allocator.state().lock().begin_trim(&mut trim, None, target, which);
    }
    let (mut unmapped, mut failed) = (0, None);
    for (range, frames) in &trim.ranges {
        if let Err(error) = unmap_range(allocator.device(), allocator.hooks(), range) {
            failed = unless_capturing(Err(error)).err();
            break;
        }
        unmapped += 1;
        trim.loose.extend(frames.iter().copied());
    }
    // The rest of the reserve becomes spare.
    let releasable = allocator.state().shared().releasable(trim.loose.granules());
    let (released, failed) = release_frames(allocator, &mut trim.loose, releasable, failed);
    commit_trim(allocator, trim, unmapped);
    // The device gets released memory back only once it is mapped nowhere.
    let old = unmap_old_mappings_at_gate(allocator, which);
    allocator.device().settle_but_graphs();
    let addresses = give_addresses_back(allocator, if which.has_default() { Which::All } else { which });
    match failed {
        Some(error) => Err(error.into()),
        None => stuck.and(old).and(addresses).map(|()| released * granule),
    }
}

/// Accounts for a trim of which the driver unmapped the first `unmapped` ranges; the loose frames
/// are still here.
fn commit_trim(allocator: &Allocator, trim: Trim, unmapped: usize) {
    let Trim { donors, ranges, loose, bytes } = trim;
    let mut left = donors.into_iter().zip(ranges).enumerate().peekable();
    loop {
        let mut guard = allocator.state().lock();
        for (at, (donor, (_, frames))) in left.by_ref().take(BATCH) {
            guard.commit_trimmed(donor, &frames, at < unmapped);
        }
        if left.peek().is_some() {
            continue;
        }
        guard.commit_trim(bytes, &loose);
        return;
    }
}

/// Unmaps stuck mappings, which the driver refused to unmap when they failed. Their frames become
/// spare. Such a frame may also be mapped where it was before, so old mappings go first,
/// and nothing is taken back while the device may use memory through one. Mappings that the driver
/// still refuses to unmap stay as they are. Returns the first error.
pub(crate) fn take_stuck_back(allocator: &Allocator) -> Result<(), AllocError> {
    let _gate = allocator.gate()?.shared();
    let old = unmap_old_mappings_at_gate(allocator, Which::NotForGraphs);
    if allocator.state().shared().may_use_old_mappings() {
        return old;
    }
    let count = allocator.state().shared().paged().stuck.len();
    (0..count).map(|_| take_one_back(allocator)).fold(old, Result::and)
}

/// Unmaps the mappings that have been stuck for longest.
fn take_one_back(allocator: &Allocator) -> Result<(), AllocError> {
    let Some(stuck) = allocator.state().shared().take_stuck() else { return Ok(()) };
    let (mut unmapped, mut failed) = (0, None);
    for frame in stuck.frames.iter().rev() {
        failed = allocator.device().unmap(DevicePtr(frame.start), frame.end - frame.start).err();
        if failed.is_some() {
            break;
        }
        unmapped += 1;
    }
    allocator.state().lock().commit_stuck(stuck, unmapped);
    Ok(unless_capturing(failed.map_or(Ok(()), Err))?)
}

/// Releases frames of at most so many granules, until none is left or a call fails. Returns how many
/// granules were released, and the error.
fn release_frames(
    allocator: &Allocator,
    loose: &mut LooseFrames,
    most: u64,
    mut failed: Option<DeviceError>,
) -> (u64, Option<DeviceError>) {
    let before = loose.granules();
    while failed.is_none()
        && let Some(frame) = loose.pop()
    {
        if before - loose.granules() > most {
            loose.add(frame);
            break;
        }
        failed = allocator.device().driver().release_physical(frame.physical).inspect_err(|_| loose.add(frame)).err();
    }
    (before - loose.granules(), failed)
}

/// Waits until the free memory in some pools is known done, and the launches that closed pools
/// among them wait for. Returns true if anything was not known done. Skips streams that cannot be
/// waited for now.
pub(crate) fn synchronize_free(allocator: &Allocator, which: Which) -> Result<bool, AllocError> {
    let of = if let Which::Of(key) | Which::UnusedOf(key) = which { Some(key) } else { None };
    let launched = awaited_launches(allocator, of);
    wait_for_launched(allocator, &launched)?;
    let waits = allocator.state().lock().free_not_done(which);
    synchronize_all(&waits)?;
    Ok(!waits.is_empty() || !launched.ticks.is_empty() || launched.device.is_some())
}

/// Unmaps the old mappings that stay although the device is known to be done with them, and no graph
/// may use them.
pub(crate) fn unmap_old_mappings(allocator: &Allocator) -> Result<(), AllocError> {
    if !allocator.state().shared().has_old_mappings() {
        return Ok(());
    }
    let _gate = allocator.gate()?.shared();
    unmap_old_mappings_at_gate(allocator, Which::NotForGraphs)
}

/// As [`unmap_old_mappings`], when some pools are to give their memory back; the caller has the gate.
/// Mappings that the driver refuses to unmap stay. Returns the first error once all others are
/// unmapped.
pub(crate) fn unmap_old_mappings_at_gate(allocator: &Allocator, which: Which) -> Result<(), AllocError> {
    let captures = allocator.device().is_capturing();
    let done = if captures { Vec::new() } else { allocator.state().shared().take_old_mappings(which) };
    let mut failed = Ok(());
    let mut unmapped = Vec::with_capacity(done.len());
    for old in done {
        // A capture that began meanwhile is no error.
        let outcome = unmap_range(allocator.device(), allocator.hooks(), &old.range);
        unmapped.push((old, outcome.is_ok()));
        failed = failed.and(unless_capturing(outcome));
    }
    let mut unmapped = unmapped.into_iter().peekable();
    while unmapped.peek().is_some() {
        let mut guard = allocator.state().lock();
        unmapped.by_ref().take(BATCH).for_each(|(old, gone)| guard.commit_unmapped(old, gone));
        guard.account_for_granules();
    }
    Ok(failed?)
}

/// Gives back reservations of some pools in which nothing is mapped.
pub(crate) fn give_addresses_back(allocator: &Allocator, which: Which) -> Result<(), AllocError> {
    let mut guard = allocator.state().lock();
    let empty = guard.take_empty_reservations(which);
    drop(guard);
    let unreserved = empty.into_iter().map(|(addr, bytes)| unreserve(allocator.device(), DevicePtr(addr), bytes));
    Ok(unreserved.fold(Ok(()), Result::and)?)
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests;
