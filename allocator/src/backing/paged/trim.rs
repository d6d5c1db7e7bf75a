//! Trimming: giving free frames and empty reservations back to the device.
//!
//! Frames on their way back are not counted as reserved, because another thread may get their
//! memory from the device, and count it, before this one has the lock again. The limit counts them
//! until they are gone (`SharedState::leaving`).

use std::ops::Range;

use aquifer_device::{DeviceError, DevicePtr};

use crate::allocator::Allocator;
use crate::backing::paged::account::{account_for_granules, note_mapping};
use crate::backing::paged::addresses::give_addresses_back;
use crate::backing::paged::carry_out::{unless_capturing, unmap_range};
use crate::backing::paged::dedicated::recycle_deferred_releases;
use crate::backing::paged::donors::{BATCH, Donor, donors, donors_below};
use crate::backing::paged::frames::{Frame, LooseFrames};
use crate::backing::paged::lingering::{lingering_not_done, may_be_in_use, unmap_lingering_at_gate};
use crate::backing::paged::plan::hold_all;
use crate::cross_stream::progress::{Pending, synchronize_all};
use crate::error::AllocError;
use crate::history::Action;
use crate::pools::lookup::{awaited_launches, wait_for_launched};
use crate::pools::table::Which;
use crate::recovery::oom::seen::is_capturing;
use crate::state::guard::StateGuard;
use crate::types::latest_by_stream;

/// Frames on their way back to the device.
#[derive(Default)]
struct Leaving {
    /// What they are in until they are unmapped, and their addresses.
    donors: Vec<Donor>,
    ranges: Vec<(Range<u64>, Vec<Frame>)>,
    /// Frames that are mapped nowhere, or not any more.
    loose: LooseFrames,
    /// Bytes of all of them.
    bytes: u64,
}

/// Gives free frames that no pool keeps back to the device, spare ones first, until at
/// most `target` bytes are held from it or none is left. Returns how many bytes went back. Frames
/// that are not known done stay.
pub(crate) fn trim_paged(allocator: &Allocator, target: u64) -> Result<u64, AllocError> {
    let recycled = recycle_deferred_releases(allocator)?;
    Ok(recycled + trim_free(allocator, target, true, Which::Unpromised)?)
}

/// As [`trim_paged`], of some private pools. Spare frames and dedicated memory stay: they belong to
/// no pool.
pub(crate) fn trim_pools(allocator: &Allocator, target: u64, which: Which) -> Result<u64, AllocError> {
    trim_free(allocator, target, false, which)
}

fn trim_free(allocator: &Allocator, target: u64, spares_too: bool, which: Which) -> Result<u64, AllocError> {
    let stuck = take_stuck_back(allocator);
    let _gate = allocator.gate()?.shared();
    let shared = allocator.state().shared();
    let Some(granule) = shared.paged.as_ref().map(|paged| paged.granule) else { return Ok(0) };
    if shared.is_asleep() {
        return Ok(0);
    }
    drop(shared);
    let mut leaving = Leaving::default();
    let mut below = Some(u64::MAX);
    while below.is_some() {
        below = begin_trim(&mut allocator.state().lock(), &mut leaving, below, target, spares_too, which);
    }
    if target > 0 {
        // A frame that is larger than what is still too much, if there is one.
        begin_trim(&mut allocator.state().lock(), &mut leaving, None, target, spares_too, which);
    }
    let (mut unmapped, mut failed) = (0, None);
    for (range, frames) in &leaving.ranges {
        if let Err(error) = unmap_range(allocator.device(), allocator.hooks(), range) {
            failed = unless_capturing(Err(error)).err();
            break;
        }
        unmapped += 1;
        leaving.loose.extend(frames.iter().copied());
    }
    let (released, failed) = release_frames(allocator, &mut leaving.loose, failed);
    settle_trim(allocator, leaving, unmapped);
    // The device gets released memory back only once it is mapped nowhere.
    let lingering = unmap_lingering_at_gate(allocator);
    let addresses = give_addresses_back(allocator, if spares_too { Which::All } else { which });
    match failed {
        Some(error) => Err(error.into()),
        None => stuck.and(lingering).and(addresses).map(|()| released * granule),
    }
}

