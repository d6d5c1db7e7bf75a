//! Memory apart: memory mapped for one owner at addresses of its own, outside of every heap ([`crate::Growable`], [`crate::Exportable`]).
//!
//! It counts in `reserved` and `allocated` as a block of the large pool. Memory that its owner gives up is *retired*: it is listed with a
//! tick of each stream that used it, which makes no driver call. Later operations on mappings unmap retired memory whose ticks are done,
//! and recycle or release it. Ticks that are not known done are asked about and waited for together with those of free blocks
//! (`donors.rs`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::internal::{Reservation, Timeline};
use aquifer_device::{DeviceError, DevicePtr, RawPhysical};

use crate::accounting::tally::Tally;
use crate::allocator::Allocator;
use crate::backing::headroom::Refusal;
use crate::backing::paged::carry_out::unmap_range;
use crate::backing::paged::frames::Frame;
use crate::backing::paged::granules::Purpose;
use crate::backing::paged::retired::Retired;
use crate::backing::paged::trim::unless_capturing;
use crate::cross_stream::ticks::Use;
use crate::error::AllocError;
use crate::history::{Action, Actions, Subject};
use crate::recovery::oom::Tried;
use crate::shell::core::{Core, Request};
use crate::shell::whole::Whole;
use crate::size_class::PoolKind;
use crate::tags::Tag;

/// The pool that memory apart counts in: the default large one.
pub(crate) const POOL: u16 = PoolKind::Large as u16;

/// The part of a reservation that its owner has, from the first address on. All sizes are 0 while the owner has nothing yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owned {
    /// Bytes, a multiple of a granule.
    pub(crate) size: u64,
    /// Requested bytes.
    pub(crate) requested: u64,
    /// The stream that it was made for.
    pub(crate) slot: u32,
    pub(crate) tag: Tag,
}

