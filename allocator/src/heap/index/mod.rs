//! The indexes of free blocks, of which a heap has one for each pool and owner.
//!
//! [`Bins`] finds a block that is nearly the best fit. A block's record is in the slab; of an
//! index's own state an operation touches few cache lines.

mod bins;
mod key;
mod sizes;

pub(super) use bins::Bins;
pub(crate) use key::Key;
pub(super) use sizes::bin_of;

use super::block::{BlockId, Slab};

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

    pub(crate) fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    fn key(self, id: BlockId) -> Key {
        Key::of(id, &self.blocks[id])
    }

    /// The first block in the index's order that has at least `size` bytes.
    pub(crate) fn best_fit(self, size: u64) -> Option<Key> {
        self.index.first_fit(self.blocks, size).map(|id| self.key(id))
    }

    /// The blocks in the index's order, from [`IndexView::best_fit`] on.
    pub(crate) fn iter_from_best_fit(self, size: u64) -> impl Iterator<Item = Key> + 'a {
        self.index.iter_from_first_fit(self.blocks, size).map(move |id| self.key(id))
    }

    /// Every block of at least `size` bytes, not 0, in the index's order.
    pub(crate) fn iter_from(self, size: u64) -> impl Iterator<Item = Key> + 'a {
        self.index.iter_from(self.blocks, size).map(move |id| self.key(id))
    }

    /// True if what the index notes about blocks besides their places agrees with these in number.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn is_consistent(&self) -> bool {
        self.index.counts_members(self.blocks)
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
