//! Splitting frames: the last rung of the ladder for mapped memory.
//!
//! A frame of several granules stays where it is as long as one of them is in use. Before a request
//! is refused for lack of memory, frames that are partly in use are *split*: their live granules
//! move to frames of one granule, which are then mapped at the same addresses, and the large frame
//! becomes spare. Pointers stay valid.
//!
//! The driver unmaps whole mappings only, so live granules have no memory for a moment, and nothing
//! may be enqueued that uses them, from the wait for the device to the end. Threads that would take
//! an access guard wait, and nothing is split while another thread has one, or while memory is
//! reserved for work. What uses an address without an access guard cannot be known: for that,
//! [`SplitFrames::On`] is a promise.
//!
//! Everything that may fail for lack of memory comes before the first frame is unmapped: the new
//! frames are created, mapped at addresses of their own, and filled. If a driver call fails after
//! that, live granules lack their mapping. They then *sleep* (`sleep.rs`), with their contents in
//! the new frames, and are woken up at once; if that fails, too, [`Allocator::wake`] wakes them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::internal::MovesContents;
use aquifer_device::{Device, DeviceError, DevicePtr, ErrorKind, PhysicalOptions, RawPhysical, Reservation};

use crate::allocator::Allocator;
use crate::backing::headroom::{buyable, room};
use crate::backing::paged::absent::{Absent, ContentsPlace};
use crate::backing::paged::account::{account_for_granules, note_mapping};
use crate::backing::paged::carry_out::unmap_range;
use crate::backing::paged::donors::{Donor, free_granules};
use crate::backing::paged::draft::draft;
use crate::backing::paged::frames::{Frame, granules_of};
use crate::backing::paged::plan::hold_all;
use crate::backing::paged::sleep::{list_unmapped, wake_ranges};
use crate::config::SplitFrames;
use crate::error::AllocError;
use crate::history::Action;
use crate::pools::table::Which;
use crate::recovery::hooks::Hooks;
use crate::size_class::PoolKind;
use crate::state::guard::StateGuard;
use crate::types::{Request, Use};

/// The result of an attempt to split frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Frames were split: the request may find memory now.
    Split,
    /// Frames could be split, but the device gives no memory for their live granules.
    NoRoom,
    /// Nothing may be split, or splitting would not help.
    Nothing,
}

/// A frame to split.
#[derive(Debug)]
struct Split {
    range: Range<u64>,
    /// The kind of pool that it counts in.
    kind: PoolKind,
    /// The stretches of granules that stay, by address.
    live: Vec<Range<u64>>,
    /// The granules that lie wholly in free blocks.
    free: Vec<Donor>,
}

impl Split {
    fn live_bytes(&self) -> u64 {
        self.live.iter().map(|live| live.end - live.start).sum()
    }

    fn free_bytes(&self) -> u64 {
        self.free.iter().map(|donor| donor.bytes).sum()
    }
}

