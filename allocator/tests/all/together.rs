//! Several allocators of one device: what one of them caches is no reason to refuse a request to
//! another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_allocator::{AllocError, Allocator, Config, Contents, PoolOptions};
use aquifer_device::{Code, Device, HandleKind, Operation, Stream};
use aquifer_sim::{Fault, SimConfig, SimDriver};

const MIB: u64 = 1 << 20;
const BACKINGS: [&str; 2] = ["", "backing:segments"];

struct Bench {
    driver: Arc<SimDriver>,
    device: Device,
    stream: Stream,
}

fn bench() -> Bench {
    let driver = SimDriver::new(SimConfig::new(1024 * MIB));
    let device = Device::new(driver.clone());
    let stream = device.stream().unwrap();
    Bench { driver, device, stream }
}

impl Bench {
    fn allocator(&self, options: &str) -> Allocator {
        Allocator::new(&self.device, Config::parse(options).unwrap()).unwrap()
    }

    fn is_served(&self, memory: &Allocator, mib: u64) -> bool {
        match memory.alloc_bytes(mib * MIB, &self.stream) {
            Ok(_) => true,
            Err(AllocError::OutOfMemory(_)) => false,
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn what_another_allocator_caches_serves_a_request() {
    for first in BACKINGS {
        for second in BACKINGS {
            for keeps in ["a cache", "a pool", "waiting blocks"] {
                let bench = bench();
                let (one, two) = (bench.allocator(first), bench.allocator(second));
                let (side, pool) = (bench.device.stream().unwrap(), one.create_pool(PoolOptions::default()).unwrap());
                let live = one.alloc_bytes(50 * MIB, &bench.stream).unwrap();
                match keeps {
                    "a cache" => drop(one.alloc_bytes(700 * MIB, &bench.stream).unwrap()),
                    "a pool" => drop(pool.alloc_bytes(700 * MIB, &bench.stream).unwrap()),
                    _ => {
                        let block = one.alloc_bytes(700 * MIB, &bench.stream).unwrap();
                        side.wait_for(&bench.stream.tick()).unwrap();
                        bench.driver.stall(side.raw(), Duration::from_secs(1)).unwrap();
                        side.fill(block.ptr(), 1, 700 * MIB).unwrap();
                        block.record_stream(&side).unwrap();
                    }
                }
                let held = two.alloc_bytes(900 * MIB, &bench.stream);
                assert!(held.is_ok(), "{first:?} {second:?} {keeps}: {}", held.unwrap_err());
                assert!(!bench.is_served(&one, 100), "and no more than there is");
                assert_eq!(bench.driver.violations(), []);
                drop(live);
            }
        }
    }
}

#[test]
fn memory_outside_of_heaps_and_memory_that_wakes_up_get_it_too() {
    let bench = bench();
    let (one, two) = (bench.allocator(""), bench.allocator(""));
    drop(one.alloc_bytes(700 * MIB, &bench.stream).unwrap());
    drop(two.alloc_exportable(900 * MIB, HandleKind::PosixFd, &bench.stream).unwrap());
    two.empty_cache().unwrap();
    drop(one.alloc_bytes(700 * MIB, &bench.stream).unwrap());
    let mut growable = two.growable(1000 * MIB, &bench.stream).unwrap();
    growable.grow_to(900 * MIB, &bench.stream).unwrap();
    drop(growable);
    two.empty_cache().unwrap();

    let weights = two.alloc_bytes(600 * MIB, &bench.stream).unwrap();
    two.sleep(Contents::Discard).unwrap();
    drop(one.alloc_bytes(700 * MIB, &bench.stream).unwrap());
    two.wake().unwrap();
    bench.stream.fill(weights.ptr(), 1, 600 * MIB).unwrap();
    bench.device.synchronize().unwrap();
    assert_eq!(bench.driver.violations(), []);
}

#[test]
fn another_allocator_gives_about_as_much_as_a_request_needs_and_nothing_for_a_limit() {
    for backing in BACKINGS {
        let bench = bench();
        let (one, two) = (bench.allocator(backing), bench.allocator("limit_mb:300"));
        drop([(); 8].map(|()| one.alloc_bytes(100 * MIB, &bench.stream).unwrap()));
        assert!(!bench.is_served(&two, 400));
        assert_eq!(one.memory_reserved(), 800 * MIB, "{backing:?}: the limit refuses");
        let _held = two.alloc_bytes(290 * MIB, &bench.stream).unwrap();
        assert!(one.memory_reserved() >= 500 * MIB, "{backing:?}: {} MiB stay", one.memory_reserved() >> 20);
    }
}

#[test]
fn the_report_names_what_other_allocators_hold_and_gave() {
    let bench = bench();
    let (one, two) = (bench.allocator(""), bench.allocator(""));
    let _live = one.alloc_bytes(300 * MIB, &bench.stream).unwrap();
    drop(one.alloc_bytes(400 * MIB, &bench.stream).unwrap());
    let Err(AllocError::OutOfMemory(report)) = two.alloc_bytes(900 * MIB, &bench.stream) else { panic!("served") };
    let text = report.to_string();
    assert!(text.contains("300.00 MiB is held by other allocators of this process"), "{text}");
    assert_eq!((report.reclaimed, report.reclaimers.len()), (400 * MIB, 1), "{text}");
    assert!(text.contains("other allocators of this process"), "{text}");
}

#[test]
fn a_request_is_refused_as_before_if_another_allocator_fails_or_a_stream_captures() {
    let bench = bench();
    let (one, two) = (bench.allocator("backing:segments"), bench.allocator(""));
    drop(one.alloc_bytes(700 * MIB, &bench.stream).unwrap());
    let capture = bench.stream.begin_capture().unwrap();
    assert!(two.alloc_bytes(700 * MIB, bench.device.default_stream()).is_err());
    drop(capture.end().unwrap());
    bench.driver.inject(Fault::Rate { operation: Some(Operation::Free), rate: 1.0, code: Code(999) });
    assert!(!bench.is_served(&two, 700));
    bench.driver.clear_faults();
    assert!(bench.is_served(&two, 700));
}

#[test]
fn an_observer_of_mappings_asks_nobody() {
    let bench = bench();
    let (one, two) = (bench.allocator(""), bench.allocator(""));
    let was_refused = Arc::new(AtomicBool::new(false));
    let (inner, stream, refused) = (two.clone(), bench.stream.clone(), was_refused.clone());
    let _registered = one.observe_mappings(move |_| {
        refused.fetch_or(inner.alloc_bytes(1000 * MIB, &stream).is_err(), Ordering::Relaxed);
    });
    drop(one.alloc_bytes(700 * MIB, &bench.stream).unwrap());
    assert!(was_refused.load(Ordering::Relaxed));
}

#[test]
fn allocators_that_are_refused_at_the_same_time_ask_each_other() {
    let bench = bench();
    for options in [["", ""], ["", "backing:segments"], ["headroom_mb:8", "frame_mb:2"]] {
        let allocators = options.map(|options| bench.allocator(options));
        std::thread::scope(|scope| {
            for memory in allocators.iter().cycle().take(4) {
                let stream = bench.device.stream().unwrap();
                scope.spawn(move || {
                    for round in 0..40 {
                        // At most one of them finds as much.
                        match memory.alloc_bytes((500 + round) * MIB, &stream) {
                            Ok(block) => stream.fill(block.ptr(), 1, block.bytes()).unwrap(),
                            Err(AllocError::OutOfMemory(_)) => {}
                            Err(other) => panic!("{other}"),
                        }
                    }
                });
            }
        });
        for memory in &allocators {
            assert!(bench.is_served(memory, 900), "{options:?}");
        }
        bench.device.synchronize().unwrap();
        assert_eq!(bench.driver.violations(), []);
    }
}
