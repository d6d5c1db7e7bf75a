//! Absent memory: addresses that keep their blocks but have no memory while the allocator sleeps
//! (`sleep.rs`).

use std::collections::VecDeque;
use std::ops::Range;

use crate::backing::paged::frames::Frame;
use crate::size_class::PoolKind;

/// Addresses that have no memory until the allocator wakes up.
#[derive(Debug)]
pub(crate) struct Absent {
    pub(crate) range: Range<u64>,
    pub(crate) kind: PoolKind,
    /// Frames that exist for the range, from the lowest address on,
    pub(crate) frames: Vec<Frame>,
    /// and how many of them are mapped.
    pub(crate) mapped: usize,
    /// Granules of the largest frame that the range had.
    pub(crate) largest: u32,
    pub(crate) saved: Vec<Saved>,
    /// True if the contents are in the frames.
    pub(crate) has_contents: bool,
}

/// Contents of memory, kept in host memory.
#[derive(Debug)]
pub(crate) struct Saved {
    pub(crate) addr: u64,
    pub(crate) bytes: Vec<u8>,
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

    /// What is left of it without some ranges, which lie within it and ascend. It has no frames.
    pub(crate) fn without(self, gone: &[Range<u64>]) -> Vec<Absent> {
        if gone.is_empty() {
            return vec![self];
        }
        let Absent { range: whole, kind, largest, saved, .. } = self;
        let borders = gone.iter().flat_map(|gone| [gone.start, gone.end]);
        let borders: Vec<u64> = std::iter::once(whole.start).chain(borders).chain([whole.end]).collect();
        let left = borders.chunks_exact(2).map(|ends| ends[0]..ends[1]).filter(|range| !range.is_empty());
        let mut pieces = VecDeque::from(saved);
        left.map(|range| {
            let mut saved = Vec::new();
            while pieces.front().is_some_and(|piece| piece.addr < range.end)
                && let Some(piece) = pieces.pop_front()
            {
                let goes_on = piece.end() > range.end;
                if piece.addr >= range.start && !goes_on {
                    saved.push(piece);
                } else {
                    saved.extend(piece.part(&range));
                    if goes_on {
                        pieces.push_front(piece);
                        break;
                    }
                }
            }
            Absent { range, kind, frames: Vec::new(), mapped: 0, largest, saved, has_contents: false }
        })
        .collect()
    }
}

impl Saved {
    fn end(&self) -> u64 {
        self.addr + self.bytes.len() as u64
    }

    /// A copy of the part of the contents that lies in a range, if there is any.
    fn part(&self, range: &Range<u64>) -> Option<Saved> {
        let part = self.addr.max(range.start)..self.end().min(range.end);
        let place = |addr: u64| usize::try_from(addr - self.addr).ok();
        let bytes = if part.is_empty() { None } else { self.bytes.get(place(part.start)?..place(part.end)?) };
        Some(Saved { addr: part.start, bytes: bytes?.to_vec() })
    }
}
