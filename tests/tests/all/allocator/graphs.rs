//! Graphs and the memory that they use: it stays while they may be launched, and while they run,
//! whatever happens to the pool that it is from; and nothing that the allocator does breaks a
//! capture.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use aquifer::device::{ErrorKind, Graph};
use aquifer::memory::{AllocError, Config, PoolOptions, PrivatePool};
use aquifer::{Allocator, Device, Stream};
use aquifer_device::{HandleKind, Operation};
use aquifer_tests::{MIB, Subject};

pub(super) const CAPACITY: u64 = 128 * MIB;
pub(super) const BACKINGS: [&str; 2] = ["", "backing:segments"];

pub(super) struct Bench {
    pub(super) driver: Subject,
    pub(super) device: Device,
    pub(super) allocator: Allocator,
    pub(super) streams: [Stream; 2],
}

impl Bench {
    pub(super) fn new(options: &str) -> Bench {
        let driver = Subject::new(CAPACITY);
        let device = driver.device();
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        Bench { driver, device, allocator, streams }
    }

    pub(super) fn pool(&self) -> PrivatePool {
        self.allocator.create_pool(PoolOptions::default()).unwrap()
    }

    /// A graph that fills scratch memory of the pool, captured on the first stream.
    pub(super) fn graph(&self, pool: &PrivatePool) -> Graph {
        let stream = &self.streams[0];
        let capture = stream.begin_capture().unwrap();
        let route = self.allocator.capture(stream, pool).unwrap();
        let scratch = self.allocator.alloc_bytes(8 * MIB, stream).unwrap();
        stream.fill(scratch.ptr(), 7, 8 * MIB).unwrap();
        drop((scratch, route));
        capture.end().unwrap()
    }

    /// Launches the graph behind work that takes its time.
    fn launch_late(&self, graph: &Graph, stream: &Stream) {
        self.driver.stall(stream, Duration::from_secs(1)).unwrap();
        graph.launch(stream).unwrap();
    }

    pub(super) fn end(self) {
        self.device.synchronize().unwrap();
        self.allocator.empty_cache().unwrap();
        self.device.settle();
        assert_eq!((self.allocator.memory_allocated(), self.allocator.memory_reserved()), (0, 0));
        assert_eq!(self.device.memory_info().unwrap().free, CAPACITY);
        self.driver.assert_no_violation();
    }
}

#[test]
fn memory_of_a_dropped_pool_stays_until_launches_are_done() {
    type After = fn(&Bench);
    let then: [(&str, After); 4] = [
        ("nothing", |_| {}),
        ("the cache is emptied", |bench| bench.allocator.empty_cache().map(|_| ()).unwrap()),
        ("another stream needs it", |bench| {
            drop(bench.allocator.alloc_bytes(CAPACITY - 4 * MIB, &bench.streams[0]).unwrap())
        }),
        ("it is trimmed", |bench| bench.allocator.trim_to(MIB).map(|_| ()).unwrap()),
    ];
    for options in BACKINGS {
        for launched_on in 0..2 {
            for (name, then) in then {
                let bench = Bench::new(options);
                let pool = bench.pool();
                let graph = bench.graph(&pool);
                bench.launch_late(&graph, &bench.streams[launched_on]);
                drop(graph);
                drop(pool);
                then(&bench);
                assert!(bench.driver.violations().is_empty(), "{options:?}, stream {launched_on}: {name}");
                bench.end();
            }
        }
    }
}

#[test]
fn dropping_a_pool_does_not_wait_for_launches() {
    let bench = Bench::new("");
    let pool = bench.pool();
    let graph = bench.graph(&pool);
    bench.launch_late(&graph, &bench.streams[1]);
    drop((graph, pool));
    assert_eq!(bench.allocator.memory_reserved(), 8 * MIB, "its launch is not done");
    bench.streams[1].synchronize().unwrap();
    drop(bench.allocator.alloc_bytes(CAPACITY, &bench.streams[0]).unwrap());
    bench.end();
}

