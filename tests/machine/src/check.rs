//! Statistics compared with values recomputed from the snapshot and from a program's live blocks.
//! What is wrong panics.

use aquifer::Allocator;
use aquifer_allocator::config::CrossStream;
use aquifer_allocator::size_class::{self, PoolKind};
use aquifer_allocator::snapshot::{BlockState, Segment, Snapshot};
use aquifer_allocator::{MemoryStats, OomReport, PoolStats, Stat};

/// Values for each pool, in one order; see [`NAMES`].
type Sums = [u64; 7];

/// The names of the values of [`Sums`].
const NAMES: [&str; 7] =
    ["allocation", "segment", "active", "allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"];

/// Sums over the segments of one pool. As in PyTorch, mapped memory is in no segment.
fn sums(segments: &mut dyn Iterator<Item = &Segment>) -> Sums {
    let mut sums = [0; 7];
    for segment in segments {
        sums[1] += u64::from(!segment.is_expandable);
        sums[4] += segment.total_size;
        for block in &segment.blocks {
            let (is_live, is_active) = (block.state == BlockState::ActiveAllocated, block.state.is_active());
            for (number, bytes, counts) in [(0, 3, is_live), (2, 5, is_active)] {
                (sums[number], sums[bytes]) =
                    (sums[number] + u64::from(counts), sums[bytes] + u64::from(counts) * block.size);
            }
            sums[6] += if is_active { block.requested_size } else { 0 };
        }
    }
    sums
}

fn pooled(stats: &MemoryStats) -> [PoolStats; 7] {
    [
        stats.allocation,
        stats.segment,
        stats.active,
        stats.allocated_bytes,
        stats.reserved_bytes,
        stats.active_bytes,
        stats.requested_bytes,
    ]
}

/// Panics unless the statistics are consistent, and agree with `live`: the number of live blocks and
/// the bytes that their holders asked for.
pub fn statistics(allocator: &Allocator, live: (u64, u64)) {
    consistent(allocator);
    let stats = allocator.stats();
    assert_eq!(stats.allocation.all.current, live.0, "live blocks");
    assert!(live.1 <= stats.requested_bytes.all.current, "{} bytes are held", live.1);
}

/// Panics unless the statistics equal those recomputed from the snapshot, and agree with each other,
/// while no other thread works.
pub fn consistent(allocator: &Allocator) {
    let (stats, snapshot) = (allocator.stats(), allocator.snapshot());
    snapshot_is_whole(&snapshot);
    plausible(&stats);
    let kind = |kind: PoolKind| snapshot.segments.iter().filter(move |segment| segment.segment_type == kind);
    let spare = allocator.fragmentation(0).spare_bytes;
    // Spare memory is in no segment, and counts as the large pool's.
    let with_spare = |mut sums: Sums| {
        sums[4] += spare;
        sums
    };
    let current = |of: fn(&PoolStats) -> Stat| pooled(&stats).map(|stats| of(&stats).current);
    assert_eq!(current(|stats| stats.all), with_spare(sums(&mut snapshot.segments.iter())), "{NAMES:?}");
    assert_eq!(current(|stats| stats.large_pool), with_spare(sums(&mut kind(PoolKind::Large))), "{NAMES:?}");
    assert_eq!(current(|stats| stats.small_pool), sums(&mut kind(PoolKind::Small)), "{NAMES:?}");
    match allocator.granule_bytes() {
        Some(granule) => assert!(spare.is_multiple_of(granule)),
        None => assert_eq!(stats.num_device_alloc - stats.num_device_free, stats.segment.all.current),
    }
    let (allocated, active, reserved) = (stats.allocated_bytes.all, stats.active_bytes.all, stats.reserved_bytes.all);
    assert!(active.current <= reserved.current, "{stats:?}");
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (allocated.current, reserved.current));
}

