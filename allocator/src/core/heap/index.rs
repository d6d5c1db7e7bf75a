//! The indexes of free blocks, of which the heap has one for each pool and owner: bins of similar
//! sizes, each a linked list through its blocks' own records, last in first out.
//!
//! Putting a block in and taking it out cost the same however many blocks there are: a bit, a head,
//! and the links of at most two other blocks. A block whose size changes within its bin stays where
//! it is, which is what cutting a little off a large block, or merging a little into it, mostly
//! does.
//!
//! Guarantees about the block that is chosen for a request:
//! * a block is found whenever any block is large enough;
//! * bins are so narrow ([`bin_of`]) that the blocks of one bin differ by at most 1/64. A
//!   request looks at the first [`CANDIDATES`] blocks of the bin of its own size and takes the
//!   first that is large enough. If there is none, it takes any block of the next occupied bin, all
//!   of which are large enough. So the block is at most 1/64 larger than the best fit, unless the
//!   best fit hides behind [`CANDIDATES`] others of the request's own bin that are too small, or
//!   one of them is slightly larger.
//!
//! Invariants:
//! * a block is in the list of the bin of its size; its links name its neighbours there,
//!   [`BlockId::NONE`] at both ends;
//! * a bin's bit is set exactly when its list is not empty.

use crate::core::heap::block::{Block, Records, Slab};
use crate::size_class::MIN_BLOCK;
use crate::types::BlockId;

/// How many blocks of a request's own bin, some of which may be too small, are looked at before the
/// next bin.
const CANDIDATES: usize = 4;

#[derive(Debug)]
pub(super) struct Bins {
    /// The first block of each bin.
    heads: [BlockId; BINS],
    occupied: Occupied,
}

impl Default for Bins {
    fn default() -> Bins {
        Bins { heads: [BlockId::NONE; BINS], occupied: Occupied::default() }
    }
}

impl Bins {
    pub(super) fn is_empty(&self) -> bool {
        self.occupied.is_empty()
    }

    /// The first block of at least `size` bytes, bins in ascending order of their sizes.
    #[cold]
    pub(super) fn first_fit(&self, blocks: &Slab, size: u64) -> Option<BlockId> {
        let bin = bin_of(size);
        let own = self.list(blocks, bin).find(|&id| blocks[id].size >= size);
        own.or_else(|| self.first_from(bin + 1))
    }

    /// The blocks from [`Bins::first_fit`] on, bins in ascending order of their sizes.
    pub(super) fn iter_from_first_fit<'a>(&'a self, blocks: &'a Slab, size: u64) -> impl Iterator<Item = BlockId> + 'a {
        let after = |id: BlockId| {
            let block = &blocks[id];
            block.bin_next.some().or_else(|| self.first_from(bin_of(block.size) + 1))
        };
        std::iter::successors(self.first_fit(blocks, size), move |&id| after(id))
    }

    /// Every block of at least `size` bytes, bins in ascending order of their sizes. Mostly the
    /// next block does not depend on the record of the last one, so the processor need not wait for
    /// each record.
    pub(super) fn iter_from<'a>(&'a self, blocks: &'a Slab, size: u64) -> impl Iterator<Item = BlockId> + 'a {
        let from = bin_of(size);
        let own = self.list(blocks, from).filter(move |&id| blocks[id].size >= size);
        let others = std::iter::successors(self.occupied.first_from(from + 1), |bin| self.occupied.first_from(bin + 1));
        own.chain(others.flat_map(move |bin| self.list(blocks, bin)))
    }

