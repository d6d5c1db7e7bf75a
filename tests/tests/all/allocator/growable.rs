//! Growable memory: one address, memory as needed, nothing reused before it is done, nothing lost
//! in a failure.

use aquifer_tests::check::readers;
use aquifer_tests::prelude::*;

const CAPACITY: u64 = 128 * MIB;

fn bench(options: &str) -> Bench {
    Bench::new(CAPACITY, options)
}

#[test]
fn memory_grows_in_place_and_keeps_its_contents() {
    let bench = bench("");
    let Bench { allocator, stream, .. } = &bench;
    let mut cache = bench.growable(200 * MIB);
    assert_eq!((cache.bytes(), allocator.memory_reserved()), (0, 0));
    let ptr = cache.ptr();
    cache.grow_to(3 * MIB, stream).unwrap();
    stream.fill(ptr, 7, 3 * MIB).unwrap();
    for mib in [4, 9, 60, 100] {
        cache.grow_to(mib * MIB, stream).unwrap();
        let last = ptr.offset(mib * MIB - 1);
        stream.fill(last, 9, 1).unwrap();
        assert_eq!((cache.ptr(), bench.byte(ptr), bench.byte(last)), (ptr, 7, 9));
        assert_eq!((cache.range(), cache.capacity()), (ptr.0..ptr.0 + mib * MIB, 200 * MIB));
        assert_eq!(allocator.memory_allocated(), mib.next_multiple_of(2) * MIB);
        assert_eq!(allocator.memory_reserved(), allocator.memory_allocated());
    }
    cache.grow_to(5 * MIB, stream).unwrap(); // it is larger
    assert_eq!(cache.bytes(), 100 * MIB);
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.current, stats.requested_bytes.all.current), (1, 100 * MIB));
    let snapshot = allocator.snapshot();
    assert_eq!((snapshot.segments.len(), snapshot.segments[0].total_size), (1, 100 * MIB));
    assert_eq!((snapshot.segments[0].address, snapshot.segments[0].active_size), (ptr.0, 100 * MIB));
    drop(cache);
    bench.assert_returned();
}

#[test]
fn memory_given_up_serves_others_once_its_last_use_is_done() {
    let bench = bench("");
    let Bench { driver, allocator, stream, side, .. } = &bench;
    let mut cache = bench.growable(CAPACITY);
    cache.grow_to(120 * MIB, stream).unwrap();
    driver.stall(side, Duration::from_secs(1)).unwrap();
    side.wait_for(&stream.tick()).unwrap();
    side.fill(cache.ptr(), 1, 120 * MIB).unwrap();
    let calls = driver.calls_made();
    cache.shrink_to(20 * MIB, side).unwrap();
    assert_eq!(driver.calls_made(), calls, "shrinking makes no driver call");
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (20 * MIB, 120 * MIB));
    assert!(driver.mapping_at(cache.ptr().offset(100 * MIB)).is_some(), "its last use is not done");
    let small = allocator.alloc_bytes(6 * MIB, stream).unwrap();
    let large = allocator.alloc_bytes(90 * MIB, stream).unwrap(); // waits
    stream.fill(large.ptr(), 2, 90 * MIB).unwrap();
    assert!(driver.now_ns() >= 1_000_000_000);
    assert_eq!(bench.byte(cache.ptr()), 1);
    drop((small, large, cache));
    bench.assert_returned();
}

#[test]
fn growing_again_takes_back_memory_that_was_not_recycled() {
    let bench = bench("");
    let Bench { driver, allocator, stream, side, .. } = &bench;
    let mut cache = bench.growable(CAPACITY);
    cache.grow_to(100 * MIB, stream).unwrap();
    stream.fill(cache.ptr(), 5, 100 * MIB).unwrap();
    cache.shrink_to(MIB, stream).unwrap();
    let calls = driver.calls_made();
    cache.grow_to(50 * MIB, stream).unwrap();
    assert_eq!(driver.calls_made(), calls, "nothing to ask the driver on the same stream");
    assert_eq!(allocator.memory_reserved(), 100 * MIB);
    // Another stream waits for the last use, on the device.
    cache.grow_to(100 * MIB, side).unwrap();
    side.fill(cache.ptr().offset(60 * MIB), 6, MIB).unwrap();
    side.synchronize().unwrap();
    drop(cache);
    bench.assert_returned();
}

