//! The paged backing: limits, pools, trimming, snapshots, addresses, teardown.

use aquifer_allocator::WhySegments;
use aquifer_allocator::snapshot::Segment;
use aquifer_device::Attribute;
use aquifer_tests::prelude::*;

use super::block;

fn bench(capacity: u64, options: &str) -> Bench {
    Bench::new(capacity, &format!("backing:paged,granule_mb:2{options}"))
}

/// Live blocks of 4 MiB, `mib` in all, after as much was given back in between them.
fn comb(bench: &Bench, mib: u64) -> Vec<Allocation> {
    let blocks: Vec<Allocation> = (0..mib / 2).map(|_| block(bench, 4)).collect();
    blocks.into_iter().enumerate().filter_map(|(at, block)| (at % 2 == 0).then_some(block)).collect()
}

fn of_pool(bench: &Bench, id: (u64, u64)) -> Vec<Segment> {
    let segments = bench.allocator.snapshot().segments;
    segments.into_iter().filter(|segment| segment.segment_pool_id == id).collect()
}

#[test]
fn memory_moves_rather_than_exceed_a_limit_or_the_headroom() {
    for (capacity, options, refusal) in [
        (GIB, ",limit_mb:64", Refusal::Limit),
        (80 * MIB, ",headroom_mb:16", Refusal::Headroom),
        (64 * MIB, "", Refusal::Device),
    ] {
        let bench = bench(capacity, options);
        let held = comb(&bench, 32);
        assert_eq!(bench.allocator.memory_reserved(), 64 * MIB, "{options}");
        let whole = block(&bench, 32);
        let stats = bench.allocator.stats();
        assert_eq!(stats.reserved_bytes.all.peak, 64 * MIB, "{options}");
        // One of the pieces may stay where it is.
        assert!((14..=16).contains(&stats.granules_moved), "{options}: {stats:?}");
        let error = bench.refused(2 * MIB);
        assert_eq!(error.report().unwrap().refusal, Some(refusal), "{error}");
        drop((held, whole));
        bench.assert_returned();
    }
}

#[test]
fn free_memory_of_an_open_pool_stays_where_it_is() {
    let bench = bench(64 * MIB, "");
    let pool = bench.pool();
    let inside = pool.alloc_bytes(2 * MIB, &bench.stream).unwrap();
    drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
    bench.stream.synchronize().unwrap();
    let before = of_pool(&bench, pool.id());
    drop(block(&bench, 30));
    assert_eq!(of_pool(&bench, pool.id()), before, "moved or lent");
    // It goes back where that is asked for, unless a request would be refused before.
    assert_eq!(pool.empty_cache().unwrap(), 30 * MIB);
    drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
    drop(pool);
    let outside = block(&bench, 60);
    assert_eq!(of_pool(&bench, (0, 0)).len(), 1);
    drop((inside, outside));
    bench.assert_returned();
}

#[test]
fn free_memory_of_a_closed_pool_moves() {
    let bench = bench(64 * MIB, "");
    let pool = bench.pool();
    let inside = pool.alloc_bytes(2 * MIB, &bench.stream).unwrap();
    let large = pool.alloc_bytes(30 * MIB, &bench.stream).unwrap();
    bench.stall(&bench.stream, Duration::from_millis(10));
    write_on(&bench.stream, large.ptr(), large.bytes());
    drop(large);
    // Not known done when the pool is closed, so it could not be released then.
    drop(pool);
    assert_eq!(bench.allocator.memory_reserved(), 32 * MIB);
    let outside = block(&bench, 60);
    assert_eq!(of_pool(&bench, (0, 0)).iter().map(|segment| segment.active_size).sum::<u64>(), 60 * MIB);
    assert!(bench.allocator.stats().granules_moved > 0);
    drop((inside, outside));
    bench.assert_returned();
}

#[test]
fn trimming_takes_free_memory_only() {
    let bench = bench(GIB, "");
    let [first, second, third] = [(); 3].map(|()| block(&bench, 8));
    let rest = block(&bench, 8);
    drop((second, rest));
    assert_eq!(bench.allocator.trim_to(24 * MIB).unwrap(), 8 * MIB);
    assert_eq!(bench.allocator.trim_to(24 * MIB).unwrap(), 0);
    assert_eq!((bench.allocator.memory_reserved(), GIB - bench.device_free()), (24 * MIB, 24 * MIB));
    assert_eq!(bench.allocator.empty_cache().unwrap(), 8 * MIB);
    assert_eq!(bench.allocator.memory_reserved(), 16 * MIB);
    drop((first, third));
    bench.assert_returned();
}

#[test]
fn a_snapshot_has_a_segment_for_each_mapped_range() {
    let bench = bench(GIB, ",history:100");
    let [first, second, third] = [(); 3].map(|()| block(&bench, 8));
    let (gap, stream) = (second.ptr().0, bench.stream.id());
    assert_eq!(bench.allocator.snapshot().segments.len(), 1, "contiguous");
    drop(second);
    bench.allocator.empty_cache().unwrap();
    let snapshot = bench.allocator.snapshot();
    let found: Vec<_> = snapshot.segments.iter().map(|segment| (segment.address, segment.total_size)).collect();
    assert_eq!(found, [(first.ptr().0, 8 * MIB), (third.ptr().0, 8 * MIB)]);
    assert!(snapshot.segments.iter().all(|segment| segment.is_expandable && segment.stream == stream));
    let of = |action| snapshot.trace().iter().filter(move |entry| entry.action == action);
    assert_eq!(
        of(Action::SegmentUnmap).map(|entry| (entry.addr, entry.size)).collect::<Vec<_>>(),
        [(Some(gap), 8 * MIB)]
    );
    assert_eq!(of(Action::SegmentMap).map(|entry| entry.size).sum::<u64>(), 24 * MIB);
    assert_eq!(of(Action::SegmentAlloc).count() + of(Action::SegmentFree).count(), 0);
    drop((first, third));
    bench.assert_returned();
}

