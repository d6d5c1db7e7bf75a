//! Absent memory: addresses that keep their blocks but have no memory while they sleep
//! (`sleep.rs`).

use std::ops::Range;

use crate::backing::paged::saved::Saved;
use crate::core::paged::frames::Frame;
use crate::core::waiting::Waiting;
use crate::size_class::PoolKind;
use crate::types::BlockId;

/// Where the contents of absent memory are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentsPlace {
    /// Where they were: the memory is mapped still.
    InPlace,
    /// In the frames, of which some are not mapped.
    InFrames,
    /// Elsewhere, if they were saved.
    Elsewhere,
}

/// Addresses that have no memory until they wake up, or that are about to lose it.
#[derive(Debug)]
pub(crate) struct Absent {
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

/// The memory and the blocks that the cordon around memory that sleeps concerns (`cordon.rs`).
#[derive(Debug, Default)]
pub(crate) struct Cordon {
    /// Free memory that is held.
    pub(crate) held: Vec<BlockId>,
    /// Live blocks that are marked.
    pub(crate) marked: Vec<BlockId>,
    /// Blocks that were given back.
    pub(crate) freed: Vec<Waiting>,
}

impl Absent {
    /// Number of granules in the range.
    pub(crate) fn places(&self, granule: u64) -> u64 {
        (self.range.end - self.range.start) / granule
    }

    /// True if there are no frames for it.
    pub(crate) fn is_released(&self) -> bool {
        self.frames.is_empty()
    }

    /// True if its frames may be released.
    pub(crate) fn may_release(&self) -> bool {
        self.mapped == 0 && self.place == ContentsPlace::Elsewhere
    }

    /// Its parts inside and outside of some ranges, which ascend. It has no frames.
    pub(crate) fn split(self, ranges: &[Range<u64>]) -> [Vec<Absent>; 2] {
        let inside = within(ranges, &self.range);
        let outside = outside(&self.range, ranges);
        if outside.is_empty() {
            return [vec![self], Vec::new()];
        }
        [inside, outside].map(|ranges| ranges.into_iter().map(|range| self.part(range)).collect())
    }

    fn part(&self, range: Range<u64>) -> Absent {
        let first = self.saved.partition_point(|saved| saved.addr + saved.bytes <= range.start);
        let saved = self.saved[first..].iter().map_while(|saved| saved.part(&range)).collect();
        Absent { range, frames: Vec::new(), saved, ..*self }
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
