//! Taking free frames out of the heap, on their way back to the device; and old mappings, where
//! frames moved away before the device was done with them.

use std::ops::Range;

use aquifer_device::Tick;

use crate::core::Core;
use crate::core::paged::frames::{Frame, LooseFrames, OldMapping, granules_of};
use crate::core::paged::granules::Stuck;
use crate::core::pools::Which;
use crate::core::remap::donors::Donor;
use crate::history::Action;
use crate::types::{BlockId, Use, latest_by_stream};

/// Frames on their way back to the device.
#[derive(Default)]
pub(crate) struct Trim {
    /// What they are in until they are unmapped, and their addresses.
    pub(crate) donors: Vec<Donor>,
    pub(crate) ranges: Vec<(Range<u64>, Vec<Frame>)>,
    /// Frames that are mapped nowhere, or not any more.
    pub(crate) loose: LooseFrames,
    /// Bytes of all of them.
    pub(crate) bytes: u64,
}

impl Core {
    /// What free memory in some pools, and old mappings, wait for.
    pub(crate) fn free_not_done(&mut self, which: Which) -> Vec<Tick> {
        let free = self.donors(u64::MAX, None, which).not_done;
        let may_unmap = which.has_default() && !self.streams.any_captures();
        let old = if may_unmap { self.old_mappings_not_done() } else { Vec::new() };
        self.streams.not_done(latest_by_stream(free.into_keys().chain(old)))
    }

    /// Takes free frames out of the heaps, and spare ones, until `target` bytes are held: those of
    /// the next blocks below an address, or, if that is `None`, of all blocks. Returns the address
    /// below which to go on; `None` if there are no more blocks.
    pub(crate) fn begin_trim(&mut self, trim: &mut Trim, below: Option<u64>, target: u64, which: Which) -> Option<u64> {
        let excess = self.reserved.saturating_sub(target);
        let paged = &mut self.paged;
        let granule = paged.granule;
        let wanted = excess.div_ceil(granule);
        let loose = paged.spares.take(if which.has_default() { wanted } else { 0 });
        let more = wanted.saturating_sub(loose.granules());
        let (donors, next) = match below {
            _ if more == 0 => (Vec::new(), None),
            Some(below) => self.donors_below(below, more, which),
            None => (self.donors(more, None, which).into_joined(), None),
        };
        let mut bytes = loose.granules() * granule;
        trim.loose.extend(loose.iter());
        for donor in self.hold_all(donors) {
            self.heap.empty_held(donor.block);
            let pool = self.note_donor(Action::SegmentUnmap, &donor);
            let paged = &mut self.paged;
            paged.mapped_bytes[pool.kind() as usize] -= donor.bytes;
            let frames = paged.forget_mapped(donor.addr, donor.bytes);
            trim.ranges.push((donor.addr..donor.addr + donor.bytes, frames));
            trim.donors.push(donor);
            bytes += donor.bytes;
        }
        trim.bytes += bytes;
        self.being_released += bytes;
        self.account_for_granules();
        next
    }

    /// How many granules of frames may go back to the device, beside the reserve, of those held and
    /// `loose` ones that were taken out.
    pub(crate) fn releasable(&self, loose: u64) -> u64 {
        let paged = &self.paged;
        if self.reserve == 0 {
            return u64::MAX;
        }
        (paged.frame_bytes() / paged.granule + loose).saturating_sub(self.reserve / paged.granule)
    }

    /// Adds frames to the reserve, of `begun` bytes that a thread was about to take.
    pub(crate) fn add_reserved(&mut self, frames: Vec<Frame>, begun: u64) {
        self.counters.events.num_device_alloc += u64::from(!frames.is_empty());
        self.paged.spares.extend(frames);
        self.account_for_granules();
        self.growing.end(begun);
    }

    /// Returns a held donor to its heap, as a hole if it was unmapped, otherwise with its frames.
    pub(crate) fn commit_trimmed(&mut self, donor: Donor, frames: &[Frame], was_unmapped: bool) {
        if was_unmapped {
            self.heap.unhold_as_hole(donor.block);
            self.counters.events.num_device_free += 1;
            return;
        }
        let pool = self.note_donor(Action::SegmentMap, &donor);
        self.heap.unhold_as_free(donor.block);
        let paged = &mut self.paged;
        paged.mapped_bytes[pool.kind() as usize] += donor.bytes;
        paged.put_all(donor.addr, frames);
    }

    /// Ends a trim: the loose frames are still here. What was bought so that less moves is not worth
    /// its memory any more.
    pub(crate) fn commit_trim(&mut self, bytes: u64, loose: &LooseFrames) {
        self.being_released -= bytes;
        let paged = &mut self.paged;
        paged.spares.extend(loose.iter());
        paged.moves = if bytes > 0 { 0 } else { paged.moves };
        self.account_for_granules();
    }

    /// Takes the mappings that have been stuck for longest. They stay in the table of what is
    /// mapped until they are unmapped.
    pub(crate) fn take_stuck(&mut self) -> Option<Stuck> {
        let paged = &mut self.paged;
        if paged.sleep.is_whole {
            return None;
        }
        let stuck = paged.stuck.pop_front()?;
        paged.in_flight += stuck.bytes() / paged.granule;
        Some(stuck)
    }

