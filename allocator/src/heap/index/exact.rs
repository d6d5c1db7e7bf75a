//! The exact index: best fit by (size, address), lowest address first.
//!
//! Sizes are multiples of [`MIN_BLOCK`], and a bitmap tells of which sizes there is a block. So a
//! search is a matter of bits, and putting a block in and taking it out cost the same however many
//! blocks of other sizes there are. For each size the block at the lowest address is noted. Where
//! sizes are mixed, that is mostly the only one; sizes with several blocks have a [`Crowd`], which
//! finds the lowest. There are few blocks beyond the sizes of the bitmap, and they are in a list.
//!
//! Tried before: bins of similar sizes, 16, 32 or 64 a doubling, each an ordered set of keys by
//! (size, address). At 10 000 live blocks a third of all insertions were into crowded bins, where
//! moving keys cost mispredicted branches or, done without branches, instructions.
//!
//! Invariants:
//! * a size's bit is set exactly when it has a block. Then its entry names the lowest one;
//!   otherwise the entry means nothing, and is not read, because it may be in no cache and on a
//!   page without memory;
//! * a size has a crowd from when it has two blocks until it has none. Meanwhile all its blocks are
//!   in the crowd.

mod crowd;
mod larger;
mod occupied;

use crowd::Crowd;
use larger::Larger;
use occupied::{Occupied, SIZES};

use super::Index;
use super::key::Key;
#[cfg(any(test, debug_assertions))]
use crate::heap::block::Slab;
use crate::heap::block::{Block, BlockId, Records};
use crate::size_class::{MIN_BLOCK, SMALL_SEGMENT};

/// The number of sizes up to that of a small segment, whole words of the bitmap.
const FEW_SIZES: usize = (SMALL_SEGMENT / MIN_BLOCK) as usize + 64;

/// Free blocks of one pool that are reusable by one stream.
#[derive(Debug, Default)]
pub(in crate::heap) struct Exact {
    /// For each size, in units of [`MIN_BLOCK`], the number of the block at the lowest address and
    /// that of the crowd, 0 if there is none. Pairs of integers, because the standard library gets
    /// zeros of such from the operating system, which provides memory only for those that are
    /// touched.
    sizes: Vec<(u32, u32)>,
    occupied: Occupied,
    /// The crowds. Nothing is in the first one.
    crowds: Vec<Crowd>,
    /// Crowds without blocks, for reuse: a size whose blocks come and go allocates no host memory.
    spare: Vec<u32>,
    /// The blocks of at least [`SIZES`] units.
    larger: Larger,
}

/// A block in the index, or one that was.
#[derive(Clone, Copy, Debug)]
pub(in crate::heap) struct Held {
    pub(in crate::heap) block: BlockId,
    pub(in crate::heap) size: u64,
}

/// A size in units, as an index.
#[inline]
fn units(size: u64) -> usize {
    usize::try_from(size.div_ceil(MIN_BLOCK)).unwrap_or(usize::MAX)
}

impl Exact {
    pub(super) fn is_empty(&self) -> bool {
        self.occupied.is_empty() && self.larger.is_empty()
    }

    /// The smallest block of at least `size` bytes; of equally small ones, that at the lowest
    /// address.
    #[inline]
    pub(in crate::heap) fn best_from(&self, size: u64) -> Option<Held> {
        let Some(units) = self.occupied.first_from(units(size)) else { return self.larger.first_from(size) };
        Some(Held { block: BlockId(self.sizes[units].0), size: units as u64 * MIN_BLOCK })
    }

    /// True if there is another block of the size of this one.
    #[inline]
    pub(in crate::heap) fn has_others(&self, held: Held) -> bool {
        match self.sizes.get(units(held.size)) {
            Some(&(_, crowd)) => crowd != 0 && self.crowds[crowd as usize].len() > 1,
            None => self.larger.has_several(held.size),
        }
    }

