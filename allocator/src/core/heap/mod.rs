//! The heap: regions tiled by blocks, and the free blocks' indexes. A pure data structure: no
//! driver, no locks, no unsafe.
//!
//! Accounting identities, asserted by [`Heap::check`] in debug builds and property tests:
//! * **H1** the blocks of a region are linked in order of address, and Σ their sizes = the region's
//!   length;
//! * **H2** live + waiting + free + holes + held = Σ region lengths, and each equals its running
//!   total;
//! * **H3** no two neighbours are holes, or free and of one owner. A free block in a region of
//!   another stream than its owner is noted as a *stray*, and belongs to the region's stream once
//!   it is known done;
//! * **H4** a block is in an index if and only if it is free and not in quarantine, and then in the
//!   index of its pool and owner;
//! * **H5** a free block's tick is the latest of all blocks that were merged into it, in whatever
//!   order.
//!
//! A free block belongs to the stream of its last use, its *owner*, which may use it again at once.
//! Another stream may once it is done. A region has a stream, too, for which its addresses were
//! reserved: memory grows in a stream's own regions, so that blocks of different streams mostly do
//! not lie side by side. A request may be served from any of them.

use std::collections::BTreeSet;

use deferred::Deferred;
use last_use::{Granules, RecentUses};
use moves::{Joined, Piece, Taken};
use pools::Pools;
use quarantine::Quarantine;

use crate::tags::Tag;
use crate::types::{After, BlockId, PoolId, StreamId};

pub use block::Block;
pub(crate) use block::{HoleIndex, Slab, State};
use block::{Members, Strays};
pub(crate) use holes::Holding;
pub(crate) use index::{IndexView, Key};
pub(crate) use last_use::LastUses;
pub(crate) use pools::{HeapPoolOptions, Owner};
pub(crate) use walk::{Passed, Walk};

mod block;
#[cfg(any(test, debug_assertions))]
mod check;
mod deferred;
mod holes;
mod index;
mod last_use;
mod moves;
mod pools;
mod quarantine;
pub(crate) mod strays;
mod walk;

/// A contiguous range of device addresses.
#[derive(Clone, Debug)]
pub struct Region {
    /// First address.
    pub addr: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// The stream for which it was reserved.
    pub(crate) stream: StreamId,
    pub(crate) pool: PoolId,
    /// Its block with the lowest address.
    pub first: BlockId,
    /// Last uses of its granules; empty for a segment.
    pub(crate) granules: Granules,
}

/// What the heap keeps for each stream.
#[derive(Debug, Default)]
struct OfStream {
    /// Blocks that it freed, and that are not merged yet.
    deferred: Deferred,
    /// The log of its last uses that are not noted in granules' ticks yet.
    recent: RecentUses,
}

/// The regions, their blocks, and the free ones' indexes.
#[derive(Debug, Default)]
pub struct Heap {
    blocks: Slab,
    pools: Pools,
    streams: Vec<OfStream>,
    /// The streams that may have deferred blocks, or a log of last uses.
    active_streams: Members,
    /// True if several blocks of a stream may be deferred.
    defers_several: bool,
    regions: Vec<Option<Region>>,
    vacant_regions: Vec<u32>,
    /// The free blocks.
    free_blocks: Members,
    strays: Strays,
    /// Holes that are not held.
    holes: HoleIndex,
    /// Those of them that are a whole region.
    empty_reservations: BTreeSet<BlockId>,
    irregular: Members,
    quarantine: Quarantine,
    /// Totals of identity H2, in bytes.
    total: u64,
    free: u64,
    /// Bytes of addresses without memory, held ones included.
    hole_bytes: u64,
    /// Bytes of held memory.
    held_bytes: u64,
}

impl Heap {
    /// A heap with the default pools: the small one has number 0, the large one number 1. `shares`
    /// says whether free blocks of different streams may become one.
    pub fn new(shares: bool) -> Heap {
        Heap { pools: Pools::new(), strays: Strays::new(shares), ..Heap::default() }
    }

