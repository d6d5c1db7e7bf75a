//! The indexes of free blocks, of which the heap has one for each pool and owner.
//!
//! A block's record is in the slab. Of an index's own state an operation touches few cache lines.

mod bins;
mod key;
mod sizes;

pub(super) use bins::Bins;
pub(crate) use key::Key;

use super::block::Slab;
use crate::types::BlockId;

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
        Key::of(id, &self.blocks[id])
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
