//! Sleep: mapped memory goes back to the device, all of it or a part, while its addresses, and
//! every live allocation there, stay what they are.
//!
//! *Absent* memory is listed by range, with its frames as long as they are not released, and its
//! contents if they were saved. Granules that lie wholly in free blocks leave the list once they
//! have no frames, and become holes: they are neither saved nor brought back. So waking up needs
//! memory only for the granules of live blocks and of graphs' pools. `asleep.rs` chooses what
//! sleeps and what wakes up.
//!
//! Falling asleep and waking up work on that list and note each step in it, so either can stop
//! anywhere: if falling asleep is interrupted, waking up undoes it; if waking up is interrupted, it
//! is continued where it stopped. Saved contents are kept until their memory is back in use.
//!
//! While all memory sleeps, nothing is mapped, moved, trimmed or allocated, and frees only change
//! the heap. While a part sleeps, the cordon (`cordon.rs`) keeps it apart from the rest. Segments,
//! exportable memory and frames with pinned granules stay where they are, because others know their
//! addresses.

use std::ops::Range;
use std::time::{Duration, Instant};

use aquifer_device::internal::HostBuffer;
use aquifer_device::{DeviceError, DevicePtr, PhysicalOptions};

use crate::allocator::Allocator;
use crate::backing::paged::absent::{Absent, ContentsPlace};
use crate::backing::paged::account::account_for_granules;
use crate::backing::paged::asleep::{Falling, begin, divide, forget_free};
use crate::backing::paged::carry_out::unmap_range;
use crate::backing::paged::cordon;
use crate::backing::paged::frames::{Frame, granules_of, sizes};
use crate::backing::paged::lingering::{has_lingering, unmap_lingering_at_gate};
use crate::backing::paged::saved::{Mover, UsedBuffers};
use crate::backing::paged::sleep_options::{Part, SleepOptions};
use crate::backing::trim::{trim_idle_pools, trim_to};
use crate::error::AllocError;
use crate::format::Bytes;
use crate::keep_awake::kept_awake_by;
use crate::open::trim_others;
use crate::state::awake::Kept;
use crate::state::guard::StateGuard;
use crate::state::special;
use crate::sync::atomic::Ordering;
use crate::sync::pause_for;

/// See [`Allocator::sleep`].
pub(crate) fn sleep(allocator: &Allocator, options: &SleepOptions) -> Result<u64, AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::Unmap)?;
    if allocator.state().shared().paged.is_none() {
        return Err(allocator.not_mapped("sleep"));
    }
    // `None` is later than any clock tells.
    let until = Instant::now().checked_add(options.patience);
    loop {
        match try_sleep(allocator, options) {
            Err(AllocError::KeptAwake(by))
                if !by.is_this_thread && until.is_none_or(|until| Instant::now() < until) =>
            {
                // No lock is held here: threads that keep the allocator awake may need any before
                // they end that.
                if options.are_for_all() {
                    allocator.state().refuse_wake_locks();
                }
                let mut delay = Duration::from_micros(50);
                while allocator.state().kept().is_some() && until.is_none_or(|until| Instant::now() < until) {
                    pause_for(delay);
                    delay = (2 * delay).min(Duration::from_millis(5));
                }
            }
            slept => {
                if slept.is_err() && options.are_for_all() {
                    let _one_at_a_time = allocator.gate()?.sleep();
                    if !allocator.state().shared().is_asleep() {
                        allocator.state().end_quiescing();
                    }
                }
                return slept;
            }
        }
    }
}

fn try_sleep(allocator: &Allocator, options: &SleepOptions) -> Result<u64, AllocError> {
    let _one_at_a_time = allocator.gate()?.sleep();
    if allocator.state().shared().is_asleep() {
        return Ok(0);
    }
    let mut given = 0;
    if options.are_for_all() {
        allocator.state().quiesce().map_err(|kept| kept_awake(allocator, kept))?;
        given = trim_to(allocator, 0)?;
    }
    let _alone = allocator.gate()?.exclusive();
    if has_lingering(allocator) {
        // A frame that is released exists as long as it is mapped anywhere.
        allocator.device().synchronize()?;
        unmap_lingering_at_gate(allocator)?;
    }
    let falling = fall_asleep(allocator, options).map_err(|kept| kept_awake(allocator, kept))?;
    match give_back(allocator, &falling) {
        Ok(released) => Ok(given + released),
        Err(error) => {
            // Copies of contents may be under way.
            let _ = allocator.device().synchronize();
            let undone: Vec<_> = falling.into_iter().map(|one| one.range).collect();
            if let Err(error) = bring_back(allocator, &Waking::Ranges(undone)) {
                tracing::warn!(%error, "falling asleep failed and could not be undone; the memory is asleep");
            }
            Err(error)
        }
    }
}

