//! Memory of idle graphs that serves other requests, and comes back for launches.

#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use aquifer::device::sim::{Fault, SimDriver};
use aquifer::memory::{AllocError, Contents, Part, PoolOptions, PrivatePool, SleepOptions, TagScope};
use aquifer::prelude::*;
use aquifer::{Error, Graph};
use aquifer_device::{Code, HandleKind};

use super::graphs::{Bench, MIB, bench};

const DEVICE: &str = "sim:64MiB,violations=panic";
const LENDS: PoolOptions = PoolOptions { use_on_oom: false, no_split: false, lends_when_idle: true, limit: None };

/// A graph that copies its parameter to its output, through a temporary of so many MiB.
struct Copying {
    graph: Graph<Buffer<u8>>,
    parameter: Buffer<u8>,
}

impl Copying {
    fn new(bench: &Bench, mib: usize) -> Copying {
        Copying::captured(bench, mib, |stream, work| bench.memory.graph(stream, work)).unwrap()
    }

    fn in_pool(bench: &Bench, pool: &PrivatePool, mib: usize) -> Copying {
        Copying::captured(bench, mib, |stream, work| bench.memory.graph_in(pool, stream, work)).unwrap()
    }

    fn captured(
        bench: &Bench,
        mib: usize,
        capture: impl FnOnce(
            &Stream,
            &mut dyn FnMut(&Stream) -> Result<Buffer<u8>, Error>,
        ) -> Result<Graph<Buffer<u8>>, Error>,
    ) -> Result<Copying, Error> {
        let Bench { memory, stream, .. } = bench;
        let parameter = memory.alloc_zeros::<u8>(512, stream)?;
        let mut work = |stream: &Stream| {
            let mut temporary = memory.alloc::<u8>(mib << 20, stream)?;
            temporary.fill(9, stream)?;
            temporary.slice_mut(1000..1512).copy_from(&parameter, stream)?;
            let mut output = memory.alloc::<u8>(512, stream)?;
            output.copy_from(&temporary.slice(1000..1512), stream)?;
            Ok(output)
        };
        let graph = capture(stream, &mut work)?;
        Ok(Copying { graph, parameter })
    }

    /// Launches it, and waits for the result.
    fn launch(&mut self, value: u8, stream: &Stream) -> Result<(), Error> {
        let upload = self.graph.update(&mut self.parameter, vec![value; 512], stream)?;
        self.graph.launch(stream)?;
        upload.wait()?;
        assert_eq!(self.graph.output().to_vec(stream)?, [value; 512]);
        Ok(())
    }
}

fn sim(bench: &Bench) -> &SimDriver {
    bench.device.driver().as_any().and_then(|driver| driver.downcast_ref()).unwrap()
}

/// Bytes that graphs have lent and that were brought back.
fn lent(memory: &Allocator) -> (u64, u64) {
    let stats = memory.stats();
    (stats.graph_bytes_lent, stats.graph_bytes_returned)
}

fn is_of_launch(error: &Error) -> bool {
    matches!(error, Error::Alloc(AllocError::OutOfMemory(report)) if report.launched_pool.is_some())
}

#[test]
fn an_idle_graph_lends_its_memory_and_each_launch_has_it_again() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let mut copying = Copying::new(&bench, 40);
    for round in 1..=3 {
        copying.launch(round, stream).unwrap();
        let mut other = memory.alloc::<u8>(50 << 20, stream).expect("the graph lends its memory");
        other.fill(7, stream).unwrap();
        let refused = copying.launch(round + 100, stream).unwrap_err();
        assert!(refused.is_out_of_memory() && is_of_launch(&refused), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("for: memory that idle graphs of a pool lent; nothing was launched"), "{text}");
        assert_eq!(other.slice(..3).to_vec(stream).unwrap(), [7; 3], "nothing was launched");
        drop(other);
        copying.launch(round + 50, stream).unwrap();
        let (given, returned) = lent(memory);
        assert!(given >= 28 * MIB * u64::from(round) && given == returned, "{given}, {returned}");
    }
}

#[test]
fn a_graph_lends_no_more_than_a_request_lacks() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let mut copying = Copying::new(&bench, 40);
    let _other = memory.alloc::<u8>(30 << 20, stream).unwrap();
    let (given, _) = lent(memory);
    assert!((4 * MIB..=12 * MIB).contains(&given), "{given}");
    let refused = copying.launch(1, stream).unwrap_err();
    assert!(is_of_launch(&refused), "{refused}");
}

#[test]
fn a_report_counts_no_memory_that_graphs_lent_which_are_gone() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(LENDS).unwrap();
    // In the same addresses, which stay.
    let _early = pool.alloc_bytes(2 << 20, stream).unwrap();
    let copying = Copying::in_pool(&bench, &pool, 40);
    let _other = memory.alloc::<u8>(50 << 20, stream).unwrap();
    let lent = || match memory.alloc::<u8>(60 << 20, stream) {
        Err(Error::Alloc(AllocError::OutOfMemory(report))) => report.lent_by_graphs,
        other => panic!("{other:?}"),
    };
    assert!(lent() >= 24 * MIB);
    drop(copying);
    assert_eq!(lent(), 0, "no launch needs it");
}

