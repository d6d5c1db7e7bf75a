//! Accounting: the counters behind every statistic, written under the heap's lock and read without it.
//!
//! Identities: for each counter `current = allocated − freed` and `peak ≥ current`; `all` is the sum of the two pools, its
//! peak its own; `allocated ≤ active ≤ reserved` in bytes. A reader sees each value exactly as of some moment, and all of
//! them as of the same moment when no call is in flight.
//!
//! A counter is a few plain words. What can be derived is not counted.
//!
//! Who writes: what slow paths count, the holder of the core's lock. What every operation counts ([`Hot`]) has two places:
//! these counters, while one thread does all the work (`shell.rs` says which), and those of each arena
//! (`tally.rs`) once several do. A value is the sum of all places. So an update is always a load and a store, never an
//! atomic read-modify-write, and threads on different streams write to different cache lines.
//!
//! Peaks of sums are exact in the first case. In the second an arena *publishes* here how far its values may rise before
//! it has to say more, so that the peak of what is published is at least the true one, and more than that by at most
//! 2 × [`Hot::credit`] for each arena and pool.

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

impl PoolStats {
    /// The same, no peak being above that of `most`, nor that of both pools above the sum of theirs.
    pub(crate) fn with_peaks_within(self, most: PoolStats) -> PoolStats {
        let within = |stat: Stat, most: u64| Stat { peak: stat.peak.min(most), ..stat };
        let large_pool = within(self.large_pool, most.large_pool.peak);
        let small_pool = within(self.small_pool, most.small_pool.peak);
        let all = within(self.all, most.all.peak.min(large_pool.peak.saturating_add(small_pool.peak)));
        PoolStats { all, large_pool, small_pool }
    }
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

/// As [`raise`], of values that may be negative.
#[inline]
fn raise_signed(cell: &AtomicU64, value: u64) {
    if value.cast_signed() > get(cell).cast_signed() {
        set(cell, value);
    }
}

/// One quantity. What was freed is derived: the sum of increases less the current value.
#[derive(Debug, Default)]
pub(crate) struct Counter {
    current: AtomicU64,
    increases: AtomicU64,
    /// The greatest sum of `current` and what others published, less what they have published now: so that an addition has
    /// to look at no more than these two.
    peak: AtomicU64,
    increases_base: AtomicU64,
    decreases_base: AtomicU64,
}

impl Counter {
    /// Adds, and returns the value then.
    #[inline]
    pub(crate) fn add(&self, n: u64) -> u64 {
        let current = get(&self.current).wrapping_add(n);
        set(&self.current, current);
        set(&self.increases, get(&self.increases).wrapping_add(n));
        raise_signed(&self.peak, current);
        current
    }

    #[inline]
    pub(crate) fn sub(&self, n: u64) {
        set(&self.current, get(&self.current).wrapping_sub(n));
    }

    pub(crate) fn read(&self) -> Stat {
        self.read_with(Sum::default(), 0)
    }

    /// Its values, with what others have and what they published.
    fn read_with(&self, others: Sum, published: u64) -> Stat {
        let current = get(&self.current).wrapping_add(others.current);
        let increases = get(&self.increases).wrapping_add(others.increases);
        let decreases = increases.wrapping_sub(current);
        Stat {
            current,
            peak: get(&self.peak).wrapping_add(published).max(current),
            allocated: increases.wrapping_sub(get(&self.increases_base)),
            freed: decreases.wrapping_sub(get(&self.decreases_base)),
        }
    }

    fn clear(&self) {
        let cells = [&self.current, &self.increases, &self.peak, &self.increases_base, &self.decreases_base];
        cells.into_iter().for_each(|cell| set(cell, 0));
    }

    fn reset_peak(&self) {
        set(&self.peak, get(&self.current));
    }

    fn reset_accumulated(&self, others: Sum) {
        let increases = get(&self.increases).wrapping_add(others.increases);
        set(&self.increases_base, increases);
        set(&self.decreases_base, increases.wrapping_sub(get(&self.current).wrapping_add(others.current)));
    }
}

/// What other places have of a quantity.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) current: u64,
    pub(crate) increases: u64,
}

/// One quantity for each pool; that of both together is the sum, except for its peak.
#[derive(Debug, Default)]
pub(crate) struct PooledCounter {
    pools: [Counter; 2],
    /// What arenas published, by pool: an upper bound of what they have, and exact while one thread does all the work.
    published: [AtomicU64; 2],
    /// As the peak of a pool, less what is published of both.
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