#[cold]
fn kept_awake(allocator: &Allocator, kept: [Kept; 4]) -> AllocError {
    AllocError::KeptAwake(Box::new(kept_awake_by(allocator.state(), kept)))
}

/// What wakes up.
enum Waking<'a> {
    All,
    Parts(&'a [Part]),
    /// Ranges that were about to fall asleep.
    Ranges(Vec<Range<u64>>),
}

/// See [`Allocator::wake`].
pub(crate) fn wake(allocator: &Allocator) -> Result<(), AllocError> {
    wake_up(allocator, &Waking::All)
}

/// See [`Allocator::wake_parts`].
pub(crate) fn wake_parts(allocator: &Allocator, parts: &[Part]) -> Result<(), AllocError> {
    wake_up(allocator, &Waking::Parts(parts))
}

fn wake_up(allocator: &Allocator, waking: &Waking) -> Result<(), AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::Map)?;
    match wake_up_alone(allocator, waking) {
        Err(AllocError::Device(error)) if error.is_out_of_memory() && make_room(allocator)? => {
            wake_up_alone(allocator, waking)
        }
        done => done,
    }
}

/// Gives back unused memory for what sleeps, of this allocator and of others of the device. Returns
/// false if there was none.
fn make_room(allocator: &Allocator) -> Result<bool, AllocError> {
    let bytes = allocator.sleeping_bytes();
    let target = allocator.memory_reserved().saturating_sub(bytes);
    let own = trim_to(allocator, target)? + trim_idle_pools(allocator, target)?;
    Ok(trim_others(allocator, bytes.saturating_sub(own)) + own > 0)
}

fn wake_up_alone(allocator: &Allocator, waking: &Waking) -> Result<(), AllocError> {
    let _one_at_a_time = allocator.gate()?.sleep();
    let _alone = allocator.gate()?.exclusive();
    bring_back(allocator, waking)
}

/// Chooses what sleeps, and has others refused there from now on: allocations if it is everything,
/// access guards of that memory in any case. Returns what keeps the allocator awake, if anything
/// does.
fn fall_asleep(allocator: &Allocator, options: &SleepOptions) -> Result<Vec<Falling>, [Kept; 4]> {
    let state = allocator.state();
    state.begin_deciding();
    let mut guard = state.lock();
    // If everything sleeps, nothing has kept the allocator awake since it became quiescing.
    let kept = if options.are_for_all() { None } else { state.kept() };
    let chosen = kept.map_or_else(|| Ok(begin(&mut guard, options)), Err);
    if options.are_for_all() {
        state.special().fetch_or(special::ASLEEP, Ordering::Relaxed);
    } else if chosen.is_ok() {
        cordon::lift(&mut guard);
        cordon::put_up(&mut guard);
    }
    state.end_deciding(&guard);
    chosen
}

/// Saves contents, unmaps, and releases frames. Returns how many bytes went back to the device.
fn give_back(allocator: &Allocator, falling: &[Falling]) -> Result<u64, AllocError> {
    allocator.device().settle();
    allocator.device().synchronize()?;
    if falling.iter().any(|one| !one.contents.is_empty()) {
        let mut spare = take_host_buffers(allocator);
        let mut mover = Mover::new(allocator.device(), &mut spare)?;
        let saved = falling.iter().map(|one| mover.save(&one.contents)).collect::<Result<Vec<_>, _>>()?;
        mover.finish()?;
        keep_host_buffers(allocator, spare);
        for (one, saved) in falling.iter().zip(saved) {
            with_absent(allocator, one, |absent| absent.saved = saved);
        }
    }
    for one in falling {
        unmap_range(allocator.device(), allocator.hooks(), &one.range)?;
        with_absent(allocator, one, |absent| (absent.mapped, absent.place) = (0, ContentsPlace::Elsewhere));
    }
    Ok(release_absent(allocator)?)
}

