//! The heap: regions tiled by blocks, and the free blocks' indexes. A pure data structure: no
//! driver, no locks, no unsafe.
//!
//! Accounting identities, asserted by [`Heap::check`] in debug builds and property tests:
//! * **H1** the blocks of a region are linked in order of address, and Σ their sizes = the region's
//!   length;
//! * **H2** live + waiting + free + holes + held = Σ region lengths, and each equals its running
//!   total;
//! * **H3** no two neighbours are mergeable, that is, both free and either of the same owner or
//!   both done for every stream;
//! * **H4** a block is in an index if and only if it is free, and then in the index of its pool and
//!   owner;
//! * **H5** a free block's tick is the latest of all blocks that were merged into it, in whatever
//!   order.
//!
//! Ownership: a heap belongs to one stream, its *home*. A free block belongs to the stream of its
//! last use, its *owner*, which may reuse it at once. A block whose owner is not the home stream is
//! a *foreign free block*. Once a foreign free block is done it goes home, so that borrowing memory
//! across streams leaves no lasting borders between free blocks.

mod block;
#[cfg(any(test, debug_assertions))]
mod check;
mod deferred;
mod foreign;
mod hole_index;
mod holes;
mod index;
mod irregular;
mod last_use;
mod members;
mod moves;
mod pools;
mod recent;
mod walk;

use std::collections::BTreeSet;

pub(crate) use block::{Block, BlockId, Slab, State};
use deferred::Deferred;
pub(crate) use deferred::DeferredBlock;
use hole_index::HoleIndex;
pub(crate) use holes::Holding;
use index::bin_of;
pub(crate) use index::{IndexView, Key};
use last_use::Granules;
pub(crate) use last_use::LastUses;
use members::Members;
use moves::{Joined, Piece, Taken};
use pools::Pools;
pub(crate) use pools::{HeapPoolOptions, kind_of};
use recent::RecentUses;
pub(crate) use walk::{Passed, Walk};

/// A contiguous range of device addresses.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) home: u32,
    pub(crate) pool: u16,
    pub(crate) first: BlockId,
    /// Last uses of its granules; empty for a segment.
    pub(crate) granules: Granules,
}

/// The regions of one stream, their blocks, and the free ones' indexes.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    /// The stream whose regions these are.
    pub(crate) home: u32,
    pub(crate) blocks: Slab,
    pub(crate) pools: Pools,
    regions: Vec<Option<Region>>,
    vacant_regions: Vec<u32>,
    /// Number of foreign free blocks.
    foreign: usize,
    /// Holes that are not held.
    holes: HoleIndex,
    /// Those of them that are a whole region.
    empty_reservations: BTreeSet<BlockId>,
    /// Blocks that were freed, and not merged yet.
    deferred: Deferred,
    irregular: Members,
    /// The log of last uses that are not noted in the granules' ticks yet.
    recent: RecentUses,
    /// Bytes of blocks that deferred and were taken again.
    pub(crate) retaken: u64,
    /// Totals of identity H2, in bytes.
    pub(crate) total: u64,
    pub(crate) free: u64,
    /// Bytes of addresses without memory, held ones included.
    pub(crate) hole_bytes: u64,
    /// Bytes of held memory.
    pub(crate) held_bytes: u64,
}

impl Heap {
    /// The heap of a stream, without pools and regions yet.
    pub(crate) fn new(home: u32) -> Heap {
        Heap { home, ..Heap::default() }
    }

    /// Adds the default pools: the small one has number 0, the large one number 1.
    pub(crate) fn add_pools(&mut self) {
        self.pools.add_default();
    }

    /// Adds a private pool, which is about to get a region here, unless the heap has it. Small
    /// pools have even numbers, large ones odd numbers. The pool goes with its last region.
    pub(crate) fn add_private_pool(&mut self, number: u16, options: HeapPoolOptions) {
        self.pools.add_private(number, options);
    }

    /// Takes `size` bytes for the home stream from the block that the index chooses among the
    /// stream's own free ones.
    #[inline(always)]
    pub(crate) fn take_best(&mut self, pool: u16, size: u64, requested: u64) -> Option<BlockId> {
        let piece = Piece { owner: self.home, size, requested };
        let record = self.pools.get_mut(pool)?;
        let mut blocks = self.blocks.records_and_a_vacant_one();
        let taken = moves::take_best(&mut record.own, &mut blocks, record.options.no_split, piece)?;
        self.took(&taken);
        Some(taken.id)
    }

