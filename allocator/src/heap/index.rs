//! The index of free blocks: exact best fit by (size, address), lowest address first.
//!
//! Blocks are sorted into bins, 16 a doubling of size, with a bitmap of the bins that hold anything. Within a bin, keys lie
//! in a sorted run; a bin that outgrows one run becomes a sorted list of runs with a separate array of their first keys.
//! So a search touches a bitmap and one or two short arrays: its cost does not grow with the number of blocks as measured
//! up to a million (`aquifer-stress bench`), while the result is that of one ordered set over all blocks.
//!
//! Invariants:
//! * every key is in the bin of its size, every run is sorted and holds at most [`RUN`] keys;
//! * only the first run of a bin may be empty, and then it is the only one;
//! * a bin's bit is set exactly when the bin holds a key.

use super::block::BlockId;
use crate::size_class::MIN_BLOCK;

/// Greatest number of keys in a run.
const RUN: usize = 64;
/// Bins of one doubling, as a shift.
const SUB_BITS: u32 = 4;
const SUB: u64 = 1 << SUB_BITS;

/// A free block as the index orders it: size, then address; the block's number rides along.
///
/// From the top: 48 bits of size and 48 bits of address, both in units of [`MIN_BLOCK`], and 32 bits of block number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u128);

impl Key {
    #[inline]
    pub(crate) fn new(size: u64, addr: u64, block: BlockId) -> Key {
        debug_assert!(size.is_multiple_of(MIN_BLOCK) && addr.is_multiple_of(MIN_BLOCK));
        Key(u128::from(size / MIN_BLOCK) << 80 | u128::from(addr / MIN_BLOCK) << 32 | u128::from(block.0))
    }

    /// The least key of all blocks of at least `size` bytes.
    #[inline]
    fn at_least(size: u64) -> Key {
        Key(u128::from(size / MIN_BLOCK) << 80)
    }

    /// The key of what is left when `size` bytes are cut off the block's low end.
    #[inline]
    pub(crate) fn without_low_end(self, size: u64) -> Key {
        let units = u128::from(size / MIN_BLOCK);
        Key(self.0 - (units << 80) + (units << 32))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low 32 bits are the block number")]
    #[inline]
    pub(crate) fn block(self) -> BlockId {
        BlockId(self.0 as u32)
    }

    #[inline]
    fn units(self) -> u64 {
        (self.0 >> 80) as u64
    }

    /// Size of the block in bytes.
    #[inline]
    pub(crate) fn size(self) -> u64 {
        self.units() * MIN_BLOCK
    }
}

/// The bin of a size given in units of [`MIN_BLOCK`]: linear up to [`SUB`], then [`SUB`] bins a doubling.
#[inline]
fn bin_of(units: u64) -> usize {
    let bin = if units < SUB {
        units
    } else {
        let exponent = u64::from(units.ilog2() - SUB_BITS);
        (exponent + 1) * SUB + ((units >> exponent) - SUB)
    };
    usize::try_from(bin).unwrap_or(usize::MAX)
}

/// Where a search found a key: its bin, and its position if it is in the bin's first run. Good until the index changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    bin: usize,
    at: Option<usize>,
}

/// Free blocks of one pool that are reusable by one stream.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    bins: Vec<Bin>,
    /// One bit a bin.
    occupied: Vec<u64>,
}

#[derive(Debug, Default)]
struct Bin {
    /// The smallest keys.
    run: Vec<Key>,
    /// The other runs, all greater; `None` while one run suffices.
    more: Option<Box<Runs>>,
}

#[derive(Debug, Default)]
struct Runs {
    /// The first key of each run.
    firsts: Vec<Key>,
    runs: Vec<Vec<Key>>,
}