    /// True if a free block is in its list, judged by its neighbours there.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn contains(&self, blocks: &Slab, id: BlockId) -> bool {
        let block = &blocks[id];
        let bin = bin_of(block.size);
        let before = match block.bin_prev.some() {
            Some(prev) => blocks[prev].bin_next == id && bin_of(blocks[prev].size) == bin,
            None => self.heads.get(bin) == Some(&id) && self.occupied.first_from(bin) == Some(bin),
        };
        before
            && block.bin_next.some().is_none_or(|next| blocks[next].bin_prev == id && bin_of(blocks[next].size) == bin)
    }

    /// Blocks of one bin, in order.
    fn list<'a>(
        &'a self,
        blocks: &'a impl std::ops::Index<BlockId, Output = Block>,
        bin: usize,
    ) -> impl Iterator<Item = BlockId> + 'a {
        let head = self.heads.get(bin).and_then(|head| head.some());
        std::iter::successors(head, |&id| blocks[id].bin_next.some())
    }

    /// Chooses a block for a request if the first block of the request's own bin is too small.
    fn choose_further(&self, blocks: &Records<'_>, own: usize, size: u64) -> Option<BlockId> {
        let fits = |id: &BlockId| blocks[*id].size >= size;
        let near = self.list(blocks, own).take(CANDIDATES).skip(1).find(fits);
        near.or_else(|| self.first_from(own + 1)).or_else(|| self.list(blocks, own).find(fits))
    }

    fn first_from(&self, bin: usize) -> Option<BlockId> {
        self.heads.get(self.occupied.first_from(bin)?).copied()
    }

    /// Takes a block out of its bin. Without branches, because a block's place in its list follows
    /// no pattern.
    #[inline]
    fn unlink(&mut self, blocks: &mut Records<'_>, id: BlockId, bin: usize) {
        let (prev, next) = (blocks[id].bin_prev, blocks[id].bin_next);
        blocks[next].bin_prev = prev;
        blocks[prev].bin_next = next;
        let head = &mut self.heads[bin];
        *head = std::hint::select_unpredictable(prev == BlockId::NONE, next, *head);
        self.occupied.set_to(bin, *head != BlockId::NONE);
    }

    /// Puts a block into a bin, without branches, too.
    #[inline]
    fn link(&mut self, blocks: &mut Records<'_>, id: BlockId, bin: usize) {
        let next = std::mem::replace(&mut self.heads[bin], id);
        let block = &mut blocks[id];
        (block.bin_prev, block.bin_next) = (BlockId::NONE, next);
        blocks[next].bin_prev = id;
        self.occupied.set_to(bin, true);
    }
}

impl Bins {
    /// The block to serve a request of `size` bytes from, if any is large enough.
    #[inline]
    pub(super) fn choose(&self, blocks: &Records<'_>, size: u64) -> Option<BlockId> {
        let own = bin_of(size);
        let bin = self.occupied.first_from(own)?;
        let head = *self.heads.get(bin)?;
        if blocks[head].size >= size { Some(head) } else { self.choose_further(blocks, own, size) }
    }

    /// Puts a free block in.
    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut Records<'_>, id: BlockId) {
        self.link(blocks, id, bin_of(blocks[id].size));
    }

    /// Takes out a block of this size, which must be in the index.
    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut Records<'_>, id: BlockId, size: u64) {
        self.unlink(blocks, id, bin_of(size));
    }

    /// Updates the index after the size of a block in it changed, which was `before`.
    #[inline]
    pub(super) fn changed(&mut self, blocks: &mut Records<'_>, id: BlockId, before: u64) {
        let (bin, before) = (bin_of(blocks[id].size), bin_of(before));
        if bin != before {
            self.unlink(blocks, id, before);
            self.link(blocks, id, bin);
        }
    }
}

/// An index and the blocks in it, for iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexView<'a> {
    index: &'a Bins,
    blocks: &'a Slab,
}

impl<'a> IndexView<'a> {
    pub(super) fn new(index: &'a Bins, blocks: &'a Slab) -> IndexView<'a> {
        IndexView { index, blocks }
    }

    fn key(self, id: BlockId) -> Key {
        let Block { size, addr, .. } = self.blocks[id];
        Key { size, addr, block: id }
    }

    /// The first block in the index's order that has at least `size` bytes: bins in ascending order
    /// of their sizes.
    pub(crate) fn first_fit(self, size: u64) -> Option<Key> {
        self.index.first_fit(self.blocks, size).map(|id| self.key(id))
    }

    /// The blocks in the index's order, from [`IndexView::first_fit`] on.
    pub(crate) fn iter_from_first_fit(self, size: u64) -> impl Iterator<Item = Key> + 'a {
        self.index.iter_from_first_fit(self.blocks, size).map(move |id| self.key(id))
    }

    /// Every block of at least `size` bytes, not 0, in the index's order.
    pub(crate) fn iter_from(self, size: u64) -> impl Iterator<Item = Key> + 'a {
        self.index.iter_from(self.blocks, size).map(move |id| self.key(id))
    }

    /// Number of blocks.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn len(self) -> usize {
        self.index.iter_from(self.blocks, 1).count()
    }

    /// True if a free block is in the index.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn contains(self, id: BlockId) -> bool {
        self.index.contains(self.blocks, id)
    }
}

