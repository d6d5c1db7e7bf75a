//! The commit of a remap: accounts for the driver calls, all of them or those before one that
//! failed, and returns all held memory to the heap.

use std::ops::Range;

use aquifer_device::DeviceError;

use crate::core::Core;
use crate::core::heap::State;
use crate::core::paged::deferred_release::DeferredRelease;
use crate::core::paged::granules::Stuck;
use crate::core::remap::donors::Donor;
use crate::core::remap::plan::{Done, Filled, Remap, Target};
use crate::history::Action;
use crate::types::{After, BlockId, Recipient};

/// The outcome of a remap.
pub(crate) struct Committed {
    /// The free block that the window became, if all went well.
    pub(crate) window: Option<BlockId>,
    /// Bytes that left their addresses.
    pub(crate) moved: u64,
    /// Bytes of usable memory that were mapped.
    pub(crate) filled: u64,
    /// The error that stopped the work, if any.
    pub(crate) error: Option<DeviceError>,
    /// True if creating a frame failed.
    pub(crate) at_creation: bool,
}

impl Core {
    /// Accounts for what the driver did, and releases the held memory to the heap.
    pub(crate) fn commit(&mut self, remap: Remap) -> Committed {
        let Remap { target, of, donors, reused, spares, work, mut done, .. } = remap;
        self.commit_donors(&donors, &done);
        let unmapped = donors[..done.unmapped].iter().map(|donor| donor.bytes).sum::<u64>();
        let paged = &mut self.paged;
        paged.in_flight -= spares;
        paged.spares.extend(done.spares.iter());
        for filled in &done.filled {
            paged.put_all(filled.range.start, &filled.frames);
            paged.mapped_bytes[of.pool.kind() as usize] += filled.bytes();
        }
        self.growing.end(work.create * paged.granule);
        self.counters.events.num_device_alloc += u64::from(done.created);
        let used_until = reused.iter().map(|donor| donor.after).max().unwrap_or_default();
        let ends = done.filled.first().zip(done.filled.last());
        let window = ends.map_or(0..0, |(first, last)| first.range.start..last.range.end);
        let moved = unmapped + self.commit_reused(&window, &reused, std::mem::take(&mut done.unmoved));
        self.note_moved(moved);
        let window = match target {
            Target::Window { pieces, peak, earns } => {
                let free = self.commit_window(&pieces, of, used_until, &done.filled);
                // A request that is refused raises no peak.
                if done.error.is_none() {
                    let paged = &mut self.paged;
                    paged.peak = paged.peak.max(peak);
                    let frames = done.filled.iter().map(|filled| filled.frames.len() as u64).sum::<u64>();
                    paged.moves += if earns && moved > 0 { frames } else { 0 };
                }
                free.filter(|_| done.error.is_none())
            }
            Target::Dedicated { base } => {
                self.commit_dedicated(base, of, &done.filled);
                None
            }
            Target::Spares => {
                self.commit_lent(&donors, done.unmapped);
                None
            }
        };
        self.account_for_granules();
        let filled = done.filled.iter().filter(|filled| filled.usable).map(Filled::bytes).sum();
        Committed { window, moved, filled, error: done.error, at_creation: done.at_creation }
    }

    /// Releases the pieces of a window to the heap. Returns the free block that the last one is in.
    fn commit_window(
        &mut self,
        pieces: &[BlockId],
        of: Recipient,
        used_until: After,
        filled: &[Filled],
    ) -> Option<BlockId> {
        let (usable, stuck) = filled.iter().partition::<Vec<&Filled>, _>(|filled| filled.usable);
        // Memory that is mapped without access is of no use to a pool.
        let bytes = stuck.iter().map(|filled| filled.bytes()).sum::<u64>();
        self.paged.mapped_bytes[of.pool.kind() as usize] -= bytes;
        // The pieces merge as they are released, so the block of the last one is the whole window.
        pieces.iter().filter_map(|&id| self.release_piece(of, id, used_until, &usable, &stuck)).last()
    }

    /// Notes what is mapped at dedicated memory now. What cannot be used is retired: the next call
    /// that recycles tries again to unmap it.
    fn commit_dedicated(&mut self, base: u64, of: Recipient, filled: &[Filled]) {
        for Filled { range, usable, .. } in filled {
            let paged = &mut self.paged;
            let granule = paged.granule;
            if !usable {
                paged.deferred_release.add(DeferredRelease::unusable(base, range.clone()));
            }
            for at in range.clone().step_by(usize::try_from(granule).unwrap_or(usize::MAX)) {
                self.note_mapping(Action::SegmentMap, of, at, granule);
            }
        }
    }

    /// Counts memory that moved.
    fn note_moved(&mut self, bytes: u64) {
        if bytes > 0 {
            self.counters.events.remaps += 1;
            self.counters.events.granules_moved += bytes / self.paged.granule;
        }
    }

    fn commit_donors(&mut self, donors: &[Donor], done: &Done) {
        let mut still_mapped = done.still_mapped.iter();
        for (at, donor) in donors.iter().enumerate() {
            if at < done.unmapped {
                let pool = self.note_donor(Action::SegmentUnmap, donor);
                self.heap.unhold_as_hole(donor.block);
                self.paged.mapped_bytes[pool.kind() as usize] -= donor.bytes;
            } else {
                self.heap.unhold_as_free(donor.block);
                if let Some(frames) = still_mapped.next() {
                    self.paged.put_all(donor.addr, frames);
                }
            }
        }
    }

    /// Releases a piece of the window to the heap. The stream may be using the memory that it got,
    /// at other addresses, until the tick `used_until`. Returns the free block that it is in now,
    /// if it is in one.
    fn release_piece(
        &mut self,
        of: Recipient,
        id: BlockId,
        used_until: After,
        usable: &[&Filled],
        stuck: &[&Filled],
    ) -> Option<BlockId> {
        let block = *self.heap.block(id);
        // Held: this piece was free memory. Otherwise it is `Filling`, a hole.
        if block.state == State::Held {
            return Some(self.heap.unhold_as_free(id));
        }
        let range = block.range();
        // Mapped without access, and not unmapped again: no request gets these addresses before
        // they are unmapped.
        let frames = stuck.iter().map(|filled| filled.range.clone());
        let frames: Vec<Range<u64>> = frames.filter(|frame| range.contains(&frame.start)).collect();
        if !frames.is_empty() {
            self.paged.stuck.push_back(Stuck { block: id, frames });
            return None;
        }
        if !usable.iter().any(|filled| filled.range.contains(&block.addr)) {
            self.heap.unhold_as_hole(id);
            return None;
        }
        let free = self.heap.unhold_as_used(id, used_until);
        self.note_mapping(Action::SegmentMap, of, block.addr, block.size);
        Some(free)
    }
}
