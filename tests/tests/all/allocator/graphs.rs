//! Graphs and the memory that they use: it stays while they may be launched, and while they run,
//! whatever happens to the pool that it is from; and nothing that the allocator does breaks a
//! capture.

use std::sync::atomic::{AtomicU32, Ordering};

use aquifer::device::Graph;
use aquifer_tests::prelude::*;

pub(super) const CAPACITY: u64 = 128 * MIB;
pub(super) const BACKINGS: [&str; 2] = ["", "backing:segments"];

pub(super) fn bench(options: &str) -> Bench {
    Bench::new(CAPACITY, options)
}

/// A graph that fills scratch memory of the pool, captured on the first stream.
pub(super) fn captured(bench: &Bench, pool: &PrivatePool) -> Graph {
    let stream = &bench.stream;
    let capture = stream.begin_capture().unwrap();
    let route = bench.allocator.capture(stream, pool).unwrap();
    let scratch = bench.alloc(8 * MIB);
    stream.fill(scratch.ptr(), 7, 8 * MIB).unwrap();
    drop((scratch, route));
    capture.end().unwrap()
}

/// Launches the graph behind work that takes its time.
fn launch_late(bench: &Bench, graph: &Graph, stream: &Stream) {
    bench.stall(stream, Duration::from_secs(1));
    graph.launch(stream).unwrap();
}

pub(super) fn end(bench: &Bench) {
    bench.device.synchronize().unwrap();
    bench.assert_returned();
}

#[test]
fn memory_of_a_dropped_pool_stays_until_launches_are_done() {
    type After = fn(&Bench);
    let then: [(&str, After); 4] = [
        ("nothing", |_| {}),
        ("the cache is emptied", |bench| bench.allocator.empty_cache().map(|_| ()).unwrap()),
        ("another stream needs it", |bench| drop(bench.alloc(CAPACITY - 4 * MIB))),
        ("it is trimmed", |bench| bench.allocator.trim_to(MIB).map(|_| ()).unwrap()),
    ];
    for options in BACKINGS {
        for on_side in [false, true] {
            for (name, then) in then {
                let bench = bench(options);
                let pool = bench.pool();
                let graph = captured(&bench, &pool);
                launch_late(&bench, &graph, if on_side { &bench.side } else { &bench.stream });
                drop(graph);
                drop(pool);
                then(&bench);
                assert!(bench.driver.violations().is_empty(), "{options:?}, on the side stream: {on_side}: {name}");
                end(&bench);
            }
        }
    }
}

#[test]
fn dropping_a_pool_does_not_wait_for_launches() {
    let bench = bench("");
    let pool = bench.pool();
    let graph = captured(&bench, &pool);
    launch_late(&bench, &graph, &bench.side);
    drop((graph, pool));
    assert_eq!(bench.allocator.memory_reserved(), 8 * MIB, "its launch is not done");
    bench.side.synchronize().unwrap();
    drop(bench.alloc(CAPACITY));
    end(&bench);
}

#[test]
fn programs_that_capture_again_and_again_do_not_run_out_of_memory() {
    for options in BACKINGS {
        let bench = bench(options);
        for _ in 0..3 * CAPACITY / (8 * MIB) {
            let pool = bench.pool();
            let graph = captured(&bench, &pool);
            graph.launch(&bench.side).unwrap();
            bench.side.synchronize().unwrap();
        }
        assert!(bench.allocator.memory_reserved() <= 20 * MIB, "{options:?}: {}", bench.allocator.memory_reserved());
        end(&bench);
    }
}

#[test]
fn emptying_a_pool_waits_for_launches() {
    for options in BACKINGS {
        let bench = bench(options);
        let pool = bench.pool();
        let graph = captured(&bench, &pool);
        launch_late(&bench, &graph, &bench.side);
        drop(graph);
        let held = bench.allocator.memory_reserved();
        assert_eq!((pool.empty_cache().unwrap(), bench.allocator.memory_reserved()), (held, 0), "{options:?}");
        drop(pool);
        end(&bench);
    }
}

#[test]
fn a_pool_lends_no_memory_that_a_graph_may_use() {
    let bench = bench("");
    let Bench { stream: one, side: two, .. } = &bench;
    let pool = bench.lending_pool();
    let graph = captured(&bench, &pool);
    let rest = bench.alloc_on(two, CAPACITY - 8 * MIB);
    assert!(matches!(bench.allocator.alloc_bytes(4 * MIB, one), Err(AllocError::OutOfMemory(_))));
    launch_late(&bench, &graph, one);
    drop(graph);
    let lent = bench.allocator.alloc_bytes(4 * MIB, one).expect("the last launch is waited for");
    assert!(one.is_idle().unwrap());
    drop((lent, rest, pool));
    end(&bench);
}

