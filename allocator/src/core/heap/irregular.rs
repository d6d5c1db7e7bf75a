//! Irregular blocks: live blocks of mapped memory that are not what a request of their bytes gets
//! by default.
//!
//! A handle knows the bytes that were requested, and from these follow the size and the kind of
//! most blocks. So most frees need not read the block's record, which is missed in the cache if
//! there are many. A bit tells which blocks are *irregular*: their size or pool is another one
//! (alignment, private pools), or other streams use them, too.
//!
//! Invariant: a live block without its bit is regular. A bit that is left over costs its next block
//! a look at the record, no more.

use super::Heap;
use crate::types::BlockId;

impl Heap {
    /// True if size and kind of a live block follow from its requested bytes, and no other stream
    /// uses it. Its record is not read.
    #[inline]
    pub(crate) fn is_regular(&self, id: BlockId) -> bool {
        !self.irregular.contains(id)
    }

    pub(crate) fn make_irregular(&mut self, id: BlockId) {
        self.irregular.insert(id);
    }

    /// Marks a live block that other streams use, too.
    pub(crate) fn mark_used_elsewhere(&mut self, id: BlockId) {
        self.blocks[id].used_elsewhere = true;
        self.make_irregular(id);
    }

    /// Takes that mark away.
    pub(crate) fn unmark_used_elsewhere(&mut self, id: BlockId) {
        self.blocks[id].used_elsewhere = false;
    }

    /// Forgets that a block was irregular, as it is about to be freed.
    #[inline]
    pub(crate) fn forget_irregular(&mut self, id: BlockId) {
        if self.irregular.contains(id) {
            self.irregular.remove(id);
        }
    }
}