/// Accounts for a trim of which the driver unmapped the first `unmapped` ranges; the loose frames
/// are still here.
fn settle_trim(allocator: &Allocator, leaving: Leaving, unmapped: usize) {
    let Leaving { donors, ranges, loose, bytes } = leaving;
    let mut settled = donors.into_iter().zip(ranges).enumerate().peekable();
    loop {
        let mut guard = allocator.state().lock();
        for (at, (donor, (_, frames))) in settled.by_ref().take(BATCH) {
            settle_leaving(&mut guard, donor, &frames, at < unmapped);
        }
        if settled.peek().is_some() {
            continue;
        }
        guard.leaving -= bytes;
        if let Some(paged) = &mut guard.paged {
            paged.spares.extend(loose.iter());
        }
        account_for_granules(&mut guard);
        return;
    }
}

/// Unmaps stuck mappings, which the driver refused to unmap when they failed. Their frames become
/// spare. Such a frame may also be mapped where it was before, so mappings that linger go first, and
/// nothing is taken back while the device may use memory through one. Mappings that the driver still
/// refuses to unmap stay as they are. Returns the first error.
pub(crate) fn take_stuck_back(allocator: &Allocator) -> Result<(), AllocError> {
    let _gate = allocator.gate()?.shared();
    let lingering = unmap_lingering_at_gate(allocator);
    if may_be_in_use(allocator) {
        return lingering;
    }
    let count = allocator.state().shared().paged.as_ref().map_or(0, |paged| paged.stuck.len());
    (0..count).map(|_| take_one_back(allocator)).fold(lingering, Result::and)
}

/// Unmaps the mappings that have been stuck for longest.
fn take_one_back(allocator: &Allocator) -> Result<(), AllocError> {
    let mut guard = allocator.state().lock();
    if guard.is_asleep() {
        return Ok(());
    }
    let Some(paged) = &mut guard.paged else { return Ok(()) };
    let Some(mut stuck) = paged.stuck.pop_front() else { return Ok(()) };
    // This call works with them from here on. The table lists them as mapped until they are
    // unmapped.
    let in_hands = stuck.bytes() / paged.granule;
    paged.in_hands += in_hands;
    drop(guard);
    let (mut unmapped, mut failed) = (Vec::new(), None);
    while failed.is_none()
        && let Some(frame) = stuck.frames.last()
    {
        failed = allocator.device().unmap(DevicePtr(frame.start), frame.end - frame.start).err();
        if failed.is_none() {
            unmapped.extend(stuck.frames.pop());
        }
    }
    let mut guard = allocator.state().lock();
    if let Some(paged) = &mut guard.paged {
        paged.in_hands -= in_hands;
        for frame in unmapped {
            let loose = paged.forget_mapped(frame.start, frame.end - frame.start);
            paged.spares.extend(loose);
        }
    }
    if stuck.frames.is_empty() {
        guard.heap.unhold_as_hole(stuck.block);
    } else if let Some(paged) = &mut guard.paged {
        paged.stuck.push_back(stuck);
    }
    account_for_granules(&mut guard);
    Ok(unless_capturing(failed.map_or(Ok(()), Err))?)
}

/// Releases frames until none is left or a call fails. Returns how many granules were released, and
/// the error.
fn release_frames(
    allocator: &Allocator,
    loose: &mut LooseFrames,
    mut failed: Option<DeviceError>,
) -> (u64, Option<DeviceError>) {
    let before = loose.granules();
    while failed.is_none()
        && let Some(frame) = loose.pop()
    {
        failed = allocator.device().driver().release_physical(frame.physical).inspect_err(|_| loose.add(frame)).err();
    }
    (before - loose.granules(), failed)
}