impl Allocator {
    /// Serves a request outside of the heaps by calling `attempt` until it succeeds. Between attempts it makes room as the ladder does: it
    /// gives unused memory back to the device, waiting for streams where needed, and runs reclaimers. The `own` bytes that the owner has
    /// already cannot be given up for the request.
    pub(crate) fn climb_apart<T>(
        &self,
        request: &Request,
        own: u64,
        mut attempt: impl FnMut() -> Result<Result<T, Refusal>, AllocError>,
    ) -> Result<T, AllocError> {
        let mut tried = Tried { apart: true, own, ..Tried::default() };
        match attempt()? {
            Ok(served) => return Ok(served),
            Err(refusal) => tried.refusal = Some(refusal),
        }
        // The calls that make room would break the capture.
        self.refuse_unannounced_capture(request.slot)?;
        if self.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
            self.shell().count(|counters| &counters.num_oom_rejections);
            return Err(self.out_of_memory(request, tried));
        }
        let mut reclaimers = self.ask_reclaimers(request);
        loop {
            // Addresses come back only where nothing is mapped any more.
            let lacks_addresses = tried.refusal == Some(Refusal::Addresses);
            let target = if lacks_addresses { 0 } else { self.may_stay_beside(request.size) };
            tried.released += self.trim_to(target)?;
            self.shell().count(|counters| &counters.num_alloc_retries);
            match attempt()? {
                Ok(served) => return Ok(served),
                Err(refusal) => tried.refusal = Some(refusal),
            }
            if !reclaimers.ask() {
                // Memory that other threads were moving was on no list when it was looked for.
                self.gate()?.wait();
                return attempt()?.map_err(|refusal| {
                    tried.refusal = Some(refusal);
                    tried.reclaimers = reclaimers.into_answers();
                    self.out_of_memory(request, tried)
                });
            }
        }
    }

    /// How many bytes may stay reserved if the device is to give so many more, within the limit and beside the headroom. As many go at least:
    /// the device may refuse memory that it says is free.
    fn may_stay_beside(&self, bytes: u64) -> u64 {
        let reserved = self.memory_reserved();
        let free = self.device().memory_info().map_or(u64::MAX, |memory| memory.free);
        let on_device = reserved.saturating_add(free).saturating_sub(self.config().headroom);
        self.limit().unwrap_or(u64::MAX).min(on_device).min(reserved).saturating_sub(bytes)
    }

    /// Unmaps retired memory that is known done. Its frames become spare; those of exportable memory go back to the device. Returns how
    /// many bytes went back.
    pub(crate) fn recycle_retired(&self) -> Result<u64, AllocError> {
        if self.device().is_capturing() || !self.shell().core().is_recyclable() {
            return Ok(0);
        }
        // Exclusive, so that a reservation never goes before the last memory mapped in it.
        let _alone = self.gate()?.exclusive();
        let mut released = 0;
        loop {
            let leaving = self.shell().core().begin_recycling();
            let Some(leaving) = leaving else { break };
            let failed = self.unmap_leaving(&leaving);
            let mut whole = self.shell().part(None);
            let frames = whole.settle_recycling(leaving, failed.is_none());
            let bytes = frames.iter().map(|&(_, bytes)| bytes).sum::<u64>();
            whole.leaving += bytes;
            drop(whole);
            self.release_freed(frames);
            self.shell().core().leaving -= bytes;
            released += bytes;
            if let Some(error) = failed {
                // A capture that began meanwhile.
                return unless_capturing(Err(error)).map(|()| released).map_err(AllocError::from);
            }
        }
        loop {
            let vacant = self.shell().core().take_vacant_reservation();
            let Some((ptr, bytes)) = vacant else { return Ok(released) };
            if let Err(error) = self.device().driver().unreserve(ptr, bytes) {
                self.device().unreserve_later(Reservation { ptr, bytes, mapped: Vec::new() });
                return Err(error.into());
            }
        }
    }

    /// Unmaps retired memory. Returns the error, if any; the memory is then mapped still, and stays retired.
    fn unmap_leaving(&self, leaving: &Leaving) -> Option<DeviceError> {
        let Retired { range, was_told, .. } = &leaving.retired;
        if *was_told {
            unmap_range(self.device(), self.hooks(), range).err()
        } else {
            self.device().unmap(DevicePtr(range.start), range.end - range.start).err()
        }
    }

    /// Releases frames that are of no use to others. What the driver keeps is left to the device, which warns if it fails once more.
    fn release_freed(&self, freed: Vec<(RawPhysical, u64)>) {
        for (physical, _) in freed {
            if let Err(error) = self.device().driver().release_physical(physical) {
                tracing::debug!(%error, "memory could not be given back; it will be tried again");
                self.device().release_later(physical);
            }
        }
    }
}

/// Retired memory while the driver unmaps it.
struct Leaving {
    retired: Retired,
    purpose: Purpose,
    frames: Vec<Frame>,
}

impl Core {
    /// Takes one piece of retired memory that is done off the list.
    fn begin_recycling(&mut self) -> Option<Leaving> {
        let Core { paged, timelines, .. } = self;
        let paged = paged.as_mut().filter(|paged| paged.absent.is_none())?;
        let retired = paged.retired.take_done(|slot| done_until(timelines, slot))?;
        let purpose = paged.purpose_of(retired.base)?;
        let frames = paged.forget_mapped(retired.range.start, retired.range.end - retired.range.start);
        Some(Leaving { retired, purpose, frames })
    }
}

impl Whole {
    /// Accounts for retired memory after the driver unmapped it, or failed to. Returns the frames that are of no use to others, with their
    /// bytes.
    fn settle_recycling(&mut self, leaving: Leaving, unmapped: bool) -> Vec<(RawPhysical, u64)> {
        let Leaving { retired, purpose, frames } = leaving;
        let Some(paged) = &mut self.paged else { return Vec::new() };
        let Range { start, end } = retired.range;
        if !unmapped {
            paged.put_all(start, &frames);
            paged.retired.put_back(retired);
            return Vec::new();
        }
        paged.mapped_bytes[PoolKind::Large as usize] -= end - start;
        let slot = paged.owned.get(&retired.base).map_or(0, |owned| owned.slot);
        paged.retired.forget(retired.base);
        let frames = if purpose == Purpose::Exportable {
            frames.into_iter().map(|frame| (frame.physical, end - start)).collect()
        } else {
            paged.spares.extend(frames);
            Vec::new()
        };
        self.note_mapping(Action::SegmentUnmap, POOL, slot, start, end - start);
        self.counters().num_device_free.add(1);
        self.account_for_granules();
        frames
    }

