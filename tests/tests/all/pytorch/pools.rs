//! PyTorch's tests of private pools, one by one; `CHECKLIST.md` lists them all.

use aquifer_tests::prelude::*;

fn pool_of(bench: &Bench, allocation: &Allocation) -> (u64, u64) {
    let snapshot = bench.allocator.snapshot();
    let at = allocation.ptr().0;
    let found =
        snapshot.segments.iter().find(|segment| (segment.address..segment.address + segment.total_size).contains(&at));
    found.unwrap().segment_pool_id
}

#[test]
fn item_75_segments_of_a_pool() {
    // The size and number of blocks, the bytes reserved while all live, and while the last lives.
    let vectors = [
        (512, 1, 2 * MIB, 2 * MIB),
        (MIB, 2, 2 * MIB, 2 * MIB),
        (MIB, 3, 4 * MIB, 2 * MIB),
        (MIB + 512, 1, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 3, 40 * MIB, 20 * MIB),
        (10 * MIB + 512, 3, 36 * MIB, 12 * MIB),
    ];
    for (bytes, count, reserved, left) in vectors {
        let bench = Bench::new(GIB, "backing:segments");
        let pool = bench.pool();
        let mut held: Vec<_> = (0..count).map(|_| pool.alloc_bytes(bytes, &bench.stream).unwrap()).collect();
        let id = pool.id();
        assert_eq!(bench.allocator.reserved_by_private_pools()[&id], reserved, "{bytes} × {count}");
        assert_eq!(bench.allocator.memory_reserved(), reserved);
        // The result stays usable after its pool.
        let last = held.pop().unwrap();
        drop(held);
        drop(pool);
        assert_eq!(bench.allocator.memory_reserved(), left, "{bytes} × {count}");
        write_on(&bench.stream, last.ptr(), bytes);
        drop(last);
        bench.assert_returned();
    }
}

#[test]
fn item_79_ids_are_distinct() {
    let bench = Bench::new(GIB, "");
    let allocator = &bench.allocator;
    let made = || (0..4).map(|_| allocator.create_pool(PoolOptions::default()).unwrap()).collect::<Vec<_>>();
    let pools: Vec<PrivatePool> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(made)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut ids: Vec<_> = pools.iter().map(PrivatePool::id).collect();
    assert!(ids.iter().all(|id| id.0 == 0 && id.1 > 0));
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 16);
}

#[test]
fn more_pools_than_there_are_numbers_are_refused() {
    let bench = Bench::new(GIB, "");
    let made = || bench.allocator.create_pool(PoolOptions::default());
    let mut pools: Vec<PrivatePool> = std::iter::from_fn(|| made().ok()).take(20_000).collect();
    assert!((16_000..20_000).contains(&pools.len()), "{}", pools.len());
    let error = made().unwrap_err();
    assert!(matches!(&error, AllocError::TooManyPools { pools: there } if *there == pools.len()), "{error}");
    let last = pools.pop().unwrap();
    let held = last.alloc_bytes(MIB, &bench.stream).unwrap();
    assert_eq!(bench.allocator.alloc_bytes(MIB, &bench.stream).map(|other| other.ptr() != held.ptr()).ok(), Some(true));
    drop((last, held));
    bench.allocator.empty_cache().unwrap();
    drop(made().unwrap());
    pools.reverse(); // the last one first: closing one looks for it
    drop(pools);
    bench.assert_returned();
}

#[test]
fn item_80_pools_give_memory_back() {
    for backing in ["", "backing:segments"] {
        let bench = Bench::new(GIB, backing);
        let pool = bench.pool();
        let fill = || drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
        fill();
        assert_eq!(bench.allocator.empty_cache().unwrap(), 30 * MIB, "outside of the route");
        fill();
        let route = pool.route_thread();
        assert_eq!(bench.allocator.empty_cache().unwrap(), 30 * MIB, "within it");
        drop(route);
        fill();
        drop(bench.alloc(10 * MIB));
        assert_eq!(bench.allocator.trim_to(30 * MIB).unwrap(), 10 * MIB, "pools go last");
        assert_eq!(pool.empty_cache().unwrap(), 30 * MIB);
        fill();
        drop(pool);
        assert_eq!(bench.allocator.memory_reserved(), 0);
        bench.assert_returned();
    }
}

#[test]
fn an_empty_cache_leaves_what_graphs_use() {
    let bench = Bench::new(GIB, "");
    let pool = bench.pool();
    let capture = bench.stream.begin_capture().unwrap();
    let route = bench.allocator.capture(&bench.stream, &pool).unwrap();
    drop(bench.alloc(20 * MIB));
    drop(route);
    let graph = capture.end().unwrap();
    drop(pool.alloc_bytes(10 * MIB, &bench.stream).unwrap());
    assert_eq!(bench.allocator.empty_cache().unwrap(), 10 * MIB);
    assert_eq!(bench.allocator.memory_reserved(), 20 * MIB);
    graph.launch(&bench.stream).unwrap();
    drop(graph);
    assert_eq!(bench.allocator.empty_cache().unwrap(), 20 * MIB, "the pool is open still");
    drop(pool);
    bench.assert_returned();
}

