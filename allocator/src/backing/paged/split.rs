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
//! that, live granules lack their mapping. They then *sleep* (`sleep/mod.rs`), with their contents
//! in the new frames, and are woken up at once; if that fails, too, [`Allocator::wake`] wakes them.

use std::ops::Range;

use aquifer_device::internal::MovesContents;
use aquifer_device::{Device, DeviceError, DevicePtr, ErrorKind, PhysicalOptions, Reservation};

use crate::allocator::Allocator;
use crate::backing::growth::{buyable, room};
use crate::backing::paged::carry_out::{map_frames, unmap_range};
use crate::config::SplitFrames;
use crate::core::Core;
use crate::core::paged::frames::Frame;
use crate::core::remap::plan::Purchase;
use crate::core::remap::split::{Replaced, Split, SplitDone, SplitOutcome, choose};
use crate::error::AllocError;
use crate::recovery::hooks::Hooks;
use crate::sleep::{list_unmapped, wake_ranges};
use crate::types::Request;

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

/// Splits as many frames as a request lacks memory, those with the fewest live granules first, as
/// far as the device gives memory for these.
pub(crate) fn split_frames(allocator: &Allocator, request: &Request) -> Result<Outcome, AllocError> {
    let (device, state) = (allocator.device(), allocator.state());
    if allocator.config().split_frames == SplitFrames::Off || device.is_capturing() {
        return Ok(Outcome::Nothing);
    }
    device.settle();
    // Free memory in frames that are partly in use may have been used until now.
    match device.synchronize_enqueued() {
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
    let Some(chosen) = choose_for(&mut guard, request, buyable.min(free)) else { return Ok(Outcome::Nothing) };
    let paged = guard.paged();
    let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
    if chosen.is_empty() {
        return Ok(Outcome::NoRoom);
    }
    let held = guard.hold_split(&chosen);
    guard.begin_growing(chosen.iter().map(Split::live_bytes).sum());
    drop(guard);
    let mut done = SplitWork { device, hooks: allocator.hooks(), granule, options, access }.carry_out(&chosen);
    let error = done.error.take();
    let mut guard = state.lock();
    let SplitOutcome { frames, copied, freed, unmapped } = guard.commit_split(&chosen, held, done);
    let asleep: Vec<Range<u64>> = unmapped.iter().map(|one| one.range.clone()).collect();
    if !unmapped.is_empty() {
        list_unmapped(&mut guard, unmapped);
    }
    drop(guard);
    if frames > 0 {
        tracing::debug!(target: "aquifer::remap", frames, copied, freed, "frames that were partly in use were split");
    }
    match error {
        None => Ok(Outcome::Split),
        Some(error) if !asleep.is_empty() => match wake_ranges(allocator, asleep) {
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

/// The frames to split for a request, if the device gives so much memory for their live granules;
/// none if that is too little. `None` if splitting would not serve the request.
pub(crate) fn choose_for(core: &mut Core, request: &Request, affordable: u64) -> Option<Vec<Split>> {
    let draft = core.draft(request, 0, Purchase::Needed)?;
    let granule = core.paged().granule;
    let affordable = affordable / granule * granule;
    let missing = (draft.buy * granule).saturating_sub(affordable).max(granule);
    let candidates = core.split_candidates(&draft.window.granules(granule));
    let free: u64 = candidates.iter().map(Split::free_bytes).sum();
    (free >= missing).then(|| choose(candidates, missing, affordable))
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
            return self.device.synchronize_enqueued();
        }
        for _ in 0..bytes / self.granule {
            created.push(Frame::new(driver.create_physical(self.granule, self.options)?, 1));
        }
        let ptr = driver.reserve(bytes, self.granule)?;
        let mut mapped = 0;
        let copied = self.copy(ptr, &live, created, &mut mapped);
        let length = mapped as u64 * self.granule;
        let unmapped = if length == 0 { Ok(()) } else { self.device.unmap(ptr, length) };
        mapped = if unmapped.is_ok() { 0 } else { mapped };
        let returned = unmapped.and_then(|()| driver.unreserve(ptr, bytes));
        if let Err(error) = &returned {
            tracing::debug!(%error, "addresses at which memory was copied go back later");
            // Frames that are still mapped there go back with the addresses.
            let places = (ptr.0..).step_by(usize::try_from(self.granule).unwrap_or(usize::MAX)).map(DevicePtr);
            let mapped = places.zip(created.drain(..mapped));
            let mapped = mapped.map(|(at, frame)| (at, self.granule, Some(frame.physical))).collect();
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
        mapped: &mut usize,
    ) -> Result<(), DeviceError> {
        map_frames(self.device, to.0, self.granule, created, mapped, &self.access[..1])?;
        self.device.synchronize_enqueued()?;
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
        map_frames(self.device, start, self.granule, &stretch.frames, &mut stretch.mapped, &self.access)?;
        stretch.is_accessible = true;
        self.hooks.mapped(start, end - start);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