#[test]
fn memory_of_a_launch_under_way_is_not_lent_before_it_is_done() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, side, .. } = &bench;
    let pool = memory.create_pool(LENDS).unwrap();
    let copying = Copying::in_pool(&bench, &pool, 40);
    bench.stall(stream);
    copying.graph.launch(stream).unwrap();
    // Memory that is enough without it.
    drop(memory.alloc::<u8>(10 << 20, side).unwrap());
    let before = memory.stats();
    assert_eq!((before.graph_bytes_lent, before.num_sync_all_streams), (0, 0));
    // The race detector would find a write that comes before the launch is done.
    memory.alloc::<u8>(50 << 20, side).expect("the ladder waits for it").fill(1, side).unwrap();
    assert!(memory.stats().num_sync_all_streams > 0);
    assert!(memory.stats().graph_bytes_lent > 0);
}

#[test]
fn graphs_that_share_a_pool_have_all_of_it_again_with_the_first_launch() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, side, .. } = &bench;
    let pool = memory.create_pool(LENDS).unwrap();
    let [mut small, mut large] = [4, 24].map(|mib| Copying::in_pool(&bench, &pool, mib));
    for round in 1..3 {
        drop(memory.alloc::<u8>(60 << 20, stream).unwrap());
        small.launch(round, stream).unwrap();
        let (given, returned) = lent(memory);
        assert_eq!(given, returned);
        large.launch(round + 10, side).unwrap();
        assert_eq!(lent(memory), (given, returned));
    }
}

#[test]
fn pools_lend_nothing_unless_they_are_told_to_and_all_their_graphs_bring_it_back() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    // A pool that was not told to.
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let mut copying = Copying::in_pool(&bench, &pool, 40);
    assert!(memory.alloc::<u8>(40 << 20, stream).unwrap_err().is_out_of_memory());
    copying.launch(1, stream).unwrap();
    drop((copying, pool));
    // One with a graph that an adapter captures and launches by itself.
    let pool = memory.create_pool(LENDS).unwrap();
    let mut copying = Copying::in_pool(&bench, &pool, 20);
    let capture = stream.begin_capture().unwrap();
    let route = memory.capture(stream, &pool).unwrap();
    let scratch = memory.alloc_bytes(20 << 20, stream).unwrap();
    stream.fill(scratch.ptr(), 1, scratch.bytes()).unwrap();
    drop(scratch);
    let adapters = capture.end().unwrap();
    drop(route);
    assert!(memory.alloc::<u8>(50 << 20, stream).unwrap_err().is_out_of_memory());
    assert_eq!(lent(memory), (0, 0));
    adapters.launch(stream).unwrap();
    copying.launch(2, stream).unwrap();
    drop(adapters);
    memory.alloc::<u8>(50 << 20, stream).expect("the other graph is gone").fill(3, stream).unwrap();
    copying.launch(3, stream).unwrap();
}

#[test]
fn every_kind_of_request_gets_what_graphs_lend() {
    type Request = fn(&Bench) -> Result<(), Error>;
    let requests: [(&str, Request); 4] = [
        ("beyond the limit", |bench| {
            bench.memory.set_limit(Some(50 << 20));
            bench.memory.alloc::<u8>(40 << 20, &bench.stream).map(drop)
        }),
        ("a segment", |bench| {
            let pool = bench.memory.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() })?;
            Ok(pool.alloc_bytes(40 << 20, &bench.stream).map(drop)?)
        }),
        ("memory that grows", |bench| {
            let mut growable = bench.memory.growable(60 << 20, &bench.stream)?;
            Ok(growable.grow_to(50 << 20, &bench.stream)?)
        }),
        ("exportable memory", |bench| {
            Ok(bench.memory.alloc_exportable(40 << 20, HandleKind::PosixFd, &bench.stream).map(drop)?)
        }),
    ];
    for (name, request) in requests {
        let bench = bench(DEVICE);
        let mut copying = Copying::new(&bench, 40);
        request(&bench).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(lent(&bench.memory).0 >= 16 * MIB, "{name}");
        copying.launch(5, &bench.stream).unwrap();
    }
}

#[test]
fn a_graph_is_captured_into_a_pool_that_has_lent_its_memory() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(LENDS).unwrap();
    let mut first = Copying::in_pool(&bench, &pool, 40);
    // The warm-up needs 44 MiB beside the pool, which has 40 of the device's 64.
    let mut second = Copying::in_pool(&bench, &pool, 44);
    assert!(lent(memory).0 > 0);
    first.launch(1, stream).unwrap();
    second.launch(2, stream).unwrap();
}