    /// Adds a private pool, which is about to get a region here, unless the heap has it. Small
    /// pools have even numbers, large ones odd numbers. The pool goes with its last region.
    pub(crate) fn add_private_pool(&mut self, number: PoolId, options: HeapPoolOptions) {
        self.pools.add_private(number, options);
    }

    /// What the heap keeps for a stream.
    #[inline]
    fn of_stream(&mut self, stream: StreamId) -> &mut OfStream {
        if stream.index() >= self.streams.len() {
            self.add_stream(stream);
        }
        &mut self.streams[stream.index()]
    }

    #[cold]
    fn add_stream(&mut self, stream: StreamId) {
        self.streams.resize_with(stream.index() + 1, OfStream::default);
    }

    /// Takes `size` bytes for a stream from the block that the index chooses among the free ones of
    /// an owner, which is that stream.
    #[inline(always)]
    pub(crate) fn take_best(&mut self, owner: Owner, pool: PoolId, size: u64, requested: u64) -> Option<BlockId> {
        let record = self.pools.get_mut(pool)?;
        let (piece, no_split) = (Piece { owner: owner.stream, size, requested }, record.options.no_split);
        let index = record.of_mut(owner)?;
        let mut blocks = self.blocks.records_and_a_vacant_one();
        let taken = moves::take_best(index, &mut blocks, &mut self.free_blocks, no_split, piece)?;
        self.took(&taken);
        Some(taken.id)
    }

    /// Takes `size` bytes for `owner` from a given free block.
    pub fn take(&mut self, id: BlockId, owner: StreamId, size: u64, requested: u64) -> BlockId {
        let Block { size: whole, pool, state, .. } = self.blocks[id];
        debug_assert!(state == State::Free && whole >= size);
        let from = self.owner_of(id);
        let record = &mut self.pools[pool];
        let no_split = record.options.no_split;
        let index = record.index_mut(from);
        let mut blocks = self.blocks.records_and_a_vacant_one();
        let piece = Piece { owner, size, requested };
        let taken = moves::take(index, &mut blocks, &mut self.free_blocks, no_split, id, piece);
        self.took(&taken);
        taken.id
    }

    /// Accounts for a block that became live and was free, or part of a free block.
    #[inline(always)]
    fn took(&mut self, taken: &Taken) {
        self.free -= taken.size;
        if taken.prev == BlockId::NONE {
            self.region_mut(taken.region).first = taken.id;
        }
    }

    /// Frees a live or waiting block: `owner` may reuse it at once, and other streams once the
    /// owner's timeline has reached `after` (0: now). Merges it with its neighbours; the merged
    /// block is done when the last of its parts is.
    #[inline(never)]
    pub(crate) fn give(&mut self, id: BlockId, owner: StreamId, after: After) -> BlockId {
        let Block { pool, state, region, .. } = self.blocks[id];
        debug_assert!(matches!(state, State::Live | State::Waiting | State::Quarantined));
        let of = Owner::in_region_of(owner, self.region(region).stream);
        let index = self.pools[pool].index_mut(of);
        let joined = moves::join(index, &mut self.blocks.records(), &mut self.free_blocks, id, owner, after);
        self.gave(&joined);
        joined.id
    }

    /// The owner of a free block.
    fn owner_of(&self, id: BlockId) -> Owner {
        let Block { owner, region, .. } = self.blocks[id];
        Owner::in_region_of(owner, self.region(region).stream)
    }

    /// Accounts for a block that became free and was joined with free neighbours.
    #[inline(always)]
    fn gave(&mut self, joined: &Joined) {
        self.free += joined.given;
        if joined.prev == BlockId::NONE {
            self.region_mut(joined.region).first = joined.id;
        }
        if joined.owner != self.region(joined.region).stream {
            self.strays.note(joined.id);
        }
    }

    /// True if a block is free. Its record is not read.
    #[inline]
    pub fn is_free(&self, id: BlockId) -> bool {
        self.free_blocks.contains(id)
    }

    /// Puts a free block in the index of its owner.
    fn index_alone(&mut self, id: BlockId) {
        let owner = self.owner_of(id);
        self.free_blocks.insert(id);
        self.pools[self.blocks[id].pool].index_mut(owner).insert(&mut self.blocks.records(), id);
        if owner.has_strays {
            self.strays.note(id);
        }
    }

