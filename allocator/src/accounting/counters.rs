//! Accounting: the counters behind every statistic, written under the heap's lock and read without
//! it.
//!
//! Identities: for each counter `current = allocated − freed` and `peak ≥ current`; `all` is the
//! sum of the two pools, its peak its own; `allocated ≤ active ≤ reserved` in bytes. A reader sees
//! each value exactly as of some moment, and all of them as of the same moment when no call is in
//! flight.
//!
//! Writers: counters of slow paths are written by the holder of the shared state's lock. Those of
//! every operation ([`Hot`]) are in two places: here, while one thread does all the work, and in
//! each arena (`writer.rs`) once several threads do. A value is the sum of all places. So threads
//! on different streams write to different cache lines.
//!
//! Peaks of sums are exact in the first case. In the second case an arena *publishes* here how far
//! its values may rise before it has to publish again. So the peak of the published values is at
//! least the true one, and exceeds it by at most 2 × [`Hot::credit`] for each arena and pool.

use std::sync::atomic::AtomicU64;

use crate::accounting::counter::{Counter, PooledCounter, Sum, get, raise, set};
use crate::accounting::reserved::Reserved;
use crate::accounting::stat::{PoolStats, Stat};
use crate::size_class::PoolKind;

/// A quantity that every allocation and free may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hot {
    /// Live blocks.
    Blocks,
    /// Bytes in live blocks.
    Bytes,
    /// Requested bytes of live and waiting blocks.
    Requested,
}

impl Hot {
    pub(crate) const ALL: [Hot; 3] = [Hot::Blocks, Hot::Bytes, Hot::Requested];

    /// By how much an arena's value may move, up or down, without being published.
    #[inline]
    pub(crate) fn credit(self) -> u64 {
        match self {
            Hot::Blocks => 64,
            Hot::Bytes | Hot::Requested => 16 << 20,
        }
    }
}

/// Every counter of an allocator.
///
/// `active` is not counted but derived: it is the sum of the allocated and the *waiting* blocks, of
/// which the latter change only on slow paths. Its peak is that of the allocated ones, unless
/// blocks were waiting at the time; only that case is noted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// The counters of [`Hot`] quantities, in its order.
    hot: [PooledCounter; 3],
    waiting: PooledCounter,
    waiting_bytes: PooledCounter,
    active_peaks: ActivePeaks,
    pub(crate) segment: PooledCounter,
    pub(crate) reserved_bytes: Reserved,
    pub(crate) num_alloc_retries: Counter,
    pub(crate) num_ooms: Counter,
    pub(crate) num_sync_all_streams: Counter,
    pub(crate) num_device_alloc: Counter,
    pub(crate) num_device_free: Counter,
    pub(crate) num_oom_rejections: Counter,
    /// How often memory moved. Not in PyTorch.
    pub(crate) remaps: Counter,
    /// How many granules moved. Not in PyTorch.
    pub(crate) granules_moved: Counter,
    /// How many frames were split so that a request found memory. Not in PyTorch.
    pub(crate) frames_split: Counter,
    /// Blocks reused by another stream than the one that freed them. Not in PyTorch.
    pub(crate) cross_stream_reuses: Counter,
    /// Those of them that cost a wait. Not in PyTorch.
    pub(crate) cross_stream_waits: Counter,
}

/// Peaks of active blocks and bytes while any block was waiting: for the small pool, the large
/// pool, and both.
#[derive(Debug, Default)]
struct ActivePeaks {
    blocks: [AtomicU64; 3],
    bytes: [AtomicU64; 3],
}

impl Counters {
    #[inline]
    pub(crate) fn hot(&self, quantity: Hot) -> &PooledCounter {
        &self.hot[quantity as usize]
    }