#[test]
fn without_addresses_a_request_gets_a_segment_and_a_refusal_says_so() {
    let bench = bench(64 * MIB, "");
    let held = block(&bench, 8);
    let mut taken = Vec::new();
    let mut bytes = 256 * MIB;
    while bytes >= 2 * MIB {
        match bench.driver.reserve(bytes, 0) {
            Ok(ptr) => taken.push((ptr, bytes)),
            Err(_) => bytes /= 2,
        }
    }
    bench.driver.inject(Fault::Rate { operation: Some(Operation::Alloc), rate: 1.0, code: Code::OUT_OF_MEMORY });
    let error = bench.allocator.alloc_bytes(8 * MIB, &bench.side).unwrap_err();
    assert_eq!(error.report().unwrap().refusal, Some(Refusal::Addresses), "{error}");
    check::statistics(&bench.allocator, (1, 8 * MIB));
    bench.driver.clear_faults();
    drop(bench.written_on(&bench.side, 8 * MIB));
    assert!(bench.allocator.snapshot().segments.iter().any(|segment| !segment.is_expandable));
    assert!(matches!(bench.allocator.why_segments(), Some(WhySegments::NoAddresses(_))));
    taken.into_iter().for_each(|(ptr, bytes)| bench.driver.unreserve(ptr, bytes).unwrap());
    let other = bench.written_on(&bench.side, 8 * MIB);
    drop((held, other));
    bench.assert_returned();
}

#[test]
fn many_streams_and_pools_find_addresses() {
    let bench = bench(512 * MIB, "");
    let streams: Vec<Stream> = (0..20).map(|_| bench.new_stream()).collect();
    let alloc = |stream: &Stream, bytes| bench.written_on(stream, bytes);
    // Every stream holds on to a little in both of its pools, and then each has most of the device
    // in turn.
    let keeps: Vec<_> = streams.iter().flat_map(|stream| [1000, MIB + 512].map(|bytes| alloc(stream, bytes))).collect();
    check::statistics(&bench.allocator, (40, 20 * (MIB + 1512)));
    for stream in &streams {
        drop(alloc(stream, 400 * MIB));
    }
    drop(keeps);
    bench.assert_returned();
}

#[test]
fn memory_is_mapped_without_rdma_where_the_driver_announces_rdma_and_refuses_it() {
    let driver = Subject::new(GIB);
    let device = driver.device();
    if device.driver().attribute(Attribute::GpuDirectRdmaWithVmm).unwrap() == 0 {
        return;
    }
    driver.inject(Fault::Nth { operation: Some(Operation::CreatePhysical), nth: 1, code: Code::NOT_SUPPORTED });
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    assert!(allocator.why_segments().is_none());
    let held = allocator.alloc_bytes(5 * MIB, device.default_stream()).unwrap();
    write_on(device.default_stream(), held.ptr(), held.bytes());
    assert!(!driver.mapping_at(held.ptr()).unwrap().options.rdma);
    drop(held);
    driver.assert_no_violation();
}

#[test]
fn live_and_cached_memory_goes_back_at_the_end() {
    let bench = bench(GIB, "");
    let live = [bench.written(5 * MIB), bench.written_on(&bench.side, 1000)];
    bench.stall(&bench.stream, Duration::from_millis(20));
    drop([bench.written(30 * MIB), bench.written_on(&bench.side, 9 * MIB)]);
    let Bench { driver, device, allocator, stream, .. } = bench;
    drop(allocator);
    // Still valid, and the device's to take back only once they are gone.
    write_on(&stream, live[0].ptr(), 5 * MIB);
    drop(live);
    // A call that lacks memory does the deferred release.
    let ptr = device.alloc(GIB).unwrap();
    device.free(ptr).unwrap();
    assert_eq!(driver.free(), GIB);
    driver.assert_no_reservation();
    driver.assert_no_violation();
}

#[test]
fn a_mapping_that_is_stuck_is_taken_back_later() {
    let bench = bench(GIB, "");
    let held = block(&bench, 8);
    for (operation, nth) in [(Operation::SetAccess, 1), (Operation::Unmap, 2)] {
        bench.fail(operation, nth, Code(999));
    }
    bench.allocator.alloc_bytes(16 * MIB, &bench.side).unwrap_err();
    bench.driver.clear_faults();
    check::statistics(&bench.allocator, (1, 8 * MIB));
    let other = bench.written_on(&bench.side, 16 * MIB);
    drop((held, other));
    bench.assert_returned();
}

#[test]
fn addresses_that_could_not_go_back_go_later() {
    let bench = bench(GIB, "");
    drop(block(&bench, 8));
    bench.fail(Operation::Unreserve, 1, Code(999));
    bench.allocator.empty_cache().unwrap_err();
    assert_eq!(bench.allocator.memory_reserved(), 0, "the memory went back all the same");
    bench.assert_returned();
}