/// Splits as many frames as a request lacks memory, those with the fewest live granules first, as
/// far as the device gives memory for these.
pub(crate) fn split_frames(allocator: &Allocator, request: &Request) -> Result<Outcome, AllocError> {
    let (device, state) = (allocator.device(), allocator.state());
    if allocator.config().split_frames == SplitFrames::Off || device.is_capturing() {
        return Ok(Outcome::Nothing);
    }
    device.settle();
    // Free memory in frames that are partly in use may have been used until now.
    match device.synchronize() {
        Err(error) if error.kind == ErrorKind::Capture => return Ok(Outcome::Nothing),
        synchronized => synchronized?,
    }
    let room = room(allocator)?;
    let _not_asleep = allocator.gate()?.sleep();
    let _alone = allocator.gate()?.exclusive();
    let Some(_splitting) = state.begin_split() else { return Ok(Outcome::Nothing) };
    let free = device.memory_info()?.free;
    let mut guard = state.lock();
    if guard.is_asleep() {
        return Err(AllocError::Asleep);
    }
    let (buyable, _) = buyable(allocator, &guard, &room);
    let Some(draft) = draft(&mut guard, request, 0, false) else { return Ok(Outcome::Nothing) };
    let Some(paged) = &guard.paged else { return Ok(Outcome::Nothing) };
    let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
    let affordable = buyable.min(free) / granule * granule;
    let missing = (draft.buy * granule).saturating_sub(affordable).max(granule);
    let window = draft.window.start / granule * granule..draft.window.end.next_multiple_of(granule);
    let candidates = candidates(&mut guard, &window);
    if candidates.iter().map(Split::free_bytes).sum::<u64>() < missing {
        return Ok(Outcome::Nothing);
    }
    let chosen = choose(candidates, missing, affordable);
    if chosen.is_empty() {
        return Ok(Outcome::NoRoom);
    }
    let held = hold(&mut guard, &chosen);
    guard.growing.begin(chosen.iter().map(Split::live_bytes).sum());
    drop(guard);
    let mut done = SplitWork { device, hooks: allocator.hooks(), granule, options, access }.carry_out(&chosen);
    let error = done.error.take();
    let Settled { frames, copied, freed, unmapped } = settle(&mut state.lock(), &chosen, held, done);
    if frames > 0 {
        tracing::debug!(target: "aquifer::remap", frames, copied, freed, "frames that were partly in use were split");
    }
    match error {
        None => Ok(Outcome::Split),
        Some(error) if !unmapped.is_empty() => match wake_ranges(allocator, unmapped) {
            Ok(()) => Ok(Outcome::Split),
            Err(again) => {
                tracing::warn!(error = %again, "live memory could not be mapped again, and sleeps");
                Err(error.of_request("live memory lacks its mapping and sleeps: call `Allocator::wake`").into())
            }
        },
        Some(error)
            if matches!(error.kind, ErrorKind::Capture | ErrorKind::OutOfMemory | ErrorKind::OutOfAddresses) =>
        {
            let nothing = if error.kind == ErrorKind::Capture { Outcome::Nothing } else { Outcome::NoRoom };
            Ok(if frames > 0 { Outcome::Split } else { nothing })
        }
        Some(error) => Err(error.into()),
    }
}

/// The frames of several granules that are free in part, and that may be split. In the window,
/// splitting gains nothing.
fn candidates(guard: &mut StateGuard, window: &Range<u64>) -> Vec<Split> {
    let free = free_granules(guard, Which::Unpromised);
    let Some(paged) = &guard.paged else { return Vec::new() };
    let mut frames: BTreeMap<u64, Split> = BTreeMap::new();
    let mut not_done = Vec::new();
    for donor in free {
        let block = &guard.heap.blocks[donor.block];
        let is_done = guard.streams.is_done(Use { stream: block.owner, after: block.after });
        let (mut addr, end) = (donor.addr, donor.addr + donor.bytes);
        while let Some(range) = (addr < end).then(|| paged.frame_at(addr)).flatten() {
            let bytes = range.end.min(end) - addr;
            if !is_done {
                not_done.push(range.start);
            }
            let is_in_window = range.start < window.end && window.start < range.end;
            if range.end - range.start > bytes && !is_in_window && !guard.pins.are_in(range.clone()) {
                let new = Split { range: range.clone(), kind: block.pool.kind(), live: Vec::new(), free: Vec::new() };
                let frame = frames.entry(range.start).or_insert(new);
                frame.free.push(Donor { addr, bytes, ..donor });
            }
            addr = range.end;
        }
    }
    not_done.into_iter().for_each(|start| drop(frames.remove(&start)));
    let mut frames: Vec<Split> = frames.into_values().collect();
    for frame in &mut frames {
        frame.free.sort_unstable_by_key(|donor| donor.addr);
        let mut at = frame.range.start;
        for donor in &frame.free {
            frame.live.push(at..donor.addr);
            at = donor.addr + donor.bytes;
        }
        frame.live.push(at..frame.range.end);
        frame.live.retain(|live| !live.is_empty());
    }
    frames
}

/// Chooses frames with `missing` bytes of free granules together, or as many as it can, of which
/// the live granules have at most `affordable` bytes.
fn choose(mut candidates: Vec<Split>, missing: u64, affordable: u64) -> Vec<Split> {
    candidates.sort_by_key(|split| (split.live_bytes(), Reverse(split.range.start)));
    let (mut live, mut free) = (0, 0);
    let chosen = candidates.into_iter().take_while(|split| {
        let wanted = free < missing && live + split.live_bytes() <= affordable;
        live += split.live_bytes();
        free += split.free_bytes();
        wanted
    });
    chosen.collect()
}

