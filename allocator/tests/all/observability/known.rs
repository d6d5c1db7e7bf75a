//! Known programs on segments: sizes, statistics and actions as PyTorch has them.

use std::time::Duration;

use aquifer_allocator::size_class::PoolKind;
use aquifer_allocator::{Action, Allocator, Config, HistoryOptions, PoolOptions, Snapshot};
use aquifer_device::{Device, Stream};
use aquifer_sim::{SimConfig, SimDriver};

use Action::{Alloc, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree, Snapshot as Taken};

fn setup(options: &str) -> (std::sync::Arc<SimDriver>, Device, Allocator) {
    let driver = SimDriver::new(SimConfig::new(1 << 30));
    let device = Device::new(driver.clone());
    let options = format!("backing:segments,{options}");
    let allocator = Allocator::new(&device, Config::parse(options.trim_end_matches(',')).unwrap()).unwrap();
    (driver, device, allocator)
}

fn actions(snapshot: &Snapshot) -> Vec<Action> {
    snapshot.trace().iter().map(|entry| entry.action).collect()
}

/// A stream with a lot of work before it, that uses what it is given.
fn busy_stream(driver: &SimDriver, device: &Device) -> Stream {
    let stream = device.stream().unwrap();
    driver.stall(stream.raw(), Duration::from_secs(1)).unwrap();
    stream.wait_for(&device.default_stream().tick()).unwrap();
    stream
}

#[test]
fn segments_have_pytorchs_sizes() {
    const MIB: u64 = 1 << 20;
    let vectors = [
        (512, 2 * MIB, PoolKind::Small),
        (MIB, 2 * MIB, PoolKind::Small),
        (MIB + 512, 20 * MIB, PoolKind::Large),
        (10 * MIB - 1, 10 * MIB, PoolKind::Large),
        (10 * MIB - 512, 20 * MIB, PoolKind::Large),
        (10 * MIB, 10 * MIB, PoolKind::Large),
        (21 * MIB + 1, 22 * MIB, PoolKind::Large),
    ];
    for (request, reserved, kind) in vectors {
        let (_, device, allocator) = setup("");
        let held = allocator.alloc_bytes(request, device.default_stream()).unwrap();
        let snapshot = allocator.snapshot();
        assert_eq!(snapshot.segments.len(), 1);
        assert_eq!((snapshot.segments[0].total_size, snapshot.segments[0].segment_type), (reserved, kind), "{request}");
        let stats = allocator.stats();
        assert_eq!(stats.reserved_bytes.all.current, reserved);
        assert_eq!(stats.requested_bytes.all.current, request);
        drop(held);
    }
}

#[test]
fn a_block_and_its_rest() {
    let (_, device, allocator) = setup("");
    let held = allocator.alloc_bytes((1 << 20) + 512, device.default_stream()).unwrap();
    let rest = (19 << 20) - 512;
    let totals = super::totals::totals(&allocator.snapshot());
    assert_eq!((totals.large_pool.inactive_split, totals.large_pool.inactive_split_bytes), (1, rest));
    assert_eq!(totals.small_pool.inactive_split, 0);
    drop(held);
    assert_eq!(super::totals::totals(&allocator.snapshot()).all.inactive_split, 0);
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (1, 1));
    assert_eq!(stats.segment.all.current, 1);
    allocator.empty_cache().unwrap();
    let stats = allocator.stats();
    assert_eq!((stats.segment.all.current, stats.segment.all.freed, stats.num_device_free), (0, 1, 1));
}

#[test]
fn actions_come_in_pytorchs_order() {
    let (driver, device, allocator) = setup("history:100");
    let stream = device.default_stream();
    let first = allocator.alloc_bytes(1000, stream).unwrap();
    let second = allocator.alloc_bytes(2000, stream).unwrap();
    drop(first);
    let busy = busy_stream(&driver, &device);
    second.record_stream(&busy).unwrap();
    busy.fill(second.ptr(), 0, 64).unwrap();
    drop(second);
    assert_eq!(
        actions(&allocator.snapshot()),
        [SegmentAlloc, Alloc, Alloc, FreeRequested, FreeCompleted, FreeRequested]
    );
    allocator.empty_cache().unwrap();
    allocator.alloc_bytes(2 << 30, stream).unwrap_err();
    let snapshot = allocator.snapshot();
    assert_eq!(actions(&snapshot)[6..], [Taken, FreeCompleted, SegmentFree, Oom]);
    let sizes: Vec<u64> = snapshot.trace().iter().map(|entry| entry.size).collect();
    assert_eq!(sizes, [2 << 20, 1000, 2000, 1000, 1000, 2000, 2048, 2000, 2 << 20, 2 << 30]);
}

#[test]
fn a_retry_releases_before_it_fails() {
    let (_, device, allocator) = setup("history:100");
    drop(allocator.alloc_bytes(600 << 20, device.default_stream()).unwrap());
    let held = allocator.alloc_bytes(700 << 20, device.default_stream()).unwrap();
    let snapshot = allocator.snapshot();
    assert_eq!(
        actions(&snapshot),
        [SegmentAlloc, Alloc, FreeRequested, FreeCompleted, SegmentFree, SegmentAlloc, Alloc]
    );
    let stats = allocator.stats();
    assert_eq!((stats.num_alloc_retries, stats.num_ooms, stats.num_device_alloc), (1, 0, 2));
    drop(held);
}

