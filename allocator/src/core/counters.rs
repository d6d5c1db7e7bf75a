//! Accounting: the counters behind every statistic, under the allocator's lock. Values that can be
//! derived are not counted.
//!
//! Identities: for each counter `current = allocated − freed` and `peak ≥ current`; `all` is the
//! sum of the two pools, its peak its own; `allocated ≤ active ≤ reserved` in bytes, and in
//! requested bytes.

use crate::size_class::PoolKind;

/// Every counter of an allocator.
///
/// `active` is not counted but derived: it is the sum of the allocated and the *waiting* blocks, of
/// which the latter change only on slow paths. Its peak is that of the allocated ones, unless
/// blocks were waiting at the time; only that case is noted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Live blocks, and their bytes.
    pub(crate) blocks: PooledCounter,
    pub(crate) bytes: PooledCounter,
    /// Requested bytes of live and waiting blocks.
    pub(crate) requested: PooledCounter,
    waiting: PooledCounter,
    waiting_bytes: PooledCounter,
    active_peaks: ActivePeaks,
    pub(crate) segment: PooledCounter,
    pub(crate) reserved_bytes: PooledCounter,
    /// How often something happened since the last reset; nothing else of it is set.
    pub(crate) events: MemoryStats,
}

/// Everything that an allocator counts. Names and meanings are those of PyTorch's `memory_stats()`.
/// Fields that PyTorch lacks say so.
///
/// All values are exact, and of one moment. A block that a thread gave back while another one held
/// the allocator's lock counts as live until the next allocation, or until statistics are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Number of live blocks.
    pub allocation: PoolStats,
    /// Number of segments held from the device. Mapped memory has none, as PyTorch's expandable
    /// segments.
    pub segment: PoolStats,
    /// Number of live blocks and of freed ones that other streams still use.
    pub active: PoolStats,
    /// Bytes in live blocks.
    pub allocated_bytes: PoolStats,
    /// Bytes held from the device.
    pub reserved_bytes: PoolStats,
    /// Bytes in live blocks and in freed ones that other streams still use.
    pub active_bytes: PoolStats,
    /// Bytes requested for active blocks, before rounding.
    pub requested_bytes: PoolStats,
    /// How often the cache was flushed to serve a request.
    pub num_alloc_retries: u64,
    /// How often a request failed for lack of memory.
    pub num_ooms: u64,
    /// How often the host waited for streams that still used freed blocks.
    pub num_sync_all_streams: u64,
    /// How often a segment came from the device.
    pub num_device_alloc: u64,
    /// How often a segment went back to the device.
    pub num_device_free: u64,
    /// How often the limit refused a request at once (`throw_on_cudamalloc_oom`).
    pub num_oom_rejections: u64,
    /// How often granules moved to where contiguous memory was needed. Not in PyTorch.
    pub remaps: u64,
    /// Number of granules that moved. Not in PyTorch.
    pub granules_moved: u64,
    /// Number of frames that were split to serve a request: [`SplitFrames`]. Not in PyTorch.
    ///
    /// [`SplitFrames`]: crate::config::SplitFrames
    pub frames_split: u64,
    /// Bytes of the memory of idle graphs that were lent, in all:
    /// [`PoolOptions::lends_when_idle`](crate::PoolOptions::lends_when_idle). Not in PyTorch.
    pub graph_bytes_lent: u64,
    /// Bytes that were brought back for launches of these graphs. Not in PyTorch.
    pub graph_bytes_returned: u64,
    /// How often a stream reused a block that another one had freed. Not in PyTorch.
    pub cross_stream_reuses: u64,
    /// How often that made the stream wait. Not in PyTorch.
    pub cross_stream_waits: u64,
}

/// Peaks of active blocks and bytes while any block was waiting: for the small pool, the large
/// pool, and both.
#[derive(Debug, Default)]
struct ActivePeaks {
    blocks: [u64; 3],
    bytes: [u64; 3],
}

