//! Accounting: the counters behind every statistic, written under the heap's lock and read without it.
//!
//! Identities: for each counter `current = allocated − freed` and `peak ≥ current`; `all` is the sum of the two pools, its
//! peak its own; `allocated ≤ active ≤ reserved` in bytes. A reader sees each value exactly as of some moment, and all of
//! them as of the same moment when no call is in flight.
//!
//! A counter is a few plain words. What can be derived is not counted. Only the holder of the heap's lock writes, so an update is a load and a store, never an
//! atomic read-modify-write.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::size_class::PoolKind;

/// Current, peak, and accumulated values of one quantity, under PyTorch's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stat {
    /// Value now.
    pub current: u64,
    /// Greatest value since the last reset of peaks.
    pub peak: u64,
    /// Sum of increases since the last reset of accumulated values.
    pub allocated: u64,
    /// Sum of decreases since then.
    pub freed: u64,
}

/// A statistic for both pools together and each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Both pools together.
    pub all: Stat,
    /// Allocations above 1 MiB.
    pub large_pool: Stat,
    /// Allocations up to 1 MiB.
    pub small_pool: Stat,
}

#[inline]
fn get(cell: &AtomicU64) -> u64 {
    cell.load(Relaxed)
}

/// Changes a value under the heap's lock: there is no other writer, so this need not be a read-modify-write.
#[inline]
fn set(cell: &AtomicU64, value: u64) {
    cell.store(value, Relaxed);
}

#[inline]
fn raise(cell: &AtomicU64, value: u64) {
    if value > get(cell) {
        set(cell, value);
    }
}

/// One quantity. What was freed is derived: the sum of increases less the current value.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    current: AtomicU64,
    increases: AtomicU64,
    peak: AtomicU64,
    increases_base: AtomicU64,
    decreases_base: AtomicU64,
}

impl Counter {
    /// Adds, and returns the new value.
    #[inline]
    pub(crate) fn add(&self, n: u64) -> u64 {
        let current = get(&self.current).wrapping_add(n);
        set(&self.current, current);
        set(&self.increases, get(&self.increases).wrapping_add(n));
        raise(&self.peak, current);
        current
    }

    #[inline]
    pub(crate) fn sub(&self, n: u64) {
        set(&self.current, get(&self.current).wrapping_sub(n));
    }

    fn decreases(&self) -> u64 {
        get(&self.increases).wrapping_sub(get(&self.current))
    }

    pub(crate) fn read(&self) -> Stat {
        let current = get(&self.current);
        Stat {
            current,
            peak: get(&self.peak).max(current),
            allocated: get(&self.increases).wrapping_sub(get(&self.increases_base)),
            freed: self.decreases().wrapping_sub(get(&self.decreases_base)),
        }
    }

    fn clear(&self) {
        let cells = [&self.current, &self.increases, &self.peak, &self.increases_base, &self.decreases_base];
        cells.into_iter().for_each(|cell| set(cell, 0));
    }

    fn reset_peak(&self) {
        set(&self.peak, get(&self.current));
    }

    fn reset_accumulated(&self) {
        set(&self.increases_base, get(&self.increases));
        set(&self.decreases_base, self.decreases());
    }
}

/// One quantity for each pool; that of both together is the sum, except for its peak.
#[derive(Debug, Default)]
pub(crate) struct PooledCounter {
    pools: [Counter; 2],
    peak_of_all: AtomicU64,
}

impl PooledCounter {
    #[inline]
    pub(crate) fn add(&self, kind: PoolKind, n: u64) {
        let [small, large] = &self.pools;
        let (own, other) = if kind == PoolKind::Small { (small, large) } else { (large, small) };
        let current = own.add(n);
        raise(&self.peak_of_all, current.wrapping_add(get(&other.current)));
    }

    #[inline]
    pub(crate) fn sub(&self, kind: PoolKind, n: u64) {
        self.pools[kind as usize].sub(n);
    }

    /// Adds or subtracts, by sign.
    #[inline]
    pub(crate) fn change(&self, kind: PoolKind, n: i64) {
        if n > 0 {
            self.add(kind, n.unsigned_abs());
        } else if n < 0 {
            self.sub(kind, n.unsigned_abs());
        }
    }

    #[inline]
    fn current(&self) -> u64 {
        let [small, large] = &self.pools;
        get(&small.current).wrapping_add(get(&large.current))
    }