    /// Adds or subtracts, by sign, which follows no pattern: so without a branch on it. Raising a peak after a subtraction
    /// changes nothing.
    #[inline]
    pub(crate) fn change(&self, kind: PoolKind, n: i64) {
        let (own, other) = (&self.pools[kind as usize], &self.pools[1 - kind as usize]);
        let current = get(&own.current).wrapping_add(n.cast_unsigned());
        set(&own.current, current);
        set(&own.increases, get(&own.increases).wrapping_add(n.max(0).unsigned_abs()));
        raise_signed(&own.peak, current);
        raise_signed(&self.peak_of_all, current.wrapping_add(get(&other.current)));
    }

    /// As changing by `n` and back.
    #[inline]
    pub(crate) fn touch(&self, kind: PoolKind, n: i64) {
        let (own, other) = (&self.pools[kind as usize], &self.pools[1 - kind as usize]);
        set(&own.increases, get(&own.increases).wrapping_add(n.unsigned_abs()));
        let most = get(&own.current).wrapping_add(n.max(0).unsigned_abs());
        raise_signed(&own.peak, most);
        raise_signed(&self.peak_of_all, most.wrapping_add(get(&other.current)));
    }

    /// The current value of a pool, or a little more.
    #[inline]
    fn bound(&self, pool: usize) -> u64 {
        get(&self.pools[pool].current).wrapping_add(get(&self.published[pool]))
    }

    /// What an arena published changes. Needs the lock of those who publish.
    pub(crate) fn publish(&self, kind: PoolKind, change: u64) {
        let pool = &self.pools[kind as usize];
        let published = &self.published[kind as usize];
        let publish = || set(published, get(published).wrapping_add(change));
        // Peaks are kept less what is published. Whoever reads meanwhile finds them too high rather than too low.
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
    fn is_zero(&self) -> bool {
        get(&self.pools[0].current) | get(&self.pools[1].current) == 0
    }

    pub(crate) fn read(&self) -> PoolStats {
        self.read_with([Sum::default(); 2])
    }

    /// Its values, with what others have of each pool.
    pub(crate) fn read_with(&self, others: [Sum; 2]) -> PoolStats {
        let published = self.published.each_ref().map(get);
        let [small_pool, large_pool] = [0, 1].map(|pool| self.pools[pool].read_with(others[pool], published[pool]));
        let current = small_pool.current.wrapping_add(large_pool.current);
        let all = Stat {
            current,
            peak: get(&self.peak_of_all).wrapping_add(published[0]).wrapping_add(published[1]).max(current),
            allocated: small_pool.allocated.wrapping_add(large_pool.allocated),
            freed: small_pool.freed.wrapping_add(large_pool.freed),
        };
        PoolStats { all, large_pool, small_pool }
    }

    fn clear(&self) {
        self.pools.iter().for_each(Counter::clear);
        self.published.iter().chain([&self.peak_of_all]).for_each(|cell| set(cell, 0));
    }

    fn reset_peak(&self) {
        self.pools.iter().for_each(Counter::reset_peak);
        set(&self.peak_of_all, self.current_of_all());
    }

    fn reset_accumulated(&self, others: [Sum; 2]) {
        self.pools.iter().zip(others).for_each(|(pool, others)| pool.reset_accumulated(others));
    }
}

/// A quantity that every allocation and free may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hot {
    /// Live blocks.
    Blocks,
    /// Bytes in them.
    Bytes,
    /// Bytes asked for.
    Requested,
    /// Free pieces of segments that are in use, and their bytes.
    Pieces,
    PieceBytes,
}

impl Hot {
    pub(crate) const ALL: [Hot; 5] = [Hot::Blocks, Hot::Bytes, Hot::Requested, Hot::Pieces, Hot::PieceBytes];

    /// How far an arena's value may move without a word, one way or the other.
    #[inline]
    pub(crate) fn credit(self) -> u64 {
        match self {
            Hot::Blocks | Hot::Pieces => 64,
            Hot::Bytes | Hot::Requested | Hot::PieceBytes => 16 << 20,
        }
    }
}

