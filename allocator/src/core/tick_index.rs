//! Memory that waits for ticks: which of it need not wait any more once streams got further.
//!
//! A pure data structure. Each entry is listed under every tick that it waits for. So the cost of
//! learning how far the streams got depends on the number of streams and of entries that become
//! done, and not on the others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::types::{After, StreamId, Use};

/// Entries of some weight, each of which waits for ticks.
#[derive(Debug)]
pub(crate) struct TickIndex<K> {
    ticks: BTreeMap<Use, Listed<K>>,
    /// How many ticks an entry still waits for, where there are several.
    left: BTreeMap<K, usize>,
    /// Entries that wait for nothing.
    done: BTreeSet<K>,
}

/// What waits for a tick.
#[derive(Debug)]
struct Listed<K> {
    weight: u64,
    entries: BTreeSet<K>,
}

impl<K> Default for TickIndex<K> {
    fn default() -> TickIndex<K> {
        TickIndex { ticks: BTreeMap::new(), left: BTreeMap::new(), done: BTreeSet::new() }
    }
}

impl<K: Copy + Ord> TickIndex<K> {
    pub(crate) fn is_empty(&self) -> bool {
        self.ticks.is_empty() && self.done.is_empty()
    }

    /// Adds an entry, which is not listed yet.
    pub(crate) fn insert(&mut self, entry: K, weight: u64, uses: &[Use]) {
        let mut left = 0;
        for &tick in uses {
            let listed = self.ticks.entry(tick).or_insert(Listed { weight: 0, entries: BTreeSet::new() });
            if listed.entries.insert(entry) {
                listed.weight += weight;
                left += 1;
            }
        }
        match left {
            0 => _ = self.done.insert(entry),
            1 => {}
            _ => _ = self.left.insert(entry, left),
        }
    }

    /// Removes an entry, which was added with this weight and these uses.
    pub(crate) fn remove(&mut self, entry: K, weight: u64, uses: &[Use]) {
        if self.done.remove(&entry) {
            return;
        }
        self.left.remove(&entry);
        for tick in uses {
            let Some(listed) = self.ticks.get_mut(tick) else { continue };
            if listed.entries.remove(&entry) {
                listed.weight -= weight;
            }
            if listed.entries.is_empty() {
                self.ticks.remove(tick);
            }
        }
    }

    /// Notes how far streams got: `reached` gives for a stream the tick that its timeline has
    /// reached.
    pub(crate) fn advance(&mut self, reached: impl Fn(StreamId) -> After) {
        let mut next = self.ticks.keys().next().copied();
        while let Some(Use { stream, .. }) = next {
            let all_of = |after| Use { stream, after };
            let until = reached(stream);
            while let Some((&tick, _)) = self.ticks.range(all_of(After::NOTHING)..=all_of(until)).next() {
                let entries = self.ticks.remove(&tick).map(|listed| listed.entries).unwrap_or_default();
                entries.into_iter().for_each(|entry| self.waits_less(entry));
            }
            let of_others = (Bound::Excluded(all_of(After::ALL)), Bound::Unbounded);
            next = self.ticks.range(of_others).next().map(|(&tick, _)| tick);
        }
    }

    fn waits_less(&mut self, entry: K) {
        match self.left.get_mut(&entry) {
            Some(left) if *left > 1 => *left -= 1,
            _ => {
                self.left.remove(&entry);
                self.done.insert(entry);
            }
        }
    }

    /// The entries that wait for nothing, as far as [`TickIndex::advance`] knows.
    pub(crate) fn done(&self) -> &BTreeSet<K> {
        &self.done
    }

    /// The ticks that entries wait for, in order, each with the weight of these entries.
    pub(crate) fn ticks(&self) -> impl Iterator<Item = (Use, u64)> + '_ {
        self.ticks.iter().map(|(&tick, listed)| (tick, listed.weight))
    }

    /// The latest tick of each stream that entries wait for.
    pub(crate) fn latest(&self) -> impl Iterator<Item = Use> + '_ {
        let last_before = |end: Use| self.ticks.range(..end).next_back().map(|(&tick, _)| tick);
        let last = self.ticks.last_key_value().map(|(&tick, _)| tick);
        std::iter::successors(last, move |&Use { stream, .. }| last_before(Use { stream, after: After::NOTHING }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::{latest_by_stream, ticks, used_until};

    #[derive(Clone, Debug)]
    enum Step {
        Insert(Vec<Use>),
        Remove(prop::sample::Index),
        Advance(StreamId, After),
    }

    fn step() -> impl Strategy<Value = Step> {
        let used = (0..4_u32, 0..20_u64).prop_map(|(stream, until)| used_until(stream, until));
        prop_oneof![
            4 => prop::collection::vec(used, 0..5).prop_map(Step::Insert),
            1 => any::<prop::sample::Index>().prop_map(Step::Remove),
            2 => (0..4_u32, 0..20_u64).prop_map(|(stream, until)| Step::Advance(StreamId(stream), ticks(until))),
        ]
    }

    proptest! {
        #[test]
        fn behaves_like_a_list_that_is_searched(steps in prop::collection::vec(step(), 0..60)) {
            let (mut index, mut list, mut reached) = (TickIndex::default(), BTreeMap::new(), [After::NOTHING; 4]);
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(uses) => {
                        index.insert(number, number as u64, &uses);
                        list.insert(number, uses);
                    }
                    Step::Remove(_) if list.is_empty() => {}
                    Step::Remove(which) => {
                        let (&entry, _) = list.iter().nth(which.index(list.len())).unwrap();
                        let uses = list.remove(&entry).unwrap();
                        index.remove(entry, entry as u64, &uses);
                    }
                    Step::Advance(stream, until) => reached[stream.index()] = until.max(reached[stream.index()]),
                }
                index.advance(|stream| reached[stream.index()]);
                let waits = |one: &&Use| one.after > reached[one.stream.index()];
                let done = list.iter().filter(|(_, uses)| !uses.iter().any(|tick| waits(&tick)));
                prop_assert!(index.done().iter().eq(done.map(|(entry, _)| entry)));
                prop_assert_eq!(index.is_empty(), list.is_empty());
                let mut ticks: BTreeMap<Use, u64> = BTreeMap::new();
                for (&entry, uses) in &list {
                    let distinct: BTreeSet<Use> = uses.iter().filter(waits).copied().collect();
                    distinct.into_iter().for_each(|tick| *ticks.entry(tick).or_default() += entry as u64);
                }
                let mut latest: Vec<Use> = latest_by_stream(ticks.keys().copied()).collect();
                latest.reverse();
                prop_assert!(index.latest().eq(latest));
                prop_assert!(index.ticks().eq(ticks));
            }
        }
    }
}
