//! The values of a statistic.

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
    /// The same statistic with peaks cut off: at those of `most`, and that of both pools also at
    /// the sum of the two pools' peaks. None is cut off below its current value, which is above
    /// `most` where peaks began while memory was away.
    pub(crate) fn with_peaks_within(self, most: PoolStats) -> PoolStats {
        let within = |stat: Stat, most: u64| Stat { peak: stat.peak.min(most.max(stat.current)), ..stat };
        let large_pool = within(self.large_pool, most.large_pool.peak);
        let small_pool = within(self.small_pool, most.small_pool.peak);
        let all = within(self.all, most.all.peak.min(large_pool.peak.saturating_add(small_pool.peak)));
        PoolStats { all, large_pool, small_pool }
    }
}
