//! The heap: regions tiled by blocks, and the free blocks' indexes. A pure data structure: no driver, no locks, no unsafe.
//!
//! Accounting identities, asserted by [`Heap::check`] in debug builds and property tests:
//! * **H1** the blocks of a region are linked in order of address, and Σ their sizes = the region's length;
//! * **H2** live + waiting + free + holes + held = Σ region lengths, and each equals its running total;
//! * **H3** no two neighbours are mergeable: both free, with the same owner, or both done for everybody;
//! * **H4** a block is in an index exactly if it is free, and then in the one of its pool and owner.
//!
//! Ownership: a heap is one stream's, its *home*. A free block belongs to the stream of its last use (its *owner*), which may
//! reuse it at once; one whose owner is not the home is a *stray*. Once a stray is done it goes home, so that
//! borrowing memory across streams leaves no lasting borders between free blocks.

mod block;
#[cfg(any(test, debug_assertions))]
mod check;
mod holes;
mod index;
mod strays;

use std::collections::{BTreeMap, BTreeSet};

use holes::Granules;
pub(crate) use holes::Holding;
pub(crate) use block::{Block, BlockId, Slab, State};
pub(crate) use index::{FreeIndex, Key};

use crate::size_class::{PoolKind, SizeClasses};

/// Blocks of one kind that are served from each other: the small or the large pool, or that of a private pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) kind: PoolKind,
    /// Blocks are handed out whole.
    pub(crate) no_split: bool,
    /// The private pool it is of, as history numbers them; 0 for the default pools.
    pub(crate) history_id: u32,
    /// Free blocks of the heap's home stream.
    own: FreeIndex,
    /// Strays, by owner.
    away: BTreeMap<u32, FreeIndex>,
    /// How often somebody searched here: the clock of garbage collection.
    pub(crate) searches: u64,
}

impl Pool {
    fn new(kind: PoolKind) -> Pool {
        let (own, away) = (FreeIndex::default(), BTreeMap::new());
        Pool { kind, no_split: false, history_id: 0, own, away, searches: 0 }
    }

    /// The index of `owner`'s free blocks.
    #[inline]
    fn index_mut(&mut self, home: u32, owner: u32) -> &mut FreeIndex {
        if owner == home { &mut self.own } else { self.away.entry(owner).or_default() }
    }
}

/// The kind of a pool, by its number.
#[inline]
pub(crate) fn kind_of(pool: u16) -> PoolKind {
    if pool.is_multiple_of(2) { PoolKind::Small } else { PoolKind::Large }
}

/// A contiguous range of device addresses.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) home: u32,
    pub(crate) pool: u16,
    pub(crate) first: BlockId,
    /// Where its memory comes in granules; empty for a segment.
    pub(crate) granules: Granules,
}

/// How a taken block changed the count and bytes of free pieces of regions (`inactive_split`), and vice versa.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SplitChange {
    pub(crate) count: i64,
    pub(crate) bytes: i64,
}

/// The regions of one stream, their blocks, and the free ones' indexes.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    /// The stream whose regions these are.
    pub(crate) home: u32,
    pub(crate) blocks: Slab,
    pub(crate) pools: Vec<Pool>,
    regions: Vec<Option<Region>>,
    vacant_regions: Vec<u32>,
    /// Free blocks whose owner is not their region's home.
    strays: BTreeSet<BlockId>,
    /// Holes that are not held, by address.
    holes: BTreeMap<u64, BlockId>,
    /// Totals of identity H2, in bytes.
    pub(crate) total: u64,
    pub(crate) free: u64,
    /// Addresses without memory behind them, held ones included.
    pub(crate) hole_bytes: u64,
    /// Memory that is held.
    pub(crate) held_bytes: u64,
}

impl Heap {
    /// Two new pools, one of each kind. Small pools have even numbers, large ones odd.
    pub(crate) fn add_pools(&mut self) {
        self.pools.extend([PoolKind::Small, PoolKind::Large].map(Pool::new));
    }

