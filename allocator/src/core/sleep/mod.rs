//! What of mapped memory sleeps, and where its contents are. `steps.rs` decides what falls asleep
//! and what wakes up.

pub(crate) mod staying;
pub(crate) mod steps;

use std::ops::Range;

use aquifer_device::HostBuffer;

use crate::core::paged::frames::{Frame, granules_of};
use crate::core::waiting::Waiting;
use crate::size_class::PoolKind;
use crate::sleep::contents::Saved;
use crate::types::BlockId;

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

    /// True if the memory at any of these addresses sleeps while other memory does not: see
    /// `steps.rs`.
    pub(crate) fn isolates(&self, range: &Range<u64>) -> bool {
        !self.is_whole && self.has(range)
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

/// The parts of some ranges, which ascend, that lie within a range.
pub(crate) fn within(ranges: &[Range<u64>], range: &Range<u64>) -> Vec<Range<u64>> {
    let first = ranges.partition_point(|other| other.end <= range.start);
    let touched = ranges[first..].iter().take_while(|other| other.start < range.end);
    touched.map(|other| other.start.max(range.start)..other.end.min(range.end)).collect()
}

/// The parts of a range outside of some others, which ascend.
pub(crate) fn outside(range: &Range<u64>, others: &[Range<u64>]) -> Vec<Range<u64>> {
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
pub(crate) fn united(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
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
