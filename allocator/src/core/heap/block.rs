//! Records of blocks, in a slab addressed by number, and sets of blocks: one bit for each.
//!
//! A block that is given back is joined with those neighbours that are in the index. Most are not,
//! and their bits are close together in the cache, where their records are not. So it is with the
//! search for holes beside free blocks.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Index, IndexMut};

use crate::types::{After, BlockId, PoolId, StreamId, Use};

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum State {
    /// The record is unused.
    #[default]
    Vacant,
    /// An allocation holds the block, or it was given back and is deferred.
    Live,
    /// Freed, but other streams may still use it; in no index.
    Waiting,
    /// Free, and in the index of its owner.
    Free,
    /// Free, and kept from requests for a while; in no index.
    Quarantined,
    /// Addresses without memory behind them.
    Hole,
    /// Free memory that no request may take, because the driver is about to move it or to map more
    /// memory beside it.
    Held,
    /// A hole at which the driver is about to map memory, or from which it is about to take memory
    /// back.
    Filling,
}

impl State {
    /// True if memory is mapped at the block's addresses.
    pub(crate) fn has_memory(self) -> bool {
        !matches!(self, State::Vacant | State::Hole | State::Filling)
    }

    /// True if the block is free, quarantined or not.
    pub(crate) fn is_free(self) -> bool {
        matches!(self, State::Free | State::Quarantined)
    }
}

/// A piece of a region. A record is one cache line: an operation touches a block and its two
/// neighbours, and the machine waits for each line. (Tried: splitting off the rarely read fields.
/// That makes neighbours denser but costs one line more for the block itself: no gain up to 100 000
/// live blocks, and a loss at a million.)
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub struct Block {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub size: u64,
    /// Bytes that the caller requested; meaningful while live or waiting.
    pub(crate) requested: u64,
    /// While free: the owner's work that must be done before other streams may use the block.
    pub(crate) after: After,
    /// Neighbours in the region, by address.
    pub(crate) prev: BlockId,
    pub(crate) next: BlockId,
    /// While free: neighbours in its bin.
    pub(crate) bin_prev: BlockId,
    pub(crate) bin_next: BlockId,
    pub(crate) region: u32,
    /// While live, the stream it was allocated for; while free, the stream that may reuse it
    /// without waiting.
    pub(crate) owner: StreamId,
    /// Tag of the allocation.
    pub(crate) tag: u32,
    /// While live, the pool that it was requested of; otherwise that of its region.
    pub(crate) pool: PoolId,
    pub(crate) state: State,
    /// While live: true if other streams use the block, too. The allocator's state lists them.
    pub(crate) used_elsewhere: bool,
}

const _: () = assert!(size_of::<Block>() == 64, "a block record fills a cache line");

impl Block {
    /// Its addresses.
    #[inline]
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        self.addr..self.addr + self.size
    }

    /// The last use of a free block.
    #[inline]
    pub(crate) fn last_use(&self) -> Use {
        Use { stream: self.owner, after: self.after }
    }

    /// True if the block is a piece of a region, not a whole one.
    #[inline]
    pub fn is_split(&self) -> bool {
        self.prev != BlockId::NONE || self.next != BlockId::NONE
    }
}

/// With this many records (256 KiB), a slab reserves addresses for [`RESERVED`].
const FEW: usize = 1 << 12;
/// Records up to this number never move again: their addresses (256 MiB) are reserved at once, and
/// the operating system finds memory for a page when it is first written. Copying a million records
/// instead stalls an allocation for 28 ms.
const RESERVED: usize = 1 << 22;

/// All blocks of the heap.
#[derive(Debug)]
pub(crate) struct Slab {
    /// The records. The first one is that of [`BlockId::NONE`].
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
        let id = BlockId(u32::try_from(self.blocks.len()).unwrap_or(u32::MAX));
        // 2^32 - 1 records of 64 bytes are 256 GiB of host memory: the process is out of memory
        // before that.
        assert!(id.0 != u32::MAX, "more than 2^32 blocks");
        if self.blocks.len() == FEW {
            // Where addresses are scarce, the records move as they double.
            let _ = self.blocks.try_reserve_exact(RESERVED - FEW);
        }
        self.blocks.push(Block::default());
        self.vacant = id;
    }

    /// Has the processor fetch the record of a block, which will be read soon, and goes on
    /// meanwhile.
    #[inline(always)]
    pub(crate) fn prefetch(&self, id: BlockId) {
        prefetch(&self[id]);
    }

    /// The record of a block, if it is not [`BlockId::NONE`].
    #[inline]
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        id.some().map(|id| &self[id])
    }

    /// Number of records, vacant ones included.
    pub(crate) fn records_count(&self) -> usize {
        self.blocks.len()
    }

    /// Every block that is not vacant.
    #[cfg(test)]
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

/// The records of a slab while one operation works on them. No record is added meanwhile, so their
/// address and number stay in registers instead of being read again after each store.
#[derive(Debug)]
pub(super) struct Records<'a> {
    blocks: &'a mut [Block],
    vacant: &'a mut BlockId,
}

impl Records<'_> {
    /// Puts a block into a vacant record. There must be one.
    #[inline]
    pub(super) fn insert(&mut self, block: Block) -> BlockId {
        let id = *self.vacant;
        debug_assert_ne!(id, BlockId::NONE, "there is a vacant record");
        let record = &mut self.blocks[id.index()];
        let next = record.next;
        // Written straight into its place: building a record elsewhere and moving it in wide words
        // would stall the machine.
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

/// Has the processor fetch what is behind a reference. Does nothing on processors for which the
/// language has no stable way to ask.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables, reason = "nothing is done"))]
fn prefetch(block: &Block) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[allow(unsafe_code, reason = "the hint takes a pointer")]
        // SAFETY: the pointer comes from a reference; and a prefetch neither reads nor writes as
        // far as the program can tell.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(block).cast());
        }
    }
}