/// The capture goes on while memory runs out or goes back, and errors are the same as without it.
#[test]
fn no_capture_is_broken_by_giving_memory_back() {
    type Meanwhile = fn(&Bench) -> Result<(), AllocError>;
    let meanwhile: [(&str, bool, Meanwhile); 6] = [
        ("the capture asks for too much", false, |bench| {
            bench.allocator.alloc_bytes(2 * CAPACITY, &bench.stream).map(drop)
        }),
        ("a bystander asks for too much", false, |bench| {
            bench.allocator.alloc_bytes(2 * CAPACITY, &bench.side).map(drop)
        }),
        ("the cache is emptied", true, |bench| bench.allocator.empty_cache().map(drop)),
        ("the cache is trimmed", true, |bench| bench.allocator.trim_to(0).map(drop)),
        ("a pool ends", true, |bench| {
            let pool = bench.pool();
            pool.alloc_bytes(3 * MIB, &bench.side).map(drop)
        }),
        ("a pool is emptied", true, |bench| {
            let pool = bench.pool();
            pool.alloc_bytes(3 * MIB, &bench.side).map(drop)?;
            pool.empty_cache().map(drop)
        }),
    ];
    let options = ["", "backing:segments", "backing:segments,no_cache:True"];
    for options in options {
        for (name, succeeds, meanwhile) in meanwhile {
            let bench = bench(options);
            let Bench { stream: one, side: two, .. } = &bench;
            drop(bench.alloc_on(two, 30 * MIB));
            let asked = Arc::new(AtomicU32::new(0));
            let count = asked.clone();
            let reclaimer = bench.allocator.register_reclaimer(0, "counts", move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                0
            });
            let pool = bench.pool();
            let capture = one.begin_capture().unwrap();
            let route = bench.allocator.capture(one, &pool).unwrap();
            let before = bench.alloc_on(one, 4 * MIB);
            one.fill(before.ptr(), 7, 4 * MIB).unwrap();
            // On a thread of its own: this one allocates for the graph.
            let result = if name.starts_with("the capture") {
                meanwhile(&bench)
            } else {
                std::thread::scope(|scope| scope.spawn(|| meanwhile(&bench)).join().unwrap())
            };
            match result {
                Ok(()) => assert!(succeeds, "{options:?}: {name}"),
                Err(error) => {
                    assert!(!succeeds && error.report().is_some(), "{options:?}: {name}: {error}");
                    assert_eq!(asked.load(Ordering::Relaxed), 1, "{options:?}: {name}");
                }
            }
            let after = bench.alloc_on(one, 4 * MIB);
            one.fill(after.ptr(), 8, 4 * MIB).unwrap();
            drop(route);
            let graph = capture.end().unwrap_or_else(|error| panic!("{options:?}: {name}: {error}"));
            graph.launch(one).unwrap();
            one.synchronize().unwrap();
            drop((before, after, graph, pool, reclaimer));
            end(&bench);
        }
    }
}

#[test]
fn a_capture_gets_no_memory_that_no_pool_keeps() {
    for options in BACKINGS {
        let bench = bench(options);
        let Bench { stream: one, side: two, .. } = &bench;
        let pool = bench.pool();
        let mut cache = bench.allocator.growable(64 * MIB, one).ok();
        if let Some(cache) = &mut cache {
            cache.grow_to(2 * MIB, one).unwrap();
        }
        let capture = one.begin_capture().unwrap();
        let route = bench.allocator.capture(one, &pool).unwrap();
        let refused = |result: Result<(), AllocError>| {
            let error = result.unwrap_err();
            let is_capture = matches!(&error, AllocError::Device(error) if error.kind == ErrorKind::Capture);
            assert!(is_capture && error.to_string().contains("before the capture"), "{error}");
        };
        refused(bench.allocator.alloc_exportable(MIB, HandleKind::PosixFd, one).map(drop));
        if let Some(cache) = &mut cache {
            refused(cache.grow_to(4 * MIB, one));
            cache.grow_to(2 * MIB, one).unwrap();
            one.fill(cache.ptr(), 1, cache.bytes()).unwrap();
            cache.grow_to(6 * MIB, two).unwrap();
        }
        drop(route);
        let graph = capture.end().unwrap();
        graph.launch(one).unwrap();
        one.synchronize().unwrap();
        drop((graph, cache, pool));
        end(&bench);
    }
}

