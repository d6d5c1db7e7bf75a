//! Memory lent between streams, and allocators, pools and streams that end while memory of theirs
//! is in use.

use std::any::Any;

use aquifer_tests::prelude::*;

/// A segment of 20 MiB of which another stream used 6 MiB in between; nothing is live any more.
fn lent_in_between(bench: &Bench) {
    let low = bench.alloc(6 * MIB);
    let middle = bench.alloc(6 * MIB);
    let place = middle.ptr();
    drop(middle);
    bench.stream.synchronize().unwrap();
    let lent = bench.alloc_on(&bench.side, 6 * MIB);
    assert_eq!(lent.ptr(), place);
    write_on(&bench.side, lent.ptr(), lent.bytes());
    bench.stall(&bench.side, Duration::from_millis(5));
    drop((low, lent));
}

#[test]
fn memory_that_was_lent_goes_back_to_the_device() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    lent_in_between(&bench);
    assert_eq!(bench.allocator.empty_cache().unwrap(), 20 * MIB);
    bench.assert_returned();
}

#[test]
fn memory_that_was_lent_serves_a_request_for_all_of_it() {
    let bench = Bench::new(20 * MIB, "backing:segments");
    lent_in_between(&bench);
    let whole = bench.written(20 * MIB);
    drop(whole);
    bench.assert_returned();
}

#[test]
fn a_closed_pool_serves_no_request_even_if_a_route_remains() {
    let bench = Bench::new(64 * MIB, "");
    let pool = bench.pool();
    let inside = pool.alloc_bytes(1000, &bench.stream).unwrap();
    let route = pool.route_thread();
    drop(pool);
    let outside = bench.alloc(1000);
    assert!(outside.ptr().0.abs_diff(inside.ptr().0) >= 2 * MIB - 1024, "served from the closed pool");
    drop((inside, outside, route));
    bench.assert_returned();
}

#[test]
fn a_capture_gets_no_memory_that_others_get_next() {
    for backing in ["backing:paged", "backing:segments"] {
        let bench = Bench::new(64 * MIB, backing);
        // Free memory that would serve the request without a capture.
        drop(bench.alloc(MIB));
        let capture = bench.stream.begin_capture().unwrap();
        for bytes in [MIB, 4 * MIB] {
            let refused = bench.refused(bytes);
            assert!(refused.to_string().contains("Allocator::capture"), "{refused}");
        }
        let beside = bench.alloc_on(&bench.side, MIB);
        let pool = bench.pool();
        let route = bench.allocator.capture(&bench.stream, &pool).unwrap();
        let scratch = bench.written(MIB);
        drop((scratch, route));
        let graph = capture.end().unwrap();
        let next = bench.alloc(MIB);
        write_on(&bench.side, beside.ptr(), beside.bytes());
        write_on(&bench.stream, next.ptr(), next.bytes());
        graph.launch(&bench.stream).unwrap();
        bench.stream.synchronize().unwrap();
        drop((graph, pool, beside, next));
        bench.assert_returned();
    }
}

#[test]
fn an_allocator_that_is_dropped_leaves_nothing_on_the_device() {
    for backing in ["backing:paged", "backing:segments"] {
        let subject = Subject::open(&SimConfig::new(GIB));
        let device = subject.device();
        let free = || device.memory_info().unwrap().free;
        let before = free();
        let allocator = Allocator::new(&device, Config::parse(backing).unwrap()).unwrap();
        let stream = device.stream().unwrap();
        let [one, two] = [(); 2].map(|()| allocator.alloc_bytes(30 * MIB, &stream).unwrap());
        subject.stall(&stream, Duration::from_millis(5)).unwrap();
        write_on(&stream, one.ptr(), one.bytes());
        drop((one, two));
        assert!(free() <= before - 60 * MIB);
        drop(allocator);
        assert_eq!(free(), before, "{backing}");
        // Dropping a buffer makes no driver call, even after its allocator.
        let allocator = Allocator::new(&device, Config::parse(backing).unwrap()).unwrap();
        let outlives = allocator.alloc_bytes(30 * MIB, &stream).unwrap();
        drop(allocator);
        let calls = device.driver_calls().total();
        drop(outlives);
        assert_eq!(device.driver_calls().total(), calls);
        assert!(subject.free() < before);
        assert_eq!(free(), before, "{backing}");
        assert!(subject.violations().is_empty());
    }
}

