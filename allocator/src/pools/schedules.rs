//! Models of a private pool while a graph is captured from it on one thread and another uses or
//! empties the pool, under a scheduler that explores interleavings. Run by `ci/schedules`.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{Code, Device, ErrorKind, Graph, Operation, Stream};
use aquifer_sim::{Fault, SimConfig, SimDriver};
use shuttle::thread;

use crate::{AllocError, Allocator, Config, GraphUses, PoolOptions, PrivatePool};

const MIB: u64 = 1 << 20;
/// More than half of the device.
const LARGE: u64 = 40 * MIB;

struct Setup {
    sim: Arc<SimDriver>,
    pool: Arc<PrivatePool>,
    streams: [Stream; 2],
}

/// Explores `model` at random, and with few but well-placed switches.
fn explore(options: &'static str, model: impl Fn(&Setup) + Send + Sync + 'static) {
    let run = move || {
        let sim = SimDriver::new(SimConfig::new(64 * MIB));
        let device = Device::new(sim.clone());
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let streams = [0; 2].map(|_| device.stream().unwrap());
        let pool = Arc::new(allocator.create_pool(PoolOptions::default()).unwrap());
        model(&Setup { sim: sim.clone(), pool, streams });
        device.synchronize().unwrap();
        allocator.empty_cache().unwrap();
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0));
        assert_eq!(sim.violations(), []);
    };
    let run = Arc::new(run);
    let again = run.clone();
    shuttle::check_random(move || run(), 500);
    shuttle::check_pct(move || again(), 300, 3);
}

/// A graph that fills scratch memory of the pool; nothing if there is no memory for it.
fn capture(pool: &PrivatePool, stream: &Stream) -> Option<(Graph, Range<u64>)> {
    let capture = stream.begin_capture().unwrap();
    let route = pool.allocator.capture(stream, pool).unwrap();
    let range = match fill_scratch(&pool.allocator, stream) {
        Ok(range) => Some(range),
        Err(AllocError::OutOfMemory(_)) => None,
        Err(AllocError::Device(error)) if error.kind == ErrorKind::Capture => None,
        Err(error) => panic!("{error}"),
    };
    drop(route);
    let graph = capture.end().expect("no call may break a capture");
    Some((graph, range?))
}

fn fill_scratch(allocator: &Allocator, stream: &Stream) -> Result<Range<u64>, AllocError> {
    let scratch = allocator.alloc_bytes(LARGE, stream)?;
    stream.fill(scratch.ptr(), 7, 512)?;
    Ok(scratch.ptr().range(LARGE))
}

#[test]
fn a_pool_that_is_emptied_keeps_what_a_graph_uses() {
    for options in ["", "backing:segments"] {
        explore(options, |Setup { pool, streams: [one, two], .. }| {
            drop(pool.alloc_bytes(LARGE, one).unwrap());
            let (capturing, emptying, stream) = (pool.clone(), pool.clone(), two.clone());
            let capture = thread::spawn(move || capture(&capturing, &stream));
            let empty = thread::spawn(move || drop(emptying.empty_cache()));
            let captured = capture.join().unwrap();
            empty.join().unwrap();
            if let Some((graph, _)) = captured {
                graph.launch(two).unwrap();
                two.synchronize().unwrap();
            }
        });
    }
}

#[test]
fn a_request_beside_a_capture_gets_nothing_that_the_graph_uses() {
    explore("", |Setup { pool, streams: [one, two], .. }| {
        let (capturing, asking) = (pool.clone(), pool.clone());
        let (stream, other) = (two.clone(), one.clone());
        let capture = thread::spawn(move || capture(&capturing, &stream));
        let ask = thread::spawn(move || match asking.alloc_bytes(LARGE, &other) {
            Ok(block) => Some(block),
            Err(AllocError::OutOfMemory(_)) => None,
            Err(error) => panic!("{error}"),
        });
        let (captured, block) = (capture.join().unwrap(), ask.join().unwrap());
        if let (Some((_, used)), Some(block)) = (&captured, &block) {
            let got = block.ptr().range(LARGE);
            assert!(got.end <= used.start || used.end <= got.start, "{got:x?} is the graph's, who has {used:x?}");
        }
    });
}

/// Frames go to a request, or stay for the launch.
#[test]
fn a_launch_has_its_memory_while_other_threads_are_lent_it() {
    explore("", |Setup { pool, streams: [one, two], .. }| {
        let allocator = pool.allocator.clone();
        let options = PoolOptions { lends_when_idle: true, ..PoolOptions::default() };
        let lender = allocator.create_pool(options).unwrap();
        let capture = one.begin_capture().unwrap();
        let uses = GraphUses::collect(&lender, one).unwrap();
        let route = allocator.capture(one, &lender).unwrap();
        let used = fill_scratch(&allocator, one).unwrap();
        assert_eq!(uses.note_pool(&lender, one), 0);
        let graph = capture.end().unwrap();
        drop(route);
        let (launching, stream) = (allocator.clone(), one.clone());
        let launch = thread::spawn(move || {
            for _ in 0..2 {
                match uses.begin_launch(&launching, &stream) {
                    Ok(_ready) => graph.launch(&stream).unwrap(),
                    Err(AllocError::OutOfMemory(report)) => assert!(report.launched_pool.is_some()),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let (asking, other) = (allocator, two.clone());
        let ask = thread::spawn(move || match asking.alloc_bytes(LARGE, &other) {
            Ok(block) => {
                other.fill(block.ptr(), 1, LARGE).unwrap();
                assert_ne!(block.ptr().range(LARGE), used, "the graph's addresses stay its own");
            }
            Err(AllocError::OutOfMemory(_)) => {}
            Err(error) => panic!("{error}"),
        });
        launch.join().unwrap();
        ask.join().unwrap();
    });
}

/// The driver refuses to take its memory, while another pool is made.
#[test]
fn a_new_pool_has_none_of_the_memory_of_one_that_goes() {
    for options in ["", "backing:segments"] {
        explore(options, |setup| {
            let allocator = setup.pool.allocator.clone();
            let going = allocator.create_pool(PoolOptions::default()).unwrap();
            drop(going.alloc_bytes(LARGE, &setup.streams[0]).unwrap());
            setup.sim.inject(Fault::Nth { operation: Some(Operation::Free), nth: 1, code: Code::INVALID_VALUE });
            let goes = thread::spawn(move || drop(going));
            let made = thread::spawn(move || allocator.create_pool(PoolOptions::default()).unwrap());
            goes.join().unwrap();
            let made = made.join().unwrap();
            setup.sim.clear_faults();
            let segments = made.allocator.snapshot().segments;
            assert!(segments.iter().all(|segment| segment.segment_pool_id != made.id()), "it never allocated");
        });
    }
}
