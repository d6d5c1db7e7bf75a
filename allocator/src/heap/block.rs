//! Records of blocks, in a slab addressed by number.

use std::ops::{Index, IndexMut};

/// Number of a block in the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(pub(crate) u32);

impl BlockId {
    /// No block. A record with this number exists, but no block ever uses it: it is vacant and of size 0. Its links may be written, so that
    /// an operation which changes a neighbour needs no branch on whether there is one.
    pub(crate) const NONE: BlockId = BlockId(0);

    /// The chunk of its record.
    #[inline]
    fn chunk(self) -> usize {
        self.0 as usize >> CHUNK_BITS
    }

    /// Its record in the chunk.
    #[inline]
    fn index(self) -> usize {
        self.0 as usize % CHUNK
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

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The record is unused.
    Vacant,
    /// An allocation holds the block, or it was given back and rests.
    Live,
    /// Freed, but other streams may still use it; in no index.
    Waiting,
    /// Free, and in the index of its owner.
    Free,
    /// Addresses without memory behind them.
    Hole,
    /// Free memory that nobody may take, because the driver is about to move it or to map more memory beside it.
    Held,
    /// A hole at which the driver is about to map memory, or from which it is about to take memory back.
    Filling,
}

impl State {
    /// True if memory is mapped at the block's addresses.
    pub(crate) fn has_memory(self) -> bool {
        !matches!(self, State::Vacant | State::Hole | State::Filling)
    }
}

/// A piece of a region. A record is one cache line: an operation touches a block and its two neighbours, and the machine waits for each
/// line. (Tried: splitting off the rarely read fields. That makes neighbours denser but costs one line more for the block itself: no gain
/// up to 100 000 live blocks, and a loss at a million.)
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    /// First address.
    pub(crate) addr: u64,
    /// Length in bytes.
    pub(crate) size: u64,
    /// Bytes that the caller requested; meaningful while live or waiting.
    pub(crate) requested: u64,
    /// While free: the tick that the owner's timeline must reach before other streams may use the block; 0 if they may use it now.
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
    /// While live: true if other streams use the block, too. The core lists them.
    pub(crate) shared: bool,
}

const _: () = assert!(size_of::<Block>() == 64, "a block record fills a cache line");

impl Block {
    /// While free, in an index that gives out slots: the block's slot. It is where lists have their links.
    #[inline]
    pub(super) fn slot(&self) -> u32 {
        self.bin_prev.0
    }

    #[inline]
    pub(super) fn set_slot(&mut self, slot: u32) {
        self.bin_prev = BlockId(slot);
    }

    /// Its addresses.
    #[inline]
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        self.addr..self.addr + self.size
    }

    /// True if the block is a piece of a region, not a whole one.
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

/// The binary logarithm of the number of records in a chunk. A chunk takes 64 KiB: adding one takes some ten
/// microseconds, under the lock.
const CHUNK_BITS: u32 = 10;
const CHUNK: usize = 1 << CHUNK_BITS;
type Chunk = Box<[Block; CHUNK]>;
/// Up to so many records, they are side by side.
const FLAT: usize = 4 * CHUNK;

/// All blocks of a heap.
///
/// The records of a small heap are side by side, which costs least to look at. Those of a larger one are in chunks, so
/// that adding one never moves others: they move for the last time when there are [`FLAT`] of them, which takes some
/// fifty microseconds.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The records. The first one is that of [`BlockId::NONE`]. Empty once there are chunks.
    flat: Vec<Block>,
    chunks: Vec<Chunk>,
    /// The number of records that were ever in use.
    count: usize,
    /// The first vacant record; they are chained through `next`.
    vacant: BlockId,
}

impl Default for Slab {
    fn default() -> Slab {
        Slab { flat: vec![Block::default()], chunks: Vec::new(), count: 1, vacant: BlockId::NONE }
    }
}

/// A chunk that begins with the given records.
fn chunk(records: &[Block]) -> Chunk {
    let mut chunk = Vec::with_capacity(CHUNK);
    chunk.extend_from_slice(records);
    chunk.resize_with(CHUNK, Block::default);
    chunk.into_boxed_slice().try_into().unwrap_or_else(|_| unreachable!("as long as a chunk"))
}

/// A record, of which the compiler finds with one comparison that it is among flat ones, as it must compare with their
/// number anyway.
#[inline(always)]
fn record<'a>(flat: &'a [Block], chunks: &'a [Chunk], id: BlockId) -> &'a Block {
    match flat.get(id.0 as usize) {
        Some(block) => block,
        None => &chunks[id.chunk()][id.index()],
    }
}

