//! Sleep: all mapped memory goes back to the device, while its addresses, and every live allocation
//! there, stay what they are.
//!
//! *Absent* memory is listed by range, with its frames as long as they are not released, and its
//! contents if they were saved. Granules that lie wholly in free blocks leave the list once they
//! have no frames, and become holes: they are neither saved nor brought back. So waking up needs
//! memory only for the granules of live blocks and of graphs' pools.
//!
//! Falling asleep and waking up work on that list and note each step in it, so either can stop
//! anywhere: if falling asleep is interrupted, waking up undoes it; if waking up is interrupted, it
//! is continued where it stopped. Saved contents are kept until their memory is back in use.
//!
//! While the list exists, nothing is mapped, moved, trimmed or allocated, and frees only change the
//! heap. Segments, exportable memory and frames with pinned granules stay where they are, because
//! others know their addresses.

use std::cmp::Reverse;
use std::ops::Range;

use aquifer_device::{DeviceError, DevicePtr, PhysicalOptions, Stream};

use crate::allocator::Allocator;
use crate::backing::paged::absent::{Absent, Saved};
use crate::backing::paged::account::{account_for_granules, note_mapping};
use crate::backing::paged::carry_out::unmap_range;
use crate::backing::paged::donors::{Donor, free_granules};
use crate::backing::paged::frames::{Frame, granules_of, sizes};
use crate::backing::paged::plan::hold_all;
use crate::error::AllocError;
use crate::format::Bytes;
use crate::history::Action;
use crate::pools::table::Which;
use crate::state::guard::StateGuard;
use crate::state::special;
use crate::sync::atomic::Ordering;

/// Fate of the contents of memory while the allocator sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// The contents are lost: after [`Allocator::wake`] the memory is uninitialised.
    Discard,
    /// The contents of live memory are kept in host memory, in units of a granule.
    /// [`Allocator::wake`] restores them.
    SaveToHost,
}

/// See [`Allocator::sleep`].
pub(crate) fn sleep(allocator: &Allocator, contents: Contents) -> Result<u64, AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::Unmap)?;
    if allocator.state().shared().paged.is_none() {
        return Err(allocator.not_mapped("sleep"));
    }
    if allocator.state().is_kept_awake_here() {
        return Err(AllocError::KeptAwake);
    }
    let _one_at_a_time = allocator.gate()?.sleep();
    if allocator.state().shared().is_asleep() {
        return Ok(0);
    }
    // Outside of the gate: threads that keep the allocator awake may have to pass the gate before
    // they end that.
    allocator.state().quiesce();
    let cached = allocator.empty_cache().inspect_err(|_| allocator.state().end_quiescing())?;
    let _alone = allocator.gate()?.exclusive();
    fall_asleep(&mut allocator.state().lock_all(), Vec::new());
    let in_use = give_all_back(allocator, contents).inspect_err(|_| {
        if let Err(error) = bring_back(allocator) {
            tracing::warn!(%error, "falling asleep failed and could not be undone; the allocator is asleep");
        }
    })?;
    Ok(cached + in_use)
}

/// See [`Allocator::wake`].
pub(crate) fn wake(allocator: &Allocator) -> Result<(), AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::Map)?;
    if allocator.state().is_kept_awake_here() {
        return Ok(());
    }
    let _one_at_a_time = allocator.gate()?.sleep();
    let _alone = allocator.gate()?.exclusive();
    bring_back(allocator)
}

/// Makes the allocator refuse allocations, and threads that would begin to keep it awake, from now
/// on. So far, some memory is absent, by address.
pub(super) fn fall_asleep(guard: &mut StateGuard, absent: Vec<Absent>) {
    if let Some(paged) = &mut guard.paged {
        paged.absent = Some(absent);
    }
    guard.state.special().fetch_or(special::ASLEEP, Ordering::Relaxed);
    guard.state.begin_quiescing();
}

fn give_all_back(allocator: &Allocator, contents: Contents) -> Result<u64, AllocError> {
    allocator.device().settle();
    allocator.device().synchronize()?;
    let shared = allocator.state().shared();
    let present = shared.paged.as_ref().map(|paged| paged.not_pinned(&shared.pins)).unwrap_or_default();
    drop(shared);
    let mut saved: Vec<Vec<Saved>> = present.iter().map(|_| Vec::new()).collect();
    if contents == Contents::SaveToHost {
        let stream = allocator.device().stream()?;
        let free = free_granules(&mut allocator.state().lock_all(), Which::Unpromised);
        let free = by_address(free);
        let _moves = allocator.device().checks().map(|checks| checks.move_contents());
        for ((range, _), saved) in present.iter().zip(&mut saved) {
            for live in outside(range, &free) {
                saved.push(save(&stream, &live)?);
            }
        }
    }
    for ((range, kind), saved) in present.into_iter().zip(saved) {
        unmap_range(allocator.device(), allocator.hooks(), &range)?;
        let mut guard = allocator.state().lock_all();
        let Some(paged) = &mut guard.paged else { continue };
        let frames = paged.forget_mapped(range.start, range.end - range.start);
        paged.mapped_bytes[kind as usize] -= range.end - range.start;
        paged.in_hands += granules_of(&frames);
        let largest = frames.iter().map(|frame| frame.granules.get()).max().unwrap_or(1);
        paged.absent.get_or_insert_default().push(Absent {
            range,
            kind,
            frames,
            largest,
            mapped: 0,
            saved,
            has_contents: false,
        });
        account_for_granules(&mut guard);
    }
    Ok(release_absent(allocator)?)
}

