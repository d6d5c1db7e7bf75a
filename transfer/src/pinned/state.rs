//! What a pool holds, under its lock: no driver call is made here.
//!
//! Invariants:
//! * `reserved = Σ slabs + slabs on their way here or back`, and growth never brings it above the limit;
//! * slabs are wasted by choice only within an eighth of the most that was ever in use, and 32 MiB, beside what was asked for in advance.

use std::time::Duration;

use aquifer_device::Tick;

use super::class::{PAGE, SLAB};
use super::deferred::{DeferredBlocks, Front};
use super::slabs::{BlockId, Removed, Slabs};
use super::source::SlabMemory;
use super::stats::HostMemoryStats;

/// What a pool holds, and counts.
#[derive(Debug)]
pub(super) struct State {
    pub(super) slabs: Slabs<SlabMemory>,
    pub(super) deferred: DeferredBlocks,
    /// Bytes of slabs that are on their way from the system, or back to it.
    pub(super) moving: usize,
    pub(super) limit: Option<u64>,
    /// Counts how often a block became unused or a slab went.
    pub(super) available: u64,
    pub(super) stats: HostMemoryStats,
    /// The most bytes that were ever in use.
    most_active: usize,
}

/// How a request was met, or is to be.
pub(super) enum Plan {
    Taken(Block),
    /// A slab of one of these lengths must come, the first if possible.
    Grow([usize; 3]),
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) id: BlockId,
    pub(super) start: usize,
}

/// Growth that the pool likes to have in hand, as a part of what it holds, and at most.
const GROWTH_PART: usize = 8;
const GROWTH_MOST: usize = 32 << 20;

impl State {
    pub(super) fn new(limit: Option<u64>) -> State {
        State {
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

    /// What blocks wait for, after those that are known to be done became available.
    pub(super) fn fronts(&mut self) -> Vec<Front> {
        self.reap();
        self.deferred.fronts()
    }

    /// Takes unused slabs of `bytes` bytes or a little more out, on their way back to the system.
    pub(super) fn begin_release(&mut self, bytes: usize) -> Vec<Removed<SlabMemory>> {
        let removed = self.slabs.remove_unused(bytes);
        self.moving += removed.iter().map(|slab| slab.bytes).sum::<usize>();
        removed
    }

    /// A slab is gone, after `time`, or comes back.
    pub(super) fn end_release(&mut self, slab: Removed<SlabMemory>, gone: bool, time: Duration) {
        self.moving -= slab.bytes;
        if gone {
            self.available += 1;
            self.stats.lost(slab.bytes, time);
        } else {
            self.slabs.put_back(slab);
        }
    }

    #[inline]
    pub(super) fn take(&mut self, class: usize, any: bool) -> Option<Block> {
        let id = self.slabs.take(class, any)?;
        Some(self.activate(id))
    }

    #[inline]
    fn activate(&mut self, id: BlockId) -> Block {
        self.stats.activate(self.slabs.bytes(id));
        Block { id, start: self.slabs.start(id) }
    }

    #[inline]
    pub(super) fn give(&mut self, block: BlockId, ticks: Vec<Tick>) {
        if ticks.is_empty() || !self.deferred.insert(block, ticks) {
            self.rest(block);
        } else {
            self.slabs.wait(block);
        }
    }

    #[inline]
    fn rest(&mut self, block: BlockId) {
        self.note_most_active();
        self.available += 1;
        self.stats.deactivate(self.slabs.bytes(block));
        self.slabs.rest(block);
    }

    /// Makes what is known to be done available.
    pub(super) fn reap(&mut self) {
        if !self.deferred.is_empty() {
            for block in self.deferred.reap() {
                self.rest(block);
            }
        }
    }

    /// Active bytes rise only until something is given back.
    #[inline]
    fn note_most_active(&mut self) {
        self.most_active = self.most_active.max(self.active());
    }

    fn active(&self) -> usize {
        usize::try_from(self.stats.active_bytes.current).unwrap_or(usize::MAX)
    }

    /// Takes a block, or says how the pool should grow: rather than that it splits a large slab, but only while that wastes little.
    pub(super) fn plan(&mut self, class: usize) -> Plan {
        if let Some(block) = self.take(class, false) {
            return Plan::Taken(block);
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
            return Plan::Taken(block);
        }
        Plan::Grow(sizes)
    }

    /// Counts a slab that is to come, if the limit lets it.
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

    /// Whether the limit lets a slab for `class` come.
    pub(super) fn has_room_for(&self, class: usize) -> bool {
        self.has_room(class.next_multiple_of(PAGE))
    }

    /// How many bytes must go before a slab for `class` can come.
    pub(super) fn excess(&self, class: usize) -> usize {
        let after = self.reserved().saturating_add(class.next_multiple_of(PAGE));
        let limit = self.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        if class > limit { 0 } else { after.saturating_sub(limit) }
    }

    /// A slab came, after `time`, which serves a request at once.
    pub(super) fn add(&mut self, memory: SlabMemory, bytes: usize, class: usize, time: Duration) -> Block {
        let id = self.slabs.add(memory.start(), bytes, class, memory);
        self.stats.gained(bytes, time);
        self.activate(id)
    }

    /// A slab came, after `time`, for requests to come.
    pub(super) fn add_open(&mut self, memory: SlabMemory, bytes: usize, time: Duration) {
        self.slabs.add_open(memory.start(), bytes, memory);
        self.stats.gained(bytes, time);
        self.available += 1;
    }
}