    /// Every block of at least `size` bytes, in order.
    pub(super) fn iter_from(&self, size: u64) -> impl Iterator<Item = BlockId> + '_ {
        let sizes = self.occupied.iter_from(units(size)).flat_map(|units| {
            let (first, crowd) = self.sizes[units];
            let alone = (crowd == 0).then_some(BlockId(first));
            let crowd = (crowd != 0).then(|| self.crowds[crowd as usize].iter());
            alone.into_iter().chain(crowd.into_iter().flatten())
        });
        sizes.chain(self.larger.iter_from(size))
    }

    /// Number of blocks, for checks that must not allocate host memory, as walking through crowds
    /// does.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn len(&self) -> usize {
        let crowds = self.occupied.iter_from(0).map(|units| self.crowds.get(self.sizes[units].1 as usize));
        let sized = crowds.map(|crowd| crowd.map_or(1, |crowd| crowd.len().max(1) as usize)).sum::<usize>();
        sized + self.larger.iter_from(0).count()
    }

    /// True if a free block is where it belongs.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn contains(&self, blocks: &Slab, id: BlockId) -> bool {
        let block = &blocks[id];
        let at = units(block.size);
        if at >= SIZES {
            return self.larger.contains(Key::of(id, block));
        }
        let Some(&(first, crowd)) = self.sizes.get(at) else { return false };
        let is_here =
            if crowd == 0 { first == id.0 } else { self.crowds[crowd as usize].has(block.slot(), block.addr, id) };
        self.occupied.first_from(at) == Some(at) && is_here && blocks[BlockId(first)].addr <= block.addr
    }

    #[inline]
    fn insert_block(&mut self, blocks: &mut Records<'_>, id: BlockId) {
        let Block { addr, size, .. } = blocks[id];
        let at = units(size);
        if at >= self.sizes.len() {
            if at >= SIZES {
                return self.larger.insert(Key::new(size, addr, id));
            }
            self.grow(at);
        }
        if !self.occupied.insert(at) {
            self.sizes[at] = (id.0, 0);
            return;
        }
        let (first, crowd) = &mut self.sizes[at];
        if *crowd == 0 {
            *crowd = Self::gather(&mut self.crowds, &mut self.spare, blocks, BlockId(*first));
        }
        let crowd = &mut self.crowds[*crowd as usize];
        crowd.insert(blocks, id);
        *first = crowd.first().0;
    }

    #[inline]
    fn remove_block(&mut self, blocks: &Records<'_>, held: Held) {
        let at = units(held.size);
        let Some((first, crowd)) = self.sizes.get_mut(at) else {
            // A record keeps its address while its size changes, and when it becomes vacant.
            return self.larger.remove(Key::new(held.size, blocks[held.block].addr, held.block));
        };
        if *crowd != 0 {
            let record = &mut self.crowds[*crowd as usize];
            record.remove(blocks[held.block].slot());
            *first = record.first().0;
            if *first != BlockId::NONE.0 {
                return;
            }
            self.spare.push(*crowd);
        }
        self.occupied.remove(at);
    }

    /// Makes a crowd of a block that was alone, and returns its number.
    fn gather(crowds: &mut Vec<Crowd>, spare: &mut Vec<u32>, blocks: &mut Records<'_>, alone: BlockId) -> u32 {
        let number = spare.pop().unwrap_or_else(|| Self::add_crowd(crowds));
        crowds[number as usize].insert(blocks, alone);
        number
    }

    #[cold]
    fn add_crowd(crowds: &mut Vec<Crowd>) -> u32 {
        if crowds.is_empty() {
            crowds.push(Crowd::new());
        }
        crowds.push(Crowd::new());
        // There are fewer crowds than sizes.
        u32::try_from(crowds.len() - 1).unwrap_or(0)
    }

    /// Makes room for a size: for those of small segments, or for all, so that entries move once at
    /// most.
    #[cold]
    fn grow(&mut self, at: usize) {
        let end = if at < FEW_SIZES { FEW_SIZES } else { SIZES };
        let mut sizes = vec![(0, 0); end];
        // Not all of them, because then all would be touched.
        self.occupied.iter_from(0).for_each(|size| sizes[size] = self.sizes[size]);
        self.sizes = sizes;
        self.occupied.grow(end);
    }
}

impl Index for Exact {
    type Place = Held;
    const SEGMENTS: bool = true;
    const FIRST_STAYS: bool = true;

    #[inline]
    fn choose(&self, _: &Records<'_>, size: u64) -> Option<(BlockId, Held)> {
        self.best_from(size).map(|held| (held.block, held))
    }

    #[cold]
    #[inline(never)]
    fn best_fit(&self, blocks: &Records<'_>, size: u64) -> Option<(BlockId, Held)> {
        self.choose(blocks, size)
    }

    #[inline]
    fn size(_: &Records<'_>, _: BlockId, place: Held) -> u64 {
        place.size
    }

    #[inline]
    fn place(block: BlockId, size: u64) -> Held {
        Held { block, size }
    }

    #[inline]
    fn insert(&mut self, blocks: &mut Records<'_>, id: BlockId) {
        self.insert_block(blocks, id);
    }

    #[inline]
    fn remove(&mut self, blocks: &mut Records<'_>, _: BlockId, place: Held) {
        self.remove_block(blocks, place);
    }