    /// Takes `size` bytes for the home stream from the best of its own free blocks that the size rules allow: as with
    /// PyTorch, the smallest that is large enough decides.
    #[inline]
    pub(crate) fn take_best(
        &mut self,
        classes: &SizeClasses,
        pool: u16,
        size: u64,
        requested: u64,
    ) -> Option<(BlockId, SplitChange)> {
        let owner = self.home;
        let pool = &mut self.pools[usize::from(pool)];
        pool.searches += 1;
        let index = &mut pool.own;
        let key = index.best_fit(size)?;
        if !classes.fits(key.size(), size) {
            return None;
        }
        let block = key.block();
        if pool.no_split || !classes.should_split(pool.kind, key.size(), size) {
            index.remove(key);
            return Some(self.take_whole(block, owner, requested));
        }
        index.replace(key, key.without_low_end(size));
        Some(self.take_low_end(block, owner, size, requested))
    }

    /// Takes `size` bytes for `owner` from a given free block.
    pub(crate) fn take(
        &mut self,
        classes: &SizeClasses,
        id: BlockId,
        owner: u32,
        size: u64,
        requested: u64,
    ) -> (BlockId, SplitChange) {
        let block = &self.blocks[id];
        debug_assert!(block.state == State::Free && block.size >= size);
        let key = Key::new(block.size, block.addr, id);
        let pool = &mut self.pools[usize::from(block.pool)];
        let whole = pool.no_split || !classes.should_split(pool.kind, block.size, size);
        let index = pool.index_mut(self.home, block.owner);
        if whole {
            index.remove(key);
            return self.take_whole(id, owner, requested);
        }
        index.replace(key, key.without_low_end(size));
        self.take_low_end(id, owner, size, requested)
    }

    /// A free block that is in no index any more becomes live.
    #[inline]
    fn take_whole(&mut self, id: BlockId, owner: u32, requested: u64) -> (BlockId, SplitChange) {
        self.strays_forget(id);
        let block = &mut self.blocks[id];
        (block.state, block.owner, block.requested) = (State::Live, owner, requested);
        self.free -= block.size;
        let split = block.is_split();
        (id, if split { SplitChange { count: -1, bytes: -signed(block.size) } } else { SplitChange::default() })
    }

    /// The low end of a free block becomes live; the rest, which is in the index already, stays free with its owner.
    #[inline]
    fn take_low_end(&mut self, rest: BlockId, owner: u32, size: u64, requested: u64) -> (BlockId, SplitChange) {
        let Block { addr, prev, region, pool, size: whole, .. } = self.blocks[rest];
        let was_split = self.blocks[rest].is_split();
        self.free -= size;
        let state = State::Live;
        let taken = Block { addr, size, requested, prev, next: rest, region, owner, pool, state, ..Block::default() };
        let id = self.blocks.insert(taken);
        self.link_before(id, rest, size);
        let (count, bytes) = if was_split { (0, -signed(size)) } else { (1, signed(whole - size)) };
        (id, SplitChange { count, bytes })
    }

    /// Cuts `size` bytes off the low end of `rest`, whose new front neighbour is `taken`.
    #[inline]
    fn link_before(&mut self, taken: BlockId, rest: BlockId, size: u64) {
        let record = &mut self.blocks[rest];
        let (prev, region) = (record.prev, record.region);
        (record.prev, record.addr, record.size) = (taken, record.addr + size, record.size - size);
        match prev.some() {
            Some(prev) => self.blocks[prev].next = taken,
            None => self.region_mut(region).first = taken,
        }
    }

