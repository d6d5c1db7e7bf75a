//! Memory apart: mapped for one owner at addresses of its own, outside of every heap ([`crate::Growable`],
//! [`crate::Exportable`]).
//!
//! It counts in `reserved` and `allocated` as a block of the large pool. What its owner gives up is *retired* with a tick of each
//! stream that used it, which makes no driver call; later operations on mappings unmap what is done, and recycle or release it.
//! Ticks that are not known done are asked about, and waited for, with those of free blocks (`donors.rs`).

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::{DeviceError, DevicePtr, RawPhysical, Reservation};

use crate::accounting::tally::Tally;
use crate::allocator::Allocator;
use crate::backing::paged::carry_out::unmap_range;
use crate::backing::paged::granules::Purpose;
use crate::backing::segments::Refusal;
use crate::error::AllocError;
use crate::history::{Action, Actions, Subject};
use crate::recovery::oom::Tried;
use crate::shell::core::{Core, Request};
use crate::shell::whole::Whole;
use crate::size_class::PoolKind;
use crate::tags::Tag;

/// The default large pool, as part of which memory apart counts.
pub(crate) const POOL: u16 = PoolKind::Large as u16;

/// What an owner has of its reservation, from the first address on. Bytes are 0 for one that has nothing yet.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owned {
    /// Bytes, a multiple of a granule.
    pub(crate) size: u64,
    /// Bytes asked for.
    pub(crate) requested: u64,
    /// The stream it was made for.
    pub(crate) slot: u32,
    pub(crate) tag: Tag,
}

/// Memory that its owner gave up.
#[derive(Debug)]
pub(crate) struct Retired {
    /// The reservation that it is in.
    pub(crate) base: u64,
    pub(crate) range: Range<u64>,
    /// Streams that used it, and where their timelines must have got to.
    pub(crate) uses: Vec<(u32, u64)>,
    /// Whether the addresses go with it.
    pub(crate) whole: bool,
}

impl Allocator {
    /// Serves a request outside of the heaps. Between attempts it makes room as the ladder does: what is unused goes back to
    /// the device, after the streams that it waits for, and reclaimers are asked. Of what its owner has already, `own` bytes, nothing can
    /// be given up for it.
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
        // What makes room would break it.
        self.refuse_unannounced_capture(request.slot)?;
        if self.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
            self.shell().count(|counters| &counters.num_oom_rejections);
            return Err(self.out_of_memory(request, tried));
        }
        let mut reclaimers = self.ask_reclaimers(request);
        loop {
            tried.released += self.trim_to(self.reserved_bytes().saturating_sub(request.size))?;
            self.shell().count(|counters| &counters.num_alloc_retries);
            match attempt()? {
                Ok(served) => return Ok(served),
                Err(refusal) => tried.refusal = Some(refusal),
            }
            match reclaimers.ask() {
                Some(freed) => tried.reclaimed = tried.reclaimed.saturating_add(freed),
                None => {
                    // Memory in the hands of other threads was on no list when it was looked for.
                    self.gate().wait();
                    return attempt()?.map_err(|refusal| {
                        tried.refusal = Some(refusal);
                        self.out_of_memory(request, tried)
                    });
                }
            }
        }
    }

    /// Unmaps what owners gave up, as far as it is known done: granules become spare, and those made for an owner of their own
    /// go back to the device. Tells how many bytes did.
    pub(crate) fn recycle_retired(&self) -> Result<u64, AllocError> {
        if self.shell().core().recyclable().is_none() {
            return Ok(0);
        }
        // Alone, so that addresses never go before the last memory behind them.
        let _alone = self.gate().exclusive();
        let mut released = 0;
        loop {
            let mut whole = self.shell().whole();
            let Some(leaving) = whole.begin_recycling() else { return Ok(released) };
            drop(whole);
            let failed = self.unmap_leaving(&leaving);
            let mut whole = self.shell().whole();
            let Freed { granules, addresses } = whole.settle_recycling(leaving, failed.is_none());
            drop(whole);
            released += self.release_freed(granules);
            if let Some(error) = failed {
                return Err(error.into());
            }
            if let Some((ptr, bytes)) = addresses
                && let Err(error) = self.device().driver().unreserve(ptr, bytes)
            {
                self.device().unreserve_later(Reservation { ptr, bytes, mapped: Vec::new() });
                return Err(error.into());
            }
        }
    }

    /// Unmaps memory on its way back; tells what stopped that. What is still mapped then stays retired.
    fn unmap_leaving(&self, leaving: &Leaving) -> Option<DeviceError> {
        let range = &leaving.retired.range;
        if leaving.granules.is_empty() { None } else { unmap_range(self.device(), self.hooks(), range).err() }
    }

    /// Releases granules that serve nobody else; tells how many bytes.
    fn release_freed(&self, freed: Vec<(RawPhysical, u64)>) -> u64 {
        for &(physical, _) in &freed {
            if let Err(error) = self.device().driver().release_physical(physical) {
                tracing::warn!(%error, "memory could not be given back; it will be tried again");
                self.device().release_later(physical);
            }
        }
        freed.iter().map(|&(_, bytes)| bytes).sum()
    }
}