/// As [`record`], to change it.
#[inline(always)]
fn record_mut<'a>(flat: &'a mut [Block], chunks: &'a mut [Chunk], id: BlockId) -> &'a mut Block {
    match flat.get_mut(id.0 as usize) {
        Some(block) => block,
        None => &mut chunks[id.chunk()][id.index()],
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
        Records { flat: &mut self.flat, chunks: &mut self.chunks, vacant: &mut self.vacant }
    }

    /// The records, for an operation that inserts at most one.
    #[inline]
    pub(super) fn records_and_a_vacant_one(&mut self) -> Records<'_> {
        if self.vacant == BlockId::NONE {
            self.grow();
        }
        self.records()
    }

    /// Makes sure that there is a vacant record.
    #[cold]
    fn grow(&mut self) {
        let id = BlockId(u32::try_from(self.count).unwrap_or(u32::MAX));
        // 2^32 - 1 records of 64 bytes are 256 GiB of host memory: the process is out of memory before that.
        assert!(id.0 != u32::MAX, "more than 2^32 blocks");
        if self.count < FLAT {
            self.flat.push(Block::default());
        } else {
            // Does nothing once there are chunks.
            self.chunks.extend(std::mem::take(&mut self.flat).chunks(CHUNK).map(chunk));
            if self.count == self.chunks.len() * CHUNK {
                self.chunks.push(chunk(&[]));
            }
        }
        self.count += 1;
        self.vacant = id;
    }

    /// Has the processor fetch the record of a block, which will be read soon, and goes on meanwhile.
    #[inline(always)]
    pub(crate) fn prefetch(&self, id: BlockId) {
        prefetch(&self[id]);
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

    /// Number of records, vacant ones included.
    pub(crate) fn records_count(&self) -> usize {
        self.count
    }

    /// Every block that is not vacant.
    #[cfg(test)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> + '_ {
        let numbered = (0..u32::MAX)
            .map(BlockId)
            .zip(self.flat.iter().chain(self.chunks.iter().flat_map(|chunk| chunk.iter())).take(self.count));
        numbered.filter(|(_, block)| block.state != State::Vacant)
    }
}

impl Index<BlockId> for Slab {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        record(&self.flat, &self.chunks, id)
    }
}

impl IndexMut<BlockId> for Slab {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        record_mut(&mut self.flat, &mut self.chunks, id)
    }
}

/// The records of a slab while one operation works on them. No chunk is added meanwhile, so their address and number
/// stay in registers instead of being read again after each store.
#[derive(Debug)]
pub(super) struct Records<'a> {
    flat: &'a mut [Block],
    chunks: &'a mut [Chunk],
    vacant: &'a mut BlockId,
}

impl Records<'_> {
    /// Puts a block into a vacant record. There must be one.
    #[inline]
    pub(super) fn insert(&mut self, block: Block) -> BlockId {
        let id = *self.vacant;
        debug_assert_ne!(id, BlockId::NONE, "there is a vacant record");
        let record = record_mut(self.flat, self.chunks, id);
        let next = record.next;
        // Written straight into its place: building a record elsewhere and moving it in wide words would stall the machine.
        *record = block;
        *self.vacant = next;
        id
    }

    #[inline]
    pub(super) fn remove(&mut self, id: BlockId) {
        debug_assert_ne!(id, BlockId::NONE);
        let record = record_mut(self.flat, self.chunks, id);
        (record.state, record.next) = (State::Vacant, *self.vacant);
        *self.vacant = id;
    }
}

impl Index<BlockId> for Records<'_> {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        record(self.flat, self.chunks, id)
    }
}

impl IndexMut<BlockId> for Records<'_> {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        record_mut(self.flat, self.chunks, id)
    }
}

/// Has the processor fetch what is behind a reference. Does nothing on processors for which the language has no stable way to ask.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "nothing is done"))]
fn prefetch(block: &Block) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[allow(unsafe_code, reason = "the hint takes a pointer")]
        // SAFETY: the pointer comes from a reference; and a prefetch neither reads nor writes as far as the program can tell.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(block).cast());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_in_chunks_never_move() {
        let mut slab = Slab::default();
        let mut ids = Vec::new();
        let mut places = Vec::new();
        for addr in 1..=(FLAT + 3 * CHUNK) as u64 {
            ids.push(slab.insert(Block { addr, state: State::Live, ..Block::default() }));
            if ids.len() == FLAT {
                places = ids.iter().map(|&id| std::ptr::from_ref(&slab[id])).collect();
            }
        }
        assert!(ids.iter().zip(&places).all(|(&id, &place)| std::ptr::eq(&raw const slab[id], place)));
        assert!(ids.iter().zip(1..).all(|(&id, addr)| slab[id].addr == addr));
        assert_eq!((slab.records_count(), slab.iter().count()), (ids.len() + 1, ids.len()));
        ids.iter().for_each(|&id| slab.remove(id));
        assert_eq!(slab.iter().count(), 0);
        let again = slab.insert(Block::default());
        assert_eq!(slab.records_count(), ids.len() + 1, "{again:?} is a vacant one");
    }
}
