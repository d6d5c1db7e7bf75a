//! Which addresses a program's allocations cover, and when each was last used.
//!
//! Invariants: ranges do not overlap; a live range is exactly one allocation, unless it was
//! reported.

use std::collections::BTreeMap;
use std::ops::Range;

/// A piece of memory and its last use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) range: Range<u64>,
    pub(super) last: u64,
    pub(super) live: bool,
}

/// Pieces by their start.
#[derive(Debug, Default)]
pub(super) struct Uses(BTreeMap<u64, Use>);

impl Uses {
    /// Adds an allocation over whatever was there. Returns a live allocation that it overlaps, if
    /// there is one.
    pub(super) fn allocate(&mut self, range: Range<u64>, now: u64) -> Option<Range<u64>> {
        if range.is_empty() {
            return None;
        }
        let overlapped = self.remove(range.clone()).into_iter().find(|found| found.live);
        self.0.insert(range.start, Use { range, last: now, live: true });
        overlapped.map(|found| found.range)
    }

    /// Notes a use of the live allocation that starts at `start`, 0 for none; with `live` false
    /// there is none after it.
    pub(super) fn touch(&mut self, start: u64, now: u64, live: bool) {
        if let Some(found) = self.0.get_mut(&start).filter(|found| found.live) {
            (found.last, found.live) = (found.last.max(now), live);
        }
    }

    /// Forgets a range and returns the pieces that were in it, cut to it.
    pub(super) fn remove(&mut self, range: Range<u64>) -> Vec<Use> {
        let before = self.0.range(..range.start).next_back().filter(|(_, found)| found.range.end > range.start);
        let starts: Vec<u64> = before.into_iter().chain(self.0.range(range.clone())).map(|(&start, _)| start).collect();
        let mut removed = Vec::new();
        for found in starts.into_iter().filter_map(|start| self.0.remove(&start)).collect::<Vec<_>>() {
            let Range { start, end } = found.range;
            let mut keep = |range: Range<u64>| {
                if !range.is_empty() {
                    self.0.insert(range.start, Use { range, ..found.clone() });
                }
            };
            keep(start..range.start);
            keep(range.end..end);
            removed.push(Use { range: start.max(range.start)..end.min(range.end), ..found });
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_where_ranges_end() {
        let mut uses = Uses::default();
        assert_eq!(uses.allocate(0..10, 1), None);
        assert_eq!(uses.allocate(10..20, 2), None);
        uses.touch(0, 3, false);
        uses.touch(10, 4, false);
        uses.touch(10, 9, true);
        let piece = |range, last| Use { range, last, live: false };
        assert_eq!(uses.remove(5..15), [piece(5..10, 3), piece(10..15, 4)]);
        assert_eq!(uses.remove(0..100), [piece(0..5, 3), piece(15..20, 4)], "what is freed is not touched any more");
        assert_eq!(uses.remove(0..100), []);
    }

    #[test]
    fn an_inner_range_leaves_both_ends() {
        let mut uses = Uses::default();
        uses.allocate(0..30, 1);
        uses.touch(0, 2, false);
        assert_eq!(uses.allocate(10..20, 5), None);
        assert_eq!(uses.allocate(12..14, 6), Some(12..14), "live memory is given out again");
        let lasts: Vec<u64> = uses.remove(0..30).iter().map(|found| found.last).collect();
        assert_eq!(lasts, [2, 5, 6, 5, 2]);
    }
}