/// Takes the page-locked memory that is kept for the contents of the next sleep.
pub(crate) fn take_host_buffers(allocator: &Allocator) -> Vec<HostBuffer> {
    let mut shared = allocator.state().shared();
    shared.paged.as_mut().map(|paged| std::mem::take(&mut paged.host_buffers)).unwrap_or_default()
}

fn keep_host_buffers(allocator: &Allocator, buffers: impl IntoIterator<Item = HostBuffer>) {
    if let Some(paged) = &mut allocator.state().shared().paged {
        paged.host_buffers.extend(buffers);
    }
}

fn with_absent(allocator: &Allocator, falling: &Falling, change: impl FnOnce(&mut Absent)) {
    let mut shared = allocator.state().shared();
    let Some(paged) = &mut shared.paged else { return };
    if let Ok(at) = paged.absent.binary_search_by_key(&falling.range.start, |absent| absent.range.start) {
        change(&mut paged.absent[at]);
    }
}

/// Releases the frames of absent memory that are not mapped, and spare ones. Returns how many
/// bytes.
fn release_absent(allocator: &Allocator) -> Result<u64, DeviceError> {
    let mut shared = allocator.state().shared();
    let is_asleep = shared.is_asleep();
    let Some(paged) = &mut shared.paged else { return Ok(0) };
    let (granule, mut absent) = (paged.granule, std::mem::take(&mut paged.absent));
    let mut spares: Vec<Frame> = Vec::new();
    if is_asleep {
        spares.extend(std::mem::take(&mut paged.spares).iter());
    }
    paged.in_hands += granules_of(&spares);
    drop(shared);
    let mut released = 0;
    let unmapped = absent.iter_mut().filter(|absent| absent.may_release());
    let lists = unmapped.map(|absent| &mut absent.frames).chain([&mut spares]);
    let failed = lists.map(|frames| release_all(allocator, frames, &mut released)).find_map(Result::err);
    let mut guard = allocator.state().lock();
    if let Some(paged) = &mut guard.paged {
        paged.in_hands -= released + granules_of(&spares);
        paged.spares.extend(spares);
    }
    cordon::lift(&mut guard);
    let absent = forget_free(&mut guard, absent);
    relist(&mut guard, absent);
    if released > 0 {
        guard.counters.num_device_free.add(1);
    }
    account_for_granules(&mut guard);
    failed.map_or(Ok(released * granule), Err)
}

/// Lists memory as asleep that lacks its mapping, with its contents in frames. No thread takes an
/// access guard meanwhile.
pub(super) fn list_unmapped(guard: &mut StateGuard, unmapped: Vec<Absent>) {
    guard.state.begin_deciding();
    let listed = guard.paged.as_mut().map(|paged| std::mem::take(&mut paged.absent)).unwrap_or_default();
    cordon::lift(guard);
    relist(guard, listed.into_iter().chain(unmapped).collect());
}

/// Wakes up what is listed at some ranges. The gates are held.
pub(super) fn wake_ranges(allocator: &Allocator, ranges: Vec<Range<u64>>) -> Result<(), AllocError> {
    bring_back(allocator, &Waking::Ranges(ranges))
}

