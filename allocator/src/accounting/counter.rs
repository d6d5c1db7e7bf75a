//! A counter for one quantity: its value, its peak, and the sums of its increases and decreases.
//!
//! A counter is a few plain words. Values that can be derived are not counted. It has one writer at
//! a time (see `counters.rs`), so an update is a load and a store. Only counts of rare events that
//! threads with different locks add to take an atomic read-modify-write.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::accounting::stat::{PoolStats, Stat};
use crate::size_class::PoolKind;

#[inline]
pub(super) fn get(cell: &AtomicU64) -> u64 {
    cell.load(Relaxed)
}

/// Changes a value under the heap's lock: there is no other writer, so this need not be a
/// read-modify-write.
#[inline]
pub(super) fn set(cell: &AtomicU64, value: u64) {
    cell.store(value, Relaxed);
}

#[inline]
pub(super) fn raise(cell: &AtomicU64, value: u64) {
    if value > get(cell) {
        set(cell, value);
    }
}

/// As [`raise`], for values that may be negative.
#[inline]
fn raise_signed(cell: &AtomicU64, value: u64) {
    if value.cast_signed() > get(cell).cast_signed() {
        set(cell, value);
    }
}

/// One quantity. The sum of decreases is derived: it is the sum of increases less the current
/// value.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    current: AtomicU64,
    increases: AtomicU64,
    /// The greatest sum of `current` and the published values of arenas, less the values published
    /// now. So an addition has to look only at this and `current`.
    peak: AtomicU64,
    increases_base: AtomicU64,
    decreases_base: AtomicU64,
}

impl Counter {
    /// Adds `n`, and returns the new value.
    #[inline]
    pub(crate) fn add(&self, n: u64) -> u64 {
        let current = get(&self.current).wrapping_add(n);
        set(&self.current, current);
        set(&self.increases, get(&self.increases).wrapping_add(n));
        raise_signed(&self.peak, current);
        current
    }

    /// As [`Counter::add`], for a counter of events that threads with different locks add to. Its
    /// peak is not kept.
    pub(crate) fn add_from_any_thread(&self, n: u64) {
        self.current.fetch_add(n, Relaxed);
        self.increases.fetch_add(n, Relaxed);
    }

    #[inline]
    pub(crate) fn sub(&self, n: u64) {
        set(&self.current, get(&self.current).wrapping_sub(n));
    }

    pub(crate) fn read(&self) -> Stat {
        self.read_with(Sum::default(), 0)
    }

    /// Its values, including the arenas' own sums (`others`) and published values.
    fn read_with(&self, others: Sum, published: u64) -> Stat {
        let current = get(&self.current).wrapping_add(others.current);
        let increases = get(&self.increases).wrapping_add(others.increases);
        let decreases = increases.wrapping_sub(current);
        Stat {
            current,
            // What arenas publish is a bound, and may be more than there ever was.
            peak: get(&self.peak).wrapping_add(published).min(increases).max(current),
            allocated: increases.wrapping_sub(get(&self.increases_base)),
            freed: decreases.wrapping_sub(get(&self.decreases_base)),
        }
    }

    pub(super) fn clear(&self) {
        let cells = [&self.current, &self.increases, &self.peak, &self.increases_base, &self.decreases_base];
        cells.into_iter().for_each(|cell| set(cell, 0));
    }

    pub(super) fn reset_peak(&self) {
        set(&self.peak, get(&self.current));
    }

    pub(super) fn reset_accumulated(&self, others: Sum) {
        let increases = get(&self.increases).wrapping_add(others.increases);
        set(&self.increases_base, increases);
        set(&self.decreases_base, increases.wrapping_sub(get(&self.current).wrapping_add(others.current)));
    }
}

/// The share of a quantity that the arenas count themselves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) current: u64,
    pub(crate) increases: u64,
}

/// One quantity for each pool. The value for both pools together is the sum, except for its peak.
#[derive(Debug, Default)]
pub(crate) struct PooledCounter {
    pools: [Counter; 2],
    /// The values that arenas published, by pool: an upper bound of their own sums, and exact while
    /// one thread does all the work.
    published: [AtomicU64; 2],
    /// The peak of both pools together, stored as that of a pool: less the published values of
    /// both.
    peak_of_all: AtomicU64,
}

