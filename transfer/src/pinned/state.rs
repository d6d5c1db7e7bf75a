//! The state of a pool, under its lock. Makes no driver call.
//!
//! Memory comes from the system in *slabs*, which are regions of a heap: the allocator's own, with
//! one stream, the host. It tiles them with blocks, merges free neighbours, and finds the smallest
//! free block that serves a request. The block that became unused last is not merged before another
//! size is asked for, or another block becomes unused.
//!
//! Invariants:
//! * every block is a multiple of 512 bytes. Blocks of at least 32 KiB are in slabs of their own,
//!   where all are multiples of a page, and so is every address;
//! * a live block is exactly as large as the class that was asked for;
//! * `reserved = Σ slabs + slabs on their way here or back`, and growth never brings it above the
//!   limit;
//! * the pool grows instead of splitting a large slab only within an eighth of the most bytes that
//!   were ever in use, and 32 MiB;
//! * where little is left of a limit, free memory of a large slab is not split for a request that
//!   would leave more than a sixteenth of it, if the pool can have a slab of the request's size
//!   instead: live parts of split slabs keep the rest from others.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_allocator::internal::{After, Block, BlockId, Heap, PoolId, StreamId};
use aquifer_device::{HostPtr, Tick};

use super::class::{PAGE, PAGED, SLAB};
use super::deferred::DeferredBlocks;
use super::source::SlabMemory;
use super::stats::HostMemoryStats;

/// The state of a pool.
#[derive(Debug)]
pub(super) struct PoolState {
    heap: Heap,
    /// The slabs by address.
    slabs: BTreeMap<u64, Slab>,
    pub(super) deferred: DeferredBlocks,
    /// Bytes of slabs that the system is asked for.
    growing: u64,
    /// The number of slabs that go back to the system.
    being_released: usize,
    pub(super) limit: Option<u64>,
    /// Counts blocks that became unused and slabs that went.
    pub(super) available: u64,
    pub(super) stats: HostMemoryStats,
    /// The most bytes that were ever in use.
    most_active: u64,
}

/// A slab.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) memory: SlabMemory,
    /// The pool of the heap in which its blocks are.
    pool: PoolId,
}

/// The outcome of a request.
pub(super) enum TakePlan {
    Taken(PoolBlock),
    /// The pool must grow by a slab of one of these lengths, the first if possible.
    Grow([u64; 3]),
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolBlock {
    pub(super) id: BlockId,
    pub(super) ptr: HostPtr,
}

/// The one stream of the heap.
const HOST: StreamId = StreamId::FIRST;

/// Extra growth as a part of the reserved bytes, and its maximum.
const GROWTH_PART: u64 = 8;
const GROWTH_MOST: u64 = 32 << 20;
/// A slab that is free as a whole, and larger than this, is not split for requests smaller than an
/// eighth of it, unless the caller says so.
const GUARDED: u64 = 32 << 20;

impl PoolState {
    pub(super) fn new() -> PoolState {
        PoolState {
            heap: Heap::new(false),
            slabs: BTreeMap::new(),
            deferred: DeferredBlocks::default(),
            growing: 0,
            being_released: 0,
            limit: None,
            available: 0,
            stats: HostMemoryStats::default(),
            most_active: 0,
        }
    }

    /// Bytes held from the system, or asked for.
    pub(super) fn reserved(&self) -> u64 {
        self.stats.allocated_bytes.current + self.growing
    }

    /// Unused bytes, those of the largest unused piece, and bytes that copies still use although
    /// their blocks were given back.
    pub(super) fn unused(&mut self) -> [u64; 3] {
        self.heap.coalesce(HOST);
        let copying = self.deferred.blocks().map(|block| self.heap.block(block).size).sum();
        [self.heap.free_bytes(), self.heap.largest_free(), copying]
    }

    /// Whether slabs are on their way here or back.
    pub(super) fn is_moving(&self) -> bool {
        self.growing > 0 || self.being_released > 0
    }

    /// The first unfinished ticks of deferred blocks, after finished ones became available.
    pub(super) fn fronts(&mut self) -> Vec<Tick> {
        self.reap();
        self.deferred.fronts()
    }

    /// Takes out slabs of which nothing is in use, the largest first, until they are at least
    /// `bytes` bytes or none is left, to release them.
    pub(super) fn begin_release(&mut self, bytes: u64) -> Vec<Slab> {
        self.heap.coalesce(HOST);
        let is_unused = |first: BlockId| self.heap.is_free(first) && !self.heap.block(first).is_split();
        let unused = self.heap.regions().filter(|region| is_unused(region.first));
        let mut unused: Vec<_> = unused.map(|region| (region.bytes, region.addr, region.first)).collect();
        unused.sort_unstable_by_key(|&(bytes, addr, _)| Reverse((bytes, addr)));
        let (mut left, mut removed) = (bytes, Vec::new());
        for (bytes, addr, first) in unused {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(bytes);
            self.heap.remove_region(first);
            removed.extend(self.slabs.remove(&addr));
        }
        self.being_released += removed.len();
        removed
    }

    /// A slab is released, after `time`, or comes back.
    pub(super) fn end_release(&mut self, slab: Slab, gone: bool, time: Duration) {
        self.being_released -= 1;
        self.available += 1;
        if gone {
            self.stats.lost(slab.memory.bytes(), time);
        } else {
            self.insert(slab);
        }
    }

    /// All slabs, including those in use.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = SlabMemory> {
        std::mem::take(&mut self.slabs).into_values().map(|slab| slab.memory)
    }