#[test]
fn plain_memory_is_not_freed_while_a_stream_captures() {
    let bench = bench("");
    let ptr = bench.device.alloc(MIB).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    let error = bench.device.free(ptr).unwrap_err();
    assert!(error.kind == ErrorKind::Capture && error.to_string().contains("waits for the device"), "{error}");
    drop(capture.end().unwrap());
    bench.device.free(ptr).unwrap();
    end(&bench);
}

/// CUDA does not say whether unmapping breaks the capture of another stream.
#[test]
fn nothing_is_unmapped_while_a_stream_captures() {
    let bench = bench("");
    let Bench { stream: one, side: two, .. } = &bench;
    let three = bench.new_stream();
    drop(bench.alloc_on(two, 60 * MIB));
    let mut growable = bench.allocator.growable(64 * MIB, two).unwrap();
    growable.grow_to(8 * MIB, two).unwrap();
    bench.device.synchronize().unwrap();
    let capture = one.begin_capture().unwrap();
    let unmapped = || bench.calls(Operation::Unmap);
    let before = unmapped();
    drop(growable);
    // Memory is lent or bought, but does not move.
    let bought = bench.alloc_on(&three, 30 * MIB);
    three.fill(bought.ptr(), 1, 30 * MIB).unwrap();
    assert!(bench.allocator.empty_cache().unwrap() <= 8 * MIB, "only what is mapped nowhere goes back");
    let error = bench.allocator.alloc_bytes(100 * MIB, &three).unwrap_err();
    let report = error.report().unwrap_or_else(|| panic!("{error}"));
    assert!(report.kept_by_captures > 0 && report.to_string().contains("wait until no stream captures"), "{report}");
    let error = bench.device.unmap(bought.ptr(), 2 * MIB).unwrap_err();
    assert!(error.kind == ErrorKind::Capture && error.to_string().starts_with("cuMemUnmap was not called"), "{error}");
    let other = Allocator::new(&bench.device, Config::default()).unwrap();
    assert_eq!(other.backing(), bench.allocator.backing(), "what was mapped to try goes back later");
    drop(other);
    assert_eq!(unmapped(), before);
    one.fill(bought.ptr(), 1, MIB).unwrap();
    drop(capture.end().expect("nothing broke it"));
    drop(bench.alloc_on(&three, 90 * MIB));
    assert!(unmapped() > before);
    drop(bought);
    end(&bench);
}

/// Else a launch would write into live memory.
#[test]
fn requests_outside_of_captures_get_no_memory_that_a_graph_uses() {
    for options in BACKINGS {
        let bench = bench(options);
        let Bench { stream: one, side: two, .. } = &bench;
        let pool = bench.lending_pool();
        let graph = captured(&bench, &pool);
        let held_on = if options.is_empty() { [one, two] } else { [one, one] };
        let held = held_on.map(|stream| pool.alloc_bytes(8 * MIB, stream).unwrap());
        for (held, stream) in held.iter().zip(held_on) {
            stream.fill(held.ptr(), 9, 8 * MIB).unwrap();
            stream.synchronize().unwrap();
        }
        graph.launch(one).unwrap();
        one.synchronize().unwrap();
        for held in &held {
            let mut bytes = vec![0; 8 << 20];
            one.download_blocking(&mut bytes, held.ptr()).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 9), "{options:?}: the graph wrote over it");
        }
        drop(held);
        // Other requests get free memory of the pool that the graph does not use; captures get the
        // graph's memory.
        let rest = bench.alloc_on(two, CAPACITY - bench.allocator.memory_reserved());
        let lent = held_on.map(|stream| bench.alloc_on(stream, 8 * MIB));
        assert!(matches!(bench.allocator.alloc_bytes(8 * MIB, one), Err(AllocError::OutOfMemory(_))), "{options:?}");
        let second = captured(&bench, &pool);
        drop((graph, second, lent, rest));
        // No graph uses it any more.
        let lent = bench.alloc_on(one, 8 * MIB);
        let inside = pool.alloc_bytes(8 * MIB, one).unwrap();
        drop((lent, inside, pool));
        end(&bench);
    }
}

