//! A free block as an ordered set sees it.

use crate::heap::block::{Block, BlockId};
use crate::size_class::MIN_BLOCK;

/// A free block: its size, then its address; the block's number rides along.
///
/// From the top: 48 bits of size and 48 bits of address, both in units of [`MIN_BLOCK`], and 32 bits of block number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub(super) u128);

impl Key {
    /// No block; greater than the key of any.
    pub(super) const NONE: Key = Key(u128::MAX);

    #[inline]
    pub(crate) fn new(size: u64, addr: u64, block: BlockId) -> Key {
        debug_assert!(size.is_multiple_of(MIN_BLOCK) && addr.is_multiple_of(MIN_BLOCK));
        Key(u128::from(size / MIN_BLOCK) << 80 | u128::from(addr / MIN_BLOCK) << 32 | u128::from(block.0))
    }

    #[inline]
    pub(super) fn of(id: BlockId, block: &Block) -> Key {
        Key::new(block.size, block.addr, id)
    }

    /// The least key of all blocks of at least `size` bytes.
    #[inline]
    pub(super) fn at_least(size: u64) -> Key {
        Key(u128::from(size / MIN_BLOCK) << 80)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low 32 bits are the block number")]
    #[inline]
    pub(crate) fn block(self) -> BlockId {
        BlockId(self.0 as u32)
    }

    #[inline]
    pub(super) fn units(self) -> u64 {
        (self.0 >> 80) as u64
    }

    /// Size of the block in bytes.
    #[inline]
    pub(crate) fn size(self) -> u64 {
        self.units() * MIN_BLOCK
    }
}