    /// A block of exactly this class, out of unused memory. With `any`, large slabs are split for
    /// small requests, too.
    #[inline]
    pub(super) fn take(&mut self, class: u64, any: bool) -> Option<PoolBlock> {
        if let Some(id) = self.heap.reuse_last_freed(HOST, pool_of(class), class, class) {
            return Some(self.activate(id, class));
        }
        self.heap.coalesce(HOST);
        let scarce = self.is_scarce(class);
        let may_take = |block: &Block| {
            let slab = self.slabs.range(..=block.addr).next_back().map_or(u64::MAX, |(_, slab)| slab.memory.bytes());
            any || if scarce {
                slab <= SLAB || class >= block.size - block.size / 16
            } else {
                block.is_split() || block.size <= GUARDED || class >= block.size / 8
            }
        };
        let free = self.heap.smallest_where(pool_of(class), class, may_take)?;
        Some(self.cut(free, class))
    }

    /// Whether more than half of the limit will be held.
    pub(super) fn is_scarce(&self, class: u64) -> bool {
        self.limit.is_some_and(|limit| self.reserved().saturating_add(class) > limit / 2)
    }

    fn cut(&mut self, free: BlockId, class: u64) -> PoolBlock {
        let id = self.heap.take(free, HOST, class, class);
        self.activate(id, class)
    }

    #[inline]
    fn activate(&mut self, id: BlockId, class: u64) -> PoolBlock {
        self.stats.activate(class);
        #[expect(clippy::cast_possible_truncation, reason = "an address of the host")]
        let ptr = HostPtr(self.heap.block(id).addr as usize);
        PoolBlock { id, ptr }
    }

    /// Takes a block back that copies may still use, until these ticks.
    #[inline]
    pub(super) fn give(&mut self, block: BlockId, ticks: Vec<Tick>) {
        if ticks.is_empty() || !self.deferred.insert(block, ticks) {
            self.make_available(block);
        }
    }

    #[inline]
    fn make_available(&mut self, block: BlockId) {
        self.note_most_active();
        self.available += 1;
        let size = self.heap.block(block).size;
        self.stats.deactivate(size);
        self.heap.give_deferred(HOST, block, size, After::NOTHING);
    }

    /// Makes finished blocks available.
    pub(super) fn reap(&mut self) {
        if !self.deferred.is_empty() {
            for block in self.deferred.reap() {
                self.make_available(block);
            }
        }
    }

    /// Active bytes rise only until a block comes back.
    #[inline]
    fn note_most_active(&mut self) {
        self.most_active = self.most_active.max(self.stats.active_bytes.current);
    }

    /// Takes a block, or plans growth: growing is preferred to splitting a large slab, but only
    /// while it wastes little.
    pub(super) fn plan(&mut self, class: u64) -> TakePlan {
        if let Some(block) = self.take(class, false) {
            return TakePlan::Taken(block);
        }
        self.note_most_active();
        let held = self.reserved();
        let (least, scarce) = (class.next_multiple_of(SLAB), self.is_scarce(class));
        let handy = if scarce { 0 } else { (held / GROWTH_PART).min(GROWTH_MOST) / SLAB * SLAB };
        let exact = class.next_multiple_of(PAGE);
        let least = if scarce && class > SLAB { exact } else { least };
        let sizes = [handy.max(least), least, exact];
        let most = self.most_active.max(self.stats.active_bytes.current + class);
        if !scarce
            && held + sizes[0] > most + most / GROWTH_PART + GROWTH_MOST
            && let Some(block) = self.take(class, true)
        {
            return TakePlan::Taken(block);
        }
        TakePlan::Grow(sizes)
    }

    /// Counts a slab that is to come, if the limit allows it.
    pub(super) fn begin_growth(&mut self, bytes: u64) -> bool {
        let fits = self.has_room(bytes);
        if fits {
            self.growing += bytes;
        }
        fits
    }

    /// It came, or not.
    pub(super) fn end_growth(&mut self, bytes: u64) {
        self.growing -= bytes;
        self.available += 1;
    }

    fn has_room(&self, bytes: u64) -> bool {
        let after = self.reserved().checked_add(bytes);
        after.is_some_and(|after| self.limit.is_none_or(|limit| after <= limit))
    }

    /// Whether the limit allows a slab for `class`.
    pub(super) fn has_room_for(&self, class: u64) -> bool {
        self.has_room(class.next_multiple_of(PAGE))
    }

    /// The bytes to release before a slab for `class` can come.
    pub(super) fn excess(&self, class: u64) -> u64 {
        let after = self.reserved().saturating_add(class.next_multiple_of(PAGE));
        let limit = self.limit.unwrap_or(u64::MAX);
        if class > limit { 0 } else { after.saturating_sub(limit) }
    }

    /// A slab came, after `time`, for a present request.
    pub(super) fn add(&mut self, memory: SlabMemory, class: u64, time: Duration) -> PoolBlock {
        self.stats.gained(memory.bytes(), time);
        let free = self.insert(Slab { memory, pool: pool_of(class) });
        self.cut(free, class)
    }

    fn insert(&mut self, slab: Slab) -> BlockId {
        let (addr, bytes) = (slab.memory.addr(), slab.memory.bytes());
        let free = self.heap.add_region(addr, bytes, HOST, slab.pool);
        self.slabs.insert(addr, slab);
        free
    }

    /// Asserts the invariants of the heap and of the module.
    #[cfg(test)]
    pub(super) fn check(&self) {
        #[cfg(debug_assertions)]
        assert_eq!(self.heap.check(), Ok(()));
        let slabs: u64 = self.slabs.values().map(|slab| slab.memory.bytes()).sum();
        assert!(self.being_released > 0 || self.stats.allocated_bytes.current == slabs);
    }
}

fn pool_of(class: u64) -> PoolId {
    if class < PAGED { PoolId::SMALL } else { PoolId::LARGE }
}
