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