/// A set of numbers, as long as the greatest that was ever in it.
#[derive(Debug, Default)]
pub(super) struct Members(Vec<u64>);

impl Members {
    #[inline]
    fn place(id: impl Into<u32>) -> (usize, u64) {
        let number: u32 = id.into();
        (number as usize / 64, 1 << (number % 64))
    }

    #[inline]
    pub(super) fn contains(&self, id: impl Into<u32>) -> bool {
        let (word, bit) = Members::place(id);
        self.0.get(word).is_some_and(|word| word & bit != 0)
    }

    #[inline]
    pub(super) fn insert(&mut self, id: impl Into<u32>) {
        let (word, bit) = Members::place(id);
        if word >= self.0.len() {
            self.grow(word);
        }
        self.0[word] |= bit;
    }

    #[cold]
    fn grow(&mut self, word: usize) {
        self.0.resize(word + 1, 0);
    }

    /// Takes out a number, which must be in the set.
    #[inline]
    pub(super) fn remove(&mut self, id: impl Into<u32>) {
        let (word, bit) = Members::place(id);
        self.0[word] &= !bit;
    }

    /// The numbers in the set, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0_u32..).zip(&self.0).flat_map(|(word, &bits)| {
            let rest = std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)));
            rest.take_while(|&bits| bits != 0).map(move |bits| word * u64::BITS + bits.trailing_zeros())
        })
    }

    /// Number of members.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// A set of holes.
#[derive(Debug, Default)]
pub(crate) struct HoleIndex {
    by_address: BTreeMap<(PoolId, StreamId, u64), BlockId>,
    /// The same holes. Their bits are close together in the cache, where blocks' records are not.
    members: Members,
}

impl HoleIndex {
    pub(super) fn insert(&mut self, pool: PoolId, stream: StreamId, addr: u64, id: BlockId) {
        self.by_address.insert((pool, stream, addr), id);
        self.members.insert(id);
    }

    /// Takes out the hole of a pool and stream at an address, which must be in the set.
    pub(super) fn remove(&mut self, pool: PoolId, stream: StreamId, addr: u64) {
        let id = self.by_address.remove(&(pool, stream, addr));
        id.into_iter().for_each(|id| self.members.remove(id));
    }

    pub(crate) fn contains(&self, id: BlockId) -> bool {
        self.members.contains(id)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }

    /// The holes of a pool in a stream's regions, by address.
    pub(crate) fn of(&self, pool: PoolId, stream: StreamId) -> impl Iterator<Item = BlockId> + '_ {
        self.by_address.range((pool, stream, 0)..=(pool, stream, u64::MAX)).map(|(_, &id)| id)
    }

    /// Every hole, pool by pool.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.by_address.values().copied()
    }

    /// True if a hole is in the set, at its place.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn is_noted(&self, pool: PoolId, stream: StreamId, addr: u64, id: BlockId) -> bool {
        self.by_address.get(&(pool, stream, addr)) == Some(&id) && self.members.contains(id)
    }

    /// True if no other blocks are taken for holes.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn is_consistent(&self) -> bool {
        self.members.count() == self.by_address.len()
    }
}

/// The strays, and blocks that were.
#[derive(Debug, Default)]
pub(super) struct Strays {
    /// True if memory passes between streams.
    shares: bool,
    pub(super) queue: VecDeque<BlockId>,
    noted: Members,
}

impl Strays {
    pub(super) fn new(shares: bool) -> Strays {
        Strays { shares, ..Strays::default() }
    }

    #[cold]
    pub(super) fn note(&mut self, id: BlockId) {
        if self.shares && !self.noted.contains(id) {
            self.noted.insert(id);
            self.queue.push_back(id);
        }
    }

    pub(super) fn take(&mut self) -> Option<BlockId> {
        let id = self.queue.pop_front()?;
        self.noted.remove(id);
        Some(id)
    }

    /// True if a stray is noted, or need not be.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn has(&self, id: BlockId) -> bool {
        !self.shares || self.noted.contains(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_a_large_slab_never_move() {
        let mut slab = Slab::default();
        let mut ids: Vec<_> = (1..=FEW as u64).map(|addr| slab.insert(Block { addr, ..Block::default() })).collect();
        let first = std::ptr::from_ref(&slab[ids[0]]);
        ids.extend((FEW as u64 + 1..=100_000).map(|addr| slab.insert(Block { addr, ..Block::default() })));
        assert!(std::ptr::eq(first, &raw const slab[ids[0]]));
        assert!(ids.iter().zip(1..).all(|(&id, addr)| slab[id].addr == addr));
    }

    #[test]
    fn vacant_records_are_used_again() {
        let mut slab = Slab::default();
        let block = Block { state: State::Live, ..Block::default() };
        let ids: Vec<_> = (0..100).map(|_| slab.insert(block)).collect();
        assert_eq!((slab.records_count(), slab.iter().count()), (101, 100));
        ids.iter().for_each(|&id| slab.remove(id));
        assert_eq!(slab.iter().count(), 0);
        slab.insert(block);
        assert_eq!(slab.records_count(), 101);
    }
}
