//! Graphs that outlive the allocator, their pool and its place among pools, and graphs that other
//! code launches on streams of its own.

use aquifer_tests::prelude::*;

use super::graphs::{BACKINGS, CAPACITY, bench, captured, end};

#[test]
fn a_graph_keeps_its_memory_after_the_last_handle_of_the_allocator() {
    for options in BACKINGS {
        let bench = bench(options);
        let pool = bench.pool();
        let graph = captured(&bench, &pool);
        let stream = bench.side.clone();
        let Bench { driver, device, allocator, .. } = bench;
        drop((pool, allocator));
        device.settle();
        graph.launch(&stream).unwrap();
        stream.synchronize().unwrap();
        device.settle();
        assert!(device.memory_info().unwrap().free <= CAPACITY - 8 * MIB, "{options:?}");
        graph.launch(&stream).unwrap();
        drop(graph);
        aquifer_allocator::close_abandoned();
        device.settle();
        assert_eq!(device.memory_info().unwrap().free, CAPACITY, "{options:?}");
        driver.assert_no_violation();
    }
}

/// The pool is dropped and another one made while a request for a capture is under way.
#[test]
fn a_pool_does_not_get_the_memory_of_a_graph_of_one_that_was_dropped() {
    for options in BACKINGS {
        let bench = bench(options);
        let Bench { stream: one, side: two, .. } = &bench;
        let in_the_way = Arc::new(Mutex::new(Some(bench.alloc_on(two, 20 * MIB))));
        bench.allocator.set_limit(Some(24 * MIB));
        let first = Arc::new(Mutex::new(Some(bench.pool())));
        let second = Arc::new(Mutex::new(None));
        let registration = {
            let (in_the_way, first, second) = (in_the_way.clone(), first.clone(), second.clone());
            let allocator = bench.allocator.clone();
            bench.allocator.register_reclaimer(0, "caches", move |_| {
                let Some(block) = in_the_way.lock().unwrap().take() else { return 0 };
                drop(first.lock().unwrap().take());
                *second.lock().unwrap() = Some(allocator.create_pool(PoolOptions::default()).unwrap());
                allocator.set_limit(None);
                block.bytes()
            })
        };
        let capture = one.begin_capture().unwrap();
        let route = bench.allocator.capture(one, first.lock().unwrap().as_ref().unwrap()).unwrap();
        let scratch = bench.alloc_on(one, 16 * MIB);
        one.fill(scratch.ptr(), 7, 16 * MIB).unwrap();
        drop((scratch, route));
        let graph = capture.end().unwrap();
        drop(registration);
        let second = second.lock().unwrap().take().expect("the request needed what was in the way");

        let other = second.alloc_bytes(16 * MIB, one).unwrap();
        one.fill(other.ptr(), 1, 16 * MIB).unwrap();
        graph.launch(two).unwrap();
        bench.device.synchronize().unwrap();
        let mut byte = [0];
        one.download_blocking(&mut byte, other.ptr()).unwrap();
        assert_eq!(byte, [1], "{options:?}");
        drop((other, second));
        bench.allocator.empty_cache().unwrap();
        graph.launch(two).unwrap();
        drop(graph);
        end(&bench);
    }
}

/// Its launches are known to be done once the device was waited for.
#[test]
fn memory_of_a_dropped_pool_outlasts_launches_on_unknown_streams() {
    for options in BACKINGS {
        for emptied in [false, true] {
            let bench = bench(options);
            // Nothing is allocated for the second stream.
            let Bench { stream: one, side: two, .. } = &bench;
            let pool = bench.pool();
            let driver = bench.device.driver();
            driver.begin_capture(one.raw()).unwrap();
            let route = bench.allocator.capture(one, &pool).unwrap();
            let scratch = bench.alloc_on(one, 8 * MIB);
            one.fill(scratch.ptr(), 7, 8 * MIB).unwrap();
            drop(scratch);
            let graph = driver.end_capture(one.raw()).unwrap();
            drop(route);
            bench.stall(two, Duration::from_secs(1));
            driver.launch_graph(graph, two.raw()).unwrap();
            if emptied {
                pool.empty_cache().unwrap();
            }
            drop(pool);
            drop(bench.alloc_on(one, CAPACITY - 4 * MIB));
            driver.destroy_graph(graph).unwrap();
            end(&bench);
        }
    }
}
