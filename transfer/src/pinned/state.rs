//! The state of a pool, under its lock. Makes no driver call.
//!
//! Invariants:
//! * `reserved = Σ slabs + slabs on their way here or back`, and growth never brings it above the
//!   limit;
//! * the pool grows instead of splitting a large slab only within an eighth of the most bytes that
//!   were ever in use, and 32 MiB, plus the prewarmed bytes.

use std::time::Duration;

use aquifer_device::Tick;

use super::class::{PAGE, SLAB};
use super::deferred::{DeferredBlocks, Front};
use super::slabs::{BlockId, Slab, Slabs};
use super::source::SlabMemory;
use super::stats::HostMemoryStats;

/// The state of a pool.
#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) slabs: Slabs<SlabMemory>,
    pub(super) deferred: DeferredBlocks,
    /// Bytes of slabs that move from the system, or back to it.
    pub(super) moving: usize,
    pub(super) limit: Option<u64>,
    /// Counts blocks that became unused and slabs that went.
    pub(super) available: u64,
    pub(super) stats: HostMemoryStats,
    /// The most bytes that were ever in use.
    most_active: usize,
}

/// The outcome of a request.
pub(super) enum TakePlan {
    Taken(PoolBlock),
    /// The pool must grow by a slab of one of these lengths, the first if possible.
    Grow([usize; 3]),
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolBlock {
    pub(super) id: BlockId,
    pub(super) start: usize,
}

/// Extra growth as a part of the reserved bytes, and its maximum.
const GROWTH_PART: usize = 8;
const GROWTH_MOST: usize = 32 << 20;

impl PoolState {
    pub(super) fn new(limit: Option<u64>) -> PoolState {
        PoolState {
            slabs: Slabs::default(),
            deferred: DeferredBlocks::default(),
            moving: 0,
            limit,
            available: 0,
            stats: HostMemoryStats::default(),
            most_active: 0,
        }
    }

    /// Bytes held from the system.
    pub(super) fn reserved(&self) -> usize {
        self.slabs.reserved() + self.moving
    }

    /// The first unfinished ticks of deferred blocks, after finished ones became available.
    pub(super) fn fronts(&mut self) -> Vec<Front> {
        self.reap();
        self.deferred.fronts()
    }

    /// Takes out unused slabs of `bytes` bytes or a little more, to release them.
    pub(super) fn begin_release(&mut self, bytes: usize) -> Vec<Slab<SlabMemory>> {
        let removed = self.slabs.remove_unused(bytes);
        self.moving += removed.iter().map(|slab| slab.bytes).sum::<usize>();
        removed
    }

    /// A slab is released, after `time`, or comes back.
    pub(super) fn end_release(&mut self, slab: Slab<SlabMemory>, gone: bool, time: Duration) {
        self.moving -= slab.bytes;
        if gone {
            self.available += 1;
            self.stats.lost(slab.bytes, time);
        } else {
            self.slabs.put_back(slab);
        }
    }

    #[inline]
    pub(super) fn take(&mut self, class: usize, any: bool) -> Option<PoolBlock> {
        let id = self.slabs.take(class, any)?;
        Some(self.activate(id))
    }

    #[inline]
    fn activate(&mut self, id: BlockId) -> PoolBlock {
        self.stats.activate(self.slabs.bytes(id));
        PoolBlock { id, start: self.slabs.start(id) }
    }

    #[inline]
    pub(super) fn give(&mut self, block: BlockId, ticks: Vec<Tick>) {
        if ticks.is_empty() || !self.deferred.insert(block, ticks) {
            self.make_available(block);
        } else {
            self.slabs.wait(block);
        }
    }

    #[inline]
    fn make_available(&mut self, block: BlockId) {
        self.note_most_active();
        self.available += 1;
        self.stats.deactivate(self.slabs.bytes(block));
        self.slabs.defer(block);
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
        self.most_active = self.most_active.max(self.active());
    }

    fn active(&self) -> usize {
        usize::try_from(self.stats.active_bytes.current).unwrap_or(usize::MAX)
    }

    /// Takes a block, or plans growth: growing is preferred to splitting a large slab, but only
    /// while it wastes little.
    pub(super) fn plan(&mut self, class: usize) -> TakePlan {
        if let Some(block) = self.take(class, false) {
            return TakePlan::Taken(block);
        }
        self.note_most_active();
        let held = self.reserved();
        let least = class.next_multiple_of(SLAB);
        let handy = (held / GROWTH_PART).min(GROWTH_MOST) / SLAB * SLAB;
        let sizes = [handy.max(least), least, class.next_multiple_of(PAGE)];
        let most = self.most_active.max(self.active() + class);
        if held + sizes[0] > most + most / GROWTH_PART + GROWTH_MOST
            && let Some(block) = self.take(class, true)
        {
            return TakePlan::Taken(block);
        }
        TakePlan::Grow(sizes)
    }

    /// Counts a slab that is to come, if the limit allows it.
    pub(super) fn begin_growth(&mut self, bytes: usize) -> bool {
        let fits = self.has_room(bytes);
        if fits {
            self.moving += bytes;
        }
        fits
    }

    fn has_room(&self, bytes: usize) -> bool {
        let after = self.reserved().checked_add(bytes);
        after.is_some_and(|after| self.limit.is_none_or(|limit| after as u64 <= limit))
    }

    /// Whether the limit allows a slab for `class`.
    pub(super) fn has_room_for(&self, class: usize) -> bool {
        self.has_room(class.next_multiple_of(PAGE))
    }

    /// The bytes to release before a slab for `class` can come.
    pub(super) fn excess(&self, class: usize) -> usize {
        let after = self.reserved().saturating_add(class.next_multiple_of(PAGE));
        let limit = self.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        if class > limit { 0 } else { after.saturating_sub(limit) }
    }

    /// A slab came, after `time`, for a present request.
    pub(super) fn add(&mut self, memory: SlabMemory, bytes: usize, class: usize, time: Duration) -> PoolBlock {
        let id = self.slabs.add(memory.start(), bytes, class, memory);
        self.stats.gained(bytes, time);
        self.activate(id)
    }

    /// A slab came, after `time`, for later requests.
    pub(super) fn add_open(&mut self, memory: SlabMemory, bytes: usize, time: Duration) {
        self.slabs.add_open(memory.start(), bytes, memory);
        self.stats.gained(bytes, time);
        self.available += 1;
    }
}
