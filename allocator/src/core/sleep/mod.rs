//! Memory that sleeps: which, where its contents are, and how it is kept apart from the rest, while
//! the rest is in use. `choose.rs` decides what falls asleep and what wakes up.
//!
//! While a part sleeps, it is *isolated*:
//! * Free memory beside it, in the same granules, is *held*, so that no request takes it.
//! * Its live blocks are marked as used by several streams. So their frees leave the fast path, and
//!   come to `begin_wait` (`../free.rs`), which keeps the blocks until their memory wakes up.
//!
//! Allocations and frees of other memory are as fast as without. The isolation ends and begins
//! again under the lock, so no other thread sees memory without it. While the whole allocator
//! sleeps it is not needed, because nothing is allocated.

pub(crate) mod choose;

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::ops::Range;

use aquifer_device::internal::HostBuffer;

use crate::core::Core;
use crate::core::heap::State;
use crate::core::paged::frames::{Frame, granules_of};
use crate::core::remap::donors::Donor;
use crate::core::waiting::Waiting;
use crate::size_class::PoolKind;
use crate::sleep::contents::Saved;
use crate::types::{After, BlockId};

/// What of mapped memory sleeps.
#[derive(Debug, Default)]
pub(crate) struct Sleep {
    /// True while the whole allocator sleeps.
    pub(crate) is_whole: bool,
    /// By address. A thread that works on the list may have taken it out.
    ranges: Vec<SleepingRange>,
    /// The addresses that sleep: ranges that do not touch, by address.
    addresses: Vec<Range<u64>>,
    /// True if some of it is memory outside of heaps.
    has_dedicated: bool,
    /// Free memory that is held because it lies beside.
    held: Vec<BlockId>,
    /// Live blocks that are marked.
    marked: Vec<BlockId>,
    /// Blocks that were given back.
    freed: Vec<Waiting>,
    /// Pinned host memory for the contents of the next sleep.
    host_buffers: Vec<HostBuffer>,
}

/// Addresses that have no memory until they wake up, or that are about to lose it.
#[derive(Debug)]
pub(crate) struct SleepingRange {
    pub(crate) range: Range<u64>,
    pub(crate) kind: PoolKind,
    /// True for memory outside of heaps.
    pub(crate) is_dedicated: bool,
    /// Frames that exist for the range, from the lowest address on,
    pub(crate) frames: Vec<Frame>,
    /// and how many of them are mapped.
    pub(crate) mapped: usize,
    pub(crate) place: ContentsPlace,
    /// Granules of the largest frame that the range had.
    pub(crate) largest: u32,
    /// Its contents, by address.
    pub(crate) saved: Vec<Saved>,
}

/// Where the contents of a sleeping range are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentsPlace {
    /// Where they were: the memory is mapped still.
    InPlace,
    /// In the frames, of which some are not mapped.
    InFrames,
    /// Elsewhere, if they were saved.
    Elsewhere,
}

impl Sleep {
    /// The addresses that sleep: ranges that do not touch, by address.
    pub(crate) fn addresses(&self) -> &[Range<u64>] {
        &self.addresses
    }

    /// True if the memory at any of these addresses sleeps.
    pub(crate) fn has(&self, range: &Range<u64>) -> bool {
        !self.addresses.is_empty() && !within(&self.addresses, range).is_empty()
    }

    /// True if dedicated memory that was given up may be unmapped.
    pub(crate) fn allows_recycling(&self) -> bool {
        !self.is_whole && !self.has_dedicated
    }

    /// True if any memory sleeps, or is about to wake up or to fall asleep.
    pub(crate) fn is_any(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Keeps a block that was given back until its memory wakes up.
    pub(crate) fn keep(&mut self, freed: Waiting) {
        self.freed.push(freed);
    }

    /// Takes out the list.
    pub(crate) fn take_ranges(&mut self) -> Vec<SleepingRange> {
        std::mem::take(&mut self.ranges)
    }

    /// Lists ranges. `taken` are those that a thread took out of the list.
    fn list(&mut self, ranges: Vec<SleepingRange>, taken: [&[SleepingRange]; 2]) {
        self.ranges = ranges;
        self.ranges.sort_unstable_by_key(|one| one.range.start);
        let all = || self.ranges.iter().chain(taken.into_iter().flatten());
        self.has_dedicated = all().any(|one| one.is_dedicated);
        self.addresses = united(all().map(|one| one.range.clone()).collect());
    }
}

impl SleepingRange {
    /// Number of granules that have no frame.
    pub(crate) fn lacks(&self, granule: u64) -> u64 {
        (self.range.end - self.range.start) / granule - granules_of(&self.frames)
    }

