//! Sleep: all mapped memory goes back to the device, while its addresses, and every live allocation there, stay what they are.
//!
//! *Absent* memory is listed by range, with its frames as long as they are not released, and its contents if they were saved. Falling
//! asleep and waking up work on that list and note each step in it, so either can stop anywhere: if falling asleep is interrupted, waking
//! up undoes it; if waking up is interrupted, it is continued where it stopped. Saved contents are kept until their memory is back in use.
//!
//! While the list exists, nothing is mapped, moved, trimmed or allocated, and frees only change the heap. Segments, exportable memory and
//! frames with pinned granules stay where they are, because others know their addresses.

use std::ops::Range;

use aquifer_device::{DeviceError, DevicePtr, PhysicalOptions, Stream};

use crate::allocator::Allocator;
use crate::backing::paged::carry_out::unmap_range;
use crate::backing::paged::frames::{Frame, granules_of, sizes};
use crate::error::AllocError;
use crate::shell::special;
use crate::size_class::PoolKind;
use crate::sync::atomic::Ordering;

/// Fate of the contents of memory while the allocator sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// The contents are lost: after [`Allocator::wake`] the memory is uninitialised.
    Discard,
    /// The contents are kept in host memory, which takes as many bytes as the device gets back. [`Allocator::wake`] restores them.
    SaveToHost,
}

/// Addresses that have no memory until the allocator wakes up.
#[derive(Debug)]
pub(crate) struct Absent {
    pub(crate) range: Range<u64>,
    kind: PoolKind,
    /// Frames that exist for the range, from the lowest address on,
    pub(crate) frames: Vec<Frame>,
    /// and how many of them are mapped.
    pub(crate) mapped: usize,
    /// Granules of the largest frame that the range had.
    largest: u32,
    saved: Option<Vec<u8>>,
}

impl Absent {
    /// Number of granules in the range.
    fn places(&self, granule: u64) -> u64 {
        (self.range.end - self.range.start) / granule
    }
}

