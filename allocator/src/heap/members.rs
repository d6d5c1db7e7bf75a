//! Sets of blocks: one bit for each number of a block.
//!
//! A block that is given back is joined with those neighbours that are in the index. Most are not,
//! and their bits are close together in the cache, where their records are not. So it is with the
//! search for holes beside free blocks.

use super::block::BlockId;

/// A set of blocks, as long as the greatest number that was ever in it.
#[derive(Debug, Default)]
pub(super) struct Members(Vec<u64>);

impl Members {
    #[inline]
    fn place(id: BlockId) -> (usize, u64) {
        (id.0 as usize / 64, 1 << (id.0 % 64))
    }

    #[inline]
    pub(super) fn contains(&self, id: BlockId) -> bool {
        let (word, bit) = Members::place(id);
        self.0.get(word).is_some_and(|word| word & bit != 0)
    }

    #[inline]
    pub(super) fn insert(&mut self, id: BlockId) {
        let (word, bit) = Members::place(id);
        if word >= self.0.len() {
            self.grow(word);
        }
        self.0[word] |= bit;
    }

    #[cold]
    fn grow(&mut self, word: usize) {
        self.0.resize(word + 1, 0);
    }

    /// Takes out a block, which must be in the set.
    #[inline]
    pub(super) fn remove(&mut self, id: BlockId) {
        let (word, bit) = Members::place(id);
        self.0[word] &= !bit;
    }

    /// Number of blocks in the set.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}