    /// Takes `size` bytes for `owner` from a given free block.
    pub(crate) fn take(&mut self, id: BlockId, owner: u32, size: u64, requested: u64) -> BlockId {
        let Block { size: whole, owner: from, pool, state, .. } = self.blocks[id];
        debug_assert!(state == State::Free && whole >= size);
        let record = &mut self.pools[pool];
        let piece = Piece { owner, size, requested };
        let no_split = record.options.no_split;
        let mut blocks = self.blocks.records_and_a_vacant_one();
        let index = record.index_mut(self.home, from);
        let taken = moves::take(index, &mut blocks, no_split, id, bin_of(whole), piece);
        self.took(&taken);
        self.foreign -= usize::from(from != self.home && !taken.is_cut);
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
    pub(crate) fn give(&mut self, id: BlockId, owner: u32, after: u64) -> BlockId {
        if after == 0 {
            self.adopt_done(id, owner);
        }
        self.give_used(id, owner, after)
    }

    /// As [`Heap::give`], for a block whose neighbours' owners do not change.
    fn give_used(&mut self, id: BlockId, owner: u32, after: u64) -> BlockId {
        let pool = self.blocks[id].pool;
        debug_assert!(matches!(self.blocks[id].state, State::Live | State::Waiting));
        let mut blocks = self.blocks.records();
        let index = self.pools[pool].index_mut(self.home, owner);
        let joined = moves::join(index, &mut blocks, id, owner, after);
        self.gave(&joined);
        if owner != self.home {
            self.foreign = self.foreign + 1 - joined.neighbours;
        }
        joined.id
    }

    /// Accounts for a block that became free and was joined with free neighbours.
    #[inline(always)]
    fn gave(&mut self, joined: &Joined) {
        self.free += joined.given;
        if joined.prev == BlockId::NONE {
            self.region_mut(joined.region).first = joined.id;
        }
    }

    #[inline]
    fn is_free_of(&self, id: BlockId, owner: u32) -> bool {
        self.blocks.get(id).is_some_and(|block| block.state == State::Free && block.owner == owner)
    }

    /// True if a block of a pool is free and the home stream's. Its record is not read.
    #[inline]
    pub(crate) fn is_own(&self, pool: u16, id: BlockId) -> bool {
        self.pools[pool].own.has(id)
    }

    /// Prepares giving a block that is done for every stream to `owner`: neighbours that are done
    /// become the owner's, too, so that they merge, unless the merged block would not be done.
    #[cold]
    fn adopt_done(&mut self, id: BlockId, owner: u32) {
        for side in [|block: &Block| block.prev, |block: &Block| block.next] {
            let Block { prev, next, .. } = self.blocks[id];
            let is_used = |id: BlockId| self.is_free_of(id, owner) && self.blocks[id].after != 0;
            if is_used(prev) || is_used(next) {
                return;
            }
            let neighbour = side(&self.blocks[id]);
            let Some(block) = self.blocks.get_mut(neighbour) else { continue };
            if block.state == State::Free && block.after == 0 && block.owner != owner {
                let size = block.size;
                self.unindex(neighbour);
                self.free -= size;
                self.blocks[neighbour].state = State::Waiting;
                self.give(neighbour, owner, 0);
            }
        }
    }

    /// Puts a free block in the index of its owner.
    fn index_alone(&mut self, id: BlockId) {
        let Block { owner, pool, .. } = self.blocks[id];
        let mut blocks = self.blocks.records();
        self.pools[pool].index_mut(self.home, owner).insert(&mut blocks, id);
        self.foreign += usize::from(owner != self.home);
    }

    fn unindex(&mut self, id: BlockId) {
        let Block { size, owner, pool, .. } = self.blocks[id];
        let mut blocks = self.blocks.records();
        self.pools[pool].index_mut(self.home, owner).remove(&mut blocks, id, bin_of(size));
        self.foreign -= usize::from(owner != self.home);
    }

    /// Makes a live block a waiting one.
    pub(crate) fn set_waiting(&mut self, id: BlockId) {
        debug_assert_eq!(self.blocks[id].state, State::Live);
        self.blocks[id].state = State::Waiting;
    }

    /// Adds a region, which is one free block of the home stream.
    pub(crate) fn add_region(&mut self, addr: u64, bytes: u64, pool: u16) -> BlockId {
        let home = self.home;
        let region = self.add_region_record(addr, bytes, pool);
        let state = State::Free;
        let block = Block { addr, size: bytes, region, owner: home, pool, state, ..Block::default() };
        let first = self.blocks.insert(block);
        self.region_mut(region).first = first;
        self.free += bytes;
        self.index_alone(first);
        first
    }

    /// Adds a region that has no block yet, and returns its number.
    fn add_region_record(&mut self, addr: u64, bytes: u64, pool: u16) -> u32 {
        let number = self.vacant_regions.pop().unwrap_or_else(|| {
            self.regions.push(None);
            u32::try_from(self.regions.len() - 1).unwrap_or(u32::MAX)
        });
        let (home, first, granules) = (self.home, BlockId::NONE, Granules::default());
        self.regions[number as usize] = Some(Region { addr, bytes, home, pool, first, granules });
        self.total += bytes;
        self.pools[pool].regions += 1;
        number
    }

    /// Removes a region that is one free block.
    pub(crate) fn remove_region(&mut self, id: BlockId) -> Region {
        debug_assert!(self.blocks[id].state == State::Free && !self.blocks[id].is_split());
        self.unindex(id);
        self.free -= self.blocks[id].size;
        self.remove_region_record(id)
    }

    /// Removes the region of a block that is all of it and in no index.
    fn remove_region_record(&mut self, id: BlockId) -> Region {
        self.note_recent_uses(0);
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
    pub(crate) fn restore_region(&mut self, region: &Region, owner: u32, after: u64) {
        let id = self.add_region(region.addr, region.bytes, region.pool);
        self.unindex(id);
        let block = &mut self.blocks[id];
        (block.owner, block.after) = (owner, after);
        self.index_alone(id);
    }

    /// The free blocks of a pool that belong to `owner`.
    pub(crate) fn index(&self, pool: u16, owner: u32) -> Option<IndexView<'_>> {
        let pool = self.pools.get(pool)?;
        let index = if owner == self.home { Some(&pool.own) } else { pool.away.get(owner) };
        index.map(|index| IndexView::new(index, &self.blocks))
    }

    /// The free blocks of a pool by owner, those of the home stream first.
    pub(crate) fn indexes(&self, pool: u16) -> impl Iterator<Item = (u32, IndexView<'_>)> + '_ {
        let pool = self.pools.get(pool).into_iter();
        let all = pool.flat_map(|pool| std::iter::once((self.home, &pool.own)).chain(pool.away.iter()));
        all.map(|(owner, index)| (owner, IndexView::new(index, &self.blocks)))
    }

    /// Every free block of a pool, those of the home stream first, and for each owner in the
    /// index's order.
    pub(crate) fn free_blocks(&self, pool: u16) -> impl Iterator<Item = Key> + '_ {
        self.free_blocks_from(pool, 1)
    }

    /// The free blocks of a pool of at least `size` bytes, not 0, in the same order.
    pub(crate) fn free_blocks_from(&self, pool: u16, size: u64) -> impl Iterator<Item = Key> + '_ {
        self.indexes(pool).flat_map(move |(_, index)| index.iter_from(size))
    }

    /// Every region, in no particular order.
    pub(crate) fn regions(&self) -> impl Iterator<Item = &Region> + '_ {
        self.regions.iter().flatten()
    }

    /// The blocks of a region in order of address.
    pub(crate) fn blocks_of(&self, region: &Region) -> impl Iterator<Item = (BlockId, &Block)> + '_ {
        let step = |id: &BlockId| self.blocks[*id].next.some();
        std::iter::successors(region.first.some(), step).map(|id| (id, &self.blocks[id]))
    }

    #[inline]
    pub(crate) fn region(&self, number: u32) -> &Region {
        self.regions[number as usize].as_ref().unwrap_or_else(|| unreachable!("block of a removed region"))
    }

    #[inline]
    fn region_mut(&mut self, number: u32) -> &mut Region {
        self.regions[number as usize].as_mut().unwrap_or_else(|| unreachable!("block of a removed region"))
    }
}