#[test]
fn programs_that_capture_again_and_again_do_not_run_out_of_memory() {
    for options in BACKINGS {
        let bench = Bench::new(options);
        for _ in 0..3 * CAPACITY / (8 * MIB) {
            let pool = bench.pool();
            let graph = bench.graph(&pool);
            graph.launch(&bench.streams[1]).unwrap();
            bench.streams[1].synchronize().unwrap();
        }
        assert!(bench.allocator.memory_reserved() <= 20 * MIB, "{options:?}: {}", bench.allocator.memory_reserved());
        bench.end();
    }
}

#[test]
fn emptying_a_pool_waits_for_launches() {
    for options in BACKINGS {
        let bench = Bench::new(options);
        let pool = bench.pool();
        let graph = bench.graph(&pool);
        bench.launch_late(&graph, &bench.streams[1]);
        drop(graph);
        let held = bench.allocator.memory_reserved();
        assert_eq!((pool.empty_cache().unwrap(), bench.allocator.memory_reserved()), (held, 0), "{options:?}");
        drop(pool);
        bench.end();
    }
}

#[test]
fn a_pool_lends_no_memory_that_a_graph_may_use() {
    let bench = Bench::new("");
    let [one, two] = &bench.streams;
    let lending = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pool = bench.allocator.create_pool(lending).unwrap();
    let graph = bench.graph(&pool);
    let rest = bench.allocator.alloc_bytes(CAPACITY - 8 * MIB, two).unwrap();
    assert!(matches!(bench.allocator.alloc_bytes(4 * MIB, one), Err(AllocError::OutOfMemory(_))));
    bench.launch_late(&graph, one);
    drop(graph);
    assert!(matches!(bench.allocator.alloc_bytes(4 * MIB, one), Err(AllocError::OutOfMemory(_))), "it runs");
    one.synchronize().unwrap();
    let lent = bench.allocator.alloc_bytes(4 * MIB, one).expect("the graph is gone");
    drop((lent, rest, pool));
    bench.end();
}

/// Whatever runs out or is given back meanwhile, the capture goes on, and errors are what they are
/// without one.
#[test]
fn no_capture_is_broken_by_giving_memory_back() {
    type Meanwhile = fn(&Bench) -> Result<(), AllocError>;
    let meanwhile: [(&str, bool, Meanwhile); 6] = [
        ("the capture asks for too much", false, |bench| {
            bench.allocator.alloc_bytes(2 * CAPACITY, &bench.streams[0]).map(drop)
        }),
        ("a bystander asks for too much", false, |bench| {
            bench.allocator.alloc_bytes(2 * CAPACITY, &bench.streams[1]).map(drop)
        }),
        ("the cache is emptied", true, |bench| bench.allocator.empty_cache().map(drop)),
        ("the cache is trimmed", true, |bench| bench.allocator.trim_to(0).map(drop)),
        ("a pool ends", true, |bench| {
            let pool = bench.pool();
            pool.alloc_bytes(3 * MIB, &bench.streams[1]).map(drop)
        }),
        ("a pool is emptied", true, |bench| {
            let pool = bench.pool();
            pool.alloc_bytes(3 * MIB, &bench.streams[1]).map(drop)?;
            pool.empty_cache().map(drop)
        }),
    ];
    let options =
        ["", "backing:segments", "backing:segments,garbage_collection_threshold:0.1", "backing:segments,no_cache:True"];
    for options in options {
        for (name, succeeds, meanwhile) in meanwhile {
            let bench = Bench::new(options);
            let [one, two] = &bench.streams;
            drop(bench.allocator.alloc_bytes(30 * MIB, two).unwrap());
            let asked = Arc::new(AtomicU32::new(0));
            let count = asked.clone();
            let reclaimer = bench.allocator.register_reclaimer(0, "counts", move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                0
            });
            let pool = bench.pool();
            let capture = one.begin_capture().unwrap();
            let route = bench.allocator.capture(one, &pool).unwrap();
            let before = bench.allocator.alloc_bytes(4 * MIB, one).unwrap();
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
            let after = bench.allocator.alloc_bytes(4 * MIB, one).unwrap();
            one.fill(after.ptr(), 8, 4 * MIB).unwrap();
            drop(route);
            let graph = capture.end().unwrap_or_else(|error| panic!("{options:?}: {name}: {error}"));
            graph.launch(one).unwrap();
            one.synchronize().unwrap();
            drop((before, after, graph, pool, reclaimer));
            bench.end();
        }
    }
}

