//! Live ranges of memory by address, by which pointers are checked.
//!
//! With a unified address space the driver would accept an address of the host for one of the
//! device, so a safe call must check its pointers.
//!
//! Locks: those here are leaves, never held across a driver call.

use std::collections::BTreeMap;

use aquifer_device::Result;
use aquifer_device::fork::RwLock;

/// Disjoint ranges of addresses, each with its kind.
#[derive(Debug)]
pub(crate) struct Ranges<K>(RwLock<BTreeMap<u64, Entry<K>>>);

#[derive(Debug)]
struct Entry<K> {
    bytes: u64,
    kind: K,
}

impl<K> Default for Ranges<K> {
    fn default() -> Self {
        Ranges(RwLock::default())
    }
}

impl<K: Copy> Ranges<K> {
    /// Adds a range that the driver just gave out.
    pub(crate) fn insert(&self, start: u64, bytes: u64, kind: K) {
        self.0.write().insert(start, Entry { bytes, kind });
    }

    /// Takes the range out that starts at `start` if `matches` says so, and returns its length.
    pub(crate) fn take_if(&self, start: u64, matches: impl FnOnce(K) -> bool) -> Option<(u64, K)> {
        let mut ranges = self.0.write();
        ranges.get(&start).filter(|entry| matches(entry.kind))?;
        ranges.remove(&start).map(|entry| (entry.bytes, entry.kind))
    }

    /// Takes the range that starts at `start` out if `matches` says so, and calls `give_back` to
    /// give it back to the driver; the range stays if that fails. `None` if there is no such range.
    ///
    /// The range leaves the table first, because the driver may give its addresses to another
    /// thread as soon as they are free.
    pub(crate) fn give_back(
        &self,
        start: u64,
        matches: impl FnOnce(K) -> bool,
        give_back: impl FnOnce(K) -> Result<()>,
    ) -> Option<Result<()>> {
        let (bytes, kind) = self.take_if(start, matches)?;
        Some(give_back(kind).inspect_err(|_| self.insert(start, bytes, kind)))
    }

    /// Whether ranges without a gap between them hold all of `start..start + bytes`.
    pub(crate) fn hold(&self, start: u64, bytes: u64) -> bool {
        let Some(end) = start.checked_add(bytes) else { return false };
        let ranges = self.0.read();
        let mut at = start;
        let first = ranges.range(..=start).next_back().map(|(&start, entry)| (start, entry));
        let later = ranges.range(start..).map(|(&start, entry)| (start, entry)).filter(|(from, _)| *from > start);
        for (from, entry) in first.into_iter().chain(later) {
            if from > at || at >= end {
                break;
            }
            at = at.max(from.saturating_add(entry.bytes));
        }
        at >= end
    }

    /// How many bytes from `start` on, of `bytes`, lie all in one range, or all in none.
    pub(crate) fn piece(&self, start: u64, bytes: u64) -> u64 {
        let ranges = self.0.read();
        let around = ranges.range(..=start).next_back().map(|(&from, entry)| from.saturating_add(entry.bytes));
        let ahead = start.checked_add(1).and_then(|next| ranges.range(next..).next()).map(|(&from, _)| from);
        let border = around.filter(|&end| end > start).or(ahead);
        border.map_or(bytes, |border| bytes.min(border - start))
    }

    /// The length of the range that starts at `start`.
    pub(crate) fn bytes_from(&self, start: u64) -> Option<u64> {
        self.0.read().get(&start).map(|entry| entry.bytes)
    }

    /// The kind of the range that holds an address.
    pub(crate) fn kind_at(&self, at: u64) -> Option<K> {
        let ranges = self.0.read();
        let (&start, entry) = ranges.range(..=at).next_back()?;
        (at - start < entry.bytes).then_some(entry.kind)
    }