/// What serves nobody any more.
#[derive(Default)]
struct Freed {
    /// Granules of no use to others, with their bytes.
    granules: Vec<(RawPhysical, u64)>,
    addresses: Option<(DevicePtr, u64)>,
}

/// Retired memory that the driver is asked to unmap.
struct Leaving {
    retired: Retired,
    purpose: Purpose,
    granules: Vec<RawPhysical>,
}

impl Whole {
    /// Takes retired memory that is done.
    fn begin_recycling(&mut self) -> Option<Leaving> {
        let at = self.recyclable()?;
        let paged = self.paged.as_mut()?;
        let retired = paged.retired.swap_remove(at);
        let purpose = paged.purpose_of(retired.base)?;
        let granules = paged.forget_mapped(retired.range.start, retired.range.end - retired.range.start);
        Some(Leaving { retired, purpose, granules })
    }

    /// Accounts for what became of retired memory; tells what serves nobody any more.
    fn settle_recycling(&mut self, leaving: Leaving, unmapped: bool) -> Freed {
        let Leaving { retired, purpose, granules } = leaving;
        let Some(paged) = &mut self.paged else { return Freed::default() };
        let Range { start, end } = retired.range;
        if !unmapped {
            paged.put_all(start, &granules);
            paged.retired.push(retired);
            return Freed::default();
        }
        paged.mapped_bytes[PoolKind::Large as usize] -= end - start;
        let slot = paged.owned.get(&retired.base).map_or(0, |owned| owned.slot);
        let granules = if purpose == Purpose::Exportable {
            granules.into_iter().map(|physical| (physical, end - start)).collect()
        } else {
            paged.spares.extend(granules);
            Vec::new()
        };
        let addresses = retired.whole.then(|| {
            paged.owned.remove(&retired.base);
            (DevicePtr(retired.base), paged.remove_reservation(retired.base))
        });
        if start < end {
            self.note_mapping(Action::SegmentUnmap, POOL, slot, start, end - start);
            self.counters().num_device_free.add(1);
        }
        self.account_for_granules();
        Freed { granules, addresses }
    }

    /// Adds retired granules to those that ticks keep from moving, by tick.
    pub(crate) fn add_retired(&self, not_done: &mut BTreeMap<(u32, u64), u64>) {
        let Some(paged) = &self.paged else { return };
        for retired in &paged.retired {
            for &(slot, after) in retired.uses.iter().filter(|&&(slot, after)| !self.is_known_done(slot, after)) {
                *not_done.entry((slot, after)).or_default() +=
                    (retired.range.end - retired.range.start) / paged.granule;
            }
        }
    }

    /// Bytes in blocks that are in use, memory apart included.
    pub(crate) fn in_use(&self) -> u64 {
        let apart = self.paged.iter().flat_map(|paged| paged.owned.values()).map(|owned| owned.size).sum::<u64>();
        apart + self.heaps().map(crate::heap::Heap::in_use).sum::<u64>()
    }

    /// How long an owner's part of its reservation is, in bytes.
    pub(crate) fn owned_size(&self, base: u64) -> u64 {
        self.paged.as_ref().and_then(|paged| paged.owned.get(&base)).map_or(0, |owned| owned.size)
    }

    /// Makes an owner's part of its reservation this long, in statistics and history.
    pub(crate) fn set_owned(&mut self, base: u64, size: u64, requested: u64) {
        let Some(paged) = &mut self.paged else { return };
        let Some(owned) = paged.owned.get_mut(&base) else { return };
        let before = *owned;
        (owned.size, owned.requested) = (size, requested);
        let tally = Tally::Shared(self.shell);
        let subject = |size| Subject { addr: base, size, slot: before.slot, tag: before.tag, pool: 0 };
        let mut history = self.shell.history.lock();
        if before.size > 0 {
            tally.freed(PoolKind::Large, before.size, before.requested);
            history.note(Actions::FREE, subject(before.requested));
        }
        if size > 0 {
            tally.allocated(PoolKind::Large, size, requested);
            history.note(Action::Alloc, subject(requested));
        }
    }
}

impl Core {
    /// Where in the list there is retired memory that is done; addresses go last.
    fn recyclable(&self) -> Option<usize> {
        // While the allocator sleeps there is nothing behind the addresses.
        let retired = &self.paged.as_ref().filter(|paged| paged.absent.is_none())?.retired;
        let is_done = |one: &Retired| one.uses.iter().all(|&(slot, after)| self.is_known_done(slot, after));
        let is_last = |one: &Retired| !one.whole || retired.iter().filter(|other| other.base == one.base).count() == 1;
        retired.iter().position(|one| is_done(one) && is_last(one))
    }

    /// An owner gives up the part of its reservation from `from` to `to`, which these streams used.
    pub(crate) fn retire(&mut self, base: u64, range: Range<u64>, users: &[u32], whole: bool) {
        let uses = users.iter().map(|&slot| (slot, self.tick_of(slot))).collect();
        if let Some(paged) = &mut self.paged {
            paged.retired.push(Retired { base, range, uses, whole });
        }
    }
}
