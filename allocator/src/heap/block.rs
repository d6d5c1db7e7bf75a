//! Records of blocks, in a slab addressed by number.

use crate::size_class::MIN_BLOCK;

/// Number of a block in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(crate) u32);

impl BlockId {
    /// No block.
    pub(crate) const NONE: BlockId = BlockId(u32::MAX);

    #[inline]
    fn index(self) -> usize {
        self.0 as usize
    }

    /// The block, if it is one.
    #[inline]
    pub(crate) fn some(self) -> Option<BlockId> {
        (self != BlockId::NONE).then_some(self)
    }
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The record is unused.
    Vacant,
    /// Somebody holds it.
    Live,
    /// Given back, but other streams may still use it; in no index.
    Waiting,
    /// In the index of its owner.
    Free,
}

/// A piece of a region: what the hot path reads of a block and its neighbours. Two share a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(crate) struct Block {
    /// First address.
    pub(crate) addr: u64,
    /// Length in units of [`MIN_BLOCK`].
    pub(crate) units: u32,
    /// Neighbours in the region, by address.
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    pub(crate) region: u32,
    /// While live, the stream it was allocated for; while free, the stream that may reuse it without waiting.
    pub(crate) owner: u32,
    pub(crate) pool: u16,
    pub(crate) state: State,
    /// While live: other streams use it too, and who they are is noted elsewhere.
    pub(crate) shared: bool,
}

/// What else is known of a block: written on the hot path, read off it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Detail {
    /// Bytes the caller asked for; meaningful while live or waiting.
    pub(crate) requested: u64,
    /// While free: where the owner's timeline must have got to for everybody else to use the block; 0 when it has.
    pub(crate) after: u64,
    /// While free: the pool's search count when it became free, for garbage collection.
    pub(crate) age_base: u64,
    /// Tag of the allocation.
    pub(crate) tag: u32,
}

/// The largest block there can be, in bytes: its length in units fits 32 bits. 2 TiB, less one unit.
pub(crate) const BLOCK_MAX: u64 = u32::MAX as u64 * MIN_BLOCK;

const _: () = assert!(size_of::<Block>() == 32 && size_of::<Detail>() == 32, "two records fill a cache line");

impl Block {
    /// A block of `size` bytes, at most [`BLOCK_MAX`]; the rest of it is to be filled in.
    #[inline]
    pub(crate) fn new(addr: u64, size: u64) -> Block {
        Block { addr, units: units(size), ..Block::default() }
    }

    /// Length in bytes.
    #[inline]
    pub(crate) fn size(&self) -> u64 {
        u64::from(self.units) * MIN_BLOCK
    }

    #[inline]
    pub(crate) fn set_size(&mut self, size: u64) {
        self.units = units(size);
    }

    /// Whether it is a piece of a region rather than a whole one.
    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        self.prev != BlockId::NONE || self.next != BlockId::NONE
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "no region is larger than BLOCK_MAX")]
fn units(size: u64) -> u32 {
    debug_assert!(size <= BLOCK_MAX);
    (size / MIN_BLOCK) as u32
}

impl Default for Block {
    #[inline]
    fn default() -> Self {
        Block {
            addr: 0,
            units: 0,
            prev: BlockId::NONE,
            next: BlockId::NONE,
            region: 0,
            owner: 0,
            pool: 0,
            state: State::Vacant,
            shared: false,
        }
    }
}

/// All blocks of a heap.
#[derive(Debug, Default)]
pub(crate) struct Slab {
    blocks: Vec<Block>,
    /// By the same numbers.
    details: Vec<Detail>,
    /// Vacant records, chained through `next`.
    vacant: Option<BlockId>,
}

impl Slab {
    #[inline]
    pub(crate) fn insert(&mut self, block: Block) -> BlockId {
        match self.vacant {
            Some(id) => {
                self.vacant = self[id].next.some();
                self[id] = block;
                id
            }
            None => {
                let id = BlockId(u32::try_from(self.blocks.len()).unwrap_or(u32::MAX));
                // 2^32 - 1 records of 64 bytes in all are 256 GiB of host memory: the process is out of memory before that.
                assert!(id != BlockId::NONE, "more than 2^32 blocks");
                self.blocks.push(block);
                self.details.push(Detail::default());
                id
            }
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, id: BlockId) {
        self[id].state = State::Vacant;
        self[id].next = self.vacant.unwrap_or(BlockId::NONE);
        self.vacant = Some(id);
    }

    #[inline]
    pub(crate) fn detail(&self, id: BlockId) -> &Detail {
        &self.details[id.index()]
    }

    #[inline]
    pub(crate) fn detail_mut(&mut self, id: BlockId) -> &mut Detail {
        &mut self.details[id.index()]
    }

    /// Every block that is not vacant.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> + '_ {
        let numbered = (0..u32::MAX).map(BlockId).zip(&self.blocks);
        numbered.filter(|(_, block)| block.state != State::Vacant)
    }
}

impl std::ops::Index<BlockId> for Slab {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }
}

impl std::ops::IndexMut<BlockId> for Slab {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.index()]
    }
}