/// As a graph of PyTorch keeps its pool.
#[test]
fn memory_of_a_dropped_pool_stays_while_its_graphs_live() {
    for options in BACKINGS {
        let bench = bench(options);
        let Bench { stream: one, side: two, .. } = &bench;
        let pool = bench.pool();
        let graph = captured(&bench, &pool);
        assert_eq!(pool.empty_cache().unwrap(), 0, "{options:?}");
        let held = bench.allocator.memory_reserved();
        drop(pool);
        bench.allocator.empty_cache().unwrap();
        assert_eq!(bench.allocator.memory_reserved(), held, "{options:?}");
        let all = bench.alloc_on(two, CAPACITY - held);
        two.fill(all.ptr(), 3, all.bytes()).unwrap();
        assert!(bench.allocator.alloc_bytes(8 * MIB, two).is_err(), "{options:?}");
        graph.launch(one).unwrap();
        drop(all);
        drop(graph);
        drop(bench.allocator.alloc_bytes(CAPACITY, two).expect("no graph uses it any more"));
        end(&bench);
    }
}

/// What one gave back while it was captured, the other uses.
#[test]
fn graphs_that_share_a_pool_run_one_after_the_other() {
    for options in BACKINGS {
        let bench = bench(options);
        let Bench { stream: one, side: two, .. } = &bench;
        let pool = bench.pool();
        let (first, second) = (captured(&bench, &pool), captured(&bench, &pool));
        for round in 0..3 {
            for (graph, stream) in [(&first, one), (&second, two), (&second, one), (&first, two)] {
                launch_late(&bench, graph, stream);
                assert!(bench.driver.violations().is_empty(), "{options:?}: round {round}");
            }
        }
        drop((first, second, pool));
        end(&bench);
    }
}

#[test]
fn pools_that_one_graph_uses_lend_when_it_is_gone() {
    let bench = bench("");
    let Bench { stream: one, side: two, .. } = &bench;
    let pools = [(); 2].map(|()| bench.lending_pool());
    let event = bench.device.create_event(false).unwrap();
    let capture = one.begin_capture().unwrap();
    let announced = bench.allocator.capture(one, &pools[0]).unwrap();
    for pool in &pools {
        let scratch = pool.alloc_bytes(8 * MIB, one).unwrap();
        one.fill(scratch.ptr(), 7, 8 * MIB).unwrap();
    }
    event.record(one).unwrap();
    drop(announced);
    let graph = capture.end().unwrap();
    let rest = bench.alloc_on(two, CAPACITY - 16 * MIB);
    assert!(bench.allocator.alloc_bytes(8 * MIB, one).is_err(), "the graph may be launched");
    drop(graph);
    let lent = [(); 2].map(|()| bench.allocator.alloc_bytes(8 * MIB, one).expect("the graph is gone"));
    drop((lent, rest, pools, event));
    end(&bench);
}

/// The stream that a graph is captured on need not be the one it is launched on.
#[test]
fn a_graph_is_ordered_after_earlier_uses_of_its_memory() {
    type Launch = fn(&Bench, &Graph);
    let launches: [(&str, Launch); 3] = [
        ("the same stream", |bench, graph| graph.launch(&bench.stream).unwrap()),
        ("another stream", |bench, graph| graph.launch(&bench.side).unwrap()),
        ("another stream, while the first captures again", |bench, graph| {
            let again = bench.stream.begin_capture().unwrap();
            graph.launch(&bench.side).unwrap();
            drop(again.end().unwrap());
        }),
    ];
    for options in BACKINGS {
        for (name, launch) in launches {
            let bench = bench(options);
            let pool = bench.pool();
            let before = pool.alloc_bytes(8 * MIB, &bench.stream).unwrap();
            bench.stall(&bench.stream, Duration::from_secs(1));
            bench.stream.fill(before.ptr(), 5, 8 * MIB).unwrap();
            drop(before);
            let held = bench.allocator.memory_reserved();
            let graph = captured(&bench, &pool);
            assert_eq!(bench.allocator.memory_reserved(), held, "{options:?}, {name}: it uses the same memory");
            launch(&bench, &graph);
            drop((graph, pool));
            bench.device.synchronize().unwrap();
            assert!(bench.driver.violations().is_empty(), "{options:?}: {name}");
            end(&bench);
        }
    }
}

type Request = fn(&Bench, &PrivatePool, &Stream) -> Result<(), aquifer::Error>;