/// Puts the list of absent memory back, and the cordon up around it, unless everything sleeps.
fn relist(guard: &mut StateGuard, mut absent: Vec<Absent>) {
    absent.sort_unstable_by_key(|absent| absent.range.start);
    if let Some(paged) = &mut guard.paged {
        paged.absent = absent;
        paged.note_sleeping([&[], &[]]);
    }
    if !guard.is_asleep() {
        cordon::put_up(guard);
    }
    guard.state.end_deciding(guard);
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

/// Maps memory at absent ranges, and wakes up what was asleep there. With success, only what was
/// not to wake up sleeps on.
fn bring_back(allocator: &Allocator, waking: &Waking) -> Result<(), AllocError> {
    let mut guard = allocator.state().lock();
    let Some(paged) = guard.paged.as_mut().filter(|paged| paged.is_asleep || !paged.absent.is_empty()) else {
        return Ok(());
    };
    let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
    let absent = std::mem::take(&mut paged.absent);
    cordon::lift(&mut guard);
    // Blocks may have been freed meanwhile.
    let absent = forget_free(&mut guard, absent);
    let [mut absent, staying] = match waking {
        Waking::All => [absent, Vec::new()],
        Waking::Parts(parts) => divide(&guard, absent, parts),
        Waking::Ranges(ranges) => {
            let falls = |absent: &Absent| ranges.iter().any(|range| range.contains(&absent.range.start));
            let (waking, staying) = absent.into_iter().partition(falls);
            [waking, staying]
        }
    };
    if let Some(paged) = &mut guard.paged {
        paged.note_sleeping([&absent, &staying]);
    }
    if !guard.is_asleep() {
        cordon::put_up(&mut guard);
    }
    drop(guard);
    let brought = create_absent(allocator, &mut absent, granule, options)
        .and_then(|()| restore(allocator, &mut absent, granule, &access));
    let mut guard = allocator.state().lock();
    cordon::lift(&mut guard);
    if brought.is_ok() {
        if let Some(paged) = &mut guard.paged {
            paged.is_asleep = false;
        }
        allocator.state().special().fetch_and(!special::ASLEEP, Ordering::Relaxed);
    }
    absent.extend(staying);
    relist(&mut guard, absent);
    drop(guard);
    if brought.is_ok() {
        allocator.state().end_quiescing();
        allocator.device().settle_host();
    }
    brought
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
    allocator.state().shared().growing.begin(lacking * granule);
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
        for absent in absent.iter_mut().filter(|absent| absent.may_release()) {
            if let Err(error) = release_all(allocator, &mut absent.frames, &mut released) {
                tracing::debug!(%error, "memory is kept for another attempt to wake up");
            }
        }
    }
    let mut guard = allocator.state().lock();
    if let Some(paged) = &mut guard.paged {
        paged.in_hands = paged.in_hands + created - released;
    }
    if created > released {
        guard.counters.num_device_alloc.add(1);
    }
    account_for_granules(&mut guard);
    guard.growing.end(lacking * granule);
    let Some((error, free)) = failed else { return Ok(()) };
    if !error.is_out_of_memory() {
        return Err(error.into());
    }
    let detail = format!(
        "waking up needs {}, and the device has {} free: free memory there, or drop allocations, and wake again",
        Bytes(lacking * granule),
        Bytes(free),
    );
    Err(error.of_request("the memory still sleeps").with_detail(detail).into())
}

/// Maps absent memory and restores its contents. All of it leaves the list, or nothing.
fn restore(allocator: &Allocator, absent: &mut Vec<Absent>, granule: u64, access: &[u32]) -> Result<(), AllocError> {
    let driver = allocator.device().driver();
    if absent.iter().any(|absent| absent.mapped > 0 && absent.place == ContentsPlace::Elsewhere) {
        // The last attempt may have failed while waiting for its copies.
        allocator.device().synchronize()?;
    }
    for absent in absent.iter_mut().filter(|absent| absent.place != ContentsPlace::InPlace) {
        let Range { start, end } = absent.range;
        let mut at = start + granules_of(&absent.frames[..absent.mapped]) * granule;
        for frame in &absent.frames[absent.mapped..] {
            let bytes = frame.granules() * granule;
            driver.map(DevicePtr(at), bytes, frame.physical)?;
            absent.mapped += 1;
            at += bytes;
        }
        driver.set_access(DevicePtr(start), end - start, access)?;
    }
    let lost = absent.iter().filter(|absent| absent.place == ContentsPlace::Elsewhere);
    for absent in lost.clone() {
        allocator.state().tell_witness(|witness| witness.lost(absent.range.clone()));
    }
    let mut saved = lost.flat_map(|absent| &absent.saved).peekable();
    let (mut spare, mut used) = (Vec::new(), UsedBuffers::default());
    if saved.peek().is_some() {
        let mut mover = Mover::new(allocator.device(), &mut spare)?;
        saved.try_for_each(|saved| mover.restore(saved))?;
        used = mover.finish()?;
    }
    let mut guard = allocator.state().lock();
    let (mut mapped, mut restored) = (Vec::new(), Vec::new());
    for Absent { range, kind, frames, place, saved, .. } in absent.drain(..) {
        restored.push(saved);
        if let Some(paged) = &mut guard.paged {
            paged.put_all(range.start, &frames);
            paged.mapped_bytes[kind as usize] += range.end - range.start;
            paged.in_hands -= granules_of(&frames);
        }
        mapped.extend((place != ContentsPlace::InPlace).then_some(range));
    }
    account_for_granules(&mut guard);
    drop(guard);
    // This removes files.
    drop(restored);
    keep_host_buffers(allocator, used.into_spare());
    mapped.iter().for_each(|range| allocator.hooks().mapped(range.start, range.end - range.start));
    Ok(())
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod part_tests;