/// Binary logarithm of the number of bins per doubling.
pub(super) const SUB_BITS: u32 = 6;
const SUB: u64 = 1 << SUB_BITS;
/// Number of bins. Blocks from 16 TiB on share the last one.
pub(super) const BINS: usize = 2048;

/// The bin of a size, not 0: one for each multiple of [`MIN_BLOCK`] up to [`SUB`] of them, then
/// [`SUB`] bins a doubling. All sizes of a bin are smaller than all of the next one.
///
/// Round sizes are the greatest of their bin, not the least, because segments have round sizes, and
/// the rest should be in the same bin when a little is cut off.
#[inline]
pub(super) fn bin_of(size: u64) -> usize {
    let last = size.wrapping_sub(1) / MIN_BLOCK;
    let exponent = (last | SUB).ilog2() - SUB_BITS;
    let bin = u64::from(exponent) * SUB + (last >> exponent);
    usize::try_from(bin).unwrap_or(usize::MAX).min(BINS - 1)
}

/// The occupied bins: one bit for each bin, and one bit for each word of those bits.
#[derive(Debug, Default)]
pub(super) struct Occupied {
    bins: [u64; BINS / 64],
    words: u64,
}

impl Occupied {
    /// Notes whether a bin is occupied.
    #[inline]
    pub(super) fn set_to(&mut self, bin: usize, occupied: bool) {
        let with = |word: u64, bit: usize, is_set: bool| word & !(1 << bit) | u64::from(is_set) << bit;
        let word = &mut self.bins[bin / 64];
        *word = with(*word, bin % 64, occupied);
        self.words = with(self.words, bin / 64, *word != 0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// The first occupied bin from `from` on.
    #[inline]
    pub(super) fn first_from(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let here = self.bins.get(word)? & (u64::MAX << (from % 64));
        // Without a branch on its position, which follows no pattern.
        let later = (self.words & (u64::MAX << 1 << word)).trailing_zeros() as usize;
        let beyond = self.bins.get(later).copied().unwrap_or(0);
        let (word, bits) = std::hint::select_unpredictable(here != 0, (word, here), (later, beyond));
        (bits != 0).then(|| word * 64 + bits.trailing_zeros() as usize)
    }
}

/// A free block, in the order of its size, then its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) size: u64,
    pub(crate) addr: u64,
    pub(crate) block: BlockId,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::size_class::MIN_BLOCK;

    /// What happens to the nth of the blocks there are, or to a new one.
    #[derive(Clone, Debug)]
    enum Step {
        Insert { size: u64 },
        Remove { nth: usize },
        Resize { nth: usize, size: u64 },
        Take { size: u64 },
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let units = || prop_oneof![1..4_u64, 60..400_u64, 1000..1100_u64, 1..(1_u64 << 36)];
        let size = move || units().prop_map(|units| units * MIN_BLOCK);
        let step = prop_oneof![
            3 => size().prop_map(|size| Step::Insert { size }),
            1 => any::<usize>().prop_map(|nth| Step::Remove { nth }),
            1 => (any::<usize>(), size()).prop_map(|(nth, size)| Step::Resize { nth, size }),
            2 => size().prop_map(|size| Step::Take { size }),
        ];
        prop::collection::vec(step, 0..600)
    }

    /// What is promised of the block that is chosen.
    fn check_choice(bins: &Bins, blocks: &mut Slab, model: &BTreeSet<BlockId>, size: u64) -> Result<(), TestCaseError> {
        let sizes: Vec<u64> = model.iter().map(|&id| blocks[id].size).collect();
        let fitting = sizes.into_iter().filter(|&other| other >= size);
        let Some(chosen) = bins.choose(&blocks.records(), size) else {
            prop_assert_eq!(fitting.min(), None, "there is one whenever any is large enough");
            return Ok(());
        };
        prop_assert!(model.contains(&chosen) && blocks[chosen].size >= size);
        let chosen = bin_of(blocks[chosen].size);
        let next = fitting.clone().map(bin_of).filter(|&bin| bin > bin_of(size)).min();
        prop_assert!(chosen == bin_of(size) || Some(chosen) == next);
        let walked = bins.iter_from_first_fit(blocks, size).filter(|&id| blocks[id].size >= size).count();
        prop_assert_eq!(walked, fitting.clone().count(), "a walk misses no block");
        let from: Vec<u64> = bins.iter_from(blocks, size).map(|id| blocks[id].size).collect();
        prop_assert!(from.iter().all(|&other| other >= size) && from.len() == fitting.count(), "{:?}", from);
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
        #[test]
        fn lists_hold_what_was_put_in(steps in steps()) {
            let (mut bins, mut blocks, mut model) = (Bins::default(), Slab::default(), BTreeSet::new());
            let nth = |model: &BTreeSet<BlockId>, nth: usize| model.iter().nth(nth % model.len().max(1)).copied();
            for step in steps {
                match step {
                    Step::Insert { size } => {
                        let id = blocks.insert(Block { size, ..Block::default() });
                        bins.insert(&mut blocks.records(), id);
                        model.insert(id);
                    }
                    Step::Remove { nth: at } => {
                        if let Some(id) = nth(&model, at) {
                            let size = blocks[id].size;
                            bins.remove(&mut blocks.records(), id, size);
                            model.remove(&id);
                            blocks.remove(id);
                        }
                    }
                    Step::Resize { nth: at, size } => {
                        if let Some(id) = nth(&model, at) {
                            let old = std::mem::replace(&mut blocks[id].size, size);
                            bins.changed(&mut blocks.records(), id, old);
                        }
                    }
                    Step::Take { size } => {
                        check_choice(&bins, &mut blocks, &model, size)?;
                        if let Some(id) = bins.choose(&blocks.records(), size) {
                            let size = blocks[id].size;
                            bins.remove(&mut blocks.records(), id, size);
                            model.remove(&id);
                            blocks.remove(id);
                        }
                    }
                }
                prop_assert!(model.iter().all(|&id| bins.contains(&blocks, id)));
            }
            let held: Vec<BlockId> = bins.iter_from(&blocks, 1).collect();
            prop_assert_eq!(held.len(), model.len());
            prop_assert_eq!(held.into_iter().collect::<BTreeSet<_>>(), model.clone());
        }
    }
}

#[cfg(test)]
mod sizes_tests {
    use super::*;