/// Holds the free granules of the frames. Returns them by address.
fn hold(guard: &mut StateGuard, chosen: &[Split]) -> BTreeMap<u64, Donor> {
    let mut free: Vec<Donor> = chosen.iter().flat_map(|split| &split.free).copied().collect();
    // Each block from its high end down, as holding it needs.
    free.sort_unstable_by_key(|donor| (donor.block, Reverse(donor.addr)));
    hold_all(guard, free).into_iter().map(|donor| (donor.addr, donor)).collect()
}

/// The terms of the driver's work.
struct SplitWork<'a> {
    device: &'a Device,
    hooks: &'a Hooks,
    granule: u64,
    options: PhysicalOptions,
    /// Devices that get access: this one and its peers.
    access: Vec<u32>,
}

/// The result of the driver's work.
#[derive(Default)]
struct SplitDone {
    /// For each of the first frames, which were unmapped, the stretches of its live granules.
    replaced: Vec<Vec<Replaced>>,
    /// New frames that are of no use and that the driver did not take back.
    spares: Vec<Frame>,
    error: Option<DeviceError>,
}

/// A stretch of live granules, and the new frames that have its contents.
struct Replaced {
    range: Range<u64>,
    frames: Vec<Frame>,
    /// How many of the frames are mapped.
    mapped: usize,
    is_accessible: bool,
}

impl SplitWork<'_> {
    /// Splits the frames, one after the other, until a driver call fails.
    fn carry_out(&self, chosen: &[Split]) -> SplitDone {
        let (mut created, mut done) = (Vec::new(), SplitDone::default());
        let filled = self.fill(chosen, &mut created);
        let mut new = created.into_iter();
        let _moves = MovesContents::begin();
        let replaced = filled.and_then(|()| {
            chosen.iter().try_for_each(|split| {
                unmap_range(self.device, self.hooks, &split.range)?;
                let mut result = Ok(());
                let stretches = split.live.iter().map(|live| {
                    let count = usize::try_from((live.end - live.start) / self.granule).unwrap_or(usize::MAX);
                    let frames = new.by_ref().take(count).collect();
                    let mut stretch = Replaced { range: live.clone(), frames, mapped: 0, is_accessible: false };
                    if result.is_ok() {
                        result = self.map(&mut stretch);
                    }
                    stretch
                });
                done.replaced.push(stretches.collect());
                result
            })
        });
        let unused = new.filter(|frame| self.device.driver().release_physical(frame.physical).is_err());
        (done.spares, done.error) = (unused.collect(), replaced.err());
        done
    }

    /// Creates a frame for each live granule, in the order of the chosen frames and of addresses,
    /// and copies the contents there.
    fn fill(&self, chosen: &[Split], created: &mut Vec<Frame>) -> Result<(), DeviceError> {
        let driver = self.device.driver();
        let live: Vec<&Range<u64>> = chosen.iter().flat_map(|split| &split.live).collect();
        let bytes: u64 = live.iter().map(|live| live.end - live.start).sum();
        if bytes == 0 {
            return self.device.synchronize();
        }
        for _ in 0..bytes / self.granule {
            created.push(Frame::new(driver.create_physical(self.granule, self.options)?, 1));
        }
        let ptr = driver.reserve(bytes, self.granule)?;
        let mut mapped = Vec::new();
        let copied = self.copy(ptr, &live, created, &mut mapped);
        let length = mapped.len() as u64 * self.granule;
        let unmapped = if length == 0 { Ok(()) } else { self.device.unmap(ptr, length) };
        if unmapped.is_ok() {
            mapped.clear();
        }
        let returned = unmapped.and_then(|()| driver.unreserve(ptr, bytes));
        if let Err(error) = &returned {
            tracing::debug!(%error, "addresses at which memory was copied go back later");
            // Frames that are still mapped there go back with the addresses.
            created.drain(..mapped.len());
            self.device.unreserve_later(Reservation { ptr, bytes, mapped });
        }
        let is_whole = created.len() as u64 * self.granule == bytes;
        copied.and(if is_whole { Ok(()) } else { returned })
    }

    /// Maps new frames side by side from `to` on, and copies live granules there.
    fn copy(
        &self,
        to: DevicePtr,
        live: &[&Range<u64>],
        created: &[Frame],
        mapped: &mut Vec<(DevicePtr, u64, Option<RawPhysical>)>,
    ) -> Result<(), DeviceError> {
        let driver = self.device.driver();
        let mut at = to;
        for frame in created {
            driver.map(at, self.granule, frame.physical)?;
            mapped.push((at, self.granule, Some(frame.physical)));
            at = at.offset(self.granule);
        }
        driver.set_access(to, at.0 - to.0, &self.access[..1])?;
        self.device.synchronize()?;
        let stream = self.device.stream()?;
        let _moves = MovesContents::begin();
        let mut at = to;
        for range in live {
            let bytes = range.end - range.start;
            stream.copy_blocking(at, DevicePtr(range.start), bytes)?;
            at = at.offset(bytes);
        }
        Ok(())
    }

    fn map(&self, stretch: &mut Replaced) -> Result<(), DeviceError> {
        let Range { start, end } = stretch.range;
        let mut at = DevicePtr(start);
        for frame in &stretch.frames {
            self.device.driver().map(at, self.granule, frame.physical)?;
            stretch.mapped += 1;
            at = at.offset(self.granule);
        }
        self.device.driver().set_access(DevicePtr(start), end - start, &self.access)?;
        stretch.is_accessible = true;
        self.hooks.mapped(start, end - start);
        Ok(())
    }
}