/// Waits until the free memory in some pools is known done, and the launches that closed pools
/// among them wait for. Returns true if anything was not known done. Skips streams that cannot be
/// waited for now.
pub(crate) fn synchronize_free(allocator: &Allocator, which: Which) -> Result<bool, AllocError> {
    let of = if let Which::Of(key) | Which::UnusedOf(key) = which { Some(key) } else { None };
    let launched = awaited_launches(&allocator.state().shared(), of);
    wait_for_launched(allocator, &launched)?;
    let waits = free_not_done(&mut allocator.state().lock(), which);
    synchronize_all(&waits)?;
    Ok(!waits.is_empty() || !launched.ticks.is_empty() || launched.device.is_some())
}

/// What free memory in some pools, and mappings that linger, wait for.
pub(crate) fn free_not_done(guard: &mut StateGuard, which: Which) -> Pending {
    let free = donors(guard, u64::MAX, None, which).not_done;
    let may_unmap = which.has_default() && !is_capturing(guard);
    let lingering = if may_unmap { lingering_not_done(guard) } else { Vec::new() };
    guard.streams.not_done(latest_by_stream(free.into_keys().chain(lingering)))
}

/// Takes free frames out of the heaps, and spare ones, until `target` bytes are held: those of the
/// next blocks below an address, or, if that is `None`, of all blocks. Returns the address below
/// which to go on; `None` if there are no more blocks.
fn begin_trim(
    guard: &mut StateGuard,
    leaving: &mut Leaving,
    below: Option<u64>,
    target: u64,
    spares_too: bool,
    which: Which,
) -> Option<u64> {
    let excess = guard.reserved.saturating_sub(target);
    let paged = guard.paged.as_mut()?;
    let granule = paged.granule;
    let wanted = excess.div_ceil(granule);
    let loose = paged.spares.take(if spares_too { wanted } else { 0 });
    let more = wanted.saturating_sub(loose.granules());
    let (donors, next) = match below {
        _ if more == 0 => (Vec::new(), None),
        Some(below) => donors_below(guard, below, more, which),
        None => (donors(guard, more, None, which).into_joined(), None),
    };
    let mut bytes = loose.granules() * granule;
    leaving.loose.extend(loose.iter());
    for donor in hold_all(guard, donors) {
        guard.heap.empty_held(donor.block);
        let region = guard.heap.region_of(donor.block);
        let (pool, stream) = (region.pool, region.stream);
        note_mapping(guard, Action::SegmentUnmap, pool, stream, donor.addr, donor.bytes);
        let Some(paged) = &mut guard.paged else { continue };
        paged.mapped_bytes[pool.kind() as usize] -= donor.bytes;
        let frames = paged.forget_mapped(donor.addr, donor.bytes);
        leaving.ranges.push((donor.addr..donor.addr + donor.bytes, frames));
        leaving.donors.push(donor);
        bytes += donor.bytes;
    }
    leaving.bytes += bytes;
    guard.leaving += bytes;
    account_for_granules(guard);
    next
}

/// Returns a held donor to its heap, as a hole if it was unmapped, otherwise with its frames.
fn settle_leaving(guard: &mut StateGuard, donor: Donor, frames: &[Frame], was_unmapped: bool) {
    if was_unmapped {
        guard.heap.unhold_as_hole(donor.block);
        guard.counters.num_device_free.add(1);
        return;
    }
    let region = guard.heap.region_of(donor.block);
    let (pool, stream) = (region.pool, region.stream);
    guard.heap.unhold_as_free(donor.block);
    note_mapping(guard, Action::SegmentMap, pool, stream, donor.addr, donor.bytes);
    if let Some(paged) = &mut guard.paged {
        paged.mapped_bytes[pool.kind() as usize] += donor.bytes;
        paged.put_all(donor.addr, frames);
    }
}
