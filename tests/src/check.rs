//! Statistics compared with values recomputed from the snapshot and from a program's live blocks.

use std::collections::BTreeSet;

use aquifer::Allocator;
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

/// Panics unless the statistics equal those recomputed from the snapshot, agree with each other,
/// and agree with `live`: the number of live blocks and the bytes that their holders asked for.
pub fn statistics(allocator: &Allocator, live: (u64, u64)) {
    let (stats, snapshot) = (allocator.stats(), allocator.snapshot());
    snapshot_is_whole(&snapshot);
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
    for PoolStats { all, large_pool, small_pool, .. } in pooled(&stats) {
        for stat in [all, large_pool, small_pool] {
            assert_eq!(stat.allocated.wrapping_sub(stat.freed), stat.current, "{stat:?}");
            assert!(stat.peak >= stat.current, "{stat:?}");
        }
        assert_eq!(all.current, large_pool.current + small_pool.current);
        assert!(all.peak <= large_pool.peak + small_pool.peak && all.peak >= large_pool.peak.max(small_pool.peak));
    }
    let granule = allocator.granule_bytes();
    match granule {
        Some(granule) => assert!(spare.is_multiple_of(granule)),
        None => assert_eq!(stats.num_device_alloc - stats.num_device_free, stats.segment.all.current),
    }
    assert_eq!(stats.allocation.all.current, live.0, "live blocks");
    assert!(live.1 <= stats.requested_bytes.all.current, "{} bytes are held", live.1);
    let [requested, allocated, active, reserved] =
        [stats.requested_bytes, stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes].map(|s| s.all.current);
    assert!(allocated <= active && requested <= active && active <= reserved, "{stats:?}");
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (allocated, reserved));
}

/// Blocks tile their segments, and segments do not overlap.
fn snapshot_is_whole(snapshot: &Snapshot) {
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

/// Panics if a request for `padded` bytes, alignment included, was refused although what cannot be
/// released would have left room for it.
///
/// What cannot be released: segments and frames of which a part is live, and those of open private
/// pools. By the time of the report everything that waited is free.
///
/// Nothing but the allocator takes memory in this process.
pub fn out_of_memory_was_right(allocator: &Allocator, report: &OomReport, padded: u64, other: u64) {
    if let Some(memory) = report.attribution.as_ref().filter(|memory| memory.rest_of_process.is_some()) {
        assert_eq!((memory.suggested_headroom, memory.unattributed), (0, 0), "{report}");
    }
    let config = allocator.config();
    if config.fail_fast {
        return;
    }
    let open = allocator.reserved_by_private_pools();
    let snapshot = allocator.snapshot();
    let is_open = |segment: &Segment| open.contains_key(&segment.segment_pool_id);
    let pinned: u64 = snapshot.segments.iter().map(|segment| pinned_bytes(segment, is_open(segment), allocator)).sum();
    let device = allocator.device().info().total_bytes.saturating_sub(other + config.headroom);
    let most = device.min(allocator.limit().unwrap_or(u64::MAX));
    // A rest of a limit or a device that is less than a granule is of no use.
    let useless = allocator.granule_bytes().map_or(0, |granule| granule - 1);
    assert!(
        pinned.saturating_add(report.growth + useless) > most,
        "refused, but {pinned} bytes pinned of {most}: {report}"
    );
    let default = |segment: &&Segment| segment.segment_pool_id == (0, 0);
    let waiting = snapshot.blocks().any(|(_, block)| block.state == BlockState::ActivePendingFree);
    assert!(!waiting, "refused while blocks wait: {report}");
    if report.pool.is_none() && !config.no_cache {
        let Some(rounded) = size_class::round_checked(padded) else { return };
        let kind = PoolKind::of(rounded);
        let of_kind = snapshot.segments.iter().filter(default).filter(|segment| segment.segment_type == kind);
        let free = |segment: &Segment| {
            let blocks = segment.blocks.iter().filter(|block| block.state == BlockState::Inactive);
            blocks.map(|block| block.size).max().unwrap_or(0)
        };
        let crosses = config.cross_stream != aquifer_allocator::config::CrossStream::Off;
        let largest = of_kind.map(free).max().unwrap_or(0);
        assert!(!crosses || largest < rounded, "refused, but {largest} bytes are free in one piece: {report}");
    }
}

/// The part of a segment that can be neither released nor moved; where frames have several
/// granules, at least that part.
fn pinned_bytes(segment: &Segment, is_open: bool, allocator: &Allocator) -> u64 {
    let mut active = segment.blocks.iter().filter(|block| block.state.is_active()).peekable();
    match allocator.granule_bytes().filter(|_| segment.is_expandable && !is_open) {
        Some(granule) => {
            let touched =
                active.flat_map(|block| block.address / granule..(block.address + block.size).div_ceil(granule));
            let touched = touched.collect::<BTreeSet<u64>>();
            // The starts of frames are not known here. A frame may reach beyond either end of the
            // touched granules.
            let beyond = frame_bytes(allocator, granule) - granule;
            let ends = touched.iter().filter(|&&at| !touched.contains(&(at + 1))).count() as u64;
            (touched.len() as u64 * granule + 2 * ends * beyond).min(segment.total_size)
        }
        None if is_open || active.peek().is_some() => segment.total_size,
        None => 0,
    }
}

/// Bytes of the largest frame that there may be. Without the option, the small devices of tests
/// have frames of one granule.
fn frame_bytes(allocator: &Allocator, granule: u64) -> u64 {
    allocator.config().frame.unwrap_or(granule).max(granule)
}