#[test]
fn a_capture_gets_no_memory_that_no_pool_keeps() {
    for options in BACKINGS {
        let bench = Bench::new(options);
        let [one, two] = &bench.streams;
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
        bench.end();
    }
}

#[test]
fn plain_memory_is_not_freed_while_a_stream_captures() {
    let bench = Bench::new("");
    let ptr = bench.device.alloc(MIB).unwrap();
    let capture = bench.streams[0].begin_capture().unwrap();
    let error = bench.device.free(ptr).unwrap_err();
    assert!(error.kind == ErrorKind::Capture && error.to_string().contains("waits for the device"), "{error}");
    drop(capture.end().unwrap());
    bench.device.free(ptr).unwrap();
    bench.end();
}

/// CUDA does not say whether unmapping breaks the capture of another stream.
#[test]
fn nothing_is_unmapped_while_a_stream_captures() {
    let bench = Bench::new("");
    let [one, two] = &bench.streams;
    let three = bench.device.stream().unwrap();
    drop(bench.allocator.alloc_bytes(60 * MIB, two).unwrap());
    let mut growable = bench.allocator.growable(64 * MIB, two).unwrap();
    growable.grow_to(8 * MIB, two).unwrap();
    bench.device.synchronize().unwrap();
    let capture = one.begin_capture().unwrap();
    let unmapped = || bench.device.driver_calls().of(Operation::Unmap);
    let before = unmapped();
    drop(growable);
    // Memory is lent or bought, but does not move.
    let bought = bench.allocator.alloc_bytes(30 * MIB, &three).unwrap();
    three.fill(bought.ptr(), 1, 30 * MIB).unwrap();
    assert_eq!(bench.allocator.empty_cache().unwrap(), 0, "it is put off");
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
    drop(bench.allocator.alloc_bytes(90 * MIB, &three).unwrap());
    assert!(unmapped() > before);
    drop(bought);
    bench.end();
}

/// A launch would write into what somebody holds.
#[test]
fn requests_outside_of_captures_get_no_memory_that_a_graph_uses() {
    for options in BACKINGS {
        let bench = Bench::new(options);
        let [one, two] = &bench.streams;
        let pool = bench.allocator.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap();
        let graph = bench.graph(&pool);
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
        // Others get what is free of the pool beside what the graph uses, and captures get that of
        // the graph.
        let rest = bench.allocator.alloc_bytes(CAPACITY - bench.allocator.memory_reserved(), two).unwrap();
        let lent = held_on.map(|stream| bench.allocator.alloc_bytes(8 * MIB, stream).unwrap());
        assert!(matches!(bench.allocator.alloc_bytes(8 * MIB, one), Err(AllocError::OutOfMemory(_))), "{options:?}");
        let second = bench.graph(&pool);
        drop((graph, second, lent, rest));
        // Nobody uses it any more.
        let lent = bench.allocator.alloc_bytes(8 * MIB, one).unwrap();
        let inside = pool.alloc_bytes(8 * MIB, one).unwrap();
        drop((lent, inside, pool));
        bench.end();
    }
}

