//! A map from disjoint ranges of `u64` to values.
//!
//! Invariants: ranges are not empty, do not overlap, and two touching ranges never hold equal
//! values (they are merged on insertion), so that the map stays as small as its content allows.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges with a value each, ordered by address.
#[derive(Clone, Debug)]
pub(crate) struct IntervalMap<V> {
    /// Start → (end, value).
    entries: BTreeMap<u64, (u64, V)>,
}

impl<V> IntervalMap<V> {
    /// A map without ranges.
    pub(crate) const fn new() -> Self {
        IntervalMap { entries: BTreeMap::new() }
    }
}

impl<V> Default for IntervalMap<V> {
    fn default() -> Self {
        IntervalMap::new()
    }
}

impl<V: Clone + PartialEq> IntervalMap<V> {
    /// Number of ranges held.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Removes the values of `range`; ranges that stick out are cut.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((_, entry)) = self.entries.range_mut(..range.start).next_back()
            && entry.0 > range.start
        {
            let tail = (entry.0 > range.end).then(|| (entry.0, entry.1.clone()));
            entry.0 = range.start;
            if let Some(tail) = tail {
                self.entries.insert(range.end, tail);
                return;
            }
        }
        while let Some((&start, _)) = self.entries.range(range.clone()).next() {
            if let Some((end, value)) = self.entries.remove(&start)
                && end > range.end
            {
                self.entries.insert(range.end, (end, value));
            }
        }
    }

    /// Holds `value` for all of `range`, instead of earlier values.
    pub(crate) fn insert(&mut self, range: Range<u64>, value: V) {
        if range.is_empty() {
            return;
        }
        match self.entries.get(&range.start) {
            Some((end, held)) if *end == range.end && *held == value => return,
            // It is replaced below.
            Some((end, _)) if *end == range.end => {}
            _ => self.remove(range.clone()),
        }
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&before, (before_end, held))) = self.entries.range(..start).next_back()
            && *before_end == start
            && *held == value
        {
            self.entries.remove(&start);
            start = before;
        }
        if let Some((after_end, held)) = self.entries.get(&end)
            && *held == value
        {
            let after_end = *after_end;
            self.entries.remove(&end);
            end = after_end;
        }
        self.entries.insert(start, (end, value));
    }

    /// The ranges that overlap `range`, cut to it, in order. None overlaps an empty one.
    pub(crate) fn overlapping(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &V)> {
        let first = self.entries.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
        let from = first.map_or(range.start, |(&start, _)| start);
        let (low, high) = (range.start, range.end);
        let until = if low < high { high } else { from };
        self.entries.range(from..until).map(move |(&start, (end, value))| (start.max(low)..(*end).min(high), value))
    }

    /// The value at `at` with the end of the range that holds it; without a value, the end of the
    /// gap (at most `limit`).
    pub(crate) fn at(&self, at: u64, limit: u64) -> (Option<&V>, u64) {
        if let Some((_, (end, value))) = self.entries.range(..=at).next_back()
            && *end > at
        {
            return (Some(value), (*end).min(limit));
        }
        let next = at.checked_add(1).and_then(|after| self.entries.range(after..).next());
        (None, next.map_or(limit, |(&start, _)| start.min(limit)))
    }

    /// The last range that ends at or before `at`.
    pub(crate) fn before(&self, at: u64) -> Option<(Range<u64>, &V)> {
        let (&start, (end, value)) = self.entries.range(..at).next_back()?;
        (*end <= at).then_some((start..*end, value))
    }

    /// Replaces each piece of `range`, held or not, by the result of `change`.
    pub(crate) fn update(&mut self, range: Range<u64>, mut change: impl FnMut(Range<u64>, Option<&V>) -> V) {
        let mut at = range.start;
        let mut pieces = Vec::new();
        while at < range.end {
            let (held, end) = self.at(at, range.end);
            pieces.push((at..end, change(at..end, held)));
            at = end;
        }
        for (piece, value) in pieces {
            self.insert(piece, value);
        }
    }

    /// Keeps only the ranges whose value passes.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&V) -> bool) {
        self.entries.retain(|_, (_, value)| keep(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(map: &IntervalMap<u8>, model: &[Option<u8>]) {
        let mut flat = vec![None; model.len()];
        let mut last: Option<(u64, u8)> = None;
        for (range, &value) in map.overlapping(0..model.len() as u64) {
            assert!(!range.is_empty());
            assert!(last.is_none_or(|(end, held)| end < range.start || (end == range.start && held != value)));
            last = Some((range.end, value));
            for at in range {
                flat[usize::try_from(at).unwrap()] = Some(value);
            }
        }
        assert_eq!(flat, model);
    }

    proptest! {
        #[test]
        fn behaves_like_one_cell_per_byte(steps in prop::collection::vec((0u64..60, 0u64..20, 0u8..5), 0..60)) {
            let mut map = IntervalMap::default();
            let mut model = vec![None; 80];
            for (start, length, what) in steps {
                let range = start..start + length;
                let cells = usize::try_from(start).unwrap()..usize::try_from(start + length).unwrap();
                match what {
                    0 => { map.remove(range); model[cells].fill(None); }
                    4 => {
                        map.update(range, |_, held| held.map_or(1, |value| value % 3 + 1));
                        for cell in &mut model[cells] { *cell = Some(cell.map_or(1, |value| value % 3 + 1)); }
                    }
                    value => { map.insert(range, value); model[cells].fill(Some(value)); }
                }
                check(&map, &model);
            }
            for (at, expected) in model.iter().enumerate() {
                prop_assert_eq!(map.at(at as u64, 80).0, expected.as_ref());
                let last = model[..at].iter().rposition(Option::is_some).map(|last| last as u64 + 1);
                let expected = if expected.is_some() && last == Some(at as u64) && map.before(at as u64).is_none() {
                    None // One range holds both.
                } else {
                    last
                };
                prop_assert_eq!(map.before(at as u64).map(|(range, _)| range.end), expected);
            }
        }
    }
}
