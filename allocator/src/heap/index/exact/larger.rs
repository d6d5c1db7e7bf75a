//! The blocks that are larger than the bitmap's sizes, in a sorted list: there are few of them,
//! because they are large.

use crate::heap::block::BlockId;
use crate::heap::index::exact::Held;
use crate::heap::index::key::Key;

#[derive(Debug, Default)]
pub(super) struct Larger(Vec<Key>);

impl Larger {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first block of at least `size` bytes.
    #[inline(never)]
    pub(super) fn first_from(&self, size: u64) -> Option<Held> {
        let key = self.0.get(self.below(size))?;
        Some(Held { block: key.block(), size: key.size() })
    }

    /// True if there is more than one block of this size.
    pub(super) fn has_several(&self, size: u64) -> bool {
        self.0.get(self.below(size) + 1).is_some_and(|key| key.size() == size)
    }

    #[inline(never)]
    pub(super) fn insert(&mut self, key: Key) {
        let at = self.0.partition_point(|&other| other < key);
        self.0.insert(at, key);
    }

    /// Removes a key that is there.
    #[inline(never)]
    pub(super) fn remove(&mut self, key: Key) {
        let at = self.0.partition_point(|&other| other < key);
        debug_assert_eq!(self.0.get(at), Some(&key), "the block is in the index");
        self.0.remove(at);
    }

    /// Every block of at least `size` bytes, in order.
    pub(super) fn iter_from(&self, size: u64) -> impl Iterator<Item = BlockId> + '_ {
        self.0[self.below(size)..].iter().map(|key| key.block())
    }

    #[cfg(any(test, debug_assertions))]
    pub(super) fn contains(&self, key: Key) -> bool {
        self.0.binary_search(&key).is_ok()
    }

    /// Number of blocks of less than `size` bytes.
    fn below(&self, size: u64) -> usize {
        self.0.partition_point(|key| key.size() < size)
    }
}
