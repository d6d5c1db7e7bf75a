//! Defects of PyTorch's expandable segments, by the numbers of their issues, that do not occur
//! here.

use aquifer_tests::prelude::*;

fn bench(capacity: u64, options: &str) -> Bench {
    Bench::new(capacity, &format!("backing:paged,granule_mb:2{options}"))
}

#[test]
fn pytorch_188008_a_mapping_that_fails_half_way_is_rolled_back() {
    for operation in [Operation::CreatePhysical, Operation::Map, Operation::SetAccess] {
        for code in [Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code(999)] {
            let bench = bench(64 * MIB, "");
            let held = bench.written(8 * MIB);
            let nth = if operation == Operation::SetAccess { 1 } else { 5 };
            bench.fail(operation, nth, code);
            let failed = bench.allocator.alloc_bytes(40 * MIB, &bench.stream);
            assert!(failed.is_err() || code == Code::OUT_OF_MEMORY, "{operation} with {code:?} went unnoticed");
            check::statistics(&bench.allocator, failed.as_ref().map_or((1, 8 * MIB), |_| (2, 48 * MIB)));
            drop(failed);
            bench.driver.clear_faults();
            let whole = bench.written(56 * MIB);
            drop((held, whole));
            bench.assert_returned();
        }
    }
}

#[test]
fn pytorch_166116_physical_memory_is_used_again_when_it_moves() {
    let bench = bench(GIB, "");
    let live: Vec<Allocation> = (0..16).map(|_| bench.written(4 * MIB)).collect();
    let keeps: Vec<Allocation> = live.into_iter().step_by(2).collect();
    bench.stream.synchronize().unwrap();
    let before = bench.device.driver_calls();
    let whole = bench.written(24 * MIB);
    let after = bench.device.driver_calls();
    let made = |operation| after.of(operation) - before.of(operation);
    assert_eq!((made(Operation::CreatePhysical), made(Operation::ReleasePhysical)), (0, 0));
    let moved = bench.allocator.stats().granules_moved;
    assert!(moved > 0 && made(Operation::Map) <= moved, "{moved} granules moved");
    assert_eq!(bench.allocator.memory_reserved(), 64 * MIB);
    drop((keeps, whole));
    bench.assert_returned();
}

#[test]
fn pytorch_122057_memory_expands_by_default() {
    let bench = Bench::new(GIB, "");
    let [first, second] = [30, 50].map(|mib| bench.written(mib * MIB));
    let segments = bench.allocator.snapshot().segments;
    assert!(segments.iter().all(|segment| segment.is_expandable), "{segments:?}");
    assert_eq!(segments.len(), 1, "later memory is contiguous with earlier memory");
    drop((first, second));
    bench.assert_returned();
}

#[test]
fn pytorch_147851_pools_and_mapped_memory_go_together() {
    let bench = bench(GIB, "");
    let pool = bench.pool();
    let apart = bench.allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let (inside, whole) =
        (pool.alloc_bytes(5 * MIB, &bench.stream).unwrap(), apart.alloc_bytes(5 * MIB, &bench.stream).unwrap());
    let outside = bench.written(5 * MIB);
    let snapshot = bench.allocator.snapshot();
    let kind = |id| snapshot.segments.iter().filter(move |segment| segment.segment_pool_id == id);
    assert!(kind(pool.id()).all(|segment| segment.is_expandable) && kind(pool.id()).count() == 1);
    assert!(kind(apart.id()).all(|segment| !segment.is_expandable) && kind(apart.id()).count() == 1);
    for (segment, block) in snapshot.blocks().filter(|(_, block)| block.state.is_active()) {
        let owner = [&inside, &whole, &outside].into_iter().position(|live| live.ptr().0 == block.address).unwrap();
        assert_eq!(segment.segment_pool_id, [pool.id(), apart.id(), (0, 0)][owner]);
    }
    drop((inside, whole, outside, pool, apart));
    bench.assert_returned();
}

#[test]
fn pytorch_159594_nothing_breaks_when_memory_is_needed_during_a_capture() {
    let bench = bench(64 * MIB, "");
    drop(bench.written(40 * MIB));
    drop(bench.alloc_on(&bench.side, 10 * MIB));
    let capture = bench.side.begin_capture().unwrap();
    // It needs memory of another stream, which must not be unmapped on the strength of events
    // inside of the capture.
    let during = bench.allocator.alloc_bytes(50 * MIB, &bench.stream);
    let inside = bench.allocator.alloc_bytes(20 * MIB, &bench.side);
    if let Ok(inside) = &inside {
        write_on(&bench.side, inside.ptr(), inside.bytes());
    }
    if let Ok(during) = &during {
        write_on(&bench.stream, during.ptr(), during.bytes());
    }
    let graph = capture.end().unwrap();
    drop(graph);
    drop((during, inside));
    bench.allocator.empty_cache().unwrap();
    bench.assert_returned();
}

#[test]
fn pytorch_189504_memory_freed_during_the_wait_is_found() {
    // A piece of a segment that cannot be released.
    for bench in Bench::on_both(20 * MIB, "cross_stream:off,granule_mb:2") {
        let (keeps, held, rest) = (bench.written(2 * MIB), bench.written(9 * MIB), bench.written(9 * MIB));
        bench.drop_in_use(held, Duration::from_millis(10));
        let again = bench.written(9 * MIB);
        drop((keeps, again, rest));
        bench.assert_returned();
    }
}
