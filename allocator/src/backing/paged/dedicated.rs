//! Dedicated memory: memory mapped for one owner at addresses of its own, outside of every heap
//! ([`crate::Growable`], [`crate::Exportable`]).
//!
//! It counts in `reserved` and `allocated` as a block of the large pool. Memory that its owner
//! gives up is *deferred*: it is listed with a tick of each stream that used it, which makes no
//! driver call. Later operations on mappings unmap deferred memory whose ticks are done, and
//! recycle or release it. Ticks that are not known done are asked about and waited for together
//! with those of free blocks (`donors.rs`).

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::{DeviceError, DevicePtr, RawPhysical, Reservation};

use crate::allocator::Allocator;
use crate::backing::paged::account::{account_for_granules, note_mapping};
use crate::backing::paged::carry_out::{unless_capturing, unmap_range};
use crate::backing::paged::deferred_release::DeferredRelease;
use crate::backing::paged::frames::Frame;
use crate::backing::paged::granules::{Owned, POOL, Purpose};

use crate::error::AllocError;
use crate::history::{Action, Actions, Subject};
use crate::size_class::PoolKind;
use crate::state::guard::StateGuard;
use crate::state::shared::SharedState;
use crate::types::{StreamId, Use};

/// Unmaps deferred memory that is known done. Its frames become spare; those of exportable memory
/// go back to the device. Returns how many bytes went back.
pub(crate) fn recycle_deferred_releases(allocator: &Allocator) -> Result<u64, AllocError> {
    if allocator.device().is_capturing() || !is_recyclable(&mut allocator.state().shared()) {
        return Ok(0);
    }
    // Exclusive, so that a reservation never goes before the last memory mapped in it.
    let _alone = allocator.gate()?.exclusive();
    let mut released = 0;
    loop {
        let leaving = begin_recycling(&mut allocator.state().shared());
        let Some(leaving) = leaving else { break };
        let failed = unmap_leaving(allocator, &leaving);
        let mut guard = allocator.state().lock();
        let frames = settle_recycling(&mut guard, leaving, failed.is_none());
        let bytes = frames.iter().map(|&(_, bytes)| bytes).sum::<u64>();
        guard.leaving += bytes;
        drop(guard);
        release_freed(allocator, frames);
        allocator.state().shared().leaving -= bytes;
        released += bytes;
        if let Some(error) = failed {
            // A capture that began meanwhile.
            return unless_capturing(Err(error)).map(|()| released).map_err(AllocError::from);
        }
    }
    loop {
        let vacant = take_vacant_reservation(&mut allocator.state().shared());
        let Some((ptr, bytes)) = vacant else { return Ok(released) };
        if let Err(error) = allocator.device().driver().unreserve(ptr, bytes) {
            allocator.device().unreserve_later(Reservation { ptr, bytes, mapped: Vec::new() });
            return Err(error.into());
        }
    }
}

/// Unmaps deferred memory. Returns the error, if any; the memory is then mapped still, and stays
/// deferred.
fn unmap_leaving(allocator: &Allocator, leaving: &Leaving) -> Option<DeviceError> {
    let DeferredRelease { range, was_told, .. } = &leaving.deferred_release;
    if *was_told {
        unmap_range(allocator.device(), allocator.hooks(), range).err()
    } else {
        allocator.device().unmap(DevicePtr(range.start), range.end - range.start).err()
    }
}

/// Releases frames that are of no use to others. What the driver keeps is left to the device, which
/// warns if it fails once more.
fn release_freed(allocator: &Allocator, freed: Vec<(RawPhysical, u64)>) {
    for (physical, _) in freed {
        if let Err(error) = allocator.device().driver().release_physical(physical) {
            tracing::debug!(%error, "memory could not be given back; it will be tried again");
            allocator.device().release_later(physical);
        }
    }
}

/// Deferred memory while the driver unmaps it.
struct Leaving {
    deferred_release: DeferredRelease,
    purpose: Purpose,
    frames: Vec<Frame>,
}

/// Takes one piece of deferred memory that is done off the list.
fn begin_recycling(shared: &mut SharedState) -> Option<Leaving> {
    let SharedState { paged, streams, .. } = shared;
    let paged = paged.as_mut().filter(|paged| !paged.is_asleep && !paged.dedicated_sleeps)?;
    let deferred_release = paged.deferred_release.take_done(|stream| streams.known_done(stream))?;
    let purpose = paged.purpose_of(deferred_release.base)?;
    let frames =
        paged.forget_mapped(deferred_release.range.start, deferred_release.range.end - deferred_release.range.start);
    Some(Leaving { deferred_release, purpose, frames })
}