/// Growth into memory that was given up comes after its last uses on every stream, and so does
/// further growth within the same granule.
#[test]
fn growing_again_comes_after_the_last_uses_of_the_memory() {
    for (large, small) in [(8, 4), (8, 5), (8, 7), (7, 6), (9, 5)] {
        let bench = bench("");
        let Bench { driver, device, stream, side, .. } = &bench;
        let third = device.stream().unwrap();
        let mut cache = bench.growable(CAPACITY);
        cache.grow_to(large * MIB, stream).unwrap();
        driver.stall(side, Duration::from_secs(1)).unwrap();
        side.wait_for(&stream.tick()).unwrap();
        cache.record_stream(side).unwrap();
        side.fill(cache.ptr().offset(small * MIB), 1, (large - small) * MIB).unwrap();
        cache.shrink_to(small * MIB, side).unwrap();
        let middle = small * MIB + MIB / 2;
        cache.grow_to(middle, stream).unwrap();
        stream.fill(cache.ptr().offset(small * MIB), 2, MIB / 2).unwrap();
        cache.grow_to(large * MIB, &third).unwrap();
        third.fill(cache.ptr().offset(middle), 3, large * MIB - middle).unwrap();
        device.synchronize().unwrap();
        assert_eq!(bench.byte(cache.ptr().offset(small * MIB)), 2);
        assert_eq!(bench.byte(cache.ptr().offset(large * MIB - 1)), 3);
        drop(cache);
        bench.assert_returned();
    }
}

#[test]
fn access_guards_come_after_growth_of_any_size() {
    for (from, to) in [(7, 8), (7, 9), (5, 6)] {
        let bench = bench("");
        let Bench { driver, device, stream, side, .. } = &bench;
        let mut cache = bench.growable(CAPACITY);
        cache.grow_to(from * MIB, stream).unwrap();
        let write = |cache: &Growable| {
            let buffer = Buffer::<u8>::of(cache.storage());
            let _access = AccessGuard::acquire(side, &[(buffer.storage(), AccessKind::Write)]).unwrap();
            side.fill(buffer.ptr(), 1, buffer.bytes()).unwrap();
        };
        write(&cache);
        // Work on bare addresses, and then growth on the same stream.
        driver.stall(stream, Duration::from_secs(1)).unwrap();
        stream.wait_for(&side.tick()).unwrap();
        stream.fill(cache.ptr(), 2, from * MIB).unwrap();
        cache.grow_to(to * MIB, stream).unwrap();
        write(&cache);
        device.synchronize().unwrap();
        assert_eq!(bench.byte(cache.ptr()), 1);
        drop(cache);
        bench.assert_returned();
    }
}

#[test]
fn addresses_of_dropped_growables_come_back() {
    let bench = bench("");
    let most = bench.driver.addresses().unwrap() / CAPACITY;
    (0..most + 10).for_each(|_| drop(bench.growable(CAPACITY)));
    bench.assert_returned();
}

#[test]
fn growth_takes_free_granules_before_new_ones() {
    let bench = bench("");
    let Bench { device, allocator, stream, .. } = &bench;
    drop(allocator.alloc_bytes(100 * MIB, stream).unwrap());
    let created = device.driver_calls().of(Operation::CreatePhysical);
    let mut cache = bench.growable(CAPACITY);
    cache.grow_to(100 * MIB, stream).unwrap();
    assert_eq!(device.driver_calls().of(Operation::CreatePhysical), created);
    assert_eq!(allocator.memory_reserved(), 100 * MIB);
    cache.shrink_to(0, stream).unwrap();
    stream.synchronize().unwrap();
    let block = allocator.alloc_bytes(100 * MIB, stream).unwrap();
    assert_eq!(device.driver_calls().of(Operation::CreatePhysical), created);
    drop((block, cache));
    bench.assert_returned();
}

#[test]
fn the_limit_holds_and_growth_makes_room() {
    let bench = bench("limit_mb:64");
    let Bench { allocator, stream, .. } = &bench;
    let held = Arc::new(Mutex::new(Some(allocator.alloc_bytes(30 * MIB, stream).unwrap())));
    let scope = TagScope::new("keys and values");
    let mut cache = bench.growable(CAPACITY);
    drop(scope);
    cache.grow_to(20 * MIB, stream).unwrap();
    let error = cache.grow_to(50 * MIB, stream).unwrap_err();
    let report = error.report().unwrap();
    assert_eq!((report.limit, report.requested), (Some(64 * MIB), 30 * MIB));
    assert!(report.largest_tags.contains(&(Some("keys and values".to_owned()), 20 * MIB)));
    assert_eq!((cache.bytes(), allocator.memory_allocated()), (20 * MIB, 50 * MIB));
    let freed = held.clone();
    let _reclaimer =
        allocator.register_reclaimer(0, "drop it", move |_| freed.lock().unwrap().take().map_or(0, |old| old.bytes()));
    cache.grow_to(50 * MIB, stream).unwrap();
    assert!(allocator.memory_reserved() <= 64 * MIB);
    assert!(matches!(cache.grow_to(CAPACITY + 1, stream), Err(AllocError::BeyondCapacity { .. })));
    drop(cache);
    bench.assert_returned();
}

#[test]
fn growth_on_a_stream_that_never_allocated_is_refused_with_a_report() {
    let bench = bench("limit_mb:20");
    let mut cache = bench.growable(CAPACITY);
    let error = cache.grow_to(30 * MIB, &bench.side).unwrap_err();
    assert_eq!(error.report().unwrap().stream_id, bench.side.id());
    assert_eq!((cache.bytes(), bench.allocator.memory_reserved()), (0, 0));
}