    fn unindex(&mut self, id: BlockId) {
        let (Block { size, pool, .. }, owner) = (self.blocks[id], self.owner_of(id));
        self.free_blocks.remove(id);
        self.pools[pool].index_mut(owner).remove(&mut self.blocks.records(), id, size);
    }

    /// Tags a live block, and returns its record.
    #[inline(always)]
    pub(crate) fn tag(&mut self, id: BlockId, tag: Tag) -> &Block {
        let block = &mut self.blocks[id];
        block.tag = tag.0;
        block
    }

    /// How the history names a pool of the heap.
    pub(crate) fn history_id(&self, pool: PoolId) -> u32 {
        self.pools[pool].options.history_id
    }

    /// The pools that the heap has.
    pub(crate) fn pools(&self) -> impl Iterator<Item = PoolId> + '_ {
        self.pools.numbers()
    }

    /// Number of block records, vacant ones included.
    #[cfg(debug_assertions)]
    pub(crate) fn records_count(&self) -> usize {
        self.blocks.records_count()
    }

    /// The record of a block.
    #[inline]
    pub fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id]
    }

    /// Makes a live block a waiting one.
    pub(crate) fn set_waiting(&mut self, id: BlockId) {
        debug_assert_eq!(self.blocks[id].state, State::Live);
        self.blocks[id].state = State::Waiting;
    }

    /// Adds a region of a stream, which is one free block of the stream.
    pub fn add_region(&mut self, addr: u64, bytes: u64, stream: StreamId, pool: PoolId) -> BlockId {
        let region = self.add_region_record(addr, bytes, stream, pool);
        let state = State::Free;
        let block = Block { addr, size: bytes, region, owner: stream, pool, state, ..Block::default() };
        let first = self.blocks.insert(block);
        self.region_mut(region).first = first;
        self.free += bytes;
        self.index_alone(first);
        first
    }

    /// Adds a region that has no block yet, and returns its number.
    fn add_region_record(&mut self, addr: u64, bytes: u64, stream: StreamId, pool: PoolId) -> u32 {
        let number = self.vacant_regions.pop().unwrap_or_else(|| {
            self.regions.push(None);
            u32::try_from(self.regions.len() - 1).unwrap_or(u32::MAX)
        });
        let (first, granules) = (BlockId::NONE, Granules::default());
        self.regions[number as usize] = Some(Region { addr, bytes, stream, pool, first, granules });
        self.total += bytes;
        self.pools[pool].regions += 1;
        number
    }

    /// Removes a region that is one free block.
    pub fn remove_region(&mut self, id: BlockId) -> Region {
        debug_assert!(self.blocks[id].state == State::Free && !self.blocks[id].is_split());
        self.unindex(id);
        self.free -= self.blocks[id].size;
        self.remove_region_record(id)
    }

    /// Removes the region of a block that is all of it and in no index.
    fn remove_region_record(&mut self, id: BlockId) -> Region {
        self.note_recent_uses(|_| After::NOTHING);
        let number = self.blocks[id].region;
        self.blocks.remove(id);
        self.vacant_regions.push(number);
        let region = self.regions[number as usize].take();
        let region = region.unwrap_or_else(|| unreachable!("block of a removed region"));
        self.total -= region.bytes;
        self.pools.region_left(region.pool);
        region
    }

    /// Puts a removed region back, as one free block of `owner`, which other streams may use after
    /// the tick `after`.
    pub(crate) fn restore_region(&mut self, region: &Region, owner: StreamId, after: After) {
        let id = self.add_region(region.addr, region.bytes, region.stream, region.pool);
        self.unindex(id);
        let block = &mut self.blocks[id];
        block.owner = owner;
        block.after = after;
        self.index_alone(id);
    }

    /// The free blocks of a pool that belong to `owner`.
    pub(crate) fn index(&self, pool: PoolId, owner: Owner) -> Option<IndexView<'_>> {
        Some(IndexView::new(self.pools.get(pool)?.of(owner)?, &self.blocks))
    }

    /// The free blocks of a pool by owner.
    pub(crate) fn indexes(&self, pool: PoolId) -> impl Iterator<Item = (Owner, IndexView<'_>)> + '_ {
        let owners = self.pools.get(pool).into_iter().flat_map(pools::Pool::owners);
        owners.map(|(owner, index)| (owner, IndexView::new(index, &self.blocks)))
    }

    /// Every free block of a pool, by owner, and for each owner in the index's order.
    pub(crate) fn free_blocks(&self, pool: PoolId) -> impl Iterator<Item = Key> + '_ {
        self.free_blocks_from(pool, 1)
    }

    /// The free blocks of a pool of at least `size` bytes, not 0, in the same order.
    pub(crate) fn free_blocks_from(&self, pool: PoolId, size: u64) -> impl Iterator<Item = Key> + '_ {
        self.indexes(pool).flat_map(move |(_, index)| index.iter_from(size))
    }

    /// A free block of a pool that has at least `size` bytes and meets a condition: the smallest
    /// one, or one that is at most 1/64 larger.
    pub fn smallest_where(&self, pool: PoolId, size: u64, condition: impl Fn(&Block) -> bool) -> Option<BlockId> {
        self.free_blocks_from(pool, size).map(|key| key.block).find(|&id| condition(self.block(id)))
    }

    /// Bytes of all free blocks. Deferred blocks are not free.
    pub fn free_bytes(&self) -> u64 {
        self.free
    }

    /// Bytes of the largest free block. Looks at all of them.
    pub fn largest_free(&self) -> u64 {
        self.pools().flat_map(|pool| self.free_blocks(pool)).map(|key| key.size).max().unwrap_or(0)
    }

    /// Every region, in no particular order.
    pub fn regions(&self) -> impl Iterator<Item = &Region> + '_ {
        self.regions.iter().flatten()
    }

    /// The blocks of a region in order of address.
    pub(crate) fn blocks_of(&self, region: &Region) -> impl Iterator<Item = (BlockId, &Block)> + '_ {
        let step = |id: &BlockId| self.blocks[*id].next.some();
        std::iter::successors(region.first.some(), step).map(|id| (id, &self.blocks[id]))
    }

    /// Every block, region by region.
    pub(crate) fn all_blocks(&self) -> impl Iterator<Item = (&Region, BlockId, &Block)> + '_ {
        self.regions().flat_map(|region| self.blocks_of(region).map(move |(id, block)| (region, id, block)))
    }

    #[inline]
    pub(crate) fn region(&self, number: u32) -> &Region {
        self.regions[number as usize].as_ref().unwrap_or_else(|| unreachable!("block of a removed region"))
    }

    /// The region of a block.
    pub(crate) fn region_of(&self, id: BlockId) -> &Region {
        self.region(self.blocks[id].region)
    }

    #[inline]
    fn region_mut(&mut self, number: u32) -> &mut Region {
        self.regions[number as usize].as_mut().unwrap_or_else(|| unreachable!("block of a removed region"))
    }
}

impl Heap {
    /// True if size and kind of a live block follow from its requested bytes, and no other stream
    /// uses it. Its record is not read.
    #[inline]
    pub(crate) fn is_regular(&self, id: BlockId) -> bool {
        !self.irregular.contains(id)
    }

    /// Has the record of a live block read when it is freed.
    pub(crate) fn make_irregular(&mut self, id: BlockId) {
        self.irregular.insert(id);
    }

    /// Marks a live block that other streams use, too.
    pub(crate) fn mark_used_elsewhere(&mut self, id: BlockId) {
        self.blocks[id].used_elsewhere = true;
        self.make_irregular(id);
    }

    /// Has a live, irregular block count as one of another pool of the same kind.
    pub(crate) fn lend(&mut self, id: BlockId, to: PoolId) {
        self.blocks[id].pool = to;
    }

    /// Forgets that a block was irregular, or lent, as it is about to be freed.
    #[inline]
    pub(crate) fn forget_irregular(&mut self, id: BlockId) {
        if self.irregular.contains(id) {
            self.irregular.remove(id);
            self.blocks[id].pool = self.region_of(id).pool;
        }
    }
}
