//! A counter for one quantity: its value, its peak, and the sums of its increases and decreases.
//! Values that can be derived are not counted.

use crate::accounting::stat::{PoolStats, Stat};
use crate::size_class::PoolKind;

/// One quantity. The sum of decreases is derived: it is the sum of increases less the current
/// value.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    current: u64,
    increases: u64,
    peak: u64,
    increases_base: u64,
    decreases_base: u64,
}

impl Counter {
    /// Adds `n`.
    #[inline]
    pub(crate) fn add(&mut self, n: u64) {
        self.current += n;
        self.increases = self.increases.wrapping_add(n);
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(crate) fn sub(&mut self, n: u64) {
        self.current -= n;
    }

    pub(crate) fn read(&self) -> Stat {
        let decreases = self.increases.wrapping_sub(self.current);
        Stat {
            current: self.current,
            peak: self.peak,
            allocated: self.increases.wrapping_sub(self.increases_base),
            freed: decreases.wrapping_sub(self.decreases_base),
        }
    }

    pub(super) fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.increases_base = self.increases;
        self.decreases_base = self.increases.wrapping_sub(self.current);
    }
}

/// One quantity for each pool. The value for both pools together is the sum, except for its peak.
#[derive(Debug, Default)]
pub(crate) struct PooledCounter {
    pools: [Counter; 2],
    peak_of_all: u64,
}

impl PooledCounter {
    #[inline]
    pub(crate) fn add(&mut self, kind: PoolKind, n: u64) {
        self.pools[kind as usize].add(n);
        self.peak_of_all = self.peak_of_all.max(self.current_of_all());
    }

    #[inline]
    pub(crate) fn sub(&mut self, kind: PoolKind, n: u64) {
        self.pools[kind as usize].sub(n);
    }

    /// Replaces a share of the value, given by pool. Losses are counted before gains, so that what
    /// moves between pools raises no peak.
    pub(crate) fn replace(&mut self, before: [u64; 2], now: [u64; 2]) {
        for kind in [PoolKind::Small, PoolKind::Large] {
            self.sub(kind, before[kind as usize].saturating_sub(now[kind as usize]));
        }
        for kind in [PoolKind::Small, PoolKind::Large] {
            self.add(kind, now[kind as usize].saturating_sub(before[kind as usize]));
        }
    }

    /// The current value of both pools.
    #[inline]
    pub(crate) fn current_of_all(&self) -> u64 {
        self.pools[0].current + self.pools[1].current
    }

    pub(crate) fn read(&self) -> PoolStats {
        let [small_pool, large_pool] = self.pools.each_ref().map(Counter::read);
        let all = Stat {
            current: self.current_of_all(),
            peak: self.peak_of_all,
            allocated: small_pool.allocated.wrapping_add(large_pool.allocated),
            freed: small_pool.freed.wrapping_add(large_pool.freed),
        };
        PoolStats { all, large_pool, small_pool }
    }

    pub(super) fn reset_peak(&mut self) {
        self.pools.iter_mut().for_each(Counter::reset_peak);
        self.peak_of_all = self.current_of_all();
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.pools.iter_mut().for_each(Counter::reset_accumulated);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_keeps_current_peak_and_sums() {
        let mut counter = Counter::default();
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
        let mut counter = PooledCounter::default();
        counter.add(PoolKind::Small, 4);
        counter.sub(PoolKind::Small, 4);
        counter.add(PoolKind::Large, 3);
        let stats = counter.read();
        assert_eq!((stats.all.peak, stats.small_pool.peak, stats.large_pool.peak), (4, 4, 3));
        assert_eq!(stats.all.current, 3);
    }

    #[test]
    fn what_moves_between_pools_raises_no_peak() {
        let mut counter = PooledCounter::default();
        counter.add(PoolKind::Large, 10);
        counter.replace([0, 10], [10, 0]);
        let stats = counter.read();
        assert_eq!((stats.all.current, stats.all.peak, stats.small_pool.current), (10, 10, 10));
        assert_eq!(stats.all.allocated - stats.all.freed, 10);
    }
}