/// Accounts for deferred memory after the driver unmapped it, or failed to. Returns the frames that
/// are of no use to others, with their bytes.
fn settle_recycling(guard: &mut StateGuard, leaving: Leaving, unmapped: bool) -> Vec<(RawPhysical, u64)> {
    let Leaving { deferred_release, purpose, frames } = leaving;
    let Some(paged) = &mut guard.paged else { return Vec::new() };
    let Range { start, end } = deferred_release.range;
    if !unmapped {
        paged.put_all(start, &frames);
        paged.deferred_release.put_back(deferred_release);
        return Vec::new();
    }
    paged.mapped_bytes[PoolKind::Large as usize] -= end - start;
    let stream = paged.owned.get(&deferred_release.base).map_or(StreamId::default(), |owned| owned.stream);
    paged.deferred_release.forget(deferred_release.base);
    let frames = if purpose == Purpose::Exportable {
        frames.into_iter().map(|frame| (frame.physical, end - start)).collect()
    } else {
        paged.spares.extend(frames);
        Vec::new()
    };
    note_mapping(guard, Action::SegmentUnmap, POOL, stream, start, end - start);
    guard.counters.num_device_free.add(1);
    account_for_granules(guard);
    frames
}

/// Adds the deferred granules to those that ticks not known done keep from moving, by tick.
pub(crate) fn add_deferred_release(guard: &StateGuard, not_done: &mut BTreeMap<Use, u64>) {
    let ticks = guard.paged.iter().flat_map(|paged| paged.deferred_release.ticks());
    for (last_use, granules) in ticks.filter(|&(last_use, _)| !guard.streams.is_done(last_use)) {
        *not_done.entry(last_use).or_default() += granules;
    }
}

/// Bytes in blocks that are in use, dedicated memory included.
pub(crate) fn in_use(shared: &SharedState) -> u64 {
    let dedicated = shared.paged.as_ref().map_or(0, |paged| paged.owned_bytes);
    dedicated + shared.heap.in_use()
}

/// Bytes of an owner's part of its reservation.
pub(crate) fn owned_size(guard: &StateGuard, base: u64) -> u64 {
    guard.paged.as_ref().and_then(|paged| paged.owned.get(&base)).map_or(0, |owned| owned.size)
}

/// Sets the size of an owner's part of its reservation, and notes that in statistics and history.
pub(crate) fn set_owned(guard: &mut StateGuard, base: u64, size: u64, requested: u64) {
    let Some(paged) = &mut guard.paged else { return };
    let Some(owned) = paged.owned.get_mut(&base) else { return };
    let before = *owned;
    (owned.size, owned.requested) = (size, requested);
    paged.owned_bytes = paged.owned_bytes - before.size + size;
    count_owned(guard, before, size, requested);
    let subject = |size| Subject { addr: base, size, stream: before.stream, tag: before.tag, pool: 0 };
    if before.size > 0 {
        guard.history.note(Actions::FREE, subject(before.requested));
    }
    if size > 0 {
        guard.history.note(Action::Alloc, subject(requested));
    }
}

fn count_owned(guard: &mut StateGuard, before: Owned, size: u64, requested: u64) {
    if before.size > 0 {
        guard.counters.freed(PoolKind::Large, before.size, before.requested);
    }
    if size > 0 {
        guard.counters.allocated(PoolKind::Large, size, requested);
    }
}

/// True if deferred memory is known done, or addresses may go back. Not while the allocator sleeps:
/// nothing is behind the addresses then.
fn is_recyclable(shared: &mut SharedState) -> bool {
    let SharedState { paged, streams, .. } = shared;
    let paged = paged.as_mut().filter(|paged| !paged.is_asleep && !paged.dedicated_sleeps);
    paged.is_some_and(|paged| paged.deferred_release.any_done(|stream| streams.known_done(stream)))
}

/// Forgets a reservation whose owner is gone and in which no memory is mapped. Returns its
/// addresses and length.
fn take_vacant_reservation(shared: &mut SharedState) -> Option<(DevicePtr, u64)> {
    let paged = shared.paged.as_mut().filter(|paged| !paged.is_asleep && !paged.dedicated_sleeps)?;
    let base = paged.deferred_release.take_vacant()?;
    paged.owned.remove(&base);
    Some((DevicePtr(base), paged.remove_reservation(base)))
}

/// Retires a range of a reservation that its owner gives up and that the streams `users` used.
pub(crate) fn retire(shared: &mut SharedState, base: u64, range: Range<u64>, users: &[StreamId]) {
    let uses = users.iter().map(|&stream| shared.streams.use_so_far(stream)).collect();
    if let Some(paged) = shared.paged.as_mut().filter(|_| !range.is_empty()) {
        paged.deferred_release.add(DeferredRelease { base, range, uses, was_told: true });
    }
}