#[test]
fn what_was_lent_is_forgotten_with_the_graph() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(LENDS).unwrap();
    let (kept, gone) = (Copying::in_pool(&bench, &pool, 20), Copying::new(&bench, 20));
    let other = memory.alloc::<u8>(60 << 20, stream).unwrap();
    drop((kept, gone));
    drop(other);
    pool.empty_cache().unwrap();
    memory.empty_cache().unwrap();
    assert_eq!(memory.memory_reserved(), 0);
    assert!(memory.snapshot().segments.is_empty());
    // A graph that is captured there later needs no more than it uses.
    let mut small = Copying::in_pool(&bench, &pool, 4);
    small.launch(1, stream).unwrap();
    assert!(memory.memory_reserved() <= 10 * MIB);
}

#[test]
fn memory_that_wakes_up_gets_what_graphs_lend() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let weights = {
        let _scope = TagScope::new("weights");
        memory.from_slice(&vec![7_u8; 40 << 20], stream).unwrap()
    };
    memory.sleep(SleepOptions::part(Part::tag("weights"), Contents::SaveToHost)).unwrap();
    let mut copying = Copying::new(&bench, 40);
    copying.launch(1, stream).unwrap();
    memory.wake().unwrap();
    assert!(weights.to_vec(stream).unwrap().iter().all(|&byte| byte == 7));
    assert!(is_of_launch(&copying.launch(2, stream).unwrap_err()));
    drop(weights);
    copying.launch(3, stream).unwrap();
}

#[test]
fn memory_that_is_lent_does_not_wake_up_and_comes_back_with_a_launch() {
    let bench = bench(DEVICE);
    let Bench { memory, stream, .. } = &bench;
    let mut copying = Copying::new(&bench, 40);
    let other = memory.from_slice(&vec![7_u8; 50 << 20], stream).unwrap();
    memory.sleep(SleepOptions::all(Contents::SaveToHost)).unwrap();
    assert!(copying.launch(1, stream).unwrap_err().is_asleep());
    memory.wake().unwrap();
    assert!(other.to_vec(stream).unwrap().iter().all(|&byte| byte == 7));
    assert!(is_of_launch(&copying.launch(1, stream).unwrap_err()));
    drop(other);
    copying.launch(2, stream).unwrap();
    memory.sleep(Contents::Discard).unwrap();
    memory.wake().unwrap();
    copying.launch(3, stream).unwrap();
}

/// A fault at each driver call of lending and of bringing memory back, one after the other.
#[test]
fn after_a_fault_at_any_call_the_graph_can_be_launched() {
    for code in [Code::OUT_OF_MEMORY, Code(999), Code::CAPTURE_IMPLICIT] {
        for of_launch in [false, true] {
            for nth in 1.. {
                let bench = bench("sim:16MiB,violations=panic");
                let Bench { memory, stream, .. } = &bench;
                let mut copying = Copying::new(&bench, 8);
                copying.launch(1, stream).unwrap();
                let inject = || sim(&bench).inject(Fault::Nth { operation: None, nth, code });
                if !of_launch {
                    inject();
                }
                let total = || bench.device.driver_calls().total();
                let before = total();
                let other = memory.alloc::<u8>(12 << 20, stream);
                let mut made = total() - before;
                drop(other);
                if of_launch {
                    inject();
                    let before = total();
                    let _ = copying.launch(2, stream);
                    made = total() - before;
                }
                sim(&bench).clear_faults();
                let again = copying.launch(3, stream);
                assert!(again.is_ok(), "{code:?} at call {nth}: {again:?}");
                let other = memory.alloc::<u8>(12 << 20, stream);
                assert!(other.is_ok(), "{code:?} at call {nth}: {other:?}");
                drop(other);
                copying.launch(4, stream).unwrap();
                drop(copying);
                bench.device.synchronize().unwrap();
                memory.empty_cache().unwrap();
                assert_eq!((memory.memory_allocated(), memory.memory_reserved()), (0, 0), "{code:?} at call {nth}");
                if nth > made {
                    break;
                }
            }
        }
    }
}

#[test]
fn threads_that_launch_and_allocate_at_once_get_memory_in_turns() {
    let bench = bench(DEVICE);
    let Bench { device, memory, .. } = &bench;
    let graphs = [16, 24].map(|mib| Copying::new(&bench, mib));
    std::thread::scope(|scope| {
        for mut copying in graphs {
            let stream = device.stream().unwrap();
            scope.spawn(move || {
                for value in 0..60 {
                    while let Err(error) = copying.launch(value, &stream) {
                        assert!(error.is_out_of_memory(), "{error}");
                    }
                }
            });
        }
        let stream = device.stream().unwrap();
        scope.spawn(move || {
            for value in 0..60 {
                let Ok(mut other) = memory.alloc::<u8>(40 << 20, &stream) else { continue };
                other.fill(value, &stream).unwrap();
                assert_eq!(other.slice((40 << 20) - 3..).to_vec(&stream).unwrap(), [value; 3]);
            }
        });
    });
    device.synchronize().unwrap();
}