    /// Adds the retired granules to those that ticks not known done keep from moving, by tick.
    pub(crate) fn add_retired(&self, not_done: &mut BTreeMap<Use, u64>) {
        let ticks = self.paged.iter().flat_map(|paged| paged.retired.ticks());
        for (tick, granules) in ticks.filter(|&((slot, after), _)| !self.is_known_done(slot, after)) {
            *not_done.entry(tick).or_default() += granules;
        }
    }

    /// Bytes in blocks that are in use, memory apart included.
    pub(crate) fn in_use(&self) -> u64 {
        let apart = self.paged.as_ref().map_or(0, |paged| paged.owned_bytes);
        apart + self.in_use_in_heaps()
    }

    /// Bytes of an owner's part of its reservation.
    pub(crate) fn owned_size(&self, base: u64) -> u64 {
        self.paged.as_ref().and_then(|paged| paged.owned.get(&base)).map_or(0, |owned| owned.size)
    }

    /// Sets the size of an owner's part of its reservation, and notes that in statistics and history.
    pub(crate) fn set_owned(&mut self, base: u64, size: u64, requested: u64) {
        let Some(paged) = &mut self.paged else { return };
        let Some(owned) = paged.owned.get_mut(&base) else { return };
        let before = *owned;
        (owned.size, owned.requested) = (size, requested);
        paged.owned_bytes = paged.owned_bytes - before.size + size;
        self.count_owned(before, size, requested);
        let subject = |size| Subject { addr: base, size, slot: before.slot, tag: before.tag, pool: 0 };
        let mut history = self.shell.history.lock();
        if before.size > 0 {
            history.note(Actions::FREE, subject(before.requested));
        }
        if size > 0 {
            history.note(Action::Alloc, subject(requested));
        }
    }

    fn count_owned(&self, before: Owned, size: u64, requested: u64) {
        // Arenas may publish meanwhile: not all of their locks are held.
        let _publishing = self.shell.publishing.lock();
        let tally = Tally::Shared(self.shell);
        if before.size > 0 {
            tally.freed(PoolKind::Large, before.size, before.requested);
        }
        if size > 0 {
            tally.allocated(PoolKind::Large, size, requested);
        }
    }
}

impl Core {
    /// True if retired memory is known done, or addresses may go back. Not while the allocator sleeps: nothing is behind the addresses then.
    fn is_recyclable(&mut self) -> bool {
        let Core { paged, timelines, .. } = self;
        let paged = paged.as_mut().filter(|paged| paged.absent.is_none());
        paged.is_some_and(|paged| paged.retired.any_done(|slot| done_until(timelines, slot)))
    }

    /// Forgets a reservation whose owner is gone and in which no memory is mapped. Returns its addresses and length.
    fn take_vacant_reservation(&mut self) -> Option<(DevicePtr, u64)> {
        let paged = self.paged.as_mut().filter(|paged| paged.absent.is_none())?;
        let base = paged.retired.take_vacant()?;
        paged.owned.remove(&base);
        Some((DevicePtr(base), paged.remove_reservation(base)))
    }

    /// Retires a range of a reservation that its owner gives up and that the streams `users` used.
    pub(crate) fn retire(&mut self, base: u64, range: Range<u64>, users: &[u32]) {
        let uses = users.iter().map(|&slot| (slot, self.tick_of(slot))).collect();
        if let Some(paged) = self.paged.as_mut().filter(|_| !range.is_empty()) {
            paged.retired.add(Retired { base, range, uses, was_told: true });
        }
    }
}

/// The tick that the stream's timeline is known to have reached. A stream that was never registered has no work to be waited for.
fn done_until(timelines: &[Option<Arc<Timeline>>], slot: u32) -> u64 {
    timelines.get(slot as usize).and_then(Option::as_ref).map_or(u64::MAX, |timeline| timeline.frontier())
}