impl FreeIndex {
    /// The smallest block of at least `size` bytes, of those the one at the lowest address; and where it stands.
    #[inline]
    pub(crate) fn find(&self, size: u64) -> Option<(Key, Place)> {
        let least = Key::at_least(size);
        let bin = bin_of(least.units());
        if let Some((key, at)) = self.bins.get(bin)?.first_from(least) {
            return Some((key, Place { bin, at }));
        }
        let bin = self.first_occupied(bin + 1)?;
        Some((*self.bins[bin].run.first()?, Place { bin, at: Some(0) }))
    }

    /// As [`FreeIndex::find`], the key alone.
    pub(crate) fn best_fit(&self, size: u64) -> Option<Key> {
        self.find(size).map(|(key, _)| key)
    }

    /// Removes the key that a search just found.
    #[inline]
    pub(crate) fn remove_at(&mut self, place: Place, key: Key) {
        match (&mut self.bins[place.bin], place.at) {
            (Bin { run, more: None }, Some(at)) => {
                remove_at(run, at);
                if run.is_empty() {
                    self.occupied[place.bin / 64] &= !(1 << (place.bin % 64));
                }
            }
            _ => self.remove(key),
        }
    }

    /// Puts a smaller key in the place of the one that a search just found.
    #[inline]
    pub(crate) fn shrink_at(&mut self, place: Place, old: Key, new: Key) {
        debug_assert!(new < old);
        if let (Bin { run, more: None }, Some(at)) = (&mut self.bins[place.bin], place.at)
            && bin_of(new.units()) == place.bin
            && (at == 0 || run[at - 1] < new)
        {
            run[at] = new;
        } else {
            self.remove_at(place, old);
            self.insert(new);
        }
    }

    /// The first key above `key`, for walking on from a block that does not suit.
    pub(crate) fn after(&self, key: Key) -> Option<Key> {
        let bin = bin_of(key.units());
        let here = self.bins.get(bin)?.first_from(Key(key.0 + 1)).map(|(key, _)| key);
        here.or_else(|| self.first_occupied(bin + 1).and_then(|next| self.bins[next].run.first().copied()))
    }

    /// The last key below `key`.
    pub(crate) fn before(&self, key: Key) -> Option<Key> {
        let bin = bin_of(key.units()).min(self.bins.len());
        let here = self.bins.get(bin).and_then(|bin| bin.last_below(key));
        here.or_else(|| (0..bin).rev().find_map(|bin| self.bins[bin].last_below(key)))
    }

    /// The last key not above `key`.
    pub(crate) fn before_or_at(&self, key: Key) -> Option<Key> {
        self.before(Key(key.0.saturating_add(1)))
    }

    /// The greatest key.
    pub(crate) fn last(&self) -> Option<Key> {
        self.before(Key(u128::MAX))
    }

    #[inline]
    pub(crate) fn insert(&mut self, key: Key) {
        let bin = bin_of(key.units());
        if bin >= self.bins.len() {
            self.grow(bin);
        }
        self.occupied[bin / 64] |= 1 << (bin % 64);
        self.bins[bin].insert(key);
    }