/// As a graph of PyTorch keeps its pool.
#[test]
fn memory_of_a_dropped_pool_stays_while_its_graphs_live() {
    for options in BACKINGS {
        let bench = Bench::new(options);
        let [one, two] = &bench.streams;
        let pool = bench.pool();
        let graph = bench.graph(&pool);
        assert_eq!(pool.empty_cache().unwrap(), 0, "{options:?}");
        let held = bench.allocator.memory_reserved();
        drop(pool);
        bench.allocator.empty_cache().unwrap();
        assert_eq!(bench.allocator.memory_reserved(), held, "{options:?}");
        let all = bench.allocator.alloc_bytes(CAPACITY - held, two).unwrap();
        two.fill(all.ptr(), 3, all.bytes()).unwrap();
        assert!(bench.allocator.alloc_bytes(8 * MIB, two).is_err(), "{options:?}");
        graph.launch(one).unwrap();
        drop(all);
        drop(graph);
        drop(bench.allocator.alloc_bytes(CAPACITY, two).expect("nobody uses it any more"));
        bench.end();
    }
}

/// What one gave back while it was captured, the other uses.
#[test]
fn graphs_that_share_a_pool_run_one_after_the_other() {
    for options in BACKINGS {
        let bench = Bench::new(options);
        let [one, two] = &bench.streams;
        let pool = bench.pool();
        let (first, second) = (bench.graph(&pool), bench.graph(&pool));
        for round in 0..3 {
            for (graph, stream) in [(&first, one), (&second, two), (&second, one), (&first, two)] {
                bench.launch_late(graph, stream);
                assert!(bench.driver.violations().is_empty(), "{options:?}: round {round}");
            }
        }
        drop((first, second, pool));
        bench.end();
    }
}

#[test]
fn pools_that_one_graph_uses_lend_when_it_is_gone() {
    let bench = Bench::new("");
    let [one, two] = &bench.streams;
    let lending = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pools = [(); 2].map(|()| bench.allocator.create_pool(lending).unwrap());
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
    let rest = bench.allocator.alloc_bytes(CAPACITY - 16 * MIB, two).unwrap();
    assert!(bench.allocator.alloc_bytes(8 * MIB, one).is_err(), "the graph may be launched");
    drop(graph);
    let lent = [(); 2].map(|()| bench.allocator.alloc_bytes(8 * MIB, one).expect("the graph is gone"));
    drop((lent, rest, pools, event));
    bench.end();
}

/// The stream that a graph is captured on need not be the one it is launched on.
#[test]
fn a_graph_comes_after_what_its_memory_was_used_for_before() {
    type Launch = fn(&Bench, &Graph);
    let launches: [(&str, Launch); 3] = [
        ("the same stream", |bench, graph| graph.launch(&bench.streams[0]).unwrap()),
        ("another stream", |bench, graph| graph.launch(&bench.streams[1]).unwrap()),
        ("another stream, while the first captures again", |bench, graph| {
            let again = bench.streams[0].begin_capture().unwrap();
            graph.launch(&bench.streams[1]).unwrap();
            drop(again.end().unwrap());
        }),
    ];
    for options in BACKINGS {
        for (name, launch) in launches {
            let bench = Bench::new(options);
            let pool = bench.pool();
            let before = pool.alloc_bytes(8 * MIB, &bench.streams[0]).unwrap();
            bench.driver.stall(&bench.streams[0], Duration::from_secs(1)).unwrap();
            bench.streams[0].fill(before.ptr(), 5, 8 * MIB).unwrap();
            drop(before);
            let held = bench.allocator.memory_reserved();
            let graph = bench.graph(&pool);
            assert_eq!(bench.allocator.memory_reserved(), held, "{options:?}, {name}: it uses the same memory");
            launch(&bench, &graph);
            drop((graph, pool));
            bench.device.synchronize().unwrap();
            assert!(bench.driver.violations().is_empty(), "{options:?}: {name}");
            bench.end();
        }
    }
}