#[test]
fn new_streams_use_memory_of_streams_that_are_gone() {
    for backing in ["backing:paged", "backing:segments"] {
        let bench = Bench::new(64 * MIB, backing);
        let keep = bench.alloc(MIB);
        let mut reserved = Vec::new();
        for round in 0..60 {
            let stream = bench.new_stream();
            assert!(stream.id() < 16, "numbers grow with streams that are gone: {}", stream.id());
            bench.stall(&stream, Duration::from_micros(round * 7 % 50));
            let (small, large) = (5000, (round % 3 + 1) * MIB);
            let blocks = [small, large].map(|bytes| bench.alloc_on(&stream, bytes));
            blocks.iter().for_each(|block| write_on(&stream, block.ptr(), block.bytes()));
            // Another stream uses one, and outlives the work.
            blocks[0].record_stream(&bench.side).unwrap();
            bench.side.wait_for(&stream.tick()).unwrap();
            write_on(&bench.side, blocks[0].ptr(), blocks[0].bytes());
            drop((blocks, stream));
            // Without exact time, wait until all work is done.
            let pause = Duration::from_micros(round * 13 % 60);
            bench.driver.advance(if Subject::has_simulated_device() { pause } else { Duration::from_secs(1) });
            reserved.push(bench.allocator.memory_reserved());
        }
        assert_eq!(reserved[30], reserved[59], "{backing}: {reserved:?}");
        drop(keep);
        bench.assert_returned();
    }
}

#[test]
fn blocks_known_to_be_done_are_lent_too() {
    let bench = Bench::new(64 * MIB, "");
    let blocks = [1, 2].map(|_| bench.alloc(10 * MIB));
    drop(blocks);
    bench.stream.synchronize().unwrap();
    let one = bench.alloc_on(&bench.side, 10 * MIB);
    let other = bench.alloc_on(&bench.side, 10 * MIB);
    assert_eq!(bench.allocator.memory_reserved(), 20 * MIB);
    drop((one, other));
    bench.assert_returned();
}

#[test]
fn memory_that_was_lent_and_recorded_goes_back_to_the_device() {
    let bench = Bench::new(20 * MIB, "");
    let third = bench.new_stream();
    let low = bench.alloc(6 * MIB);
    let lent = bench.alloc_on(&bench.side, 6 * MIB);
    bench.stall(&third, Duration::from_millis(5));
    bench.stall(&bench.side, Duration::from_millis(50));
    lent.record_stream(&third).unwrap();
    drop((low, lent));
    let whole = bench.written(20 * MIB);
    drop(whole);
    bench.assert_returned();
}

#[test]
fn blocks_given_back_after_their_stream_are_lent() {
    let bench = Bench::new(20 * MIB, "");
    let gone = bench.new_stream();
    let keeps = bench.alloc_on(&gone, 5 * MIB);
    let late = bench.alloc_on(&gone, 9 * MIB);
    bench.stall(&gone, Duration::from_millis(5));
    write_on(&gone, late.ptr(), late.bytes());
    drop(gone);
    drop(late);
    let lent = bench.written(9 * MIB);
    drop((keeps, lent));
    bench.assert_returned();
}

/// Memory of a deferred release goes back once that needs no wait, or when memory runs out.
#[test]
fn growth_does_not_wait_for_work_of_others() {
    for options in ["", "backing:segments"] {
        let bench = Bench::new(256 * MIB, options);
        drop(bench.alloc(MIB));
        let left = bench.device.alloc(100 * MIB).unwrap();
        write_on(&bench.side, left, 100 * MIB);
        bench.stall(&bench.side, Duration::from_secs(1));
        bench.device.free_later(left);
        let before = bench.device.driver_calls();
        let block = bench.alloc(64 * MIB);
        let calls = bench.device.driver_calls().since(&before);
        let waits = [Operation::Free, Operation::Synchronize, Operation::SynchronizeStream];
        assert!(waits.iter().all(|&wait| calls.of(wait) == 0), "{options:?}: {calls:?}");
        let more = bench.alloc(150 * MIB);
        drop((block, more));
        bench.assert_returned();
    }
}