/// What a program asks an allocator for on behalf of a stream.
const REQUESTS: [(&str, Request); 7] = [
    ("alloc_bytes", |bench, _, stream| {
        let _: () = drop(bench.allocator.alloc_bytes(MIB, stream)?);
        Ok(())
    }),
    ("alloc_zeros", |bench, _, stream| bench.allocator.alloc_zeros::<u8>(1 << 20, stream).map(drop)),
    ("alloc_raw", |bench, _, stream| Ok(bench.allocator.free_raw(bench.allocator.alloc_raw(MIB, stream)?)?)),
    ("growable", |bench, _, stream| match bench.allocator.growable(8 * MIB, stream) {
        Err(AllocError::NotMapped { .. }) => {
            let _: () = drop(bench.allocator.alloc_bytes(MIB, stream)?);
            Ok(())
        }
        growable => Ok(growable?.grow_to(MIB, stream)?),
    }),
    ("a pool", |_, pool, stream| {
        let _: () = drop(pool.alloc_bytes(MIB, stream)?);
        Ok(())
    }),
    ("a raw pointer of a pool", |bench, pool, stream| Ok(bench.allocator.free_raw(pool.alloc_raw(MIB, stream)?)?)),
    ("an access guard", |bench, _, stream| {
        let buffer = bench.allocator.alloc::<u8>(1 << 20, &bench.side)?;
        let _: () = drop(AccessGuard::acquire(stream, &[(buffer.storage(), AccessKind::Write)])?);
        Ok(())
    }),
];

#[test]
fn a_stream_whose_capture_was_dropped_gets_memory_again_once_the_capture_is_over() {
    for options in BACKINGS {
        for (name, request) in REQUESTS {
            let bench = bench(options);
            let (own, pool) = (bench.device.per_thread_stream(), bench.pool());
            let capture = own.begin_capture().unwrap();
            std::thread::scope(|scope| scope.spawn(move || drop(capture)).join()).unwrap();
            request(&bench, &pool, &own).unwrap_or_else(|error| panic!("{options:?}, {name}: {error}"));
            assert!(!own.is_capturing(), "{options:?}, {name}");
            let stream = bench.new_stream();
            let capture = stream.begin_capture().unwrap();
            let operation = Some(Operation::EndCapture);
            bench.driver.inject(Fault::Rate { operation, rate: 1.0, code: Code(999) });
            drop(capture);
            assert!(request(&bench, &pool, &stream).is_err(), "{options:?}, {name}");
            bench.driver.clear_faults();
            request(&bench, &pool, &stream).unwrap_or_else(|error| panic!("{options:?}, {name}: {error}"));
            assert!(!stream.is_capturing(), "{options:?}, {name}");
            drop(pool);
            end(&bench);
        }
    }
}

#[test]
fn memory_of_a_dropped_capture_goes_back_with_its_pool() {
    type Dropped = fn(&Bench, aquifer::device::Capture);
    let ways: [(&str, Dropped); 4] = [
        ("at once", |_, capture| drop(capture)),
        ("on another thread", |bench, capture| {
            std::thread::scope(|scope| scope.spawn(move || drop(capture)).join()).unwrap();
            bench.device.settle();
        }),
        ("on another thread, and its own ends", |_, capture| {
            std::thread::scope(|scope| scope.spawn(move || drop(capture)).join()).unwrap();
        }),
        ("while the driver does not end it", |bench, capture| {
            (1..=3).for_each(|nth| bench.fail(Operation::EndCapture, nth, Code(999)));
            drop(capture);
        }),
    ];
    for options in BACKINGS {
        for (name, dropped) in ways {
            let bench = bench(options);
            let pool = bench.pool();
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let own = bench.device.per_thread_stream();
                    let capture = own.begin_capture().unwrap();
                    let route = bench.allocator.capture(&own, &pool).unwrap();
                    let scratch = bench.alloc_on(&own, 4 * MIB);
                    own.fill(scratch.ptr(), 1, 4 * MIB).unwrap();
                    drop((scratch, route));
                    dropped(&bench, capture);
                });
                // Returns once the thread has ended, which the end of the scope does not wait for.
                thread.join().unwrap();
            });
            drop(pool);
            bench.driver.clear_faults();
            bench.device.synchronize().unwrap_or_else(|error| panic!("{options:?}, {name}: {error}"));
            bench.allocator.empty_cache().unwrap();
            assert_eq!(bench.allocator.memory_reserved(), 0, "{options:?}, {name}");
            end(&bench);
        }
    }
}
