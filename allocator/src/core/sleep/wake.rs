//! The list of absent memory while some of it falls asleep or wakes up.

use std::ops::Range;

use aquifer_device::PhysicalOptions;
use aquifer_device::internal::HostBuffer;

use crate::backing::paged::sleep_options::Part;
use crate::core::Core;
use crate::core::paged::frames::{Frame, granules_of};
use crate::core::sleep::absent::{Absent, ContentsPlace};

/// What wakes up.
pub(crate) enum Waking<'a> {
    All,
    Parts(&'a [Part]),
    /// Ranges that were about to fall asleep.
    Ranges(Vec<Range<u64>>),
}

/// Memory that wakes up, and what its frames are made with.
pub(crate) struct Woken {
    pub(crate) absent: Vec<Absent>,
    /// What sleeps on.
    pub(crate) staying: Vec<Absent>,
    pub(crate) granule: u64,
    pub(crate) options: PhysicalOptions,
    pub(crate) access: Vec<u32>,
}

impl Core {
    /// Takes the pinned host memory that is kept for the contents of the next sleep.
    pub(crate) fn take_host_buffers(&mut self) -> Vec<HostBuffer> {
        self.paged.as_mut().map(|paged| std::mem::take(&mut paged.host_buffers)).unwrap_or_default()
    }

    pub(crate) fn keep_host_buffers(&mut self, buffers: impl IntoIterator<Item = HostBuffer>) {
        if let Some(paged) = &mut self.paged {
            paged.host_buffers.extend(buffers);
        }
    }

    /// Changes what is listed for absent memory that starts at an address.
    pub(crate) fn change_absent(&mut self, start: u64, change: impl FnOnce(&mut Absent)) {
        let Some(paged) = &mut self.paged else { return };
        if let Ok(at) = paged.absent.binary_search_by_key(&start, |absent| absent.range.start) {
            change(&mut paged.absent[at]);
        }
    }

    /// Takes out the list, and spare frames if everything sleeps, so that frames can be released.
    pub(crate) fn begin_release_absent(&mut self) -> Option<(Vec<Absent>, Vec<Frame>)> {
        let paged = self.paged.as_mut()?;
        let mut spares: Vec<Frame> = Vec::new();
        if paged.is_asleep {
            spares.extend(std::mem::take(&mut paged.spares).iter());
        }
        paged.in_hands += granules_of(&spares);
        Some((std::mem::take(&mut paged.absent), spares))
    }

    /// Accounts for `released` granules of frames that were released, and puts the list and the other
    /// spare frames back.
    pub(crate) fn commit_release_absent(&mut self, absent: Vec<Absent>, spares: Vec<Frame>, released: u64) {
        if let Some(paged) = &mut self.paged {
            paged.in_hands -= released + granules_of(&spares);
            paged.spares.extend(spares);
        }
        self.lift_cordon();
        let absent = self.forget_free(absent);
        self.relist(absent);
        self.counters.num_device_free.add(u64::from(released > 0));
        self.account_for_granules();
    }

    /// Lists memory as asleep that lacks its mapping, with its contents in frames.
    pub(crate) fn list_unmapped(&mut self, unmapped: Vec<Absent>) {
        let listed = self.paged.as_mut().map(|paged| std::mem::take(&mut paged.absent)).unwrap_or_default();
        self.lift_cordon();
        self.relist(listed.into_iter().chain(unmapped).collect());
    }

    /// Puts the list of absent memory back, and the cordon up around it, unless everything sleeps.
    fn relist(&mut self, mut absent: Vec<Absent>) {
        absent.sort_unstable_by_key(|absent| absent.range.start);
        if let Some(paged) = &mut self.paged {
            paged.absent = absent;
            paged.note_sleeping([&[], &[]]);
        }
        if !self.is_asleep() {
            self.put_cordon_up();
        }
    }

    /// Takes out what wakes up. `None` if nothing sleeps.
    pub(crate) fn begin_waking(&mut self, waking: &Waking) -> Option<Woken> {
        let paged = self.paged.as_mut().filter(|paged| paged.is_asleep || !paged.absent.is_empty())?;
        let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
        let absent = std::mem::take(&mut paged.absent);
        self.lift_cordon();
        // Blocks may have been freed meanwhile.
        let absent = self.forget_free(absent);
        let [absent, staying] = match waking {
            Waking::All => [absent, Vec::new()],
            Waking::Parts(parts) => self.divide_absent(absent, parts),
            Waking::Ranges(ranges) => {
                let falls = |absent: &Absent| ranges.iter().any(|range| range.contains(&absent.range.start));
                let (waking, staying) = absent.into_iter().partition(falls);
                [waking, staying]
            }
        };
        if let Some(paged) = &mut self.paged {
            paged.note_sleeping([&absent, &staying]);
        }
        if !self.is_asleep() {
            self.put_cordon_up();
        }
        Some(Woken { absent, staying, granule, options, access })
    }

    /// Accounts for frames that were created for absent memory, and released again, in granules.
    /// `lacking` bytes were to be created.
    pub(crate) fn commit_created(&mut self, created: u64, released: u64, lacking: u64) {
        if let Some(paged) = &mut self.paged {
            paged.in_hands = paged.in_hands + created - released;
        }
        self.counters.num_device_alloc.add(u64::from(created > released));
        self.account_for_granules();
        self.growing.end(lacking);
    }

    /// Accounts for absent memory that is mapped again. Returns the ranges that were not mapped before.
    pub(crate) fn commit_mapped(&mut self, absent: &[Absent]) -> Vec<Range<u64>> {
        let Some(paged) = &mut self.paged else { return Vec::new() };
        for Absent { range, kind, frames, .. } in absent {
            paged.put_all(range.start, frames);
            paged.mapped_bytes[*kind as usize] += range.end - range.start;
            paged.in_hands -= granules_of(frames);
        }
        self.account_for_granules();
        let mapped = absent.iter().filter(|absent| absent.place != ContentsPlace::InPlace);
        mapped.map(|absent| absent.range.clone()).collect()
    }

    /// Lists what still sleeps after an attempt to wake up. `has_woken` says whether it succeeded.
    pub(crate) fn end_waking(&mut self, absent: Vec<Absent>, has_woken: bool) {
        self.lift_cordon();
        if let Some(paged) = self.paged.as_mut().filter(|_| has_woken) {
            paged.is_asleep = false;
        }
        self.relist(absent);
    }
}