    /// Gives a live or waiting block back: `owner` may reuse it at once, everybody else once the owner's timeline got to
    /// `after` (0: now). Merges it with its neighbours.
    ///
    /// Except for 0, `after` must not be less than any earlier one of the same owner: ticks of a stream only grow.
    #[inline]
    pub(crate) fn give(&mut self, id: BlockId, owner: u32, after: u64) -> (BlockId, SplitChange) {
        let block = &mut self.blocks[id];
        debug_assert!(matches!(block.state, State::Live | State::Waiting));
        let Block { prev, next, pool, .. } = *block;
        let size = block.size;
        (block.state, block.owner, block.shared) = (State::Free, owner, false);
        self.free += size;
        let (into_prev, with_next, after) = self.merges(prev, next, owner, after);
        let (merged, count) = match (into_prev, with_next) {
            (false, false) => (self.index_alone(id), 1),
            (true, false) => (self.extend_up(prev, id), 0),
            (false, true) => (self.extend_down(next, id), 0),
            (true, true) => {
                self.unindex(next);
                self.unlink(next, id);
                (self.extend_up(prev, id), -1)
            }
        };
        let age_base = self.pools[usize::from(pool)].searches;
        let block = &mut self.blocks[merged];
        (block.after, block.age_base) = (after, age_base);
        if block.is_split() {
            return (merged, SplitChange { count, bytes: signed(size) });
        }
        // Whole regions do not count as split: take back what this block counted as before, itself included.
        (merged, SplitChange { count: count - 1, bytes: signed(size) - signed(block.size) })
    }

    /// Which neighbours a block of `owner` and `after` merges with, and the `after` of the whole. Only blocks that are
    /// exactly as available as each other merge: of one owner, or all of them done for everybody.
    #[inline]
    fn merges(&self, prev: BlockId, next: BlockId, owner: u32, after: u64) -> (bool, bool, u64) {
        let free = |id: BlockId| id != BlockId::NONE && self.blocks[id].state == State::Free;
        let owned = |id: BlockId| free(id) && self.blocks[id].owner == owner;
        if after != 0 {
            return (owned(prev), owned(next), after);
        }
        // Done for everybody: an owner's later tick counts for what merges, and then only its own blocks do.
        let later = |id: BlockId| if owned(id) { self.blocks[id].after } else { 0 };
        let after = later(prev).max(later(next));
        if after != 0 {
            return (owned(prev), owned(next), after);
        }
        let done = |id: BlockId| free(id) && self.blocks[id].after == 0;
        (done(prev), done(next), 0)
    }

    #[inline]
    fn index_alone(&mut self, id: BlockId) -> BlockId {
        let block = &self.blocks[id];
        let (key, owner, pool) = (Key::new(block.size, block.addr, id), block.owner, usize::from(block.pool));
        self.pools[pool].index_mut(self.home, owner).insert(key);
        self.strays_note(id);
        id
    }

    /// Merges `id`, which is in no index, into its free predecessor.
    #[inline]
    fn extend_up(&mut self, into: BlockId, id: BlockId) -> BlockId {
        let (size, next) = (self.blocks[id].size, self.blocks[id].next);
        let block = &mut self.blocks[into];
        let old = Key::new(block.size, block.addr, into);
        block.size += size;
        block.next = next;
        let new = Key::new(block.size, block.addr, into);
        self.pools[usize::from(block.pool)].index_mut(self.home, block.owner).replace(old, new);
        if let Some(next) = next.some() {
            self.blocks[next].prev = into;
        }
        self.blocks.remove(id);
        into
    }

    /// Merges `id`, which is in no index, into its free successor.
    #[inline]
    fn extend_down(&mut self, into: BlockId, id: BlockId) -> BlockId {
        let Block { addr, prev, region, .. } = self.blocks[id];
        let size = self.blocks[id].size;
        let block = &mut self.blocks[into];
        let old = Key::new(block.size, block.addr, into);
        block.size += size;
        (block.addr, block.prev) = (addr, prev);
        let new = Key::new(block.size, block.addr, into);
        self.pools[usize::from(block.pool)].index_mut(self.home, block.owner).replace(old, new);
        match prev.some() {
            Some(prev) => self.blocks[prev].next = into,
            None => self.region_mut(region).first = into,
        }
        self.blocks.remove(id);
        into
    }

