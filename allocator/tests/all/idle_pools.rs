//! Private pools keep free memory for their own requests, but a request is not refused because of
//! it, unless a graph may use it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use aquifer_allocator::{AllocError, Allocator, Config, PoolOptions, PrivatePool};
use aquifer_device::{Device, Driver, HandleKind, Stream};
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;
const BACKINGS: [&str; 2] = ["", "backing:segments"];
/// What refuses a request: the device, the limit, the headroom.
const REFUSALS: [(&str, u64); 3] = [("", 1024), ("limit_mb:1024", 2048), ("headroom_mb:1024", 2048)];

struct Bench {
    driver: Arc<SimDriver>,
    device: Device,
    memory: Allocator,
    stream: Stream,
}

impl Bench {
    fn new(options: &str, size_mib: u64) -> Bench {
        let driver = SimDriver::new(SimConfig::new(size_mib * MIB));
        let device = Device::new(driver.clone());
        let (memory, stream) =
            (Allocator::new(&device, Config::parse(options).unwrap()).unwrap(), device.stream().unwrap());
        Bench { driver, device, memory, stream }
    }

    fn pool(&self) -> PrivatePool {
        self.memory.create_pool(PoolOptions::default()).unwrap()
    }

    /// A pool that keeps so much.
    fn idle(&self, mib: u64) -> PrivatePool {
        let pool = self.pool();
        drop(pool.alloc_bytes(mib * MIB, &self.stream).unwrap());
        pool
    }

    fn is_refused(&self, mib: u64) -> bool {
        match self.memory.alloc_bytes(mib * MIB, &self.stream) {
            Ok(_) => false,
            Err(AllocError::OutOfMemory(_)) => true,
            Err(other) => panic!("{other}"),
        }
    }
}

fn all(backing: &str, more: &str) -> String {
    [backing, more].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(",")
}

#[test]
fn what_an_idle_pool_keeps_serves_any_request() {
    type Request = fn(&Bench, &PrivatePool) -> Result<(), AllocError>;
    let requests: [(&str, Request); 5] = [
        ("outside", |bench, _| bench.memory.alloc_bytes(900 * MIB, &bench.stream).map(drop)),
        ("of its own", |bench, pool| pool.alloc_bytes(900 * MIB, &bench.stream).map(drop)),
        ("of another pool", |bench, _| bench.pool().alloc_bytes(900 * MIB, &bench.stream).map(drop)),
        ("of another stream", |bench, pool| pool.alloc_bytes(900 * MIB, &bench.device.stream().unwrap()).map(drop)),
        ("of a pool of whole blocks", |bench, _| {
            let options = PoolOptions { no_split: true, ..PoolOptions::default() };
            bench.memory.create_pool(options)?.alloc_bytes(900 * MIB, &bench.stream).map(drop)
        }),
    ];
    for backing in BACKINGS {
        for (options, size) in REFUSALS {
            for (what, request) in requests {
                let bench = Bench::new(&all(backing, options), size);
                let pool = bench.idle(400);
                // The default pool keeps some, too.
                drop(bench.memory.alloc_bytes(100 * MIB, &bench.stream).unwrap());
                let served = request(&bench, &pool);
                assert!(served.is_ok(), "{backing:?} {options:?} {what}: {}", served.unwrap_err());
                assert_eq!(bench.driver.violations(), []);
            }
        }
    }
}

#[test]
fn what_an_idle_pool_keeps_serves_memory_outside_of_pools() {
    let bench = Bench::new("", 1024);
    let _pool = bench.idle(400);
    drop(bench.memory.alloc_exportable(900 * MIB, HandleKind::PosixFd, &bench.stream).unwrap());
    let _again = bench.idle(400);
    let mut growable = bench.memory.growable(1000 * MIB, &bench.stream).unwrap();
    growable.grow_to(900 * MIB, &bench.stream).unwrap();
}

#[test]
fn a_pool_gives_up_no_more_than_a_request_needs_and_nothing_before() {
    for backing in BACKINGS {
        let bench = Bench::new(backing, 1024);
        let asked = Arc::new(AtomicU64::new(0));
        let asks = asked.clone();
        let _registered = bench.memory.register_reclaimer(0, "another cache", move |request| {
            asks.fetch_add(request.bytes, Ordering::Relaxed);
            0
        });
        let pool = bench.pool();
        drop([(); 4].map(|()| pool.alloc_bytes(100 * MIB, &bench.stream).unwrap()));
        let kept = || bench.memory.reserved_by_private_pools().get(&pool.id()).copied().unwrap_or(0) / MIB;
        let held = bench.memory.alloc_bytes(624 * MIB, &bench.stream).unwrap();
        assert_eq!(kept(), 400, "{backing:?}");
        let _more = bench.memory.alloc_bytes(90 * MIB, &bench.stream).unwrap();
        assert!((300..=310).contains(&kept()), "{backing:?}: {} stay", kept());
        bench.memory.empty_cache().unwrap();
        assert_eq!(kept(), 0, "{backing:?}");
        drop(held);
        assert_eq!(asked.load(Ordering::Relaxed), 0, "no one had to give anything up");
    }
}