    /// Accounts for stuck mappings, of which the last `unmapped` were unmapped, and the others
    /// stay.
    pub(crate) fn commit_stuck(&mut self, mut stuck: Stuck, unmapped: usize) {
        let paged = &mut self.paged;
        paged.in_flight -= stuck.bytes() / paged.granule;
        for frame in stuck.frames.split_off(stuck.frames.len() - unmapped) {
            let loose = paged.forget_mapped(frame.start, frame.end - frame.start);
            paged.spares.extend(loose);
        }
        if stuck.frames.is_empty() {
            self.heap.unhold_as_hole(stuck.block);
        } else {
            paged.stuck.push_back(stuck);
        }
        self.account_for_granules();
    }

    /// Takes reservations of some pools that consist of one hole out of the heaps. Returns their
    /// addresses and lengths.
    pub(crate) fn take_empty_reservations(&mut self, which: Which) -> Vec<(u64, u64)> {
        let empty = self.heap.empty_reservations();
        let goes = |id: &BlockId| {
            let block = self.heap.block(*id);
            self.pools.is_among(block.pool, which) && !self.keeps_lent(block.pool, &block.range())
        };
        let empty: Vec<BlockId> = empty.filter(goes).collect();
        let regions = empty.into_iter().map(|id| {
            let region = self.heap.remove_reservation(id);
            self.forget_lent(region.pool, &(region.addr..region.addr + region.bytes));
            self.pools.forget_region(region.pool);
            self.paged.remove_reservation(region.addr);
            (region.addr, region.bytes)
        });
        regions.collect()
    }
}

impl Core {
    /// Accounts for donors that the device was not done with. `unmoved` has the frames of each that
    /// are mapped nowhere else; the others are in the window now, too. Returns how many bytes left
    /// their addresses.
    pub(crate) fn commit_reused(&mut self, window: &Range<u64>, donors: &[Donor], unmoved: Vec<Vec<Frame>>) -> u64 {
        let mut left = 0;
        for (donor, unmoved) in donors.iter().zip(unmoved) {
            let range = donor.addr..donor.addr + donor.bytes;
            let paged = &mut self.paged;
            if granules_of(&unmoved) * paged.granule == donor.bytes {
                paged.put_all(donor.addr, &unmoved);
                self.heap.unhold_as_free(donor.block);
                continue;
            }
            let Donor { block, after, .. } = *donor;
            let last_use = Use { stream: self.heap.block(block).owner, after };
            paged.old_mappings.push(OldMapping { block, range, last_use, window: window.clone(), unmoved });
            paged.mapped_bytes[self.heap.region_of(block).pool.kind() as usize] -= donor.bytes;
            self.heap.empty_held(block);
            self.note_donor(Action::SegmentUnmap, donor);
            left += donor.bytes;
        }
        left
    }

    /// Accounts for a mapping that was taken off the list: it is gone, or stays.
    pub(crate) fn commit_unmapped(&mut self, old: OldMapping, gone: bool) {
        let paged = &mut self.paged;
        paged.in_flight -= granules_of(&old.unmoved);
        if gone {
            paged.spares.extend(old.unmoved);
            self.heap.unhold_as_hole(old.block);
        } else {
            paged.old_mappings.push(old);
        }
    }

    /// The uses that such mappings wait for.
    pub(crate) fn old_mappings_not_done(&self) -> Vec<Use> {
        let all = self.paged.old_mappings.iter().map(|one| one.last_use);
        all.filter(|&one| !self.streams.is_done(one)).collect()
    }

    /// True if there are such mappings, done or not.
    pub(crate) fn has_old_mappings(&self) -> bool {
        !self.paged.old_mappings.is_empty()
    }

    /// True if the device may be using memory through such a mapping.
    pub(crate) fn may_use_old_mappings(&self) -> bool {
        self.paged.old_mappings.iter().any(|one| self.keeps_old(one, Which::NotForGraphs))
    }

    /// True if such a mapping stays although some pools are to give their memory back: the device
    /// may be using it, or a graph may.
    fn keeps_old(&self, one: &OldMapping, which: Which) -> bool {
        let pool = self.heap.block(one.block).pool;
        let is_kept = self.pools.keeps_for_graphs(pool) && !self.pools.is_among(pool, which);
        is_kept || !self.streams.is_done(one.last_use)
    }

    /// Takes the mappings off the list that need not stay although some pools are to give their
    /// memory back.
    pub(crate) fn take_old_mappings(&mut self, which: Which) -> Vec<OldMapping> {
        let all = std::mem::take(&mut self.paged.old_mappings);
        let (rest, over) = all.into_iter().partition::<Vec<_>, _>(|one| self.keeps_old(one, which));
        let paged = &mut self.paged;
        paged.old_mappings = rest;
        paged.in_flight += over.iter().map(|one| granules_of(&one.unmoved)).sum::<u64>();
        over
    }
}
