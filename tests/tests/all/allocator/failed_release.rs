//! Segments that the driver refuses to take back stay cached and keep the order of their uses.

use aquifer_tests::prelude::*;

fn bench() -> Bench {
    let bench = Bench::new(GIB, "history:100,backing:segments");
    // As while another thread captures a graph: refused, without waiting for the device.
    bench.driver.inject(Fault::Rate { operation: Some(Operation::Free), rate: 1.0, code: Code::CAPTURE_IMPLICIT });
    bench
}

#[test]
fn other_streams_still_wait_for_its_last_use() {
    let Bench { driver, device, allocator, stream: one, side: two } = &bench();
    driver.stall(one, Duration::from_secs(1)).unwrap();
    let first = allocator.alloc_bytes(40 << 20, one).unwrap();
    one.fill(first.ptr(), 1, 64).unwrap();
    drop(first);
    assert_eq!(allocator.empty_cache().unwrap(), 0, "nothing goes back while a stream captures");
    driver.clear_faults();
    assert_eq!(allocator.memory_reserved(), 40 << 20);
    // Something of another stream that must be asked for makes the search look at every stream's
    // blocks.
    let three = device.stream().unwrap();
    driver.stall(&three, Duration::from_secs(1)).unwrap();
    drop(allocator.alloc_bytes(60 << 20, &three).unwrap());
    let second = allocator.alloc_bytes(40 << 20, two).unwrap();
    two.fill(second.ptr(), 2, 64).unwrap();
    driver.assert_no_violation();
}

#[test]
fn it_still_belongs_to_the_stream_that_used_it_last() {
    let Bench { driver, device: _, allocator, stream: one, side: two } = &bench();
    driver.stall(two, Duration::from_secs(1)).unwrap();
    let first = allocator.alloc_bytes(40 << 20, one).unwrap();
    two.wait_for(&one.tick()).unwrap();
    two.fill(first.ptr(), 1, 64).unwrap();
    first.drop_on(two).unwrap();
    assert_eq!(allocator.empty_cache().unwrap(), 0, "nothing goes back while a stream captures");
    driver.clear_faults();
    let second = allocator.alloc_bytes(40 << 20, one).unwrap();
    one.fill(second.ptr(), 2, 64).unwrap();
    driver.assert_no_violation();
}

#[test]
fn statistics_and_snapshot_count_it() {
    let Bench { driver, device, allocator, .. } = &bench();
    drop(allocator.alloc_bytes(40 << 20, device.default_stream()).unwrap());
    drop(allocator.alloc_bytes(1000, device.default_stream()).unwrap());
    assert_eq!(allocator.empty_cache().unwrap(), 0, "nothing goes back while a stream captures");
    driver.clear_faults();
    let stats = allocator.stats();
    let segments = allocator.snapshot().segments;
    assert_eq!((segments.len(), segments.iter().map(|segment| segment.total_size).sum()), (2, 42 << 20));
    assert_eq!((stats.segment.all.current, stats.reserved_bytes.all.current), (2, 42 << 20));
    assert_eq!(allocator.empty_cache().unwrap(), 42 << 20);
}

/// Without a cache, free segments go back before a request is served, also from a pool.
#[test]
fn no_block_of_a_pool_is_lost_when_a_release_fails() {
    let bench = Bench::new(GIB, "no_cache:True");
    let pool = bench.pool();
    drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
    drop(bench.alloc(MIB));
    bench.fail(Operation::Free, 1, Code(999));
    pool.alloc_bytes(30 * MIB, &bench.stream).unwrap_err();
    assert_eq!(bench.allocator.memory_allocated(), 0);
    drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
    drop(pool);
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.allocator.memory_reserved(), 0);
}