#[test]
fn item_81_segments_of_pools_are_separate_and_visible() {
    let bench = Bench::new(GIB, "");
    let pool = bench.pool();
    let outside = bench.alloc(1000);
    let inside = pool.alloc_bytes(1000, &bench.stream).unwrap();
    assert_eq!((pool_of(&bench, &outside), pool_of(&bench, &inside)), ((0, 0), pool.id()));
    drop((outside, inside, pool));
    bench.assert_returned();
}

#[test]
fn item_82_allocations_outlive_pool_and_allocator() {
    let bench = Bench::new(GIB, "");
    let inside = bench.pool().alloc_bytes(30 * MIB, &bench.stream).unwrap();
    write_on(&bench.stream, inside.ptr(), inside.bytes());
    let Bench { driver, device, allocator, stream, side } = bench;
    drop(allocator);
    write_on(&stream, inside.ptr(), inside.bytes());
    drop(inside);
    drop((stream, side, device));
    drop(Bench::new(MIB, ""));
    driver.assert_all_free();
    driver.assert_no_violation();
}

#[test]
fn item_84_a_dropped_pool_lends_nothing() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    let lends = bench.lending_pool();
    let keeps = lends.alloc_bytes(2 * MIB, &bench.stream).unwrap();
    drop(lends);
    let other = bench.alloc(40 * MIB);
    // 18 MiB are free in the closed pool's segment.
    let error = bench.refused(15 * MIB);
    assert!(matches!(error, AllocError::OutOfMemory(_)));
    drop((keeps, other));
    bench.assert_returned();
}

#[test]
fn item_85_no_split() {
    let bench = Bench::new(GIB, "");
    let pool = bench.allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let held = [1, 2].map(|_| pool.alloc_bytes(1000, &bench.stream).unwrap());
    assert_eq!(bench.allocator.stats().segment.all.current, 2);
    drop((held, pool));
    bench.assert_returned();
}

#[test]
fn item_86_routes_belong_to_their_thread() {
    let bench = Bench::new(GIB, "");
    let pool = bench.pool();
    let route = pool.route_thread();
    let (allocator, stream) = (&bench.allocator, &bench.stream);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| allocator.alloc_bytes(1000, stream).unwrap()).join().unwrap();
        assert_eq!(pool_of(&bench, &other), (0, 0));
        let inside = allocator.alloc_bytes(1000, stream).unwrap();
        assert_eq!(pool_of(&bench, &inside), pool.id());
        scope.spawn(|| allocator.empty_cache().unwrap()).join().unwrap();
        write_on(stream, inside.ptr(), 1000);
    });
    drop(route);
    let after = allocator.alloc_bytes(1000, stream).unwrap();
    assert_eq!(pool_of(&bench, &after), (0, 0));
    drop((after, pool));
    bench.assert_returned();
}

#[test]
fn item_87_nested_pools() {
    let bench = Bench::new(GIB, "");
    let (outer, inner) = (bench.pool(), bench.pool());
    let alloc = || pool_of(&bench, &bench.alloc(1000));
    let outer_route = outer.route_thread();
    {
        let _inner_route = inner.route_thread();
        assert_eq!(alloc(), inner.id());
    }
    assert_eq!(alloc(), outer.id());
    drop(outer_route);
    assert_eq!(alloc(), (0, 0));
}

#[test]
fn every_way_to_allocate_from_a_pool_takes_its_memory() {
    for bench in Bench::on_both(256 * MIB, "") {
        let Bench { allocator, stream, .. } = &bench;
        let pool = allocator.create_pool(PoolOptions::default()).unwrap();
        let aligned = pool.alloc_aligned(3 * MIB, MIB, stream).unwrap();
        assert!(aligned.ptr().0.is_multiple_of(MIB));
        let zeroed = pool.alloc_bytes_zeroed(700, stream).unwrap();
        let raw = pool.alloc_raw(5 * MIB, stream).unwrap();
        let snapshot = allocator.snapshot();
        for ptr in [aligned.ptr(), zeroed.ptr(), raw] {
            let holds = |address: u64, size: u64| (address..address + size).contains(&ptr.0);
            let segment = snapshot.segments.iter().find(|segment| holds(segment.address, segment.total_size)).unwrap();
            assert_eq!(segment.segment_pool_id, pool.id());
        }
        let mut bytes = [1; 700];
        stream.download_blocking(&mut bytes, zeroed.ptr()).unwrap();
        assert_eq!(bytes, [0; 700]);
        assert!(matches!(pool.alloc_aligned(1, 3, stream), Err(AllocError::InvalidAlignment { alignment: 3 })));
        allocator.free_raw(raw).unwrap();
        let outside = allocator.alloc_bytes(MIB, stream).unwrap(); // the thread is not routed any more
        let snapshot = allocator.snapshot();
        let (segment, _) = snapshot.blocks().find(|(_, block)| block.address == outside.ptr().0).unwrap();
        assert_eq!(segment.segment_pool_id, (0, 0));
        drop((aligned, zeroed, outside, pool));
        bench.assert_returned();
    }
}