/// Releases the frames of all absent memory. Returns how many bytes.
fn release_absent(allocator: &Allocator) -> Result<u64, DeviceError> {
    let mut shared = allocator.state().shared();
    let Some(paged) = &mut shared.paged else { return Ok(0) };
    // The list is empty while this thread works on it.
    let (granule, mut absent) = (paged.granule, paged.absent.replace(Vec::new()).unwrap_or_default());
    let mut spares: Vec<Frame> = std::mem::take(&mut paged.spares).iter().collect();
    paged.in_hands += granules_of(&spares);
    drop(shared);
    let mut released = 0;
    let lists = absent.iter_mut().map(|absent| &mut absent.frames).chain([&mut spares]);
    let failed = lists.map(|frames| release_all(allocator, frames, &mut released)).find_map(Result::err);
    let mut guard = allocator.state().lock_all();
    if let Some(paged) = &mut guard.paged {
        paged.in_hands -= released + granules_of(&spares);
        paged.spares.extend(spares);
    }
    let absent = forget_free(&mut guard, absent);
    if let Some(paged) = &mut guard.paged {
        paged.absent = Some(absent);
    }
    if released > 0 {
        guard.counters().num_device_free.add(1);
    }
    account_for_granules(&mut guard);
    failed.map_or(Ok(released * granule), Err)
}

/// Releases frames, from the last one on, and counts their granules. Frames that the driver does
/// not release stay in the list.
fn release_all(allocator: &Allocator, frames: &mut Vec<Frame>, released: &mut u64) -> Result<(), DeviceError> {
    while let Some(frame) = frames.last() {
        allocator.device().driver().release_physical(frame.physical)?;
        *released += frame.granules();
        frames.pop();
    }
    Ok(())
}

/// Maps memory at all absent ranges, and wakes the allocator up.
pub(super) fn bring_back(allocator: &Allocator) -> Result<(), AllocError> {
    let mut guard = allocator.state().lock_all();
    let Some(paged) = guard.paged.as_mut() else { return Ok(()) };
    let Some(absent) = paged.absent.as_mut().map(std::mem::take) else { return Ok(()) };
    let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
    // Blocks may have been freed meanwhile.
    let mut absent = forget_free(&mut guard, absent);
    drop(guard);
    let brought = create_absent(allocator, &mut absent, granule, options)
        .and_then(|()| restore(allocator, &mut absent, granule, &access));
    let mut shared = allocator.state().shared();
    if let Some(paged) = shared.paged.as_mut() {
        paged.absent = Some(absent).filter(|_| brought.is_err());
    }
    if brought.is_ok() {
        allocator.state().special().fetch_and(!special::ASLEEP, Ordering::Relaxed);
        allocator.state().end_quiescing();
    }
    brought
}

/// Makes holes of absent granules that lie wholly in free blocks, unless a graph may use them, and
/// returns the absent memory that is left. Ranges with frames stay as they are.
fn forget_free(guard: &mut StateGuard, absent: Vec<Absent>) -> Vec<Absent> {
    let free = free_granules(guard, Which::Unpromised);
    let mut gone = Vec::new();
    for donor in free {
        let end = donor.addr + donor.bytes;
        let first = absent.partition_point(|absent| absent.range.end <= donor.addr);
        let touched = absent[first..].iter().take_while(|absent| absent.range.start < end);
        gone.extend(touched.filter(|absent| absent.is_released()).map(|absent| {
            let addr = donor.addr.max(absent.range.start);
            Donor { addr, bytes: end.min(absent.range.end) - addr, ..donor }
        }));
    }
    // Each block from its high end down, as holding it needs.
    gone.sort_unstable_by_key(|donor| (donor.arena, donor.block, Reverse(donor.addr)));
    for donor in hold_all(guard, gone.clone()) {
        let heap = &mut guard.arena(donor.arena).heap;
        let pool = heap.blocks[donor.block].pool;
        heap.unhold_as_hole(donor.block);
        note_mapping(guard, Action::SegmentUnmap, pool, donor.arena, donor.addr, donor.bytes);
    }
    let gone = by_address(gone);
    let left = absent.into_iter().flat_map(|absent| {
        let first = gone.partition_point(|gone| gone.start < absent.range.start);
        let count = gone[first..].partition_point(|gone| gone.start < absent.range.end);
        if absent.is_released() { absent.without(&gone[first..first + count]) } else { vec![absent] }
    });
    left.collect()
}

fn by_address(donors: Vec<Donor>) -> Vec<Range<u64>> {
    let mut ranges: Vec<_> = donors.into_iter().map(|donor| donor.addr..donor.addr + donor.bytes).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges
}