#[test]
fn skipped_actions_are_absent() {
    let (_, device, allocator) = setup("");
    drop(allocator.alloc_bytes(1000, device.default_stream()).unwrap());
    assert!(allocator.snapshot().trace().is_empty(), "off by default");
    let skip = vec![FreeRequested, SegmentAlloc, Taken];
    allocator.record_history(HistoryOptions { entries: 100, skip, clear: false });
    drop(allocator.alloc_bytes(5 << 20, device.default_stream()).unwrap());
    assert_eq!(actions(&allocator.snapshot()), [Alloc, FreeCompleted]);
    allocator.record_history(HistoryOptions { entries: 100, ..HistoryOptions::default() });
    assert_eq!(actions(&allocator.snapshot()), [Alloc, FreeCompleted], "starting again keeps what there is");
    allocator.record_history(HistoryOptions { entries: 100, clear: true, ..HistoryOptions::default() });
    assert_eq!(actions(&allocator.snapshot()), []);
    allocator.stop_history();
    allocator.record_history(HistoryOptions { entries: 100, ..HistoryOptions::default() });
    assert_eq!(actions(&allocator.snapshot()), [], "stopping forgets");
}

#[test]
fn a_shorter_ring_keeps_the_latest_entries() {
    let (_, device, allocator) = setup("history:100");
    let held: Vec<_> = (1..=9).map(|n| allocator.alloc_bytes(n * 512, device.default_stream()).unwrap()).collect();
    allocator.record_history(HistoryOptions { entries: 4, ..HistoryOptions::default() });
    let snapshot = allocator.snapshot();
    assert_eq!(snapshot.trace().iter().map(|entry| entry.size / 512).collect::<Vec<_>>(), [6, 7, 8, 9]);
    assert_eq!(snapshot.entries_overwritten, 6);
    drop(held);
}

#[test]
fn entries_name_the_private_pool_of_their_time() {
    let (_, device, allocator) = setup("history:100");
    let mut ids = Vec::new();
    for _ in 0..2 {
        let pool = allocator.create_pool(PoolOptions::default()).unwrap();
        drop(pool.alloc_bytes(1000, device.default_stream()).unwrap());
        ids.push(pool.id());
    }
    let snapshot = allocator.snapshot();
    for (entries, id) in snapshot.trace().chunks(5).zip(&ids) {
        assert_eq!(entries.len(), 5);
        assert!(entries.iter().all(|entry| entry.pool_id == *id), "{entries:?}");
    }
    assert_ne!(ids[0], ids[1]);
}

#[test]
fn private_pools_tell_what_they_hold() {
    let (_, device, allocator) = setup("");
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    assert_eq!(allocator.reserved_by_private_pools()[&pool.id()], 0);
    let (id, held) = (pool.id(), pool.alloc_bytes(3 << 20, device.default_stream()).unwrap());
    drop(pool);
    assert_eq!(allocator.reserved_by_private_pools()[&id], 20 << 20, "closed, but something is live");
    drop(held);
    allocator.empty_cache().unwrap();
    assert!(allocator.reserved_by_private_pools().is_empty());
}

#[test]
fn fragmentation_of_a_hole() {
    let (_, device, allocator) = setup("");
    let stream = device.default_stream();
    let mut held: Vec<_> = (0..4).map(|_| allocator.alloc_bytes(5 << 20, stream).unwrap()).collect();
    drop((held.remove(2), held.remove(0)));
    let fragmentation = allocator.fragmentation(6 << 20);
    assert_eq!(
        (fragmentation.free_bytes, fragmentation.largest_free_block, fragmentation.free_blocks),
        (10 << 20, 5 << 20, 2)
    );
    assert!((fragmentation.external - 0.5).abs() < 1e-9 && (fragmentation.unusable - 1.0).abs() < 1e-9);
    let [range] = fragmentation.free_sizes[..] else { panic!("{fragmentation}") };
    assert_eq!((range.at_least, range.count, range.bytes), (4 << 20, 2, 10 << 20));
    assert!(allocator.fragmentation(5 << 20).unusable.abs() < 1e-9);
    let text = fragmentation.to_string();
    assert!(text.contains("50.0 % outside the largest, 100.0 % unusable for 6.00 MiB"), "{text}");
    drop(held);
    let (_, device, allocator) = setup("");
    let held = [3, 3].map(|mib| allocator.alloc_bytes(mib << 20, device.default_stream()).unwrap());
    let [freed, _held] = held;
    drop(freed);
    let text = allocator.fragmentation(1).to_string();
    let reserved = "reserved:  20.00 MiB in 1 segments, 0 of them wholly free\n           0 bytes of it can go back to the device\n";
    assert!(text.starts_with(reserved), "{text}");
}

#[test]
fn the_summary_names_the_device() {
    let (_, device, allocator) = setup("");
    let held = allocator.alloc_bytes(100 << 20, device.default_stream()).unwrap();
    let text = allocator.summary();
    assert!(text.contains("Aquifer memory summary, device 0: Simulated"), "{text}");
    assert!(text.contains("| Allocated memory      | 102400 KiB | 102400 KiB | 102400 KiB |      0 B   |"), "{text}");
    drop(held);
}