/// Every counter of an allocator.
///
/// `active` is not counted but derived: it is what is allocated and what is *waiting*, which only a slow path changes. Its
/// peak is that of allocated, unless something was waiting at the time; so that case alone is noted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// By [`Hot`].
    hot: [PooledCounter; 5],
    waiting: PooledCounter,
    waiting_bytes: PooledCounter,
    active_peaks: ActivePeaks,
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
    /// Ours: how often memory moved, and the bytes that did.
    pub(crate) remaps: Counter,
    pub(crate) granules_moved: Counter,
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
    #[inline]
    pub(crate) fn hot(&self, quantity: Hot) -> &PooledCounter {
        &self.hot[quantity as usize]
    }

    /// A block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(&self, kind: PoolKind, size: u64, requested: u64) {
        self.hot(Hot::Blocks).add(kind, 1);
        self.hot(Hot::Bytes).add(kind, size);
        self.hot(Hot::Requested).add(kind, requested);
        if !self.waiting.is_zero() {
            self.note_active_peaks();
        }
    }

    /// A live block was given back, and is free at once.
    #[inline]
    pub(crate) fn freed(&self, kind: PoolKind, size: u64, requested: u64) {
        self.hot(Hot::Blocks).sub(kind, 1);
        self.hot(Hot::Bytes).sub(kind, size);
        self.hot(Hot::Requested).sub(kind, requested);
    }

    /// A block that is not live any more waits for other streams.
    pub(crate) fn waits(&self, kind: PoolKind, size: u64) {
        self.waiting.add(kind, 1);
        self.waiting_bytes.add(kind, size);
        self.note_active_peaks();
    }

    /// A waiting block is free.
    pub(crate) fn waited(&self, kind: PoolKind, size: u64) {
        self.waiting.sub(kind, 1);
        self.waiting_bytes.sub(kind, size);
    }

    /// An arena has published more, or less. Needs the lock of those who publish.
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

    /// Blocks that are live or waiting, given those that are live.
    pub(crate) fn active(&self, live: PoolStats) -> PoolStats {
        active(live, self.waiting.read(), &self.active_peaks.blocks)
    }

    /// Bytes in blocks that are live or waiting, given those in live ones.
    pub(crate) fn active_bytes(&self, live: PoolStats) -> PoolStats {
        active(live, self.waiting_bytes.read(), &self.active_peaks.bytes)
    }

    fn pooled(&self) -> impl Iterator<Item = &PooledCounter> {
        self.hot.iter().chain([&self.waiting, &self.waiting_bytes, &self.segment, &self.reserved_bytes])
    }

    fn plain(&self) -> [&Counter; 12] {
        [
            &self.oversize_allocations,
            &self.oversize_segments,
            &self.num_alloc_retries,
            &self.num_ooms,
            &self.num_sync_all_streams,
            &self.num_device_alloc,
            &self.num_device_free,
            &self.num_oom_rejections,
            &self.remaps,
            &self.granules_moved,
            &self.cross_stream_reuses,
            &self.cross_stream_waits,
        ]
    }

    fn active_peaks(&self) -> impl Iterator<Item = &AtomicU64> {
        self.active_peaks.blocks.iter().chain(&self.active_peaks.bytes)
    }

    /// Back to zero, for the next allocator in the same shell.
    pub(crate) fn clear(&self) {
        self.pooled().for_each(PooledCounter::clear);
        self.plain().into_iter().for_each(Counter::clear);
        self.active_peaks().for_each(|cell| set(cell, 0));
    }

    /// Sets every peak to the current value. Needs every lock, and what arenas published to be exact.
    pub(crate) fn reset_peaks(&self) {
        self.pooled().for_each(PooledCounter::reset_peak);
        self.plain().into_iter().for_each(Counter::reset_peak);
        self.active_peaks().for_each(|cell| set(cell, 0));
        self.note_active_peaks();
    }

    /// Starts every accumulated value from zero. Needs every lock; `others` tells what arenas have.
    pub(crate) fn reset_accumulated(&self, others: impl Fn(Hot) -> [Sum; 2]) {
        self.pooled().for_each(|counter| counter.reset_accumulated([Sum::default(); 2]));
        Hot::ALL.into_iter().for_each(|quantity| self.hot(quantity).reset_accumulated(others(quantity)));
        self.plain().into_iter().for_each(|counter| counter.reset_accumulated(Sum::default()));
    }
}

/// Sums what is live and what is waiting. A block that starts to wait is freed in the one and allocated in the other, which
/// is neither for the sum.
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