/// The parts of a range outside of some others, which ascend.
fn outside(range: &Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
    let first = others.partition_point(|other| other.end <= range.start);
    let mut parts = Vec::new();
    let mut at = range.start;
    for other in others[first..].iter().take_while(|other| other.start < range.end) {
        parts.push(at..other.start.max(at));
        at = other.end;
    }
    parts.push(at..range.end.max(at));
    parts.retain(|part| !part.is_empty());
    parts
}

/// Creates the frames that absent memory lacks. If the device lacks memory, those created go back.
fn create_absent(
    allocator: &Allocator,
    absent: &mut [Absent],
    granule: u64,
    options: PhysicalOptions,
) -> Result<(), AllocError> {
    allocator.device().settle();
    let lacking: u64 = absent.iter().map(|absent| absent.places(granule) - granules_of(&absent.frames)).sum();
    let (mut created, mut failed) = (0, None);
    'all: for absent in absent.iter_mut() {
        let lacking = absent.places(granule) - granules_of(&absent.frames);
        for size in sizes(lacking, absent.largest) {
            match allocator.device().driver().create_physical(u64::from(size) * granule, options) {
                Ok(physical) => absent.frames.push(Frame::new(physical, size)),
                Err(error) => {
                    let free = allocator.device().memory_info().map_or(0, |memory| memory.free);
                    failed = Some((error, free + created * granule));
                    break 'all;
                }
            }
            created += u64::from(size);
        }
    }
    let mut released = 0;
    if failed.is_some() {
        for absent in absent.iter_mut().filter(|absent| absent.mapped == 0) {
            if let Err(error) = release_all(allocator, &mut absent.frames, &mut released) {
                tracing::debug!(%error, "memory is kept for another attempt to wake up");
            }
        }
    }
    let mut guard = allocator.state().lock_all();
    if let Some(paged) = &mut guard.paged {
        paged.in_hands = paged.in_hands + created - released;
    }
    if created > released {
        guard.counters().num_device_alloc.add(1);
    }
    account_for_granules(&mut guard);
    let Some((error, free)) = failed else { return Ok(()) };
    if !error.is_out_of_memory() {
        return Err(error.into());
    }
    let detail = format!(
        "waking up needs {}, and the device has {} free: free memory there, or drop allocations, and wake again",
        Bytes(lacking * granule),
        Bytes(free),
    );
    Err(error.of_request("the allocator still sleeps").with_detail(detail).into())
}

/// Maps absent memory, range by range, and restores its saved contents. A range that is done leaves
/// the list.
fn restore(allocator: &Allocator, absent: &mut Vec<Absent>, granule: u64, access: &[u32]) -> Result<(), AllocError> {
    let driver = allocator.device().driver();
    if absent.iter().any(|absent| absent.mapped > 0) {
        // The last attempt may have failed while waiting for its copies.
        allocator.device().synchronize()?;
    }
    let is_saved = absent.iter().any(|absent| !absent.saved.is_empty());
    let copies = if is_saved { Some(allocator.device().stream()?) } else { None };
    while let Some(last) = absent.last_mut() {
        let Range { start, end } = last.range;
        let mut at = start + granules_of(&last.frames[..last.mapped]) * granule;
        for frame in &last.frames[last.mapped..] {
            let bytes = frame.granules() * granule;
            driver.map(DevicePtr(at), bytes, frame.physical)?;
            last.mapped += 1;
            at += bytes;
        }
        driver.set_access(DevicePtr(start), end - start, access)?;
        if last.saved.is_empty() && !last.has_contents {
            allocator.state().report_to_checks(|checks| checks.lost(start..end));
        }
        for saved in &last.saved {
            let _moves = allocator.device().checks().map(|checks| checks.move_contents());
            if let Some(copies) = &copies {
                copies.upload_blocking(DevicePtr(saved.addr), &saved.bytes)?;
            }
        }
        let mut guard = allocator.state().lock_all();
        if let Some(paged) = &mut guard.paged {
            paged.put_all(start, &last.frames);
            paged.mapped_bytes[last.kind as usize] += end - start;
            paged.in_hands -= granules_of(&last.frames);
        }
        account_for_granules(&mut guard);
        drop(guard);
        absent.pop();
        allocator.hooks().mapped(start, end - start);
    }
    Ok(())
}

/// Copies the contents of a range to host memory.
fn save(copies: &Stream, range: &Range<u64>) -> Result<Saved, AllocError> {
    let bytes = range.end - range.start;
    let out_of_host_memory = AllocError::OutOfHostMemory { bytes };
    let Ok(len) = usize::try_from(bytes) else { return Err(out_of_host_memory) };
    let mut saved = Vec::new();
    saved.try_reserve_exact(len).map_err(|_| out_of_host_memory)?;
    saved.resize(len, 0);
    copies.download_blocking(&mut saved, DevicePtr(range.start))?;
    Ok(Saved { addr: range.start, bytes: saved })
}

#[cfg(test)]
mod tests;
