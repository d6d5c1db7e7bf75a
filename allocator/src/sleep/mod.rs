//! Sleep: mapped memory goes back to the device, all of it or a part, while its addresses, and
//! every live allocation there, stay what they are.
//!
//! What sleeps is listed by range (`core/sleep/`), with its frames as long as they are not
//! released, and its contents if they were saved (`contents.rs`). Granules that lie wholly in free
//! blocks leave the list once they have no frames, and become holes: they are neither saved nor
//! brought back. So waking up needs memory only for the granules of live blocks and of graphs'
//! pools.
//!
//! Falling asleep and waking up work on that list and note each step in it, so either can stop
//! anywhere: if falling asleep is interrupted, waking up undoes it; if waking up is interrupted, it
//! is continued where it stopped. Saved contents are kept until their memory is back in use.
//!
//! What sleeps is decided once, by the request of each allocation: its tag, its private pool, or
//! all ([`Part`]). No caller names addresses. Ranges are how the list says it, because frames and
//! granules are shared by allocations that are chosen and others: a frame goes whole or stays, and
//! a granule wakes up whole.
//!
//! While all memory sleeps, nothing is mapped, moved, trimmed or allocated, and frees only change
//! the heap. While a part sleeps, it is isolated from the rest. Segments, exportable memory and
//! frames with pinned granules stay where they are, because others know their addresses, and so do
//! frames that graphs have at several addresses.
//! `wake_lock.rs` says what prevents sleep.

pub(crate) mod contents;
pub(crate) mod options;
pub(crate) mod wake_lock;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_device::fork::Mutex;
use aquifer_device::{Code, DeviceError, Operation, PhysicalOptions};

use crate::allocator::Allocator;
use crate::backing::paged::carry_out::{map_frames, unmap_range};
use crate::backing::paged::lend::lend;
use crate::backing::trim::unmap_old_mappings_at_gate;
use crate::core::paged::frames::{Frame, sizes};
use crate::core::pools::Which;
use crate::core::sleep::steps::{Falling, Waking, Woken};
use crate::core::sleep::{ContentsPlace, SleepingRange};
use crate::error::AllocError;
use crate::format::Bytes;
use crate::open::trim_others;
use crate::sleep::contents::Mover;
use crate::state::{StateGuard, slow};
use crate::sync::atomic::Ordering;
use crate::sync::pause_for;

pub use crate::core::sleep::staying::{KeptBy, StayingAwake};
pub use options::{Contents, Part, SleepOptions};
pub use wake_lock::WakeLock;

fn try_sleep(allocator: &Allocator, options: &SleepOptions) -> Result<u64, AllocError> {
    let _one_at_a_time = allocator.gate()?.sleep();
    if allocator.state().shared().is_asleep() {
        return Ok(0);
    }
    let mut given = 0;
    if options.are_for_all() {
        allocator.state().quiesce()?;
        given = allocator.trim_to(0)?;
    }
    let _alone = allocator.gate()?.exclusive();
    if allocator.state().shared().has_old_mappings() {
        // A frame that is released exists as long as it is mapped anywhere.
        allocator.device().synchronize_enqueued()?;
        unmap_old_mappings_at_gate(allocator, Which::NotForGraphs)?;
    }
    let falling = fall_asleep(allocator, options)?;
    match give_back(allocator, &falling) {
        Ok(released) => {
            for staying in allocator.staying_awake(options.clone()) {
                tracing::debug!(%staying, "memory stays awake");
            }
            Ok(given + released)
        }
        Err(error) => {
            // Copies of contents may be under way.
            let _ = allocator.device().synchronize_enqueued();
            let undone: Vec<_> = falling.into_iter().map(|one| one.range).collect();
            if let Err(error) = bring_back(allocator, &Waking::Ranges(undone)) {
                tracing::warn!(%error, "falling asleep failed and could not be undone; the memory is asleep");
            }
            Err(error)
        }
    }
}