    /// Counts that a block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(&self, kind: PoolKind, size: u64, requested: u64) {
        self.hot(Hot::Blocks).add(kind, 1);
        self.hot(Hot::Bytes).add(kind, size);
        self.hot(Hot::Requested).add(kind, requested);
        if !self.waiting.is_zero() {
            self.note_active_peaks();
        }
    }

    /// Counts that a live block was freed at once.
    #[inline]
    pub(crate) fn freed(&self, kind: PoolKind, size: u64, requested: u64) {
        self.hot(Hot::Blocks).sub(kind, 1);
        self.hot(Hot::Bytes).sub(kind, size);
        self.hot(Hot::Requested).sub(kind, requested);
    }

    /// Counts that a block, not live any more, waits for other streams. Needs the lock for
    /// publishing.
    pub(crate) fn waits(&self, kind: PoolKind, size: u64) {
        self.waiting.add(kind, 1);
        self.waiting_bytes.add(kind, size);
        self.note_active_peaks();
    }

    /// Counts that a waiting block became free.
    pub(crate) fn waited(&self, kind: PoolKind, size: u64) {
        self.waiting.sub(kind, 1);
        self.waiting_bytes.sub(kind, size);
    }

    /// Changes the values that arenas have published. Needs the lock for publishing.
    pub(crate) fn published(&self, quantity: Hot, kind: PoolKind, change: u64) {
        self.hot(quantity).publish(kind, change);
        if !self.waiting.is_zero() {
            self.note_active_peaks();
        }
    }

    #[cold]
    fn note_active_peaks(&self) {
        let quantities = [
            (&self.active_peaks.blocks, self.hot(Hot::Blocks), &self.waiting),
            (&self.active_peaks.bytes, self.hot(Hot::Bytes), &self.waiting_bytes),
        ];
        for (peaks, live, waiting) in quantities {
            let active = |pool: usize| live.bound(pool).wrapping_add(waiting.bound(pool));
            raise(&peaks[0], active(0));
            raise(&peaks[1], active(1));
            raise(&peaks[2], active(0).wrapping_add(active(1)));
        }
    }

    /// Number of live and waiting blocks, given that of the live ones.
    pub(crate) fn active(&self, live: PoolStats) -> PoolStats {
        active(live, self.waiting.read(), &self.active_peaks.blocks)
    }

    /// Bytes in live and waiting blocks, given those in live ones.
    pub(crate) fn active_bytes(&self, live: PoolStats) -> PoolStats {
        active(live, self.waiting_bytes.read(), &self.active_peaks.bytes)
    }

    fn pooled(&self) -> impl Iterator<Item = &PooledCounter> {
        self.hot.iter().chain([&self.waiting, &self.waiting_bytes, &self.segment])
    }

    fn plain(&self) -> [&Counter; 11] {
        [
            &self.num_alloc_retries,
            &self.num_ooms,
            &self.num_sync_all_streams,
            &self.num_device_alloc,
            &self.num_device_free,
            &self.num_oom_rejections,
            &self.remaps,
            &self.granules_moved,
            &self.frames_split,
            &self.cross_stream_reuses,
            &self.cross_stream_waits,
        ]
    }

    fn active_peaks(&self) -> impl Iterator<Item = &AtomicU64> {
        self.active_peaks.blocks.iter().chain(&self.active_peaks.bytes)
    }

    /// Sets all counters to zero, for the next allocator in the same allocator state.
    pub(crate) fn clear(&self) {
        self.pooled().for_each(PooledCounter::clear);
        self.reserved_bytes.clear();
        self.plain().into_iter().for_each(Counter::clear);
        self.active_peaks().for_each(|cell| set(cell, 0));
    }

    /// Sets every peak to the current value. Needs every lock, and exact published values.
    pub(crate) fn reset_peaks(&self) {
        self.pooled().for_each(PooledCounter::reset_peak);
        self.reserved_bytes.reset_peak();
        self.plain().into_iter().for_each(Counter::reset_peak);
        self.active_peaks().for_each(|cell| set(cell, 0));
        self.note_active_peaks();
    }

    /// Starts every accumulated value from zero. Needs every lock. `others` gives the arenas' own
    /// sums.
    pub(crate) fn reset_accumulated(&self, others: impl Fn(Hot) -> [Sum; 2]) {
        self.pooled().for_each(|counter| counter.reset_accumulated([Sum::default(); 2]));
        self.reserved_bytes.reset_accumulated();
        Hot::ALL.into_iter().for_each(|quantity| self.hot(quantity).reset_accumulated(others(quantity)));
        self.plain().into_iter().for_each(|counter| counter.reset_accumulated(Sum::default()));
    }
}

/// Sums the statistics of live and waiting blocks. A block that starts to wait is freed in the
/// first and allocated in the second; in the sum it is neither.
fn active(live: PoolStats, waiting: PoolStats, peaks: &[AtomicU64; 3]) -> PoolStats {
    let sum = |live: Stat, waiting: Stat, peak: &AtomicU64| Stat {
        current: live.current + waiting.current,
        peak: live.peak.max(get(peak)).max(live.current + waiting.current),
        allocated: live.allocated,
        freed: live.freed.wrapping_sub(waiting.allocated).wrapping_add(waiting.freed),
    };
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
    fn waiting_blocks_stay_active() {
        let counters = Counters::default();
        let (live, requested) = (|| counters.hot(Hot::Bytes).read(), || counters.hot(Hot::Requested).read());
        counters.allocated(PoolKind::Large, 100, 90);
        counters.freed(PoolKind::Large, 100, 0);
        counters.waits(PoolKind::Large, 100);
        counters.allocated(PoolKind::Small, 10, 10);
        assert_eq!(counters.active_bytes(live()).all, Stat { current: 110, peak: 110, allocated: 110, freed: 0 });
        assert_eq!(live().all, Stat { current: 10, peak: 100, allocated: 110, freed: 100 });
        counters.waited(PoolKind::Large, 100);
        counters.hot(Hot::Requested).sub(PoolKind::Large, 90);
        counters.freed(PoolKind::Small, 10, 10);
        assert_eq!(counters.active_bytes(live()).all, Stat { current: 0, peak: 110, allocated: 110, freed: 110 });
        let blocks = counters.active(counters.hot(Hot::Blocks).read()).all;
        assert_eq!(blocks, Stat { current: 0, peak: 2, allocated: 2, freed: 2 });
        assert_eq!(requested().all.current, 0);
        counters.reset_peaks();
        assert_eq!(counters.active_bytes(live()).all.peak, 0);
    }
}