#[test]
fn blocks_that_other_streams_use_are_waited_for() {
    for backing in BACKINGS {
        let bench = Bench::new(backing, 1024);
        let (pool, side) = (bench.pool(), bench.device.stream().unwrap());
        let block = pool.alloc_bytes(400 * MIB, &bench.stream).unwrap();
        side.wait_for(&bench.stream.tick()).unwrap();
        bench.driver.stall(side.raw(), Duration::from_secs(1)).unwrap();
        side.fill(block.ptr(), 1, 400 * MIB).unwrap();
        block.record_stream(&side).unwrap();
        drop(block);
        assert!(!bench.is_refused(900), "{backing:?}");
        assert_eq!(bench.driver.violations(), []);
    }
}

#[test]
fn the_last_launches_of_a_graph_that_was_dropped_are_waited_for() {
    for backing in BACKINGS {
        let bench = Bench::new(backing, 1024);
        let Bench { driver, device, memory, stream } = &bench;
        let (pool, side) = (bench.pool(), device.stream().unwrap());
        let capture = stream.begin_capture().unwrap();
        let route = memory.capture(stream, &pool).unwrap();
        let scratch = memory.alloc_bytes(400 * MIB, stream).unwrap();
        stream.fill(scratch.ptr(), 7, 400 * MIB).unwrap();
        drop((scratch, route));
        let graph = capture.end().unwrap();
        driver.stall(side.raw(), Duration::from_secs(1)).unwrap();
        graph.launch(&side).unwrap();
        drop(graph);
        assert!(!bench.is_refused(900), "{backing:?}");
        assert_eq!(driver.violations(), []);
    }
}

/// Captured here, or by another library; ended, or not yet.
#[test]
fn what_a_graph_may_use_is_never_given_out() {
    for backing in BACKINGS {
        for is_foreign in [false, true] {
            let bench = Bench::new(backing, 1024);
            let Bench { driver, device, memory, stream } = &bench;
            let (pool, side) = (bench.idle(400), device.stream().unwrap());
            let capture = if is_foreign {
                driver.begin_capture(stream.raw()).unwrap();
                None
            } else {
                Some(stream.begin_capture().unwrap())
            };
            let route = memory.capture(stream, &pool).unwrap();
            let scratch = memory.alloc_bytes(400 * MIB, stream).unwrap();
            stream.fill(scratch.ptr(), 7, 400 * MIB).unwrap();
            let used = scratch.ptr();
            drop((scratch, route));
            assert!(memory.alloc_bytes(900 * MIB, &side).is_err(), "{backing:?}: while it captures");
            let foreign = is_foreign.then(|| driver.end_capture(stream.raw()).unwrap());
            let graph = capture.map(|capture| capture.end().unwrap());
            assert!(bench.is_refused(900), "{backing:?}");
            assert!(pool.alloc_bytes(900 * MIB, stream).is_err());
            // What the pool serves beside the graph is not the graph's.
            drop(pool.alloc_bytes(300 * MIB, stream).unwrap());
            assert!(!bench.is_refused(500), "{backing:?}");
            let others = memory.alloc_bytes(600 * MIB, stream).unwrap();
            assert!(!(others.ptr()..others.ptr().offset(600 * MIB)).contains(&used));
            drop(others);
            if let Some(graph) = &graph {
                graph.launch(stream).unwrap();
            }
            if let Some(foreign) = foreign {
                driver.launch_graph(foreign, stream.raw()).unwrap();
                device.synchronize().unwrap();
                driver.destroy_graph(foreign).unwrap();
            }
            drop(graph);
            device.synchronize().unwrap();
            // Nothing tells when a graph of another library is gone.
            assert_eq!(bench.is_refused(900), is_foreign, "{backing:?}");
            assert_eq!(driver.violations(), []);
        }
    }
}

#[test]
fn what_a_pool_keeps_stays_while_a_stream_captures() {
    for backing in BACKINGS {
        let bench = Bench::new(backing, 1024);
        let (_pool, side) = (bench.idle(400), bench.device.stream().unwrap());
        bench.device.synchronize().unwrap();
        let capture = side.begin_capture().unwrap();
        assert!(bench.is_refused(900), "{backing:?}");
        drop(capture.end().unwrap());
        assert!(!bench.is_refused(900), "{backing:?}");
    }
}

#[test]
fn what_a_pool_that_lent_leaves_when_it_is_dropped_serves_requests() {
    for backing in BACKINGS {
        let bench = Bench::new(backing, 64);
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let pool = bench.memory.create_pool(options).unwrap();
        drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
        drop(pool);
        let _rest = bench.memory.alloc_bytes(20 * MIB, &bench.stream).unwrap();
        let served = bench.memory.alloc_bytes(40 * MIB, &bench.stream);
        assert!(served.is_ok(), "{backing:?}: {served:?}");
        assert!(bench.is_refused(20), "{backing:?}");
    }
}
