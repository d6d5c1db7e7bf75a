//! Accounting: the counters behind every statistic, written under the heap's lock and read without it.
//!
//! Identities: for each counter `current = allocated − freed` and `peak ≥ current`; `all` is the sum of the two pools, its
//! peak its own; `allocated ≤ active ≤ reserved` in bytes. A reader sees each value exactly as of some moment, and all of
//! them as of the same moment when no call is in flight.
//!
//! A counter is a few plain words. Only the holder of the heap's lock writes, so an update is a load and a store, never an
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

fn get(cell: &AtomicU64) -> u64 {
    cell.load(Relaxed)
}

/// Adds under the heap's lock: there is no other writer, so this need not be a read-modify-write.
fn bump(cell: &AtomicU64, n: u64) {
    cell.store(get(cell).wrapping_add(n), Relaxed);
}

fn raise(cell: &AtomicU64, value: u64) {
    if value > get(cell) {
        cell.store(value, Relaxed);
    }
}

/// One quantity of one pool, or of both.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    increases: AtomicU64,
    decreases: AtomicU64,
    peak: AtomicU64,
    increases_base: AtomicU64,
    decreases_base: AtomicU64,
}

impl Counter {
    #[inline]
    fn current(&self) -> u64 {
        // Wrapping: a reader without the lock may catch a decrease before the increase it belongs to.
        let current = get(&self.increases).wrapping_sub(get(&self.decreases));
        if current.cast_signed() < 0 { 0 } else { current }
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        bump(&self.increases, n);
        raise(&self.peak, self.current());
    }

    #[inline]
    pub(crate) fn sub(&self, n: u64) {
        bump(&self.decreases, n);
    }

    pub(crate) fn read(&self) -> Stat {
        let (increases, decreases) = (get(&self.increases), get(&self.decreases));
        let current = self.current();
        Stat {
            current,
            peak: get(&self.peak).max(current),
            allocated: increases.wrapping_sub(get(&self.increases_base)),
            freed: decreases.wrapping_sub(get(&self.decreases_base)),
        }
    }

    fn clear(&self) {
        let cells = [&self.increases, &self.decreases, &self.peak, &self.increases_base, &self.decreases_base];
        cells.into_iter().for_each(|cell| cell.store(0, Relaxed));
    }

    fn reset_peak(&self) {
        self.peak.store(self.current(), Relaxed);
    }

    fn reset_accumulated(&self) {
        self.increases_base.store(get(&self.increases), Relaxed);
        self.decreases_base.store(get(&self.decreases), Relaxed);
    }
}

/// One quantity for both pools together and for each.
#[derive(Debug, Default)]
pub(crate) struct PooledCounter {
    all: Counter,
    pools: [Counter; 2],
}

impl PooledCounter {
    #[inline]
    pub(crate) fn add(&self, kind: PoolKind, n: u64) {
        self.all.add(n);
        self.pools[kind as usize].add(n);
    }

    #[inline]
    pub(crate) fn sub(&self, kind: PoolKind, n: u64) {
        self.all.sub(n);
        self.pools[kind as usize].sub(n);
    }

    /// Adds or subtracts, by sign.
    #[inline]
    pub(crate) fn change(&self, kind: PoolKind, n: i64) {
        match n {
            0 => {}
            1.. => self.add(kind, n.unsigned_abs()),
            _ => self.sub(kind, n.unsigned_abs()),
        }
    }

    pub(crate) fn read(&self) -> PoolStats {
        PoolStats {
            all: self.all.read(),
            large_pool: self.pools[PoolKind::Large as usize].read(),
            small_pool: self.pools[PoolKind::Small as usize].read(),
        }
    }

    fn each(&self) -> impl Iterator<Item = &Counter> {
        std::iter::once(&self.all).chain(&self.pools)
    }
}

/// Every counter of an allocator.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) allocation: PooledCounter,
    pub(crate) allocated_bytes: PooledCounter,
    pub(crate) active: PooledCounter,
    pub(crate) active_bytes: PooledCounter,
    pub(crate) requested_bytes: PooledCounter,
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

impl Counters {
    /// A block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(&self, kind: PoolKind, size: u64, requested: u64) {
        self.allocation.add(kind, 1);
        self.allocated_bytes.add(kind, size);
        self.active.add(kind, 1);
        self.active_bytes.add(kind, size);
        self.requested_bytes.add(kind, requested);
    }

    /// A live block was given back by its holder.
    #[inline]
    pub(crate) fn freed(&self, kind: PoolKind, size: u64) {
        self.allocation.sub(kind, 1);
        self.allocated_bytes.sub(kind, size);
    }

    /// A block given back is waited for by nobody any more.
    #[inline]
    pub(crate) fn completed(&self, kind: PoolKind, size: u64, requested: u64) {
        self.active.sub(kind, 1);
        self.active_bytes.sub(kind, size);
        self.requested_bytes.sub(kind, requested);
    }

    /// Back to zero, for the next allocator in the same shell.
    pub(crate) fn clear(&self) {
        self.pooled().into_iter().flat_map(PooledCounter::each).chain(self.plain()).for_each(Counter::clear);
    }

    fn pooled(&self) -> [&PooledCounter; 9] {
        [
            &self.allocation,
            &self.allocated_bytes,
            &self.active,
            &self.active_bytes,
            &self.requested_bytes,
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

    /// Sets every peak to the current value. Needs the heap's lock.
    pub(crate) fn reset_peaks(&self) {
        self.pooled().into_iter().flat_map(PooledCounter::each).chain(self.plain()).for_each(Counter::reset_peak);
    }

    /// Starts every accumulated value from zero. Needs the heap's lock.
    pub(crate) fn reset_accumulated(&self) {
        let all = self.pooled().into_iter().flat_map(PooledCounter::each).chain(self.plain());
        all.for_each(Counter::reset_accumulated);
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
}
