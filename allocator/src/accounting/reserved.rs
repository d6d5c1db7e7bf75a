//! Bytes held from the device, by pool. Memory moves between the pools, and a concurrent reader
//! finds it in one of them, never in both or in none.
//!
//! Writers hold the shared state's lock, so there is one at a time. It makes the version odd,
//! changes the counters, and makes the version even. A reader who met an odd version, or two
//! different ones, reads again. It takes no lock.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};
use std::time::Duration;

use super::counter::{PooledCounter, Sum};
use super::stat::PoolStats;
use crate::size_class::PoolKind;

/// A reader who met a change under way so often lets other threads run: the writer may need this
/// one's processor.
const PATIENCE: u32 = 64;

/// The counter of these bytes.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    counter: PooledCounter,
    /// Odd while the counter changes.
    version: AtomicU64,
}

impl Reserved {
    /// Counts memory that came from the device.
    pub(crate) fn add(&self, kind: PoolKind, bytes: u64) {
        self.change(|counter| counter.add(kind, bytes));
    }

    /// Counts memory that went back to it.
    pub(crate) fn sub(&self, kind: PoolKind, bytes: u64) {
        self.change(|counter| counter.sub(kind, bytes));
    }

    /// Replaces a share of the memory, given by pool. Losses are counted before gains, so that what
    /// moved between pools raises no peak.
    pub(crate) fn replace(&self, before: [u64; 2], now: [u64; 2]) {
        self.change(|counter| {
            for kind in [PoolKind::Small, PoolKind::Large] {
                counter.sub(kind, before[kind as usize].saturating_sub(now[kind as usize]));
            }
            for kind in [PoolKind::Small, PoolKind::Large] {
                counter.add(kind, now[kind as usize].saturating_sub(before[kind as usize]));
            }
        });
    }

    /// All values as of one moment.
    pub(crate) fn read(&self) -> PoolStats {
        let mut met = 0;
        loop {
            let version = self.version.load(Acquire);
            if version.is_multiple_of(2) {
                let stats = self.counter.read();
                fence(Acquire);
                if self.version.load(Relaxed) == version {
                    return stats;
                }
            }
            met += 1;
            if met < PATIENCE { std::hint::spin_loop() } else { aquifer_device::executor::pause(Duration::ZERO) }
        }
    }

    pub(super) fn clear(&self) {
        self.change(PooledCounter::clear);
    }

    pub(super) fn reset_peak(&self) {
        self.change(PooledCounter::reset_peak);
    }

    pub(super) fn reset_accumulated(&self) {
        self.change(|counter| counter.reset_accumulated([Sum::default(); 2]));
    }

    fn change(&self, change: impl FnOnce(&PooledCounter)) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        change(&self.counter);
        self.version.store(version.wrapping_add(2), Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_between_pools_is_read_in_one_of_them() {
        const MOVES: u64 = 200_000;
        let reserved = Reserved::default();
        reserved.add(PoolKind::Large, 10);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..MOVES {
                    reserved.replace([0, 10], [10, 0]);
                    reserved.replace([10, 0], [0, 10]);
                }
            });
            loop {
                let last = writer.is_finished();
                let stats = reserved.read();
                assert_eq!((stats.all.current, stats.all.peak), (10, 10));
                assert_eq!(stats.small_pool.current + stats.large_pool.current, 10);
                assert_eq!(stats.all.allocated - stats.all.freed, 10);
                if last {
                    break;
                }
            }
        });
        reserved.sub(PoolKind::Large, 10);
        let all = reserved.read().all;
        assert_eq!((all.current, all.peak, all.allocated), (0, 10, 10 + 2 * MOVES * 10));
    }
}