impl PooledCounter {
    #[inline]
    pub(crate) fn add(&self, kind: PoolKind, n: u64) {
        let (own, other) = (kind as usize, 1 - kind as usize);
        let current = self.pools[own].add(n);
        raise_signed(&self.peak_of_all, current.wrapping_add(get(&self.pools[other].current)));
    }

    #[inline]
    pub(crate) fn sub(&self, kind: PoolKind, n: u64) {
        self.pools[kind as usize].sub(n);
    }

    /// Adds `n`, which may be negative. Without a branch on its sign, which follows no pattern:
    /// raising a peak after a subtraction changes nothing.
    #[inline]
    pub(crate) fn change(&self, kind: PoolKind, n: i64) {
        let (own, other) = (&self.pools[kind as usize], &self.pools[1 - kind as usize]);
        let current = get(&own.current).wrapping_add(n.cast_unsigned());
        set(&own.current, current);
        set(&own.increases, get(&own.increases).wrapping_add(n.max(0).unsigned_abs()));
        raise_signed(&own.peak, current);
        raise_signed(&self.peak_of_all, current.wrapping_add(get(&other.current)));
    }

    /// The current value of a pool, or a bound that is a little greater.
    #[inline]
    pub(super) fn bound(&self, pool: usize) -> u64 {
        get(&self.pools[pool].current).wrapping_add(get(&self.published[pool]))
    }

    /// Changes the published values of a pool. Needs the lock for publishing.
    pub(crate) fn publish(&self, kind: PoolKind, change: u64) {
        let pool = &self.pools[kind as usize];
        let published = &self.published[kind as usize];
        let publish = || set(published, get(published).wrapping_add(change));
        // Peaks are stored less the published values. A thread that reads meanwhile finds them too
        // high rather than too low.
        if change.cast_signed() > 0 {
            publish();
        }
        set(&pool.peak, get(&pool.peak).wrapping_sub(change));
        set(&self.peak_of_all, get(&self.peak_of_all).wrapping_sub(change));
        if change.cast_signed() <= 0 {
            publish();
        }
        raise_signed(&pool.peak, get(&pool.current));
        raise_signed(&self.peak_of_all, self.current_of_all());
    }

    fn current_of_all(&self) -> u64 {
        get(&self.pools[0].current).wrapping_add(get(&self.pools[1].current))
    }

    #[inline]
    pub(super) fn is_zero(&self) -> bool {
        get(&self.pools[0].current) | get(&self.pools[1].current) == 0
    }

    pub(crate) fn read(&self) -> PoolStats {
        self.read_with([Sum::default(); 2])
    }

    /// Its values, including the arenas' own sums of each pool.
    pub(crate) fn read_with(&self, others: [Sum; 2]) -> PoolStats {
        let published = self.published.each_ref().map(get);
        let [small_pool, large_pool] = [0, 1].map(|pool| self.pools[pool].read_with(others[pool], published[pool]));
        let current = small_pool.current.wrapping_add(large_pool.current);
        let peak = get(&self.peak_of_all).wrapping_add(published[0]).wrapping_add(published[1]);
        let all = Stat {
            current,
            peak: peak.min(small_pool.peak.saturating_add(large_pool.peak)).max(current),
            allocated: small_pool.allocated.wrapping_add(large_pool.allocated),
            freed: small_pool.freed.wrapping_add(large_pool.freed),
        };
        PoolStats { all, large_pool, small_pool }
    }

    pub(super) fn clear(&self) {
        self.pools.iter().for_each(Counter::clear);
        self.published.iter().chain([&self.peak_of_all]).for_each(|cell| set(cell, 0));
    }

    pub(super) fn reset_peak(&self) {
        self.pools.iter().for_each(Counter::reset_peak);
        set(&self.peak_of_all, self.current_of_all());
    }

    pub(super) fn reset_accumulated(&self, others: [Sum; 2]) {
        self.pools.iter().zip(others).for_each(|(pool, others)| pool.reset_accumulated(others));
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
        counter.reset_accumulated(Sum::default());
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