    /// Removes `next`, which is in no index, by growing its predecessor `id`, which is in none either.
    #[inline]
    fn unlink(&mut self, next: BlockId, id: BlockId) {
        let (size, beyond) = (self.blocks[next].size, self.blocks[next].next);
        let block = &mut self.blocks[id];
        block.size += size;
        block.next = beyond;
        if let Some(beyond) = beyond.some() {
            self.blocks[beyond].prev = id;
        }
        self.blocks.remove(next);
    }

    #[inline]
    fn unindex(&mut self, id: BlockId) {
        let block = &self.blocks[id];
        let key = Key::new(block.size, block.addr, id);
        self.pools[usize::from(block.pool)].index_mut(self.home, block.owner).remove(key);
        self.strays_forget(id);
    }

    /// A live block becomes a waiting one.
    pub(crate) fn set_waiting(&mut self, id: BlockId) {
        debug_assert_eq!(self.blocks[id].state, State::Live);
        self.blocks[id].state = State::Waiting;
    }

    /// A new region, one free block of the home stream.
    pub(crate) fn add_region(&mut self, addr: u64, bytes: u64, pool: u16) -> BlockId {
        let home = self.home;
        let region = self.add_region_record(addr, bytes, pool);
        let age_base = self.pools[usize::from(pool)].searches;
        let state = State::Free;
        let block = Block { addr, size: bytes, region, owner: home, pool, state, age_base, ..Block::default() };
        let first = self.blocks.insert(block);
        self.region_mut(region).first = first;
        self.free += bytes;
        self.index_alone(first)
    }

    /// A region that has no block yet; its number.
    fn add_region_record(&mut self, addr: u64, bytes: u64, pool: u16) -> u32 {
        let number = self.vacant_regions.pop().unwrap_or_else(|| {
            self.regions.push(None);
            u32::try_from(self.regions.len() - 1).unwrap_or(u32::MAX)
        });
        let (home, first, granules) = (self.home, BlockId::NONE, Granules::default());
        self.regions[number as usize] = Some(Region { addr, bytes, home, pool, first, granules });
        self.total += bytes;
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
        let number = self.blocks[id].region;
        self.blocks.remove(id);
        self.vacant_regions.push(number);
        let region = self.regions[number as usize].take();
        let region = region.unwrap_or_else(|| unreachable!("block of a removed region"));
        self.total -= region.bytes;
        region
    }

    /// Puts a region back that was removed, as one free block of `owner`, for everybody else after `after`.
    pub(crate) fn restore_region(&mut self, region: &Region, owner: u32, after: u64) {
        let id = self.add_region(region.addr, region.bytes, region.pool);
        self.unindex(id);
        let block = &mut self.blocks[id];
        (block.owner, block.after) = (owner, after);
        self.index_alone(id);
    }

    /// The free blocks of a pool that belong to `owner`.
    pub(crate) fn index(&self, pool: u16, owner: u32) -> Option<&FreeIndex> {
        let pool = &self.pools[usize::from(pool)];
        if owner == self.home { Some(&pool.own) } else { pool.away.get(&owner) }
    }

    /// Streams that may own free blocks in a pool.
    pub(crate) fn owners(&self, pool: u16) -> impl Iterator<Item = u32> + '_ {
        std::iter::once(self.home).chain(self.pools[usize::from(pool)].away.keys().copied())
    }

    /// Every free block of a pool, those of the home stream first, and of each owner by size and address.
    pub(crate) fn free_blocks(&self, pool: u16) -> impl Iterator<Item = Key> + '_ {
        let pool = &self.pools[usize::from(pool)];
        std::iter::once(&pool.own).chain(pool.away.values()).flat_map(FreeIndex::iter)
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

/// Bytes of device memory as a signed difference; addresses have at most 57 bits.
#[inline]
fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}
