//! Statistics of an allocator under PyTorch's names.

use std::collections::BTreeMap;

use crate::accounting::fragmentation::held_in;
use crate::allocator::Allocator;
use crate::core::counters::{Counter, Counters, PoolStats, Stat};

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

impl MemoryStats {
    fn read(counters: &Counters) -> MemoryStats {
        let events = |counter: &Counter| counter.read().allocated;
        MemoryStats {
            allocation: counters.blocks.read(),
            segment: counters.segment.read(),
            active: counters.active(),
            allocated_bytes: counters.bytes.read(),
            reserved_bytes: counters.reserved_bytes.read(),
            active_bytes: counters.active_bytes(),
            requested_bytes: counters.requested.read(),
            num_alloc_retries: events(&counters.num_alloc_retries),
            num_ooms: events(&counters.num_ooms),
            num_sync_all_streams: events(&counters.num_sync_all_streams),
            num_device_alloc: events(&counters.num_device_alloc),
            num_device_free: events(&counters.num_device_free),
            num_oom_rejections: events(&counters.num_oom_rejections),
            remaps: events(&counters.remaps),
            granules_moved: events(&counters.granules_moved),
            frames_split: events(&counters.frames_split),
            graph_bytes_lent: events(&counters.graph_bytes_lent),
            graph_bytes_returned: events(&counters.graph_bytes_returned),
            cross_stream_reuses: events(&counters.cross_stream_reuses),
            cross_stream_waits: events(&counters.cross_stream_waits),
        }
    }

    /// The 123 entries of PyTorch's `memory_stats()`, by its keys, such as
    /// `allocated_bytes.all.peak`.
    ///
    /// Some are always the same here. Free pieces of segments (`inactive_split` and
    /// `inactive_split_bytes`) are not counted, and are 0: [`Snapshot::totals`] sums them up. No block
    /// is oversize, so `oversize_allocations` and `oversize_segments` are 0, and `max_split_size` is
    /// -1 for unlimited.
    ///
    /// [`Snapshot::totals`]: crate::Snapshot::totals
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let buffer = allocator.alloc_bytes(1_000, device.default_stream())?;
    /// let stats = allocator.stats().to_map();
    /// assert_eq!(stats["allocated_bytes.small_pool.current"], 1024);
    /// assert_eq!(stats["requested_bytes.all.peak"], 1000);
    /// assert_eq!(stats["max_split_size"], -1);
    /// # drop(buffer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn to_map(&self) -> BTreeMap<String, i64> {
        let pooled = [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &PoolStats::default()),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &PoolStats::default()),
            ("requested_bytes", &self.requested_bytes),
        ];
        let plain = [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("num_oom_rejections", self.num_oom_rejections),
        ];
        let mut map: BTreeMap<String, i64> =
            plain.into_iter().map(|(name, count)| (name.to_owned(), integer(count))).collect();
        for (name, stats) in pooled {
            insert(&mut map, &format!("{name}.all"), stats.all);
            insert(&mut map, &format!("{name}.large_pool"), stats.large_pool);
            insert(&mut map, &format!("{name}.small_pool"), stats.small_pool);
        }
        insert(&mut map, "oversize_allocations", Stat::default());
        insert(&mut map, "oversize_segments", Stat::default());
        map.insert("max_split_size".to_owned(), -1);
        map
    }
}

/// Puts the four values of a statistic into the map.
fn insert(map: &mut BTreeMap<String, i64>, name: &str, stat: Stat) {
    let Stat { current, peak, allocated, freed } = stat;
    for (part, value) in [("current", current), ("peak", peak), ("allocated", allocated), ("freed", freed)] {
        map.insert(format!("{name}.{part}"), integer(value));
    }
}

/// A count as a signed integer, as PyTorch has; larger counts than that holds are cut off.
fn integer(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Allocator {
    /// The most bytes that were allocated at once since the last [`Allocator::reset_peak_stats`],
    /// as PyTorch's `max_memory_allocated()`.
    pub fn max_memory_allocated(&self) -> u64 {
        self.stats().allocated_bytes.all.peak
    }

    /// The most bytes that were reserved from the device at once since the last
    /// [`Allocator::reset_peak_stats`], as PyTorch's `max_memory_reserved()`.
    pub fn max_memory_reserved(&self) -> u64 {
        self.stats().reserved_bytes.all.peak
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        self.state().enter().counters.reset_peaks();
    }

    /// Starts the accumulated values (`allocated`, `freed`) and the numbers of events (`num_…`)
    /// from zero.
    pub fn reset_accumulated_stats(&self) {
        self.state().enter().counters.reset_accumulated();
    }

    /// The allocator's statistics.
    pub fn stats(&self) -> MemoryStats {
        self.state().read(|shared| MemoryStats::read(&shared.counters))
    }

    /// Bytes that each private pool holds from the device, by its id, for open pools and for closed
    /// ones that still hold memory. They are part of `reserved_bytes`.
    pub fn reserved_by_private_pools(&self) -> BTreeMap<(u64, u64), u64> {
        let shared = self.state().shared();
        let open = shared.pools.iter().filter(|private| private.open);
        let mut bytes: BTreeMap<(u64, u64), u64> = open.map(|private| (private.id, 0)).collect();
        for region in shared.heap().regions() {
            let Some(private) = shared.pools.owner_of(region.pool) else { continue };
            let held = held_in(&shared, region);
            if held > 0 {
                *bytes.entry(private.id).or_default() += held;
            }
        }
        bytes
    }
}