impl Counters {
    /// Counts that a block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(&mut self, kind: PoolKind, size: u64, requested: u64) {
        self.blocks.add(kind, 1);
        self.bytes.add(kind, size);
        self.requested.add(kind, requested);
        if self.waiting.current_of_all() != 0 {
            self.note_active_peaks();
        }
    }

    /// Counts that a block is not live any more. `requested` is 0 if other streams still use the
    /// block.
    #[inline]
    pub(crate) fn freed(&mut self, kind: PoolKind, size: u64, requested: u64) {
        self.blocks.sub(kind, 1);
        self.bytes.sub(kind, size);
        self.requested.sub(kind, requested);
    }

    /// Counts that a block, not live any more, waits for other streams.
    pub(crate) fn waits(&mut self, kind: PoolKind, size: u64) {
        self.waiting.add(kind, 1);
        self.waiting_bytes.add(kind, size);
        self.note_active_peaks();
    }

    /// Counts that a waiting block became free.
    pub(crate) fn waited(&mut self, kind: PoolKind, size: u64, requested: u64) {
        self.waiting.sub(kind, 1);
        self.waiting_bytes.sub(kind, size);
        self.requested.sub(kind, requested);
    }

    #[cold]
    fn note_active_peaks(&mut self) {
        let ActivePeaks { blocks, bytes } = &mut self.active_peaks;
        for (peaks, live, waiting) in [(blocks, &self.blocks, &self.waiting), (bytes, &self.bytes, &self.waiting_bytes)]
        {
            let (live, waiting) = (live.read(), waiting.read());
            let active =
                [(live.small_pool, waiting.small_pool), (live.large_pool, waiting.large_pool), (live.all, waiting.all)];
            for (peak, (live, waiting)) in peaks.iter_mut().zip(active) {
                *peak = (*peak).max(live.current + waiting.current);
            }
        }
    }

    pub(crate) fn read(&self) -> MemoryStats {
        MemoryStats {
            allocation: self.blocks.read(),
            segment: self.segment.read(),
            active: self.active(),
            allocated_bytes: self.bytes.read(),
            reserved_bytes: self.reserved_bytes.read(),
            active_bytes: self.active_bytes(),
            requested_bytes: self.requested.read(),
            ..self.events
        }
    }

    /// Number of live and waiting blocks.
    pub(crate) fn active(&self) -> PoolStats {
        active(self.blocks.read(), self.waiting.read(), &self.active_peaks.blocks)
    }

    /// Bytes in live and waiting blocks.
    pub(crate) fn active_bytes(&self) -> PoolStats {
        active(self.bytes.read(), self.waiting_bytes.read(), &self.active_peaks.bytes)
    }

    fn pooled(&mut self) -> [&mut PooledCounter; 7] {
        [
            &mut self.blocks,
            &mut self.bytes,
            &mut self.requested,
            &mut self.waiting,
            &mut self.waiting_bytes,
            &mut self.segment,
            &mut self.reserved_bytes,
        ]
    }

    /// Sets every peak to the current value.
    pub(crate) fn reset_peaks(&mut self) {
        self.pooled().into_iter().for_each(PooledCounter::reset_peak);
        self.active_peaks = ActivePeaks::default();
        self.note_active_peaks();
    }

    /// Starts every accumulated value from zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.pooled().into_iter().for_each(PooledCounter::reset_accumulated);
        self.events = MemoryStats::default();
    }
}

/// Sums the statistics of live and waiting blocks. A block that starts to wait is freed in the
/// first and allocated in the second; in the sum it is neither.
fn active(live: PoolStats, waiting: PoolStats, peaks: &[u64; 3]) -> PoolStats {
    let sum = |live: Stat, waiting: Stat, peak: u64| Stat {
        current: live.current + waiting.current,
        peak: live.peak.max(peak).max(live.current + waiting.current),
        allocated: live.allocated,
        freed: live.freed.wrapping_sub(waiting.allocated).wrapping_add(waiting.freed),
    };
    PoolStats {
        all: sum(live.all, waiting.all, peaks[2]),
        large_pool: sum(live.large_pool, waiting.large_pool, peaks[1]),
        small_pool: sum(live.small_pool, waiting.small_pool, peaks[0]),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_blocks_stay_active() {
        let mut counters = Counters::default();
        counters.allocated(PoolKind::Large, 100, 90);
        counters.freed(PoolKind::Large, 100, 0);
        counters.waits(PoolKind::Large, 100);
        counters.allocated(PoolKind::Small, 10, 10);
        assert_eq!(counters.active_bytes().all, Stat { current: 110, peak: 110, allocated: 110, freed: 0 });
        assert_eq!(counters.bytes.read().all, Stat { current: 10, peak: 100, allocated: 110, freed: 100 });
        counters.waited(PoolKind::Large, 100, 90);
        counters.freed(PoolKind::Small, 10, 10);
        assert_eq!(counters.active_bytes().all, Stat { current: 0, peak: 110, allocated: 110, freed: 110 });
        assert_eq!(counters.active().all, Stat { current: 0, peak: 2, allocated: 2, freed: 2 });
        assert_eq!(counters.requested.read().all.current, 0);
        counters.reset_peaks();
        assert_eq!(counters.active_bytes().all.peak, 0);
    }
}

#[cfg(test)]
mod counter_tests {
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