    #[inline]
    pub(crate) fn remove(&mut self, key: Key) {
        let bin = bin_of(key.units());
        if self.bins[bin].remove(key) {
            self.occupied[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// Puts `new` in the place of `old`; cheaper than a removal and an insertion where both fall into a bin of their own.
    #[inline]
    pub(crate) fn replace(&mut self, old: Key, new: Key) {
        let bin = bin_of(old.units());
        if bin == bin_of(new.units())
            && let Bin { run, more: None } = &mut self.bins[bin]
            && let [only] = &mut run[..]
        {
            debug_assert_eq!(*only, old);
            *only = new;
        } else {
            self.remove(old);
            self.insert(new);
        }
    }

    /// Every key, smallest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Key> + '_ {
        self.bins.iter().flat_map(|bin| {
            let more = bin.more.iter().flat_map(|more| more.runs.iter().flatten());
            bin.run.iter().chain(more).copied()
        })
    }

    #[cold]
    fn grow(&mut self, bin: usize) {
        self.bins.resize_with(bin + 1, Bin::default);
        self.occupied.resize(bin / 64 + 1, 0);
    }

    #[inline]
    fn first_occupied(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = self.occupied.get(word)? & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.occupied.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }
}

impl Bin {
    /// The first key not below `least`, and its position if that is in the first run.
    #[inline]
    fn first_from(&self, least: Key) -> Option<(Key, Option<usize>)> {
        let at = position(&self.run, least);
        match (self.run.get(at), &self.more) {
            (Some(&key), _) => Some((key, Some(at))),
            (None, None) => None,
            (None, Some(more)) => more.first_from(least).map(|key| (key, None)),
        }
    }

    fn last_below(&self, key: Key) -> Option<Key> {
        let in_more = self.more.as_ref().and_then(|more| more.last_below(key));
        in_more.or_else(|| position(&self.run, key).checked_sub(1).map(|at| self.run[at]))
    }

    #[inline]
    fn insert(&mut self, key: Key) {
        match &mut self.more {
            Some(more) if key > more.firsts[0] => more.insert(key),
            _ if self.run.len() < RUN => {
                let at = position(&self.run, key);
                insert_at(&mut self.run, at, key);
            }
            _ => self.split_and_insert(key),
        }
    }

    #[cold]
    fn split_and_insert(&mut self, key: Key) {
        let upper = self.run.split_off(RUN / 2);
        let more = self.more.get_or_insert_default();
        more.firsts.insert(0, upper[0]);
        more.runs.insert(0, upper);
        self.insert(key);
    }

    /// Removes a key that is there; tells whether the bin is empty now.
    #[inline]
    fn remove(&mut self, key: Key) -> bool {
        match &mut self.more {
            Some(more) if key >= more.firsts[0] => {
                if more.remove(key) {
                    self.more = None;
                }
                false
            }
            None if self.run.len() == 1 => {
                debug_assert_eq!(self.run[0], key);
                self.run.clear();
                true
            }
            _ => {
                let at = position(&self.run, key);
                debug_assert_eq!(self.run.get(at), Some(&key));
                remove_at(&mut self.run, at);
                self.run.is_empty() && self.refill()
            }
        }
    }

    /// Moves the next run to the front; tells whether there was none.
    #[cold]
    fn refill(&mut self) -> bool {
        let Some(more) = &mut self.more else { return true };
        more.firsts.remove(0);
        self.run = more.runs.remove(0);
        if more.runs.is_empty() {
            self.more = None;
        }
        false
    }
}

impl Runs {
    /// The run that a key belongs to: the last whose first key is not greater.
    #[inline]
    fn run_of(&self, key: Key) -> usize {
        self.firsts.partition_point(|&first| first <= key).saturating_sub(1)
    }

    #[inline]
    fn first_from(&self, least: Key) -> Option<Key> {
        let run = self.run_of(least);
        let at = position(&self.runs[run], least);
        self.runs[run].get(at).copied().or_else(|| self.firsts.get(run + 1).copied())
    }

    fn last_below(&self, key: Key) -> Option<Key> {
        let run = self.run_of(key);
        match position(&self.runs[run], key).checked_sub(1) {
            Some(at) => Some(self.runs[run][at]),
            None => run.checked_sub(1).and_then(|run| self.runs[run].last().copied()),
        }
    }

    #[inline]
    fn insert(&mut self, key: Key) {
        let mut run = self.run_of(key);
        if self.runs[run].len() == RUN {
            let upper = self.runs[run].split_off(RUN / 2);
            self.firsts.insert(run + 1, upper[0]);
            self.runs.insert(run + 1, upper);
            run += usize::from(key >= self.firsts[run + 1]);
        }
        let at = position(&self.runs[run], key);
        insert_at(&mut self.runs[run], at, key);
    }

    /// Removes a key that is there; tells whether no run is left.
    #[inline]
    fn remove(&mut self, key: Key) -> bool {
        let run = self.run_of(key);
        let keys = &mut self.runs[run];
        let at = position(keys, key);
        debug_assert_eq!(keys.get(at), Some(&key));
        remove_at(keys, at);
        match keys.first() {
            Some(&first) => self.firsts[run] = first,
            None => {
                self.firsts.remove(run);
                self.runs.remove(run);
            }
        }
        self.runs.is_empty()
    }
}

/// As `Vec::insert`; the tail is mostly a few keys, for which a loop beats a call that moves memory.
#[inline]
fn insert_at(run: &mut Vec<Key>, at: usize, key: Key) {
    run.push(key);
    let tail = &mut run[at..];
    if tail.len() > 16 {
        tail.rotate_right(1);
        return;
    }
    let mut carried = key;
    for slot in tail {
        std::mem::swap(slot, &mut carried);
    }
}

/// As `Vec::remove`.
#[inline]
fn remove_at(run: &mut Vec<Key>, at: usize) {
    let tail = &mut run[at..];
    if tail.len() > 16 {
        tail.copy_within(1.., 0);
    } else {
        for next in 1..tail.len() {
            tail[next - 1] = tail[next];
        }
    }
    run.pop();
}

/// How many keys of a sorted run are smaller than `key`.
#[inline]
fn position(run: &[Key], key: Key) -> usize {
    if run.len() <= 8 {
        run.iter().take_while(|&&other| other < key).count()
    } else {
        run.partition_point(|&other| other < key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_contiguous_and_ordered() {
        let mut last = bin_of(1);
        for units in 2..100_000 {
            let bin = bin_of(units);
            assert!(bin == last || bin == last + 1, "units {units}");
            last = bin;
        }
        assert!(bin_of((1 << 48) - 1) < 1024);
    }

    fn key(size: u64, addr: u64) -> Key {
        Key::new(size * MIN_BLOCK, addr * MIN_BLOCK, BlockId(u32::try_from(addr % 1000).unwrap()))
    }

    fn addr_of(key: Key) -> u64 {
        u64::try_from((key.0 >> 32) & ((1 << 48) - 1)).unwrap() * MIN_BLOCK
    }

    /// Few distinct sizes make long runs, many make full bitmaps.
    fn keys() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
        let size = prop_oneof![1..4u64, 1..400u64, 1..(1u64 << 40)];
        prop::collection::vec((size, 0..3000u64, any::<bool>()), 0..1200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        #[test]
        fn equals_an_ordered_set(steps in keys()) {
            let mut index = FreeIndex::default();
            let mut model = BTreeSet::new();
            for (size, addr, search) in steps {
                let key = key(size, addr);
                if search {
                    let least = Key::at_least(key.size());
                    if let Some((found, place)) = index.find(key.size())
                        && found.size() > key.size()
                    {
                        // Take the key's size off the low end of the block that was found, as an allocation does.
                        let rest = Key::new(found.size() - key.size(), addr_of(found) + key.size(), found.block());
                        if !model.contains(&rest) {
                            model.remove(&found);
                            model.insert(rest);
                            index.shrink_at(place, found, rest);
                        }
                    } else if let Some((found, place)) = index.find(key.size()) {
                        model.remove(&found);
                        index.remove_at(place, found);
                    }
                    prop_assert_eq!(index.best_fit(key.size()), model.range(least..).next().copied());
                    prop_assert_eq!(index.before(key), model.range(..key).next_back().copied());
                    prop_assert_eq!(index.after(key), model.range(Key(key.0 + 1)..).next().copied());
                } else if model.insert(key) {
                    index.insert(key);
                } else {
                    model.remove(&key);
                    index.remove(key);
                }
                prop_assert_eq!(index.last(), model.last().copied());
            }
            prop_assert!(index.iter().eq(model.iter().copied()));
            while let Some(key) = model.pop_first() {
                let new = Key::new(key.size() + 512, 1 << 30, BlockId(1));
                index.replace(key, new);
                prop_assert_eq!(index.best_fit(key.size()), model.first().copied().into_iter().chain([new]).min());
                index.remove(new);
            }
            prop_assert_eq!(index.last(), None);
        }
    }
}