#[test]
fn wrong_devices_and_sizes_are_refused() {
    let Bench { stream, device, .. } = &bench("");
    let Bench { allocator, .. } = &bench("");
    assert!(matches!(allocator.growable(MIB, stream), Err(AllocError::Request(RequestError::WrongDevice { .. }))));
    let own = allocator.device().default_stream();
    assert!(matches!(allocator.growable(1 << 60, own), Err(AllocError::TooLarge { .. })));
    assert!(matches!(
        allocator.growable(MIB, own).unwrap().grow_to(MIB, device.default_stream()),
        Err(AllocError::Request(RequestError::WrongDevice { .. }))
    ));
}

#[test]
fn more_than_any_device_has_is_refused_before_it_is_laid_out() {
    let bench = bench("");
    let mut cache = bench.growable(bench.driver.addresses().unwrap());
    let calls = bench.driver.calls_made();
    assert!(cache.grow_to(cache.capacity(), &bench.stream).unwrap_err().is_out_of_memory());
    let made = bench.driver.calls_made() - calls;
    assert!(made < 20, "{made} calls");
    drop(cache);
    bench.assert_returned();
}

#[test]
fn growth_that_fails_at_any_call_changes_nothing() {
    let operations =
        [Operation::CreatePhysical, Operation::Map, Operation::SetAccess, Operation::Unmap, Operation::ReleasePhysical];
    let codes = [Code(999), Code::OUT_OF_MEMORY];
    for (operation, code, nth) in operations
        .into_iter()
        .flat_map(|operation| codes.map(|code| (operation, code)))
        .flat_map(|(operation, code)| [1, 2, 7].map(|nth| (operation, code, nth)))
    {
        let bench = bench("");
        let Bench { driver, allocator, stream, .. } = &bench;
        let mut cache = bench.growable(CAPACITY);
        cache.grow_to(10 * MIB, stream).unwrap();
        stream.fill(cache.ptr(), 3, 10 * MIB).unwrap();
        let blocks: Vec<_> = (0..8).map(|_| allocator.alloc_bytes(12 * MIB, stream).unwrap()).collect();
        drop(blocks);
        stream.synchronize().unwrap();
        driver.inject(Fault::Nth { operation: Some(operation), nth, code });
        driver.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 3, code });
        let grown = cache.grow_to(100 * MIB, stream);
        let bytes = if grown.is_ok() { 100 * MIB } else { 10 * MIB };
        assert_eq!((cache.bytes(), allocator.memory_allocated()), (bytes, bytes), "{operation:?} {code:?} {nth}");
        driver.clear_faults();
        cache.grow_to(90 * MIB, stream).unwrap();
        assert_eq!(bench.byte(cache.ptr()), 3);
        stream.fill(cache.ptr(), 4, cache.bytes()).unwrap();
        cache.shrink_to(3 * MIB, stream).unwrap();
        drop(cache);
        bench.assert_returned();
    }
}

#[test]
fn growable_memory_counts_as_fragmentation() {
    let bench = bench("");
    let Bench { allocator, stream, .. } = &bench;
    let mut cache = bench.growable(CAPACITY);
    cache.grow_to(50 * MIB - 1, stream).unwrap();
    let shared = allocator.alloc_exportable(6 * MIB, HandleKind::PosixFd, stream).unwrap();
    readers(allocator);
    let found = allocator.fragmentation(1);
    assert_eq!((found.reserved_bytes, found.allocated_bytes, found.internal_waste), (56 * MIB, 56 * MIB, 1));
    assert_eq!((found.segments, found.address_bytes), (2, CAPACITY + 6 * MIB));
    cache.shrink_to(20 * MIB, stream).unwrap();
    readers(allocator);
    let found = allocator.fragmentation(1);
    assert_eq!((found.free_bytes, found.releasable_bytes, found.releasable_segments), (30 * MIB, 30 * MIB, 0));
    drop((cache, shared));
    bench.assert_returned();
}

/// A full cache of frames of several granules, from which a growable takes its memory, is grown and
/// shrunk by one granule at a time.
fn shrinks_by_granules(options: &str, capacity: u64) {
    let bench = Bench::new(capacity, options);
    drop((0..capacity / (8 * MIB)).map(|_| bench.alloc(8 * MIB)).collect::<Vec<_>>());
    bench.stream.tick().synchronize().unwrap();
    let most = capacity / (4 * MIB);
    let mut cache = bench.growable(capacity);
    cache.grow_to(2 * most * MIB, &bench.stream).unwrap();
    for left in (0..most).rev() {
        cache.shrink_to(2 * left * MIB, &bench.stream).unwrap();
        bench.stream.tick().synchronize().unwrap();
        bench.allocator.empty_cache().unwrap();
        assert_eq!(bench.allocator.memory_reserved(), 2 * left * MIB, "{options}");
    }
    cache.grow_to(6 * MIB, &bench.stream).unwrap();
    drop(cache);
    bench.assert_returned();
}

#[test]
fn a_growable_splits_larger_frames() {
    shrinks_by_granules("backing:paged,frame_mb:4", 64 * MIB);
    shrinks_by_granules("backing:paged", 1024 * MIB);
}