/// Panics where statistics of one moment contradict each other.
pub fn plausible(stats: &MemoryStats) {
    for PoolStats { all, large_pool, small_pool, .. } in pooled(stats) {
        for stat in [all, large_pool, small_pool] {
            assert_eq!(stat.allocated.wrapping_sub(stat.freed), stat.current, "{stat:?}");
            assert!(stat.peak >= stat.current, "{stat:?}");
        }
        assert_eq!(all.current, large_pool.current + small_pool.current);
        assert!(all.peak <= large_pool.peak + small_pool.peak && all.peak >= large_pool.peak.max(small_pool.peak));
    }
    // Blocks that other streams still use are active and requested, and not allocated.
    let [requested, allocated, active] =
        [stats.requested_bytes, stats.allocated_bytes, stats.active_bytes].map(|stat| stat.all.current);
    assert!(allocated <= active && requested <= active, "{stats:?}");
}

/// Blocks tile their segments, and segments do not overlap.
pub fn snapshot_is_whole(snapshot: &Snapshot) {
    let mut end = 0;
    for segment in &snapshot.segments {
        assert!(end <= segment.address, "segments overlap at {:#x}", segment.address);
        end = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, end, "a gap or an overlap in the segment at {:#x}", segment.address);
            assert!(block.size > 0 && (block.state.is_active() || block.requested_size == 0), "{block:?}");
            assert!(block.requested_size <= block.size, "{block:?}");
            end += block.size;
        }
        assert_eq!(end, segment.address + segment.total_size);
    }
}

/// Compares the results of all reading calls with the statistics.
pub fn readers(allocator: &Allocator) {
    let stats = allocator.stats();
    assert!(stats.to_string().contains("Allocated memory"));
    let fragmentation = allocator.fragmentation(1 << 20);
    assert_eq!(fragmentation.reserved_bytes, stats.reserved_bytes.all.current);
    assert_eq!(fragmentation.allocated_bytes, stats.allocated_bytes.all.current);
    let parts = fragmentation.allocated_bytes + fragmentation.waiting_bytes + fragmentation.free_bytes;
    assert_eq!(parts + fragmentation.spare_bytes, fragmentation.reserved_bytes);
    assert_eq!(fragmentation.segments, allocator.snapshot().segments.len() as u64);
    assert!(!format!("{fragmentation} {allocator:?}").is_empty());
    assert_eq!(stats.to_map().len(), 123);
}

/// Panics if a report counts memory of this process that no open allocator has, where there is none.
pub fn attribution(report: &OomReport) {
    if let Some(memory) = report.attribution.as_ref().filter(|memory| memory.rest_of_process.is_some()) {
        assert_eq!((memory.suggested_headroom, memory.unattributed), (0, 0), "{report}");
    }
}

/// Panics if the report of a refusal contradicts what the allocator holds when this is called. Nothing
/// else may take memory in this process, and the host may wait for the device. `padded` is a request
/// of the heap with padding for an alignment.
pub fn refusal(allocator: &Allocator, report: &OomReport, padded: Option<u64>) {
    let (config, snapshot) = (allocator.config(), allocator.snapshot());
    if config.fail_fast {
        return;
    }
    let waiting = snapshot.blocks().any(|(_, block)| block.state == BlockState::ActivePendingFree);
    assert!(!waiting, "refused while blocks wait: {report}");
    let Some(rounded) = padded.and_then(size_class::round_checked) else { return };
    if report.pool.is_none() && !config.no_cache && config.cross_stream != CrossStream::Off {
        let of_kind =
            |segment: &Segment| segment.segment_pool_id == (0, 0) && segment.segment_type == PoolKind::of(rounded);
        let free = snapshot.blocks().filter(|(segment, block)| of_kind(segment) && block.state == BlockState::Inactive);
        let largest = free.map(|(_, block)| block.size).max().unwrap_or(0);
        assert!(largest < rounded, "refused, but {largest} bytes are free in one piece: {report}");
    }
}
