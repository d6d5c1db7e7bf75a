//! The indexes of free blocks, of which a heap has one for each pool and owner.
//!
//! There are two kinds, chosen when the heap is made. [`Exact`] is one ordered set by (size,
//! address), as PyTorch's, for heaps whose reserved memory is to equal PyTorch's to the byte.
//! [`Bins`] finds a block that is nearly the best fit and costs less; it is for heaps whose memory
//! can be moved, where a misfit costs nothing.
//!
//! A block's record is in the slab. Of an index's own state an operation touches few cache lines.

mod bins;
mod exact;
mod key;
mod sizes;

pub(super) use bins::Bins;
pub(super) use exact::Exact;
pub(crate) use key::Key;

use super::block::{BlockId, Records, Slab, State};

/// How the free blocks of a heap are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum IndexKind {
    /// The best fit by (size, address), lowest address first.
    #[default]
    Exact,
    /// A block that is nearly the best fit: see [`Bins`].
    Bins,
}

/// Free blocks of one pool that are reusable by one stream.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "few, and an operation should find its index without another pointer")]
pub(super) enum FreeIndex {
    Exact(Exact),
    Bins(Bins),
}

/// An index and the blocks in it, for iteration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexView<'a> {
    index: &'a FreeIndex,
    blocks: &'a Slab,
}

/// The operations that allocations and frees need of an index.
pub(super) trait Index {
    /// The place of a block in the index.
    type Place: Copy;
    /// True if memory comes in segments. Then free pieces are counted, and rules decide which
    /// blocks serve a request and which are cut. Otherwise memory can be moved: every block that is
    /// large enough serves, and is cut ([`SizeClasses::paged`]).
    ///
    /// [`SizeClasses::paged`]: crate::size_class::SizeClasses::paged
    const SEGMENTS: bool;
    /// When blocks are joined or a block is cut, true if the lowest block keeps the number. Then a
    /// region's first block always has the same number. Otherwise the free block keeps it, which an
    /// index of lists then need not touch.
    const FIRST_STAYS: bool;

    /// The block to serve a request of `size` bytes from, if any is large enough.
    fn choose(&self, blocks: &Records<'_>, size: u64) -> Option<(BlockId, Self::Place)>;

    /// The smallest block of at least `size` bytes; of equally small ones, that at the lowest
    /// address.
    fn best_fit(&self, blocks: &Records<'_>, size: u64) -> Option<(BlockId, Self::Place)>;

    /// The size of a block in the index. If its place implies the size, the record need not be
    /// read.
    fn size(blocks: &Records<'_>, id: BlockId, place: Self::Place) -> u64;

    /// The place that a block of this size has.
    fn place(id: BlockId, size: u64) -> Self::Place;

    /// True if a block is in the index, which is that of `owner`'s blocks in the block's pool.
    #[inline]
    fn holds(&self, blocks: &Records<'_>, id: BlockId, owner: u32) -> bool {
        let block = &blocks[id];
        block.state == State::Free && block.owner == owner
    }

    /// Puts a free block in.
    fn insert(&mut self, blocks: &mut Records<'_>, id: BlockId);

    /// Takes out a block, which must be in the index.
    fn remove(&mut self, blocks: &mut Records<'_>, id: BlockId, place: Self::Place);

    /// Updates the index after the record of a block in it changed. The block was at `place`
    /// before.
    fn changed(&mut self, blocks: &mut Records<'_>, id: BlockId, place: Self::Place);
}

impl FreeIndex {
    pub(super) fn new(kind: IndexKind) -> FreeIndex {
        match kind {
            IndexKind::Exact => FreeIndex::Exact(Exact::default()),
            IndexKind::Bins => FreeIndex::Bins(Bins::default()),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            FreeIndex::Exact(index) => index.is_empty(),
            FreeIndex::Bins(index) => index.is_empty(),
        }
    }

    /// Passes every block to `look`.
    pub(super) fn each(&self, blocks: &Slab, look: impl FnMut(BlockId)) {
        match self {
            FreeIndex::Exact(index) => index.iter_from(1).for_each(look),
            FreeIndex::Bins(index) => index.iter_from(blocks, 1).for_each(look),
        }
    }
}

impl<'a> IndexView<'a> {
    pub(super) fn new(index: &'a FreeIndex, blocks: &'a Slab) -> IndexView<'a> {
        IndexView { index, blocks }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    fn key(self, id: BlockId) -> Key {
        Key::of(id, &self.blocks[id])
    }

    /// The first block in the index's order that has at least `size` bytes. With
    /// [`IndexKind::Exact`] all after it have, too.
    pub(crate) fn best_fit(self, size: u64) -> Option<Key> {
        match self.index {
            FreeIndex::Exact(index) => index.best_from(size).map(|held| self.key(held.block)),
            FreeIndex::Bins(index) => index.first_fit(self.blocks, size).map(|id| self.key(id)),
        }
    }

    /// The blocks in the index's order, from [`IndexView::best_fit`] on.
    pub(crate) fn iter_from_best_fit(self, size: u64) -> impl Iterator<Item = Key> + 'a {
        let (exact, bins) = match self.index {
            FreeIndex::Exact(index) => (Some(index.iter_from(size)), None),
            FreeIndex::Bins(index) => (None, Some(index.iter_from_first_fit(self.blocks, size))),
        };
        self.keys(exact, bins)
    }

    /// Every block of at least `size` bytes, not 0, in the index's order.
    pub(crate) fn iter_from(self, size: u64) -> impl Iterator<Item = Key> + 'a {
        let (exact, bins) = match self.index {
            FreeIndex::Exact(index) => (Some(index.iter_from(size)), None),
            FreeIndex::Bins(index) => (None, Some(index.iter_from(self.blocks, size))),
        };
        self.keys(exact, bins)
    }

    /// The keys of the blocks of an iteration, which is over one kind of index.
    fn keys(
        self,
        exact: Option<impl Iterator<Item = BlockId> + 'a>,
        bins: Option<impl Iterator<Item = BlockId> + 'a>,
    ) -> impl Iterator<Item = Key> + 'a {
        let ids = exact.into_iter().flatten().chain(bins.into_iter().flatten());
        ids.map(move |id| self.key(id))
    }

    /// True if what the index notes about blocks besides their places agrees with these in number.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn is_consistent(&self) -> bool {
        match self.index {
            FreeIndex::Exact(_) => true,
            FreeIndex::Bins(index) => index.counts_members(self.blocks),
        }
    }

    /// Number of blocks.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn len(self) -> usize {
        match self.index {
            FreeIndex::Exact(index) => index.len(),
            FreeIndex::Bins(index) => index.iter_from(self.blocks, 1).count(),
        }
    }

    /// True if a free block is in the index.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn contains(self, id: BlockId) -> bool {
        match self.index {
            FreeIndex::Exact(index) => index.contains(self.blocks, id),
            FreeIndex::Bins(index) => index.contains(self.blocks, id),
        }
    }
}
