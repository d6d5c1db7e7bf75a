//! Makes the driver calls of a remap, without a lock. The remap was planned under locks
//! (`core/remap/plan.rs`), and is committed under locks afterwards.
//!
//! Frames are created first, because that is the step which fails for lack of memory, and then
//! nothing has to be undone. If a later call fails, frames that are unmapped already become spare,
//! and frames that are mapped but cannot be accessed are unmapped again. Breaking
//! a frame (`layout.rs`) releases its memory before smaller frames are created; if another program
//! takes it first, the remap fails. Frames that are reused stay mapped where they are
//! (`trim.rs`).

use std::collections::HashSet;
use std::ops::Range;

use aquifer_device::{Device, DeviceError, DevicePtr, ErrorKind, RawPhysical, Reservation};

use crate::core::paged::frames::{Frame, LooseFrames, granules_of};
use crate::core::paged::layout::Layout;
use crate::core::remap::plan::{Done, Filled, Remap, Work};
use crate::recovery::hooks::Hooks;

/// Up to this many granules are created without checking first that the device has that much
/// memory.
const CREATED_UNASKED: u64 = 32;

/// Frames to map.
#[derive(Debug, Default)]
struct Stock {
    /// Frames that are mapped elsewhere and stay so.
    reused: LooseFrames,
    /// Frames that are mapped nowhere.
    spares: LooseFrames,
}

impl Stock {
    /// Takes out a frame of this size. Returns whether it is reused, too.
    fn take_sized(&mut self, size: u32) -> Option<(Frame, bool)> {
        let reused = self.reused.take_sized(size).map(|frame| (frame, true));
        reused.or_else(|| self.spares.take_sized(size).map(|frame| (frame, false)))
    }

    fn put_back(&mut self, frame: Frame, reused: bool) {
        if reused { self.reused.add(frame) } else { self.spares.add(frame) }
    }
}

/// Does the work until it is finished or a driver call fails.
pub(crate) fn carry_out(device: &Device, hooks: &Hooks, remap: &mut Remap) {
    let Remap { work, done, .. } = remap;
    let reused = frames_of(&work.reused);
    let layout = layout(work, &reused);
    done.spares = std::mem::take(&mut work.spares);
    let mut stock = Stock { reused, spares: LooseFrames::default() };
    let steps = create(device, work, &layout.first, done)
        .and_then(|()| unmap(device, hooks, &work.unmap, done))
        .and_then(|()| break_frames(device, work, &layout, done))
        .and_then(|()| {
            stock.spares = std::mem::take(&mut done.spares);
            map(device, hooks, work, &layout, &mut stock, done)
        });
    done.spares.extend(stock.spares.iter());
    done.error = steps.err();
    done.still_mapped = work.unmap.drain(..).skip(done.unmapped).map(|(_, frames)| frames).collect();
    let unmoved: HashSet<RawPhysical> = stock.reused.iter().map(|frame| frame.physical).collect();
    let is_unmoved = |frame: &Frame| unmoved.contains(&frame.physical);
    done.unmoved = work.reused.drain(..).map(|(_, frames)| frames.into_iter().filter(is_unmoved).collect()).collect();
}

/// All frames of some ranges.
fn frames_of(ranges: &[(Range<u64>, Vec<Frame>)]) -> LooseFrames {
    let mut all = LooseFrames::default();
    all.extend(ranges.iter().flat_map(|(_, frames)| frames).copied());
    all
}

/// Which frames fill which range.
fn layout(work: &Work, reused: &LooseFrames) -> Layout {
    let mut there = frames_of(&work.unmap);
    there.extend(work.spares.iter());
    Layout::of(reused, &there, &work.fill, work.granule, work.create, work.sizes)
}

/// Creates frames of these sizes. If one fails, releases those created before it.
fn create(device: &Device, work: &Work, sizes: &[u32], done: &mut Done) -> Result<(), DeviceError> {
    if work.create > 0 {
        device.settle_unused();
    }
    check_memory_left(device, work).inspect_err(|_| done.at_creation = true)?;
    let mut created = Vec::with_capacity(sizes.len());
    for &size in sizes {
        match create_one(device, work, size) {
            Ok(frame) => created.push(frame),
            Err(error) => {
                done.at_creation = true;
                // The frames created so far do not help: they go back, so that others may have the
                // memory.
                created.retain(|frame| device.driver().release_physical(frame.physical).is_err());
                done.created = !created.is_empty();
                done.spares.extend(created);
                return Err(error);
            }
        }
    }
    done.created = !created.is_empty();
    done.spares.extend(created);
    Ok(())
}

fn create_one(device: &Device, work: &Work, size: u32) -> Result<Frame, DeviceError> {
    let physical = device.driver().create_physical(u64::from(size) * work.granule, work.options)?;
    Ok(Frame::new(physical, size))
}