    /// True if its frames may be released.
    pub(crate) fn may_release(&self) -> bool {
        self.mapped == 0 && self.place == ContentsPlace::Elsewhere
    }

    /// Its parts inside and outside of some ranges, which ascend. It has no frames.
    fn split(self, ranges: &[Range<u64>]) -> [Vec<SleepingRange>; 2] {
        let inside = within(ranges, &self.range);
        let outside = outside(&self.range, ranges);
        if outside.is_empty() {
            return [vec![self], Vec::new()];
        }
        [inside, outside].map(|ranges| ranges.into_iter().map(|range| self.part(range)).collect())
    }

    fn part(&self, range: Range<u64>) -> SleepingRange {
        let first = self.saved.partition_point(|saved| saved.addr + saved.bytes <= range.start);
        let saved = self.saved[first..].iter().map_while(|saved| saved.part(&range)).collect();
        SleepingRange { range, frames: Vec::new(), saved, ..*self }
    }
}

impl Core {
    /// Changes what is listed for the sleeping range that starts at an address.
    pub(crate) fn change_sleeping(&mut self, start: u64, change: impl FnOnce(&mut SleepingRange)) {
        let Some(paged) = &mut self.paged else { return };
        if let Ok(at) = paged.sleep.ranges.binary_search_by_key(&start, |one| one.range.start) {
            change(&mut paged.sleep.ranges[at]);
        }
    }

    /// Isolates all memory that sleeps, unless everything does.
    pub(crate) fn isolate_sleeping(&mut self) {
        let Some(paged) = self.paged.as_ref().filter(|paged| !paged.sleep.is_whole) else { return };
        let sleeping = paged.sleep.addresses.clone();
        if sleeping.is_empty() {
            return;
        }
        let (mut live, mut free) = (Vec::new(), Vec::new());
        let touches = |range: &Range<u64>| !within(&sleeping, range).is_empty();
        let heap = &self.heap;
        for region in heap.regions().filter(|region| touches(&(region.addr..region.addr + region.bytes))) {
            for (id, block) in heap.blocks_of(region) {
                let parts = within(&sleeping, &block.range());
                match block.state {
                    State::Live if !parts.is_empty() => live.push(id),
                    State::Free => free.extend(parts.into_iter().map(|Range { start: addr, end }| Donor {
                        block: id,
                        addr,
                        bytes: end - addr,
                        after: After::NOTHING,
                    })),
                    _ => {}
                }
            }
        }
        // Each block from its high end down, as holding it needs.
        free.sort_unstable_by_key(|donor| (donor.block, Reverse(donor.addr)));
        let held = self.hold_all(free).into_iter().map(|donor| donor.block).collect();
        live.retain(|&id| self.mark_asleep(id));
        let freed = self.waiting.take_where(|waiting| touches(&waiting.block.range()));
        if let Some(Sleep { held: of_sleep, marked, freed: given, .. }) = self.paged.as_mut().map(|one| &mut one.sleep)
        {
            (*of_sleep, *marked) = (held, live);
            given.extend(freed);
        }
    }

    /// Ends the isolation: blocks that were given back meanwhile are free, and so is what was held.
    pub(crate) fn end_isolation(&mut self) {
        let Some(Sleep { held, marked, freed, .. }) = self.paged.as_mut().map(|paged| &mut paged.sleep) else { return };
        let (held, marked, freed) = (std::mem::take(held), std::mem::take(marked), std::mem::take(freed));
        marked.into_iter().for_each(|id| self.unmark_asleep(id));
        for block in held {
            self.heap.unhold_as_free(block);
        }
        for waiting in freed {
            if waiting.uses.iter().all(|&one| self.streams.is_done(one)) {
                self.end_wait(&waiting);
            } else {
                self.waiting.push(waiting);
            }
        }
    }

    /// Marks a live block, so that its free takes the slow path. Returns false if it was marked already.
    fn mark_asleep(&mut self, id: BlockId) -> bool {
        let Entry::Vacant(users) = self.other_users.entry(id) else { return false };
        users.insert(Vec::new());
        self.heap.mark_used_elsewhere(id);
        true
    }

    /// Takes the mark away, unless the block was given back, or other streams do use it now.
    fn unmark_asleep(&mut self, id: BlockId) {
        let Entry::Occupied(users) = self.other_users.entry(id) else { return };
        if !users.get().is_empty() {
            return;
        }
        users.remove();
        self.heap.unmark_used_elsewhere(id);
    }

