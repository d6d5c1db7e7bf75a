//! Statistics of a pool, named as in PyTorch's `host_memory_stats()`.
//!
//! All counters are written and read under the pool's lock, so every value is exact, and all are of
//! the same moment.

use std::time::Duration;

use aquifer_allocator::Stat;

/// Statistics of a pool of pinned memory, named as in PyTorch's
/// `torch.cuda.host_memory_stats()`; additions are marked. Bytes are those of blocks, after
/// rounding.
///
/// PyTorch takes every block from the system by itself. Here blocks are carved from slabs:
/// `allocations` and `allocated_bytes` count slabs, which the system lends, `active_requests` and
/// `active_bytes` blocks.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::PinnedPool;
/// let device = aquifer::open("sim:24GiB")?;
/// let pool = PinnedPool::new(&device);
/// let buffer = pool.alloc::<f32>(10 * 1024)?;
/// let stats = pool.stats();
/// assert_eq!((stats.active_bytes.current, stats.allocated_bytes.current), (40_960, 2 << 20));
/// assert_eq!(stats.iter().find(|(name, _)| *name == "active_requests.peak"), Some(("active_requests.peak", 1)));
/// # drop(buffer);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostMemoryStats {
    /// Slabs held from the system, by number.
    pub allocations: Stat,
    /// Slabs held from the system, in bytes.
    pub allocated_bytes: Stat,
    /// Blocks in use, and those given back that the device still used when the pool last looked, by
    /// number.
    pub active_requests: Stat,
    /// The same blocks, in bytes.
    pub active_bytes: Stat,
    /// The number of slabs that came from the system.
    pub num_host_alloc: u64,
    /// The number of slabs that went back to the system.
    pub num_host_free: u64,
    /// The time of taking slabs from the system.
    pub host_alloc_time: TimeStat,
    /// The time of giving slabs back.
    pub host_free_time: TimeStat,
    /// The number of waits of the host for the device, to reuse memory or to touch it. Not in
    /// PyTorch.
    pub num_waits: u64,
    /// The time of these waits. Not in PyTorch.
    pub wait_time: TimeStat,
    /// The number of requests that failed for lack of pinned memory. Not in PyTorch.
    pub num_ooms: u64,
}

/// Durations of calls, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimeStat {
    /// Sum.
    pub total: u64,
    /// Longest.
    pub max: u64,
    /// Shortest; 0 if there was none.
    pub min: u64,
    /// The number of copies that were added.
    pub count: u64,
    /// Mean, rounded down; 0 if there was none.
    pub avg: u64,
}

impl HostMemoryStats {
    /// The 28 entries of PyTorch's dictionary, by its keys.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        macro_rules! entries {
            ($($stat:ident { $($part:ident)* })*) => {
                [$($((concat!(stringify!($stat), ".", stringify!($part)), self.$stat.$part),)*)*]
            };
        }
        let parts = entries! {
            allocations { current peak allocated freed }
            allocated_bytes { current peak allocated freed }
            active_requests { current peak allocated freed }
            active_bytes { current peak allocated freed }
            host_alloc_time { total max min count avg }
            host_free_time { total max min count avg }
        };
        let plain = [("num_host_alloc", self.num_host_alloc), ("num_host_free", self.num_host_free)];
        parts.into_iter().chain(plain)
    }

    pub(super) fn reset_peaks(&mut self) {
        for stat in self.stats_mut() {
            stat.peak = stat.current;
        }
    }

    pub(super) fn reset_accumulated(&mut self) {
        for stat in self.stats_mut() {
            (stat.allocated, stat.freed) = (0, 0);
        }
        (self.host_alloc_time, self.host_free_time, self.wait_time) = Default::default();
        (self.num_host_alloc, self.num_host_free, self.num_waits, self.num_ooms) = Default::default();
    }

    fn stats_mut(&mut self) -> [&mut Stat; 4] {
        [&mut self.allocations, &mut self.allocated_bytes, &mut self.active_requests, &mut self.active_bytes]
    }

    /// A block of `bytes` bytes is in use.
    #[inline]
    pub(super) fn activate(&mut self, bytes: u64) {
        add(&mut self.active_requests, 1);
        add(&mut self.active_bytes, bytes);
    }

    /// It is not any more.
    #[inline]
    pub(super) fn deactivate(&mut self, bytes: u64) {
        sub(&mut self.active_requests, 1);
        sub(&mut self.active_bytes, bytes);
    }

    /// A slab came, after the system took `time`.
    pub(super) fn gained(&mut self, bytes: u64, time: Duration) {
        add(&mut self.allocations, 1);
        add(&mut self.allocated_bytes, bytes);
        self.num_host_alloc += 1;
        self.host_alloc_time.note(time);
    }

    /// A slab went.
    pub(super) fn lost(&mut self, bytes: u64, time: Duration) {
        sub(&mut self.allocations, 1);
        sub(&mut self.allocated_bytes, bytes);
        self.num_host_free += 1;
        self.host_free_time.note(time);
    }

    /// The host waited for the device.
    pub(super) fn waited(&mut self, time: Duration) {
        self.num_waits += 1;
        self.wait_time.note(time);
    }
}

impl TimeStat {
    fn note(&mut self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.min = if self.count == 0 { micros } else { self.min.min(micros) };
        self.max = self.max.max(micros);
        self.total = self.total.saturating_add(micros);
        self.count += 1;
        self.avg = self.total / self.count;
    }
}

#[inline]
fn add(stat: &mut Stat, n: u64) {
    stat.current += n;
    stat.allocated += n;
    stat.peak = stat.peak.max(stat.current);
}

#[inline]
fn sub(stat: &mut Stat, n: u64) {
    stat.current -= n;
    stat.freed += n;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_those_of_pytorch() {
        let mut keys: Vec<_> = HostMemoryStats::default().iter().map(|(key, _)| key).collect();
        assert_eq!(keys.len(), 28);
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 28);
        assert!(
            keys.contains(&"active_bytes.peak")
                && keys.contains(&"host_free_time.avg")
                && keys.contains(&"num_host_free")
        );
    }

    #[test]
    fn times_add_up() {
        let mut stats = HostMemoryStats::default();
        stats.gained(512, Duration::from_micros(10));
        stats.gained(512, Duration::from_micros(5));
        assert_eq!(stats.host_alloc_time, TimeStat { total: 15, max: 10, min: 5, count: 2, avg: 7 });
    }
}
