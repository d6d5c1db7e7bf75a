//! Mappings that linger where frames moved away before the device was done with them.

use crate::core::Core;
use crate::core::paged::frames::{Frame, Lingering, granules_of};
use crate::core::remap::donors::Donor;
use crate::history::Action;
use crate::types::{StreamId, Use};

impl Core {
    /// Accounts for donors that the device was not done with. `unmoved` has the frames of each that are
    /// mapped nowhere else. Returns how many bytes left their addresses.
    pub(crate) fn commit_reused(&mut self, stream: StreamId, donors: &[Donor], unmoved: Vec<Vec<Frame>>) -> u64 {
        let mut left = 0;
        for (donor, unmoved) in donors.iter().zip(unmoved) {
            let range = donor.addr..donor.addr + donor.bytes;
            let region = self.heap.region_of(donor.block);
            let (pool, of_region) = (region.pool, region.stream);
            let Some(paged) = self.paged.as_mut() else { continue };
            if granules_of(&unmoved) * paged.granule == donor.bytes {
                paged.put_all(donor.addr, &unmoved);
                self.heap.unhold_as_free(donor.block);
                continue;
            }
            paged.mapped_bytes[pool.kind() as usize] -= donor.bytes;
            let Donor { block, after, .. } = *donor;
            self.heap.empty_held(block);
            let Some(paged) = self.paged.as_mut() else { continue };
            let last_use = Use { stream, after };
            paged.lingering.push(Lingering { block, range, last_use, unmoved });
            self.note_mapping(Action::SegmentUnmap, pool, of_region, donor.addr, donor.bytes);
            left += donor.bytes;
        }
        left
    }

    /// Accounts for a mapping that was taken off the list: it is gone, or lingers on.
    pub(crate) fn commit_unmapped(&mut self, lingering: Lingering, gone: bool) {
        let Some(paged) = self.paged.as_mut() else { return };
        paged.in_hands -= granules_of(&lingering.unmoved);
        if gone {
            paged.spares.extend(lingering.unmoved);
            self.heap.unhold_as_hole(lingering.block);
        } else {
            paged.lingering.push(lingering);
        }
    }

    /// The uses that such mappings wait for.
    pub(crate) fn lingering_not_done(&self) -> Vec<Use> {
        let all = self.paged.iter().flat_map(|paged| &paged.lingering).map(|one| one.last_use);
        all.filter(|&one| !self.streams.is_done(one)).collect()
    }

    /// True if there are such mappings, done or not.
    pub(crate) fn has_lingering(&self) -> bool {
        self.paged.as_ref().is_some_and(|paged| !paged.lingering.is_empty())
    }

    /// True if the device may be using memory through such a mapping.
    pub(crate) fn may_use_lingering(&self) -> bool {
        self.paged.as_ref().is_some_and(|paged| !paged.lingering.iter().all(|one| self.streams.is_done(one.last_use)))
    }

    /// Takes the mappings off the list that the device is known to be done with.
    pub(crate) fn take_lingering(&mut self) -> Vec<Lingering> {
        let Core { paged: Some(paged), streams, .. } = self else { return Vec::new() };
        let all = std::mem::take(&mut paged.lingering);
        let (done, rest) = all.into_iter().partition::<Vec<_>, _>(|one| streams.is_done(one.last_use));
        paged.lingering = rest;
        paged.in_hands += done.iter().map(|one| granules_of(&one.unmoved)).sum::<u64>();
        done
    }
}