impl Allocator {
    /// Gives mapped memory back to the device until [`Allocator::wake`]: all of it, or some parts
    /// ([`SleepOptions`]; [`Contents`](crate::Contents) alone stands for all). Returns how many
    /// bytes went back, with all of it free memory included. Addresses stay reserved: after waking
    /// up, allocations and their pointers are as before, and meanwhile they may be dropped. Memory
    /// comes back in units of a granule, and only where live allocations lie or a graph may use it.
    ///
    /// Segments, exportable memory, frames with pinned granules, and memory that graphs of one pool
    /// have at several addresses stay. So do frames, mostly of
    /// one to a few granules, in which allocations of other parts lie: what of a part lies in these
    /// stays awake, with its contents. [`Allocator::staying_awake`] names all that. Allocations
    /// that were made of a part after it fell asleep are awake, until it is put to sleep once more.
    ///
    /// This fails while anything keeps the allocator awake: access guards ([`crate::AccessGuard`])
    /// and reservations ([`crate::Reservation`]) with its memory, as transfers have until they are
    /// enqueued, and [`Allocator::keep_awake`]. With [`SleepOptions::waiting`] it waits for the end
    /// of these. Then it waits for the device. So kernels that other threads launch come before the
    /// sleep or are refused.
    ///
    /// The reserve ([`crate::Config::reserve`]) stays held from the device: as much less goes back.
    ///
    /// Until the memory wakes up, access guards and reservations of it fail with
    /// [`AllocError::Asleep`], and if all memory sleeps, allocations do. Work that bypasses access
    /// guards, and graphs, must not touch it. Threads that allocate while everything falls asleep
    /// may still be served, with memory that is there after waking up. Statistics count the memory
    /// held now; snapshots show the memory that will be there after waking up. If all memory sleeps
    /// already, this does nothing.
    ///
    /// Pinned host memory for contents takes a while to get, so it is kept for the next sleep,
    /// until [`Allocator::empty_cache`].
    ///
    /// ```
    /// use aquifer::memory::Contents;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let weights = memory.alloc_bytes(4 << 20, &stream)?;
    /// stream.fill(weights.ptr(), 7, 4 << 20)?;
    /// assert_eq!(memory.sleep(Contents::SaveToHost)?, 4 << 20);
    /// assert_eq!(memory.memory_reserved(), 0); // another program may use the device now
    /// memory.wake()?;
    /// let mut byte = [0];
    /// stream.download_blocking(&mut byte, weights.ptr())?;
    /// assert_eq!(byte, [7]);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::NotMapped`] where memory comes in segments; [`AllocError::KeptAwake`], which
    /// says what keeps the allocator awake; [`AllocError::OutOfHostMemory`];
    /// [`AllocError::SavedFile`]; errors of the driver. The memory is then awake as before, with
    /// its contents unless they were to be discarded. If the driver fails at waking it up, too,
    /// [`Allocator::sleeping_bytes`] is not 0, and [`Allocator::wake`] can be tried.
    pub fn sleep(&self, options: impl Into<SleepOptions>) -> Result<u64, AllocError> {
        let options = options.into();
        aquifer_device::fork::check(Operation::Unmap)?;
        if self.state().shared().granule().is_none() {
            return Err(self.not_mapped("sleep"));
        }
        // `None` is later than any clock tells.
        let until = Instant::now().checked_add(options.patience);
        let mut refuses = false;
        loop {
            match try_sleep(self, &options) {
                Err(AllocError::KeptAwake(by))
                    if !by.is_this_thread && until.is_none_or(|until| Instant::now() < until) =>
                {
                    // No lock is held here: threads that keep the allocator awake may need any
                    // before they end that.
                    let mut delay = Duration::from_micros(50);
                    loop {
                        // Each time, because another sleep that gives up and waking a part end it.
                        if options.are_for_all() {
                            self.state().refuse_wake_locks();
                            refuses = true;
                        }
                        if self.state().wake_counts().is_none() || until.is_some_and(|until| Instant::now() >= until) {
                            break;
                        }
                        pause_for(delay);
                        delay = (2 * delay).min(Duration::from_millis(5));
                    }
                }
                slept => {
                    // One that was refused at once raised nothing, and another one may wait.
                    let raised = refuses || !matches!(slept, Err(AllocError::KeptAwake(_)));
                    if slept.is_err() && raised && options.are_for_all() {
                        let _one_at_a_time = self.gate()?.sleep();
                        if !self.state().shared().is_asleep() {
                            self.state().end_quiescing();
                        }
                    }
                    return slept;
                }
            }
        }
    }