    #[test]
    fn bins_are_contiguous_and_ordered() {
        let mut last = bin_of(MIN_BLOCK);
        for units in 2..100_000 {
            let bin = bin_of(units * MIN_BLOCK);
            assert!(bin == last || bin == last + 1, "units {units}");
            last = bin;
        }
        assert_eq!((bin_of(MIN_BLOCK), bin_of(u64::MAX)), (0, BINS - 1));
        let mib = 1 << 20;
        assert!([2, 20, 32, 64].iter().all(|n| bin_of(n * mib) == bin_of(n * mib - 1)), "round sizes end their bins");
        assert!(bin_of((16 << 40) - 1) < BINS);
    }

    #[test]
    fn a_bin_is_at_most_a_64th_of_its_sizes_wide() {
        let mut least = 1_u64;
        for units in 1..1_u64 << 20 {
            if bin_of(units * MIN_BLOCK) != bin_of(least * MIN_BLOCK) {
                least = units;
            }
            assert!((units - least) << SUB_BITS <= least, "{least} and {units} share a bin");
        }
    }
}

#[cfg(test)]
mod key_tests {
    use super::*;

    #[test]
    fn sizes_then_addresses_decide_wherever_memory_is() {
        let high = u64::MAX - MIN_BLOCK + 1;
        for addr in [0, 1 << 57, 3 << 58, high] {
            let (small, large) = (
                Key { size: MIN_BLOCK, addr, block: BlockId(7) },
                Key { size: 2 * MIN_BLOCK, addr: 0, block: BlockId(7) },
            );
            assert!(small < large);
            assert_eq!((small.size, small.block), (MIN_BLOCK, BlockId(7)));
        }
        assert!(
            Key { size: MIN_BLOCK, addr: 1 << 57, block: BlockId(0) }
                < Key { size: MIN_BLOCK, addr: high, block: BlockId(0) }
        );
    }
}