/// Releases frames that fit nowhere, and creates smaller ones of their memory.
fn break_frames(device: &Device, work: &Work, layout: &Layout, done: &mut Done) -> Result<(), DeviceError> {
    for &size in &layout.broken {
        let Some(frame) = done.spares.take_sized(size) else { continue };
        device.driver().release_physical(frame.physical).inspect_err(|_| done.spares.add(frame))?;
    }
    for &size in &layout.then {
        let frame = create_one(device, work, size).inspect_err(|_| done.at_creation = true)?;
        done.spares.add(frame);
    }
    for &size in &layout.surplus {
        match create_one(device, work, size) {
            Ok(frame) => done.spares.add(frame),
            // Others have the memory now. The request does not need it.
            Err(error) if error.is_out_of_memory() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fails if many granules are to be created and the device has not that much memory. Otherwise
/// granules created one by one would take all its memory from other programs for a while, only to
/// give it back. Where the device reports too little free memory, that is not decisive, because the
/// driver's own pool gives up memory that it holds in reserve. So this then creates one piece of
/// the whole size, which succeeds as a whole or not at all, and releases it.
fn check_memory_left(device: &Device, work: &Work) -> Result<(), DeviceError> {
    let bytes = work.create.saturating_mul(work.granule);
    let seems_lacking = || device.driver().memory_info().is_ok_and(|memory| memory.free < bytes);
    if work.create <= CREATED_UNASKED || !seems_lacking() {
        return Ok(());
    }
    let whole = device.driver().create_physical(bytes, work.options)?;
    release(device, whole);
    Ok(())
}

fn unmap(
    device: &Device,
    hooks: &Hooks,
    ranges: &[(Range<u64>, Vec<Frame>)],
    done: &mut Done,
) -> Result<(), DeviceError> {
    for (range, frames) in ranges {
        unmap_range(device, hooks, range)?;
        done.unmapped += 1;
        done.spares.extend(frames.iter().copied());
    }
    Ok(())
}

/// Unmaps a range. Notifies observers before it, and notifies them again that memory is mapped
/// there if the call fails.
pub(crate) fn unmap_range(device: &Device, hooks: &Hooks, range: &Range<u64>) -> Result<(), DeviceError> {
    let bytes = range.end - range.start;
    hooks.about_to_unmap(range.start, bytes);
    device.unmap(DevicePtr(range.start), bytes).inspect_err(|_| hooks.mapped(range.start, bytes))
}

fn map(
    device: &Device,
    hooks: &Hooks,
    work: &Work,
    layout: &Layout,
    stock: &mut Stock,
    done: &mut Done,
) -> Result<(), DeviceError> {
    for (range, sizes) in work.fill.iter().zip(&layout.ranges) {
        let mut mapped = Vec::with_capacity(sizes.len());
        if let Err(error) = map_range(device, work, range, sizes, stock, &mut mapped) {
            unmap_again(device, work.granule, range.start, mapped, stock, done);
            return Err(error);
        }
        hooks.mapped(range.start, range.end - range.start);
        let frames = mapped.into_iter().map(|(frame, _)| frame).collect();
        done.filled.push(Filled { range: range.clone(), frames, usable: true });
    }
    Ok(())
}

/// Maps frames of these sizes at a range, and gives access to all of it with one call. Mapped
/// frames move from the stock to the list, with whether they are reused.
fn map_range(
    device: &Device,
    work: &Work,
    range: &Range<u64>,
    sizes: &[u32],
    stock: &mut Stock,
    mapped: &mut Vec<(Frame, bool)>,
) -> Result<(), DeviceError> {
    let mut at = range.start;
    for &size in sizes {
        let Some((frame, reused)) = stock.take_sized(size) else { break };
        let bytes = u64::from(size) * work.granule;
        let result = device.driver().map(DevicePtr(at), bytes, frame.physical);
        result.inspect_err(|_| stock.put_back(frame, reused))?;
        mapped.push((frame, reused));
        at += bytes;
    }
    device.driver().set_access(DevicePtr(range.start), range.end - range.start, &work.access)
}

/// Unmaps the frames mapped from `start` on, which cannot be accessed.
fn unmap_again(
    device: &Device,
    granule: u64,
    start: u64,
    mapped: Vec<(Frame, bool)>,
    stock: &mut Stock,
    done: &mut Done,
) {
    let mut failed: Option<(DeviceError, u64)> = None;
    let mut at = start;
    for (frame, reused) in mapped {
        let range = at..at + frame.granules() * granule;
        at = range.end;
        match device.unmap(DevicePtr(range.start), range.end - range.start) {
            Ok(()) => stock.put_back(frame, reused),
            Err(error) => {
                failed.get_or_insert((error, 0)).1 += 1;
                done.filled.push(Filled { range, frames: vec![frame], usable: false });
            }
        }
    }
    // Skip: the device is lost and the error was already reported.
    if let Some((error, mappings)) = failed.filter(|(error, _)| !error.is_device_lost()) {
        tracing::warn!(%error, mappings, "mappings without access could not be taken back; their addresses stay unused until they are");
    }
}

/// The outcome of unmapping memory that may as well stay mapped for now: it stays while a stream
/// captures.
pub(crate) fn unless_capturing(unmapped: Result<(), DeviceError>) -> Result<(), DeviceError> {
    unmapped.or_else(|error| if error.kind == ErrorKind::Capture { Ok(()) } else { Err(error) })
}

/// Maps frames side by side from an address on, those that are not `mapped` so far, and gives
/// access to all of them.
pub(crate) fn map_frames(
    device: &Device,
    start: u64,
    granule: u64,
    frames: &[Frame],
    mapped: &mut usize,
    access: &[u32],
) -> Result<(), DeviceError> {
    let mut end = start + granules_of(&frames[..*mapped]) * granule;
    for frame in &frames[*mapped..] {
        let bytes = frame.granules() * granule;
        device.driver().map(DevicePtr(end), bytes, frame.physical)?;
        *mapped += 1;
        end += bytes;
    }
    device.driver().set_access(DevicePtr(start), end - start, access)
}

/// Releases physical memory, now or, if the driver refuses that, later.
pub(crate) fn release(device: &Device, physical: RawPhysical) {
    if let Err(error) = device.driver().release_physical(physical) {
        tracing::debug!(%error, "memory could not be given back; it will be tried again");
        device.release_later(physical);
    }
}

/// Gives empty addresses back, now or, if the driver refuses that, later.
pub(crate) fn unreserve(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<(), DeviceError> {
    let unreserved = device.driver().unreserve(ptr, bytes);
    unreserved.inspect_err(|_| device.unreserve_later(Reservation { ptr, bytes, mapped: Vec::new() }))
}