/// The result of a split.
#[derive(Default)]
struct Settled {
    frames: u64,
    /// Bytes that were copied, and bytes that can move now.
    copied: u64,
    freed: u64,
    /// Live memory that lacks its mapping: it sleeps.
    unmapped: Vec<Range<u64>>,
}

/// Accounts for what the driver did.
fn settle(guard: &mut StateGuard, chosen: &[Split], mut held: BTreeMap<u64, Donor>, done: SplitDone) -> Settled {
    let mut replaced = done.replaced.into_iter();
    let (mut settled, mut unmapped) = (Settled::default(), Vec::new());
    for split in chosen {
        let stretches = replaced.next();
        for donor in split.free.iter().filter_map(|donor| held.remove(&donor.addr)) {
            if stretches.is_none() {
                guard.heap.unhold_as_free(donor.block);
                continue;
            }
            let region = guard.heap.region_of(donor.block);
            let (pool, stream) = (region.pool, region.stream);
            guard.heap.unhold_as_hole(donor.block);
            note_mapping(guard, Action::SegmentUnmap, pool, stream, donor.addr, donor.bytes);
        }
        let (Some(paged), Some(stretches)) = (&mut guard.paged, stretches) else { continue };
        let (kind, bytes) = (split.kind, split.range.end - split.range.start);
        let old = paged.forget_mapped(split.range.start, bytes);
        paged.spares.extend(old);
        paged.mapped_bytes[kind as usize] -= bytes;
        settled.frames += 1;
        settled.copied += split.live_bytes();
        settled.freed += split.free_bytes();
        for Replaced { range, frames, mapped, is_accessible } in stretches {
            if is_accessible {
                paged.put_all(range.start, &frames);
                paged.mapped_bytes[kind as usize] += range.end - range.start;
                continue;
            }
            paged.in_hands += granules_of(&frames);
            settled.unmapped.push(range.clone());
            let (is_dedicated, place, largest, saved) = (false, ContentsPlace::InFrames, 1, Vec::new());
            unmapped.push(Absent { range, kind, is_dedicated, frames, mapped, place, largest, saved });
        }
    }
    if let Some(paged) = &mut guard.paged {
        paged.spares.extend(done.spares);
    }
    if settled.copied > 0 {
        guard.counters.num_device_alloc.add(1);
    }
    guard.counters.frames_split.add(settled.frames);
    guard.growing.end(chosen.iter().map(Split::live_bytes).sum());
    if !unmapped.is_empty() {
        list_unmapped(guard, unmapped);
    }
    account_for_granules(guard);
    settled
}

#[cfg(test)]
mod tests;