    pub(crate) fn read(&self) -> PoolStats {
        let [small_pool, large_pool] = [0, 1].map(|pool| self.pools[pool].read());
        let current = small_pool.current.wrapping_add(large_pool.current);
        let all = Stat {
            current,
            peak: get(&self.peak_of_all).max(current),
            allocated: small_pool.allocated.wrapping_add(large_pool.allocated),
            freed: small_pool.freed.wrapping_add(large_pool.freed),
        };
        PoolStats { all, large_pool, small_pool }
    }

    fn clear(&self) {
        self.pools.iter().for_each(Counter::clear);
        set(&self.peak_of_all, 0);
    }

    fn reset_peak(&self) {
        self.pools.iter().for_each(Counter::reset_peak);
        set(&self.peak_of_all, self.current());
    }
}

/// Every counter of an allocator.
///
/// `active` is not counted but derived: it is what is allocated and what is *waiting*, which only a slow path changes. Its
/// peak is that of allocated, unless something was waiting at the time; so that case alone is noted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) allocation: PooledCounter,
    pub(crate) allocated_bytes: PooledCounter,
    pub(crate) requested_bytes: PooledCounter,
    waiting: PooledCounter,
    waiting_bytes: PooledCounter,
    active_peaks: ActivePeaks,
    pub(crate) inactive_split: PooledCounter,
    pub(crate) inactive_split_bytes: PooledCounter,
    pub(crate) segment: PooledCounter,
    pub(crate) reserved_bytes: PooledCounter,
    pub(crate) oversize_allocations: Counter,
    pub(crate) oversize_segments: Counter,
    pub(crate) num_alloc_retries: Counter,
    pub(crate) num_ooms: Counter,
    pub(crate) num_sync_all_streams: Counter,
    pub(crate) num_device_alloc: Counter,
    pub(crate) num_device_free: Counter,
    pub(crate) num_oom_rejections: Counter,
    /// Ours: blocks reused by another stream than the one that freed them, and those of them that cost a wait.
    pub(crate) cross_stream_reuses: Counter,
    pub(crate) cross_stream_waits: Counter,
}

/// Peaks of what is active, while anything was waiting: blocks and bytes of the small pool, the large pool, and both.
#[derive(Debug, Default)]
struct ActivePeaks {
    blocks: [AtomicU64; 3],
    bytes: [AtomicU64; 3],
}

impl Counters {
    /// A block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(&self, kind: PoolKind, size: u64, requested: u64) {
        self.allocation.add(kind, 1);
        self.allocated_bytes.add(kind, size);
        self.requested_bytes.add(kind, requested);
        if self.waiting.current() != 0 {
            self.note_active_peaks();
        }
    }

    /// A live block was given back, and is free at once.
    #[inline]
    pub(crate) fn freed(&self, kind: PoolKind, size: u64, requested: u64) {
        self.allocation.sub(kind, 1);
        self.allocated_bytes.sub(kind, size);
        self.requested_bytes.sub(kind, requested);
    }

    /// A live block was given back, and waits for other streams.
    pub(crate) fn freed_waiting(&self, kind: PoolKind, size: u64) {
        self.allocation.sub(kind, 1);
        self.allocated_bytes.sub(kind, size);
        self.waiting.add(kind, 1);
        self.waiting_bytes.add(kind, size);
        self.note_active_peaks();
    }

    /// A waiting block is free.
    pub(crate) fn waited(&self, kind: PoolKind, size: u64, requested: u64) {
        self.waiting.sub(kind, 1);
        self.waiting_bytes.sub(kind, size);
        self.requested_bytes.sub(kind, requested);
    }

    #[cold]
    fn note_active_peaks(&self) {
        let quantities = [
            (&self.active_peaks.blocks, &self.allocation, &self.waiting),
            (&self.active_peaks.bytes, &self.allocated_bytes, &self.waiting_bytes),
        ];
        for (peaks, live, waiting) in quantities {
            let active = |pool: usize| get(&live.pools[pool].current) + get(&waiting.pools[pool].current);
            raise(&peaks[0], active(0));
            raise(&peaks[1], active(1));
            raise(&peaks[2], active(0) + active(1));
        }
    }

    /// Blocks that are live or waiting.
    pub(crate) fn active(&self) -> PoolStats {
        active(&self.allocation, &self.waiting, &self.active_peaks.blocks)
    }

    /// Bytes in blocks that are live or waiting.
    pub(crate) fn active_bytes(&self) -> PoolStats {
        active(&self.allocated_bytes, &self.waiting_bytes, &self.active_peaks.bytes)
    }

    fn pooled(&self) -> [&PooledCounter; 9] {
        [
            &self.allocation,
            &self.allocated_bytes,
            &self.requested_bytes,
            &self.waiting,
            &self.waiting_bytes,
            &self.inactive_split,
            &self.inactive_split_bytes,
            &self.segment,
            &self.reserved_bytes,
        ]
    }

    fn plain(&self) -> [&Counter; 10] {
        [
            &self.oversize_allocations,
            &self.oversize_segments,
            &self.num_alloc_retries,
            &self.num_ooms,
            &self.num_sync_all_streams,
            &self.num_device_alloc,
            &self.num_device_free,
            &self.num_oom_rejections,
            &self.cross_stream_reuses,
            &self.cross_stream_waits,
        ]
    }

    fn each(&self) -> impl Iterator<Item = &Counter> {
        self.pooled().into_iter().flat_map(|counter| &counter.pools).chain(self.plain())
    }

    /// Back to zero, for the next allocator in the same shell.
    pub(crate) fn clear(&self) {
        self.pooled().into_iter().for_each(PooledCounter::clear);
        self.plain().into_iter().for_each(Counter::clear);
        self.active_peaks.blocks.iter().chain(&self.active_peaks.bytes).for_each(|cell| set(cell, 0));
    }

    /// Sets every peak to the current value. Needs the heap's lock.
    pub(crate) fn reset_peaks(&self) {
        self.pooled().into_iter().for_each(PooledCounter::reset_peak);
        self.plain().into_iter().for_each(Counter::reset_peak);
        self.active_peaks.blocks.iter().chain(&self.active_peaks.bytes).for_each(|cell| set(cell, 0));
        self.note_active_peaks();
    }

    /// Starts every accumulated value from zero. Needs the heap's lock.
    pub(crate) fn reset_accumulated(&self) {
        self.each().for_each(Counter::reset_accumulated);
    }
}