#[test]
fn objects_that_keep_an_allocator_open_are_dropped_without_driver_calls() {
    type Keep = fn(&Allocator, &Stream) -> Box<dyn Any>;
    let keeps: [(&str, Keep); 5] = [
        ("a buffer of growable memory", |allocator, stream| {
            let mut growable = allocator.growable(64 * MIB, stream).unwrap();
            growable.grow_to(4 * MIB, stream).unwrap();
            Box::new(Buffer::<u8>::of(growable.storage()))
        }),
        ("growable memory", |allocator, stream| Box::new(allocator.growable(64 * MIB, stream).unwrap())),
        ("exportable memory", |allocator, stream| {
            Box::new(allocator.alloc_exportable(MIB, HandleKind::PosixFd, stream).unwrap())
        }),
        ("a pinned mapping", |allocator, stream| {
            let block = allocator.alloc_bytes(4 * MIB, stream).unwrap();
            let pinned = allocator.pin_mapping(&block).unwrap();
            Box::new((block, pinned))
        }),
        ("a guard", |allocator, _| Box::new(allocator.keep_awake().unwrap())),
    ];
    for (name, keep) in keeps {
        let driver = Subject::new(GIB);
        let device = driver.device();
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let stream = device.stream().unwrap();
        drop(allocator.alloc_bytes(8 * MIB, &stream).unwrap());
        let kept = keep(&allocator, &stream);
        drop(allocator);
        let before = device.driver_calls();
        drop(kept);
        let calls = device.driver_calls().since(&before);
        assert_eq!(calls.iter().map(|(_, count)| count).sum::<u64>(), 0, "{name}: {calls:?}");
        device.settle();
        assert_eq!(driver.free(), GIB, "{name}");
        driver.assert_no_violation();
    }
}

#[test]
fn a_pool_is_reused_without_a_cache_too() {
    for bench in Bench::on_both(64 * MIB, "no_cache:True") {
        let pool = bench.pool();
        (0..20).for_each(|_| drop(pool.alloc_bytes(10 * MIB, &bench.stream).unwrap()));
        assert_eq!(bench.allocator.memory_reserved(), 10 * MIB);
        drop(bench.alloc(10 * MIB));
        drop(pool);
        bench.assert_returned();
    }
}

#[test]
fn a_pool_lends_memory_that_came_free_during_a_host_wait() {
    for bench in Bench::on_both(256 * MIB, "limit_mb:40") {
        let pool = bench.lending_pool();
        bench.drop_in_use(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap(), Duration::from_secs(1));
        drop(bench.alloc(20 * MIB));
        drop(pool);
        bench.assert_returned();
    }
}

#[test]
fn a_pool_lends_memory_that_a_reclaimer_gave_back() {
    for bench in Bench::on_both(256 * MIB, "limit_mb:40") {
        let pool = bench.lending_pool();
        let cache = Arc::new(Mutex::new(Some(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap())));
        let reclaimer = bench.allocator.register_reclaimer(0, "cache", move |_| {
            cache.lock().unwrap().take().map_or(0, |allocation| allocation.bytes())
        });
        drop(bench.alloc(20 * MIB));
        drop((pool, reclaimer));
        bench.assert_returned();
    }
}

#[test]
fn a_pool_lends_before_the_limit_refuses_at_once() {
    for bench in Bench::on_both(256 * MIB, "limit_mb:40,throw_on_cudamalloc_oom:True") {
        let pool = bench.lending_pool();
        drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
        let lent = bench.alloc(20 * MIB);
        let error = bench.refused(20 * MIB);
        let advises = |advice: &Advice| matches!(advice, Advice::PrivatePool { .. });
        assert!(!error.report().unwrap().advice.iter().any(advises), "{error}");
        assert_eq!(bench.allocator.stats().num_oom_rejections, 1);
        drop((lent, pool));
        bench.assert_returned();
    }
}
