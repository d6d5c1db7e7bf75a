//! Accounting: the counters behind every statistic, under the allocator's lock.
//!
//! Identities: for each counter `current = allocated − freed` and `peak ≥ current`; `all` is the
//! sum of the two pools, its peak its own; `allocated ≤ active ≤ reserved` in bytes, and in
//! requested bytes.

use crate::accounting::stat::{PoolStats, Stat};
use crate::core::counter::{Counter, PooledCounter};
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
    /// Bytes that idle graphs lent. Not in PyTorch.
    pub(crate) graph_bytes_lent: Counter,
    /// Bytes that were brought back for launches of them. Not in PyTorch.
    pub(crate) graph_bytes_returned: Counter,
    /// Blocks reused by another stream than the one that freed them. Not in PyTorch.
    pub(crate) cross_stream_reuses: Counter,
    /// Those of them that cost a wait. Not in PyTorch.
    pub(crate) cross_stream_waits: Counter,
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

    fn plain(&mut self) -> [&mut Counter; 13] {
        [
            &mut self.num_alloc_retries,
            &mut self.num_ooms,
            &mut self.num_sync_all_streams,
            &mut self.num_device_alloc,
            &mut self.num_device_free,
            &mut self.num_oom_rejections,
            &mut self.remaps,
            &mut self.granules_moved,
            &mut self.frames_split,
            &mut self.graph_bytes_lent,
            &mut self.graph_bytes_returned,
            &mut self.cross_stream_reuses,
            &mut self.cross_stream_waits,
        ]
    }

    /// Sets every peak to the current value.
    pub(crate) fn reset_peaks(&mut self) {
        self.pooled().into_iter().for_each(PooledCounter::reset_peak);
        self.plain().into_iter().for_each(Counter::reset_peak);
        self.active_peaks = ActivePeaks::default();
        self.note_active_peaks();
    }

    /// Starts every accumulated value from zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.pooled().into_iter().for_each(PooledCounter::reset_accumulated);
        self.plain().into_iter().for_each(Counter::reset_accumulated);
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