/// Sums what is live and what is waiting. A block that starts to wait is freed in the one and allocated in the other, which
/// is neither for the sum.
fn active(live: &PooledCounter, waiting: &PooledCounter, peaks: &[AtomicU64; 3]) -> PoolStats {
    let sum = |live: Stat, waiting: Stat, peak: &AtomicU64| Stat {
        current: live.current + waiting.current,
        peak: live.peak.max(get(peak)).max(live.current + waiting.current),
        allocated: live.allocated,
        freed: live.freed.wrapping_sub(waiting.allocated).wrapping_add(waiting.freed),
    };
    let (live, waiting) = (live.read(), waiting.read());
    PoolStats {
        all: sum(live.all, waiting.all, &peaks[2]),
        large_pool: sum(live.large_pool, waiting.large_pool, &peaks[1]),
        small_pool: sum(live.small_pool, waiting.small_pool, &peaks[0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_keeps_current_peak_and_sums() {
        let counter = Counter::default();
        counter.add(5);
        counter.sub(3);
        counter.add(1);
        assert_eq!(counter.read(), Stat { current: 3, peak: 5, allocated: 6, freed: 3 });
        counter.reset_peak();
        counter.reset_accumulated();
        counter.sub(1);
        assert_eq!(counter.read(), Stat { current: 2, peak: 3, allocated: 0, freed: 1 });
    }

    #[test]
    fn the_peak_of_both_pools_is_its_own() {
        let counter = PooledCounter::default();
        counter.add(PoolKind::Small, 4);
        counter.sub(PoolKind::Small, 4);
        counter.add(PoolKind::Large, 3);
        let stats = counter.read();
        assert_eq!((stats.all.peak, stats.small_pool.peak, stats.large_pool.peak), (4, 4, 3));
        assert_eq!(stats.all.current, 3);
    }

    #[test]
    fn waiting_blocks_stay_active() {
        let counters = Counters::default();
        counters.allocated(PoolKind::Large, 100, 90);
        counters.freed_waiting(PoolKind::Large, 100);
        counters.allocated(PoolKind::Small, 10, 10);
        assert_eq!(counters.active_bytes().all, Stat { current: 110, peak: 110, allocated: 110, freed: 0 });
        assert_eq!(counters.allocated_bytes.read().all, Stat { current: 10, peak: 100, allocated: 110, freed: 100 });
        counters.waited(PoolKind::Large, 100, 90);
        counters.freed(PoolKind::Small, 10, 10);
        assert_eq!(counters.active_bytes().all, Stat { current: 0, peak: 110, allocated: 110, freed: 110 });
        assert_eq!(counters.active().all, Stat { current: 0, peak: 2, allocated: 2, freed: 2 });
        assert_eq!(counters.requested_bytes.read().all.current, 0);
        counters.reset_peaks();
        assert_eq!(counters.active_bytes().all.peak, 0);
    }
}