    /// Takes the pinned host memory that is kept for the contents of the next sleep.
    pub(crate) fn take_host_buffers(&mut self) -> Vec<HostBuffer> {
        self.paged.as_mut().map(|paged| std::mem::take(&mut paged.sleep.host_buffers)).unwrap_or_default()
    }

    pub(crate) fn keep_host_buffers(&mut self, buffers: impl IntoIterator<Item = HostBuffer>) {
        if let Some(paged) = &mut self.paged {
            paged.sleep.host_buffers.extend(buffers);
        }
    }

    /// Takes out the list, and spare frames if everything sleeps, so that frames can be released.
    pub(crate) fn begin_release_sleeping(&mut self) -> Option<(Vec<SleepingRange>, Vec<Frame>)> {
        let paged = self.paged.as_mut()?;
        let mut spares: Vec<Frame> = Vec::new();
        if paged.sleep.is_whole {
            spares.extend(std::mem::take(&mut paged.spares).iter());
        }
        paged.in_hands += granules_of(&spares);
        Some((paged.sleep.take_ranges(), spares))
    }

    /// Accounts for `released` granules of frames that were released, and puts the list and the other
    /// spare frames back.
    pub(crate) fn commit_release_sleeping(&mut self, ranges: Vec<SleepingRange>, spares: Vec<Frame>, released: u64) {
        if let Some(paged) = &mut self.paged {
            paged.in_hands -= released + granules_of(&spares);
            paged.spares.extend(spares);
        }
        self.end_isolation();
        let ranges = self.forget_free(ranges);
        self.relist(ranges);
        self.counters.num_device_free.add(u64::from(released > 0));
        self.account_for_granules();
    }

    /// Lists memory as asleep that lacks its mapping, with its contents in frames.
    pub(crate) fn list_unmapped(&mut self, unmapped: Vec<SleepingRange>) {
        let listed = self.paged.as_mut().map(|paged| paged.sleep.take_ranges()).unwrap_or_default();
        self.end_isolation();
        self.relist(listed.into_iter().chain(unmapped).collect());
    }

    /// Puts the list back, and isolates what is in it.
    fn relist(&mut self, ranges: Vec<SleepingRange>) {
        if let Some(paged) = &mut self.paged {
            paged.sleep.list(ranges, [&[], &[]]);
        }
        self.isolate_sleeping();
    }

    /// Accounts for frames that were created for sleeping ranges, and released again, in granules.
    /// `lacking` bytes were to be created.
    pub(crate) fn commit_created(&mut self, created: u64, released: u64, lacking: u64) {
        if let Some(paged) = &mut self.paged {
            paged.in_hands = paged.in_hands + created - released;
        }
        self.counters.num_device_alloc.add(u64::from(created > released));
        self.account_for_granules();
        self.growing.end(lacking);
    }

    /// Accounts for ranges that are mapped again. Returns those that were not mapped before.
    pub(crate) fn commit_mapped(&mut self, woken: &[SleepingRange]) -> Vec<Range<u64>> {
        let Some(paged) = &mut self.paged else { return Vec::new() };
        for SleepingRange { range, kind, frames, .. } in woken {
            paged.put_all(range.start, frames);
            paged.mapped_bytes[*kind as usize] += range.end - range.start;
            paged.in_hands -= granules_of(frames);
        }
        self.account_for_granules();
        let mapped = woken.iter().filter(|one| one.place != ContentsPlace::InPlace);
        mapped.map(|one| one.range.clone()).collect()
    }

    /// Lists what still sleeps after an attempt to wake up. `has_woken` says whether it succeeded.
    pub(crate) fn end_waking(&mut self, ranges: Vec<SleepingRange>, has_woken: bool) {
        self.end_isolation();
        if let Some(paged) = self.paged.as_mut().filter(|_| has_woken) {
            paged.sleep.is_whole = false;
        }
        self.relist(ranges);
    }
}

/// The parts of some ranges, which ascend, that lie within a range.
pub(crate) fn within(ranges: &[Range<u64>], range: &Range<u64>) -> Vec<Range<u64>> {
    let first = ranges.partition_point(|other| other.end <= range.start);
    let touched = ranges[first..].iter().take_while(|other| other.start < range.end);
    touched.map(|other| other.start.max(range.start)..other.end.min(range.end)).collect()
}

/// The parts of a range outside of some others, which ascend.
fn outside(range: &Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    for other in within(others, range) {
        parts.push(at..other.start);
        at = other.end;
    }
    parts.push(at..range.end);
    parts.retain(|part| !part.is_empty());
    parts
}

/// Ranges in any order, joined where they touch or overlap, by address.
fn united(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut united: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match united.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => united.push(range),
        }
    }
    united
}
