//! Records of blocks, in a slab addressed by number.

use std::ops::{Index, IndexMut};

/// Number of a block in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(crate) u32);

impl BlockId {
    /// No block. There is a record of that number, which is never anybody's: it is vacant and of size 0, and its links may be
    /// written, so that what an operation changes of a neighbour needs no branch on whether there is one.
    pub(crate) const NONE: BlockId = BlockId(0);

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

impl Default for BlockId {
    fn default() -> BlockId {
        BlockId::NONE
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
    /// Addresses without memory behind them.
    Hole,
    /// Free memory that nobody may take, because the driver is asked to move it or to put more beside it.
    Held,
    /// A hole that the driver is asked to put memory behind.
    Filling,
}

impl State {
    /// Whether there is memory behind the block.
    pub(crate) fn has_memory(self) -> bool {
        !matches!(self, State::Vacant | State::Hole | State::Filling)
    }
}

/// A piece of a region. A record is one cache line: an operation touches a block and its two neighbours, and the machine
/// waits for each line. (Tried: splitting off what is rarely read. It makes neighbours denser and costs a line more for the
/// block itself, which is no gain up to 100 000 live blocks and a loss at a million.)
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    /// First address.
    pub(crate) addr: u64,
    /// Length in bytes.
    pub(crate) size: u64,
    /// Bytes the caller asked for; meaningful while live or waiting.
    pub(crate) requested: u64,
    /// While free: where the owner's timeline must have got to for everybody else to use the block; 0 when it has.
    pub(crate) after: u64,
    /// Neighbours in the region, by address.
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    /// While free: neighbours in its bin, for an index that keeps lists.
    pub(crate) bin_prev: BlockId,
    pub(crate) bin_next: BlockId,
    pub(crate) region: u32,
    /// While live, the stream it was allocated for; while free, the stream that may reuse it without waiting.
    pub(crate) owner: u32,
    /// Tag of the allocation.
    pub(crate) tag: u32,
    pub(crate) pool: u16,
    pub(crate) state: State,
    /// While live: other streams use it too, and who they are is noted elsewhere.
    pub(crate) shared: bool,
}

const _: () = assert!(size_of::<Block>() == 64, "a block record fills a cache line");

impl Block {
    /// Whether it is a piece of a region rather than a whole one.
    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        self.prev != BlockId::NONE || self.next != BlockId::NONE
    }
}

impl Default for Block {
    #[inline]
    fn default() -> Self {
        Block {
            addr: 0,
            size: 0,
            requested: 0,
            after: 0,
            prev: BlockId::NONE,
            next: BlockId::NONE,
            bin_prev: BlockId::NONE,
            bin_next: BlockId::NONE,
            region: 0,
            owner: 0,
            tag: 0,
            pool: 0,
            state: State::Vacant,
            shared: false,
        }
    }
}

/// All blocks of a heap.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The first is that of [`BlockId::NONE`].
    blocks: Vec<Block>,
    /// The first vacant record; they are chained through `next`.
    vacant: BlockId,
}

impl Default for Slab {
    fn default() -> Slab {
        Slab { blocks: vec![Block::default()], vacant: BlockId::NONE }
    }
}

impl Slab {
    pub(crate) fn insert(&mut self, block: Block) -> BlockId {
        self.records_and_a_vacant_one().insert(block)
    }

    pub(crate) fn remove(&mut self, id: BlockId) {
        self.records().remove(id);
    }

    /// The records, for an operation that inserts none.
    #[inline]
    pub(super) fn records(&mut self) -> Records<'_> {
        Records { blocks: &mut self.blocks, vacant: &mut self.vacant }
    }

    /// The records, for an operation that inserts one at most.
    #[inline]
    pub(super) fn records_and_a_vacant_one(&mut self) -> Records<'_> {
        if self.vacant == BlockId::NONE {
            self.grow();
        }
        self.records()
    }

    /// Makes a vacant record where there is none.
    #[cold]
    fn grow(&mut self) {
        let id = BlockId(u32::try_from(self.blocks.len()).unwrap_or(u32::MAX));
        // 2^32 - 1 records of 64 bytes are 256 GiB of host memory: the process is out of memory before that.
        assert!(id.0 != u32::MAX, "more than 2^32 blocks");
        self.blocks.push(Block::default());
        self.vacant = id;
    }

    /// The record of a block, if it is not [`BlockId::NONE`].
    #[inline]
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        id.some().map(|id| &self[id])
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: BlockId) -> Option<&mut Block> {
        id.some().map(|id| &mut self[id])
    }

    /// How many records there are, vacant ones included.
    #[cfg(debug_assertions)]
    pub(crate) fn records_count(&self) -> usize {
        self.blocks.len()
    }

    /// Every block that is not vacant.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> + '_ {
        let numbered = (0..u32::MAX).map(BlockId).zip(&self.blocks);
        numbered.filter(|(_, block)| block.state != State::Vacant)
    }
}

impl Index<BlockId> for Slab {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }
}

impl IndexMut<BlockId> for Slab {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.index()]
    }
}

/// The records of a slab while one operation works on them. None are made meanwhile, so where they are and how many stays in
/// registers instead of being read again after each store.
#[derive(Debug)]
pub(super) struct Records<'a> {
    blocks: &'a mut [Block],
    vacant: &'a mut BlockId,
}

impl Records<'_> {
    /// Uses a vacant record, which there is.
    #[inline]
    pub(super) fn insert(&mut self, block: Block) -> BlockId {
        let id = *self.vacant;
        debug_assert_ne!(id, BlockId::NONE, "there is a vacant record");
        let record = &mut self.blocks[id.index()];
        let next = record.next;
        // Straight into its place: a record that is put together elsewhere and moved in wide words stalls the machine.
        *record = block;
        *self.vacant = next;
        id
    }

    #[inline]
    pub(super) fn remove(&mut self, id: BlockId) {
        debug_assert_ne!(id, BlockId::NONE);
        let record = &mut self.blocks[id.index()];
        (record.state, record.next) = (State::Vacant, *self.vacant);
        *self.vacant = id;
    }
}

impl Index<BlockId> for Records<'_> {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }
}

impl IndexMut<BlockId> for Records<'_> {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.index()]
    }
}