    /// Takes everything out, highest addresses first.
    pub(crate) fn drain(&self) -> Vec<(u64, u64, K)> {
        let ranges = std::mem::take(&mut *self.0.write());
        ranges.into_iter().rev().map(|(start, entry)| (start, entry.bytes, entry.kind)).collect()
    }

    /// Whether a range starts inside `start..start + bytes`.
    pub(crate) fn any_in(&self, start: u64, bytes: u64) -> bool {
        self.0.read().range(start..start.saturating_add(bytes)).next().is_some()
    }

    /// The ranges that tile `start..start + bytes`; `None` where whole ranges do not.
    pub(crate) fn tiling(&self, start: u64, bytes: u64) -> Option<Vec<(u64, u64, K)>> {
        let end = start.checked_add(bytes).filter(|&end| end > start)?;
        let ranges = self.0.read();
        let mut at = start;
        let mut tiles = Vec::new();
        for (&from, entry) in ranges.range(start..end) {
            if from != at {
                return None;
            }
            tiles.push((from, entry.bytes, entry.kind));
            at = from.saturating_add(entry.bytes);
        }
        (at == end).then_some(tiles)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges() -> Ranges<char> {
        let ranges = Ranges::default();
        for (start, bytes, kind) in [(10, 10, 'a'), (20, 5, 'b'), (30, 10, 'c')] {
            ranges.insert(start, bytes, kind);
        }
        ranges
    }

    #[test]
    fn a_range_with_a_gap_is_not_held() {
        let ranges = ranges();
        for (start, bytes) in [(10, 10), (10, 15), (12, 1), (19, 2), (24, 1), (30, 10), (39, 1), (12, 0)] {
            assert!(ranges.hold(start, bytes), "{bytes} at {start}");
        }
        for (start, bytes) in [(9, 1), (9, 2), (10, 16), (24, 2), (25, 1), (25, 6), (40, 1), (10, 30), (10, u64::MAX)] {
            assert!(!ranges.hold(start, bytes), "{bytes} at {start}");
        }
    }

    #[test]
    fn a_piece_is_all_in_one_range_or_all_in_none() {
        let ranges = ranges();
        for (start, bytes, piece) in
            [(10, 10, 10), (12, 20, 8), (20, 5, 5), (5, 3, 3), (5, 9, 5), (25, 9, 5), (39, 9, 1), (40, 9, 9)]
        {
            assert_eq!(ranges.piece(start, bytes), piece, "{bytes} at {start}");
        }
        assert_eq!(ranges.piece(u64::MAX, 1), 1);
        assert_eq!(
            [9, 10, 19, 20, 25, 39, 40].map(|at| ranges.kind_at(at)),
            [None, Some('a'), Some('a'), Some('b'), None, Some('c'), None]
        );
    }

    #[test]
    fn whole_ranges_tile() {
        let ranges = ranges();
        assert_eq!(ranges.tiling(10, 15), Some(vec![(10, 10, 'a'), (20, 5, 'b')]));
        assert_eq!(ranges.tiling(30, 10), Some(vec![(30, 10, 'c')]));
        for (start, bytes) in [(10, 14), (11, 9), (10, 20), (10, 30), (50, 1), (10, 0), (20, u64::MAX)] {
            assert_eq!(ranges.tiling(start, bytes), None, "{bytes} at {start}");
        }
    }

    #[test]
    fn taken_ranges_are_gone() {
        let ranges = ranges();
        assert_eq!(ranges.take_if(10, |kind| kind == 'b'), None);
        assert_eq!(ranges.take_if(11, |_| true), None);
        assert_eq!(ranges.take_if(10, |kind| kind == 'a'), Some((10, 'a')));
        assert!(!ranges.hold(10, 1) && ranges.any_in(10, 11) && !ranges.any_in(10, 10));
        assert_eq!(ranges.drain(), [(30, 10, 'c'), (20, 5, 'b')]);
        assert!(!ranges.any_in(0, u64::MAX));
    }
}