impl Allocator {
    /// Gives mapped memory back to the device until [`Allocator::wake`]. Returns how many bytes went back, cached memory
    /// included, which does not come back. Addresses stay reserved: after
    /// waking up, allocations and their pointers are as before, and meanwhile they may be dropped. Segments,
    /// exportable memory and pinned granules stay.
    ///
    /// This first waits for the end of all that keeps the allocator awake: turns ([`crate::Turn`]) and claims ([`crate::Claim`]) with its
    /// memory, and [`Allocator::keep_awake`]. Then it waits for the device. So kernels that other threads launch come before the sleep or
    /// are refused, and transfers that were begun are enqueued first (those that convert on the device after arrival do so when they are
    /// waited for). The call never returns if it waits for a claim that only this thread would drop, or for a thread that itself waits for
    /// this one, for example because that thread puts another allocator to sleep, which this thread keeps awake.
    ///
    /// Until the allocator wakes up, turns and claims with its memory, and allocations, fail with [`AllocError::Asleep`]; work that
    /// bypasses turns must not touch its memory. Threads that allocate while it falls asleep may still be served, with memory that is there
    /// after waking up. Statistics count the memory held now; snapshots show the memory that will be there after waking up. If the
    /// allocator sleeps already, this does nothing.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, Contents};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// let weights = allocator.alloc_bytes(4 << 20, &stream)?;
    /// stream.fill(weights.ptr(), 7, 4 << 20)?;
    /// assert_eq!(allocator.sleep(Contents::SaveToHost)?, 4 << 20);
    /// assert_eq!(allocator.memory_reserved(), 0); // another program may use the device now
    /// allocator.wake()?;
    /// let mut byte = [0];
    /// stream.download_blocking(&mut byte, weights.ptr())?;
    /// assert_eq!(byte, [7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::NotMapped`] where memory comes in segments; [`AllocError::KeptAwake`] while this very thread keeps the allocator
    /// awake; [`AllocError::OutOfHostMemory`]; errors of the driver. The allocator is then awake as before, with its contents unless they
    /// were to be discarded. If the driver fails at waking it up, too, [`Allocator::is_asleep`] is true, and [`Allocator::wake`] can be
    /// tried.
    pub fn sleep(&self, contents: Contents) -> Result<u64, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Unmap)?;
        if self.shell().core().paged.is_none() {
            return Err(self.not_mapped("sleep"));
        }
        if self.shell().is_kept_awake_here() {
            return Err(AllocError::KeptAwake);
        }
        let _one_at_a_time = self.gate()?.sleep();
        if self.shell().core().is_asleep() {
            return Ok(0);
        }
        // Outside of the gate: threads that keep the allocator awake may have to pass the gate before they end that.
        self.shell().grow_drowsy();
        let cached = self.empty_cache().inspect_err(|_| self.shell().end_drowsiness())?;
        let _alone = self.gate()?.exclusive();
        self.fall_asleep();
        let in_use = self.give_all_back(contents).inspect_err(|_| {
            if let Err(error) = self.bring_back() {
                tracing::warn!(%error, "falling asleep failed and could not be undone; the allocator is asleep");
            }
        })?;
        Ok(cached + in_use)
    }

    /// Ends [`Allocator::sleep`]: takes as much memory from the device as was given back, even for allocations dropped meanwhile, maps it
    /// where it was, and restores saved contents. The limit is not checked, because this memory was held before. If the allocator is awake
    /// already, this does nothing. While another thread puts it to sleep, this waits for that first, unless this thread keeps the allocator
    /// awake.
    ///
    /// # Errors
    /// Errors of the driver. If the device lacks memory, everything taken so far goes back to it. The allocator is still asleep then,
    /// nothing is lost, and this can be tried again.
    pub fn wake(&self) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Map)?;
        if self.shell().is_kept_awake_here() {
            return Ok(());
        }
        let _one_at_a_time = self.gate()?.sleep();
        let _alone = self.gate()?.exclusive();
        self.bring_back()
    }

    /// True if the allocator sleeps, or is about to and refuses turns already. To wait for the end of that, see [`Allocator::wait_awake`].
    pub fn is_asleep(&self) -> bool {
        self.shell().is_drowsy()
    }

    /// Makes the allocator refuse allocations from now on.
    fn fall_asleep(&self) {
        if let Some(paged) = &mut self.shell().core().paged {
            paged.absent = Some(Vec::new());
        }
        self.shell().special().fetch_or(special::ASLEEP, Ordering::Relaxed);
    }

    fn give_all_back(&self, contents: Contents) -> Result<u64, AllocError> {
        self.device().settle();
        self.device().synchronize()?;
        let core = self.shell().core();
        let present = core.paged.as_ref().map(|paged| paged.not_pinned(&core.pins)).unwrap_or_default();
        drop(core);
        let mut saved = Vec::with_capacity(present.len());
        let copies = if contents == Contents::SaveToHost { Some(self.device().stream()?) } else { None };
        let moves = self.device().checks().map(|checks| checks.move_contents());
        for (range, _) in &present {
            saved.push(copies.as_ref().map(|stream| save(stream, range)).transpose()?);
        }
        drop(moves);
        for ((range, kind), saved) in present.into_iter().zip(saved) {
            unmap_range(self.device(), self.hooks(), &range)?;
            let mut whole = self.shell().whole();
            let Some(paged) = &mut whole.paged else { continue };
            let frames = paged.forget_mapped(range.start, range.end - range.start);
            paged.mapped_bytes[kind as usize] -= range.end - range.start;
            paged.in_hands += granules_of(&frames);
            let largest = frames.iter().map(|frame| frame.granules.get()).max().unwrap_or(1);
            paged.absent.get_or_insert_default().push(Absent { range, kind, frames, largest, mapped: 0, saved });
            whole.account_for_granules();
        }
        Ok(self.release_absent()?)
    }

    /// Releases the frames of all absent memory. Returns how many bytes.
    fn release_absent(&self) -> Result<u64, DeviceError> {
        let mut core = self.shell().core();
        let Some(paged) = &mut core.paged else { return Ok(0) };
        // The list is empty while this thread works on it.
        let (granule, mut absent) = (paged.granule, paged.absent.replace(Vec::new()).unwrap_or_default());
        let mut spares: Vec<Frame> = std::mem::take(&mut paged.spares).iter().collect();
        paged.in_hands += granules_of(&spares);
        drop(core);
        let mut released = 0;
        let lists = absent.iter_mut().map(|absent| &mut absent.frames).chain([&mut spares]);
        let failed = lists.map(|frames| self.release_all(frames, &mut released)).find_map(Result::err);
        let mut whole = self.shell().whole();
        if let Some(paged) = &mut whole.paged {
            paged.in_hands -= released + granules_of(&spares);
            paged.spares.extend(spares);
            paged.absent = Some(absent);
        }
        if released > 0 {
            whole.counters().num_device_free.add(1);
        }
        whole.account_for_granules();
        failed.map_or(Ok(released * granule), Err)
    }

    /// Releases frames, from the last one on, and counts their granules. Frames that the driver does not release stay in the list.
    fn release_all(&self, frames: &mut Vec<Frame>, released: &mut u64) -> Result<(), DeviceError> {
        while let Some(frame) = frames.last() {
            self.device().driver().release_physical(frame.physical)?;
            *released += frame.granules();
            frames.pop();
        }
        Ok(())
    }

    /// Maps memory at all absent ranges, and wakes the allocator up.
    fn bring_back(&self) -> Result<(), AllocError> {
        let mut core = self.shell().core();
        let Some(paged) = core.paged.as_mut() else { return Ok(()) };
        let Some(mut absent) = paged.absent.as_mut().map(std::mem::take) else { return Ok(()) };
        let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
        drop(core);
        let brought = self
            .create_absent(&mut absent, granule, options)
            .and_then(|()| self.restore(&mut absent, granule, &access));
        let mut core = self.shell().core();
        if let Some(paged) = core.paged.as_mut() {
            paged.absent = Some(absent).filter(|_| brought.is_err());
        }
        if brought.is_ok() {
            self.shell().special().fetch_and(!special::ASLEEP, Ordering::Relaxed);
            self.shell().end_drowsiness();
        }
        brought
    }

    /// Creates the frames that absent memory lacks. If the device lacks memory, those created go back.
    fn create_absent(&self, absent: &mut [Absent], granule: u64, options: PhysicalOptions) -> Result<(), AllocError> {
        self.device().settle();
        let (mut created, mut failed) = (0, None);
        'all: for absent in absent.iter_mut() {
            let lacking = absent.places(granule) - granules_of(&absent.frames);
            for size in sizes(lacking, absent.largest) {
                match self.device().driver().create_physical(u64::from(size) * granule, options) {
                    Ok(physical) => absent.frames.push(Frame::new(physical, size)),
                    Err(error) => {
                        failed = Some(error);
                        break 'all;
                    }
                }
                created += u64::from(size);
            }
        }
        let mut released = 0;
        if failed.is_some() {
            for absent in absent.iter_mut().filter(|absent| absent.mapped == 0) {
                if let Err(error) = self.release_all(&mut absent.frames, &mut released) {
                    tracing::debug!(%error, "memory is kept for another attempt to wake up");
                }
            }
        }
        let mut whole = self.shell().whole();
        if let Some(paged) = &mut whole.paged {
            paged.in_hands = paged.in_hands + created - released;
        }
        if created > released {
            whole.counters().num_device_alloc.add(1);
        }
        whole.account_for_granules();
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Maps absent memory, range by range, and restores its saved contents. A range that is done leaves the list.
    fn restore(&self, absent: &mut Vec<Absent>, granule: u64, access: &[u32]) -> Result<(), AllocError> {
        let driver = self.device().driver();
        if absent.iter().any(|absent| absent.mapped > 0) {
            // The last attempt may have failed while waiting for its copies.
            self.device().synchronize()?;
        }
        let is_saved = absent.iter().any(|absent| absent.saved.is_some());
        let copies = if is_saved { Some(self.device().stream()?) } else { None };
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
            if let (Some(saved), Some(copies)) = (&last.saved, &copies) {
                let _moves = self.device().checks().map(|checks| checks.move_contents());
                copies.upload_blocking(DevicePtr(start), saved)?;
            } else {
                self.shell().tell_checks(|checks| checks.lost(start..end));
            }
            let mut whole = self.shell().whole();
            if let Some(paged) = &mut whole.paged {
                paged.put_all(start, &last.frames);
                paged.mapped_bytes[last.kind as usize] += end - start;
                paged.in_hands -= granules_of(&last.frames);
            }
            whole.account_for_granules();
            drop(whole);
            absent.pop();
            self.hooks().mapped(start, end - start);
        }
        Ok(())
    }
}

/// Copies the contents of a range to host memory.
fn save(copies: &Stream, range: &Range<u64>) -> Result<Vec<u8>, AllocError> {
    let bytes = range.end - range.start;
    let out_of_host_memory = AllocError::OutOfHostMemory { bytes };
    let Ok(len) = usize::try_from(bytes) else { return Err(out_of_host_memory) };
    let mut saved = Vec::new();
    saved.try_reserve_exact(len).map_err(|_| out_of_host_memory)?;
    saved.resize(len, 0);
    copies.download_blocking(&mut saved, DevicePtr(range.start))?;
    Ok(saved)
}