    #[inline]
    fn changed(&mut self, blocks: &mut Records<'_>, id: BlockId, place: Held) {
        self.remove_block(blocks, place);
        self.insert_block(blocks, id);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// What happens to the nth of the blocks there are, or to a new one.
    #[derive(Clone, Debug)]
    enum Step {
        Insert {
            size: u64,
            addr: u64,
        },
        Remove {
            nth: usize,
        },
        /// Takes a size off the low end of the best block, as an allocation does.
        Take {
            size: u64,
        },
    }

    /// Few distinct sizes make crowds, many make full bitmaps.
    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let ends = || (-2..2_i64).prop_map(|by| (SIZES as u64).saturating_add_signed(by));
        let units =
            || prop_oneof![4 => 1..4_u64, 2 => 1..400_u64, 1 => 1..SIZES as u64, 1 => ends(), 1 => 1..(1_u64 << 40)];
        let size = move || units().prop_map(|units| units * MIN_BLOCK);
        let step = prop_oneof![
            3 => (size(), 0..3000_u64).prop_map(|(size, at)| Step::Insert { size, addr: at * MIN_BLOCK }),
            1 => any::<usize>().prop_map(|nth| Step::Remove { nth }),
            2 => size().prop_map(|size| Step::Take { size }),
        ];
        prop::collection::vec(step, 0..1200)
    }

    fn key(blocks: &Slab, id: BlockId) -> Key {
        Key::of(id, &blocks[id])
    }

    /// True if a block of this size is at this address already.
    fn is_there(model: &BTreeSet<Key>, size: u64, addr: u64) -> bool {
        model.range(Key::new(size, addr, BlockId::NONE)..=Key::new(size, addr, BlockId(u32::MAX))).next().is_some()
    }

    fn best(index: &Exact, blocks: &Slab, size: u64) -> Option<Key> {
        index.best_from(size).map(|held| key(blocks, held.block))
    }

    fn check(index: &Exact, blocks: &Slab, model: &BTreeSet<Key>, size: u64) -> Result<(), TestCaseError> {
        let mut from = model.iter().filter(|key| key.size() >= size);
        let first = from.next().copied();
        prop_assert_eq!(best(index, blocks, size), first);
        if let Some(held) = index.best_from(size) {
            prop_assert_eq!(Some((held.block, held.size)), first.map(|first| (first.block(), first.size())));
            prop_assert_eq!(index.has_others(held), from.next().is_some_and(|next| next.size() == held.size));
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        #[test]
        fn equals_an_ordered_set(steps in steps()) {
            let (mut index, mut blocks, mut model) = (Exact::default(), Slab::default(), BTreeSet::new());
            for step in steps {
                match step {
                    Step::Insert { size, addr } => {
                        if is_there(&model, size, addr) {
                            continue;
                        }
                        let id = blocks.insert(Block { size, addr, ..Block::default() });
                        index.insert(&mut blocks.records(), id);
                        model.insert(key(&blocks, id));
                        check(&index, &blocks, &model, size)?;
                    }
                    Step::Remove { nth } => {
                        if let Some(key) = model.iter().nth(nth % model.len().max(1)).copied() {
                            let id = key.block();
                            index.remove(&mut blocks.records(), id, Exact::place(id, key.size()));
                            model.remove(&key);
                            blocks.remove(id);
                            check(&index, &blocks, &model, key.size())?;
                        }
                    }
                    Step::Take { size } => {
                        check(&index, &blocks, &model, size)?;
                        let Some(held) = index.best_from(size) else { continue };
                        if is_there(&model, held.size - size, blocks[held.block].addr + size) {
                            continue;
                        }
                        model.remove(&key(&blocks, held.block));
                        if held.size == size {
                            index.remove(&mut blocks.records(), held.block, held);
                            blocks.remove(held.block);
                        } else {
                            let Block { addr, size: whole, .. } = blocks[held.block];
                            let id = blocks.insert(Block { size: whole - size, addr: addr + size, ..Block::default() });
                            index.changed(&mut blocks.records(), id, held);
                            blocks.remove(held.block);
                            model.insert(key(&blocks, id));
                        }
                    }
                }
            }
            prop_assert!(model.iter().all(|key| index.contains(&blocks, key.block())));
            for size in [1, 4 * MIN_BLOCK, SIZES as u64 * MIN_BLOCK] {
                let keys = model.iter().filter(|key| key.size() >= size).map(|key| key.block());
                prop_assert!(index.iter_from(size).eq(keys));
            }
            while let Some(key) = model.pop_first() {
                prop_assert_eq!(best(&index, &blocks, MIN_BLOCK), Some(key));
                index.remove(&mut blocks.records(), key.block(), Exact::place(key.block(), key.size()));
            }
            prop_assert!(index.best_from(MIN_BLOCK).is_none());
        }
    }

    #[test]
    fn a_size_whose_blocks_come_and_go_keeps_its_crowd() {
        let (mut index, mut blocks) = (Exact::default(), Slab::default());
        for _ in 0..100 {
            let ids: Vec<BlockId> = (0..20)
                .map(|at| blocks.insert(Block { size: MIN_BLOCK, addr: at * MIN_BLOCK, ..Block::default() }))
                .collect();
            ids.iter().for_each(|&id| index.insert(&mut blocks.records(), id));
            for id in ids {
                index.remove(&mut blocks.records(), id, Exact::place(id, MIN_BLOCK));
                blocks.remove(id);
            }
        }
        assert_eq!(index.crowds.len(), 2, "one, and the one in which nothing is");
    }
}
