//! Keys: the form in which free blocks are ordered.

use crate::core::heap::block::Block;
use crate::size_class::MIN_BLOCK;
use crate::types::BlockId;

/// The key of a free block: its size, then its address. The block's number is stored in the low
/// bits.
///
/// From the top: 41 bits of size and 55 bits of address, both in units of [`MIN_BLOCK`], and 32
/// bits of block number. That is any address, and sizes below 2^50 bytes: no device holds more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u128);

/// The lowest bit of the address.
const ADDRESS: u32 = 32;
/// The lowest bit of the size.
const SIZE: u32 = ADDRESS + u64::BITS - MIN_BLOCK.ilog2();

impl Key {
    /// The least size in bytes that a key cannot hold.
    const SIZES_END: u64 = MIN_BLOCK << (u128::BITS - SIZE);

    #[inline]
    pub(crate) fn new(size: u64, addr: u64, block: BlockId) -> Key {
        debug_assert!(size.is_multiple_of(MIN_BLOCK) && addr.is_multiple_of(MIN_BLOCK) && size < Self::SIZES_END);
        Key(u128::from(size / MIN_BLOCK) << SIZE | u128::from(addr / MIN_BLOCK) << ADDRESS | u128::from(block.0))
    }

    #[inline]
    pub(super) fn of(id: BlockId, block: &Block) -> Key {
        Key::new(block.size, block.addr, id)
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low 32 bits are the block number")]
    #[inline]
    pub(crate) fn block(self) -> BlockId {
        BlockId(self.0 as u32)
    }

    /// Size of the block in bytes.
    #[inline]
    pub(crate) fn size(self) -> u64 {
        (self.0 >> SIZE) as u64 * MIN_BLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_then_addresses_decide_wherever_memory_is() {
        let high = u64::MAX - MIN_BLOCK + 1;
        for addr in [0, 1 << 57, 3 << 58, high] {
            let (small, large) = (Key::new(MIN_BLOCK, addr, BlockId(7)), Key::new(2 * MIN_BLOCK, 0, BlockId(7)));
            assert!(small < large);
            assert_eq!((small.size(), small.block()), (MIN_BLOCK, BlockId(7)));
        }
        assert!(Key::new(MIN_BLOCK, 1 << 57, BlockId(0)) < Key::new(MIN_BLOCK, high, BlockId(0)));
    }
}