    /// The memory in use that stays awake if these options are given to [`Allocator::sleep`], or
    /// that stayed so, by address, with the reason. Free memory, which goes back rather than to
    /// sleep, is not listed.
    ///
    /// ```
    /// use aquifer::memory::{Contents, KeptBy};
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let [buffer, other] = [32, 64].map(|mib| memory.alloc_bytes(mib << 20, device.default_stream()));
    /// let pin = memory.pin_mapping(buffer.as_ref().unwrap())?; // as a network card registers it
    /// assert_eq!(memory.sleep(Contents::SaveToHost)?, 64 << 20);
    /// let staying = memory.staying_awake(Contents::SaveToHost);
    /// assert_eq!((staying.len(), staying[0].why), (1, KeptBy::Pin));
    /// assert_eq!(staying[0].range, pin.range());
    /// # drop((buffer, other));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn staying_awake(&self, options: impl Into<SleepOptions>) -> Vec<StayingAwake> {
        self.state().lock().staying_awake(&options.into())
    }

    /// Bytes of addresses that sleep: they have no memory, and access guards there are refused.
    pub fn sleeping_bytes(&self) -> u64 {
        let shared = self.state().shared();
        let sleeping = shared.paged().sleep.addresses().iter();
        sleeping.map(|range| range.end - range.start).sum()
    }

    /// True if the allocator sleeps, or is about to and refuses access guards already. To wait for
    /// the end of that, see [`Allocator::wait_awake`].
    pub fn is_asleep(&self) -> bool {
        self.state().is_quiescing()
    }

    /// Ends [`Allocator::sleep`]: takes memory from the device for the allocations that are still
    /// live, maps it where it was, and restores saved contents. The limit is not checked, because
    /// this memory was held before. If the allocator is awake already, this does nothing. While
    /// another thread puts it to sleep, this waits for that first.
    ///
    /// # Errors
    /// Errors of the driver. If the device lacks memory, the error says how much is needed and how
    /// much is free, and everything taken so far goes back. The allocator is still asleep then,
    /// nothing is lost, and this can be tried again.
    pub fn wake(&self) -> Result<(), AllocError> {
        wake_up(self, &Waking::All)
    }

    /// As [`Allocator::wake`], for some of the memory that sleeps. If the whole allocator sleeps,
    /// it is awake afterwards and serves allocations, and the rest of its memory sleeps on, as if
    /// only that had been put to sleep.
    ///
    /// ```
    /// use aquifer::memory::{Contents, Part, SleepOptions, TagScope};
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let alloc = |tag| {
    ///     let _scope = TagScope::new(tag);
    ///     memory.alloc_bytes(8 << 20, &stream)
    /// };
    /// let (weights, cache) = (alloc("weights")?, alloc("kv_cache")?);
    /// memory.sleep(SleepOptions::all(Contents::Discard).with(Part::tag("weights"), Contents::SaveToHost))?;
    /// memory.wake_parts(&[Part::tag("weights")])?;
    /// assert_eq!(memory.memory_reserved(), 8 << 20); // the cache has no memory so far
    /// stream.fill(weights.ptr(), 1, weights.bytes())?;
    /// memory.wake()?;
    /// stream.fill(cache.ptr(), 0, cache.bytes())?;
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Allocator::wake`].
    pub fn wake_parts(&self, parts: &[Part]) -> Result<(), AllocError> {
        wake_up(self, &Waking::Parts(parts))
    }
}

fn wake_up(allocator: &Allocator, waking: &Waking) -> Result<(), AllocError> {
    aquifer_device::fork::check(Operation::Map)?;
    match wake_up_alone(allocator, waking) {
        Err(AllocError::Device(error)) if error.is_out_of_memory() && make_room(allocator)? => {
            wake_up_alone(allocator, waking)
        }
        done => done,
    }
}

/// Gives back unused memory for what sleeps, of this allocator and of others of the device, and
/// what idle graphs lend. Returns false if there was none.
fn make_room(allocator: &Allocator) -> Result<bool, AllocError> {
    let bytes = allocator.sleeping_bytes();
    let target = allocator.memory_reserved().saturating_sub(bytes);
    // Spare frames go back first.
    lend(allocator, bytes, true)?;
    let own = allocator.trim_to(target)?;
    Ok(trim_others(allocator, bytes.saturating_sub(own)) + own > 0)
}

fn wake_up_alone(allocator: &Allocator, waking: &Waking) -> Result<(), AllocError> {
    let _one_at_a_time = allocator.gate()?.sleep();
    let _alone = allocator.gate()?.exclusive();
    bring_back(allocator, waking)
}

/// Chooses what sleeps, and has others refused there from now on: allocations if it is everything,
/// access guards of that memory in any case.
///
/// # Errors
/// When anything keeps the allocator awake.
fn fall_asleep(allocator: &Allocator, options: &SleepOptions) -> Result<Vec<Falling>, AllocError> {
    let state = allocator.state();
    state.begin_deciding();
    let mut guard = state.lock();
    // If everything sleeps, nothing has kept the allocator awake since it became quiescing.
    let counts = if options.are_for_all() { None } else { state.wake_counts() };
    if let Some(counts) = counts {
        state.end_deciding(&guard);
        drop(guard);
        return Err(state.kept_awake(counts));
    }
    let chosen = guard.begin_sleep(options);
    if options.are_for_all() {
        state.slow_reasons().fetch_or(slow::ASLEEP, Ordering::Relaxed);
    } else {
        guard.end_isolation();
        guard.isolate_sleeping();
        guard.show_waiting();
    }
    state.end_deciding(&guard);
    Ok(chosen)
}

/// Saves contents, unmaps, and releases frames. Returns how many bytes went back to the device.
fn give_back(allocator: &Allocator, falling: &[Falling]) -> Result<u64, AllocError> {
    allocator.device().settle_but_graphs();
    allocator.device().synchronize_enqueued()?;
    if falling.iter().any(|one| !one.contents.is_empty()) {
        let mut spare = allocator.state().shared().take_host_buffers();
        let mut mover = Mover::new(allocator.device(), &mut spare)?;
        let saved = falling.iter().map(|one| mover.save(&one.contents)).collect::<Result<Vec<_>, _>>()?;
        mover.finish()?;
        allocator.state().shared().keep_host_buffers(spare);
        for (one, saved) in falling.iter().zip(saved) {
            allocator.state().shared().change_sleeping(one.range.start, |one| one.saved = saved);
        }
    }
    for one in falling {
        unmap_range(allocator.device(), allocator.hooks(), &one.range)?;
        allocator
            .state()
            .shared()
            .change_sleeping(one.range.start, |one| (one.mapped, one.place) = (0, ContentsPlace::Elsewhere));
    }
    Ok(release_sleeping(allocator)?)
}

/// Releases the frames of sleeping ranges that are not mapped, and spare ones. Returns how many
/// bytes.
fn release_sleeping(allocator: &Allocator) -> Result<u64, DeviceError> {
    let mut shared = allocator.state().shared();
    let (granule, most) = (shared.paged().granule, shared.releasable(0));
    let Some((mut ranges, mut spares)) = shared.begin_release_sleeping() else { return Ok(0) };
    drop(shared);
    let mut released = 0;
    let unmapped = ranges.iter_mut().filter(|one| one.may_release());
    let lists = unmapped.map(|one| &mut one.frames).chain([&mut spares]);
    let failed = lists.map(|frames| release_all(allocator, frames, most, &mut released)).find_map(Result::err);
    let mut guard = allocator.state().lock();
    guard.commit_release_sleeping(ranges, spares, released);
    show_list(&guard);
    failed.map_or(Ok(released * granule), Err)
}

/// Lists memory as asleep that lacks its mapping, with its contents in frames. No thread takes an
/// access guard meanwhile.
pub(crate) fn list_unmapped(guard: &mut StateGuard, unmapped: Vec<SleepingRange>) {
    guard.state.begin_deciding();
    guard.list_unmapped(unmapped);
    show_list(guard);
}

/// Has others look whether memory sleeps, while some does, and whether blocks wait.
fn show_list(guard: &StateGuard) {
    guard.show_waiting();
    guard.state.end_deciding(guard);
}

/// Wakes up what is listed at some ranges. The gates are held.
pub(crate) fn wake_ranges(allocator: &Allocator, ranges: Vec<Range<u64>>) -> Result<(), AllocError> {
    bring_back(allocator, &Waking::Ranges(ranges))
}

/// Releases frames, from the last one on, and counts their granules, at most so many. Frames that
/// the driver does not release stay in the list.
fn release_all(
    allocator: &Allocator,
    frames: &mut Vec<Frame>,
    most: u64,
    released: &mut u64,
) -> Result<(), DeviceError> {
    while let Some(frame) = frames.last().filter(|frame| *released + frame.granules() <= most) {
        allocator.device().driver().release_physical(frame.physical)?;
        *released += frame.granules();
        frames.pop();
    }
    Ok(())
}

/// Maps memory at sleeping ranges, and wakes up what was asleep there. With success, only what was
/// not to wake up sleeps on.
fn bring_back(allocator: &Allocator, waking: &Waking) -> Result<(), AllocError> {
    let mut guard = allocator.state().lock();
    let Some(Woken { mut ranges, staying, granule, options, access }) = guard.begin_waking(waking) else {
        return Ok(());
    };
    guard.show_waiting();
    drop(guard);
    let brought = create_frames(allocator, &mut ranges, granule, options)
        .and_then(|()| restore(allocator, &mut ranges, granule, &access));
    ranges.extend(staying);
    let mut guard = allocator.state().lock();
    guard.end_waking(ranges, brought.is_ok());
    if brought.is_ok() {
        allocator.state().slow_reasons().fetch_and(!slow::ASLEEP, Ordering::Relaxed);
    }
    show_list(&guard);
    drop(guard);
    if brought.is_ok() {
        allocator.state().end_quiescing();
        allocator.device().settle_host();
    }
    brought
}

/// Creates the frames that sleeping ranges lack. If the device lacks memory, those created go back.
fn create_frames(
    allocator: &Allocator,
    ranges: &mut [SleepingRange],
    granule: u64,
    options: PhysicalOptions,
) -> Result<(), AllocError> {
    let device = allocator.device();
    device.settle_but_graphs();
    let lacking: u64 = ranges.iter().map(|one| one.lacks(granule)).sum();
    if device.info().shares_host_memory {
        // The driver would not refuse it: processes would end.
        let free = device.memory_info()?.free.saturating_sub(allocator.headroom());
        if free < lacking * granule {
            let error = DeviceError::refused(Operation::CreatePhysical, Code::OUT_OF_MEMORY);
            return Err(sleeps_on(error, lacking * granule, free));
        }
    }
    allocator.state().shared().begin_growing(lacking * granule);
    let (mut created, mut failed) = (0, None);
    'all: for one in ranges.iter_mut() {
        for size in sizes(one.lacks(granule), one.largest) {
            match device.driver().create_physical(u64::from(size) * granule, options) {
                Ok(physical) => one.frames.push(Frame::new(physical, size)),
                Err(error) => {
                    let free = device.memory_info().map_or(0, |memory| memory.free);
                    failed = Some((error, free + created * granule));
                    break 'all;
                }
            }
            created += u64::from(size);
        }
    }
    let mut released = 0;
    if failed.is_some() {
        for one in ranges.iter_mut().filter(|one| one.may_release()) {
            let most = allocator.state().shared().releasable(created);
            if let Err(error) = release_all(allocator, &mut one.frames, most, &mut released) {
                tracing::debug!(%error, "memory is kept for another attempt to wake up");
            }
        }
    }
    allocator.state().lock().commit_created(created, released, lacking * granule);
    let Some((error, free)) = failed else { return Ok(()) };
    if !error.is_out_of_memory() {
        return Err(error.into());
    }
    Err(sleeps_on(error, lacking * granule, free))
}

fn sleeps_on(error: DeviceError, needs: u64, free: u64) -> AllocError {
    let [needs, free] = [needs, free].map(Bytes);
    error
        .of_request("the memory still sleeps")
        .with_detail(format!(
            "waking up needs {needs}, and the device has {free} free: free memory there, or drop allocations, and wake \
             again"
        ))
        .into()
}

/// Maps sleeping ranges and restores their contents. All of it leaves the list, or nothing.
fn restore(
    allocator: &Allocator,
    ranges: &mut Vec<SleepingRange>,
    granule: u64,
    access: &[u32],
) -> Result<(), AllocError> {
    if ranges.iter().any(|one| one.mapped > 0 && one.place == ContentsPlace::Elsewhere) {
        // The last attempt may have failed while waiting for its copies.
        allocator.device().synchronize_enqueued()?;
    }
    for one in ranges.iter_mut().filter(|one| one.place != ContentsPlace::InPlace) {
        map_frames(allocator.device(), one.range.start, granule, &one.frames, &mut one.mapped, access)?;
    }
    let lost = ranges.iter().filter(|one| one.place == ContentsPlace::Elsewhere);
    for one in lost.clone() {
        allocator.state().tell_witness(|witness| witness.lost(one.range.clone()));
    }
    let mut saved = lost.flat_map(|one| &one.saved).peekable();
    let (mut spare, mut used) = (Vec::new(), Vec::new());
    if saved.peek().is_some() {
        let mut mover = Mover::new(allocator.device(), &mut spare)?;
        saved.try_for_each(|saved| mover.restore(saved))?;
        used = mover.finish()?;
    }
    let mapped = allocator.state().lock().commit_mapped(ranges);
    // This removes files.
    ranges.clear();
    let spare = used.into_iter().filter_map(Arc::into_inner).map(Mutex::into_inner);
    allocator.state().shared().keep_host_buffers(spare);
    mapped.iter().for_each(|range| allocator.hooks().mapped(range.start, range.end - range.start));
    Ok(())
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod part_tests;
