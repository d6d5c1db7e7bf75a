//! Memory that outlives the allocator's last handle goes back once the last buffer is gone, too.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use aquifer_allocator::{Allocator, Config, PoolOptions, Storage};
use aquifer_device::{Device, HandleKind, Operation, Stream};
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;
/// Those that were used.
const DEFAULT_STREAMS: usize = 1;
const BACKINGS: [&str; 2] = ["", "backing:segments"];

struct Bench {
    driver: Arc<SimDriver>,
    device: Device,
    memory: Allocator,
    stream: Stream,
}

fn bench(options: &str) -> Bench {
    let driver = SimDriver::new(SimConfig::parse("1GiB").unwrap());
    let device = Device::new(driver.clone());
    let (memory, stream) =
        (Allocator::new(&device, Config::parse(options).unwrap()).unwrap(), device.stream().unwrap());
    Bench { driver, device, memory, stream }
}

/// Weights beside a cache of other memory.
fn load(memory: &Allocator, stream: &Stream) -> Arc<Storage> {
    let [weights, other] = [400, 300].map(|mib| memory.alloc_storage(mib << 20, 1, stream).unwrap());
    for storage in [&weights, &other] {
        stream.fill(storage.ptr(), 0, storage.bytes()).unwrap();
    }
    weights
}

/// Drops the last owner of memory, which makes no driver call.
fn drop_last<T>(driver: &SimDriver, last: T) {
    let (calls, now) = (driver.calls_made(), driver.now_ns());
    drop(last);
    assert_eq!((driver.calls_made(), driver.now_ns()), (calls, now), "dropping memory calls no driver");
}

#[test]
fn the_next_call_of_the_device_gives_the_cache_back() {
    type Call = fn(&Bench);
    let calls: [(&str, Call); 12] = [
        ("synchronize", |bench| bench.device.synchronize().unwrap()),
        ("settle", |bench| bench.device.settle()),
        ("a stream", |bench| drop(bench.device.stream().unwrap())),
        ("memory_info", |bench| assert_eq!(bench.device.memory_info().unwrap().free, 1024 * MIB)),
        ("memory_users", |bench| assert_eq!(bench.device.memory_users().own, Some(0))),
        ("an event", |bench| drop(bench.device.create_event(false).unwrap())),
        ("an allocation", |bench| bench.device.free(bench.device.alloc(1000 * MIB).unwrap()).unwrap()),
        ("waiting for a stream", |bench| bench.stream.synchronize().unwrap()),
        ("waiting for a tick", |bench| bench.stream.tick().synchronize().unwrap()),
        ("waiting for an event", |bench| {
            let event = bench.device.create_event(false).unwrap();
            event.record(&bench.stream).unwrap();
            event.synchronize().unwrap();
        }),
        ("an allocator", |bench| drop(Allocator::new(&bench.device, Config::default()).unwrap())),
        ("the allocator of the device", |bench| {
            let other = Allocator::new(&bench.device, Config::default()).unwrap();
            drop(other.alloc_bytes(1000 * MIB, &bench.stream).unwrap());
        }),
    ];
    for options in BACKINGS {
        for (what, call) in calls {
            let mut bench = bench(options);
            let weights = load(&bench.memory, &bench.stream);
            bench.device.synchronize().unwrap();
            let other = Allocator::new(&Device::new(SimDriver::new(SimConfig::default())), Config::default()).unwrap();
            drop(std::mem::replace(&mut bench.memory, other));
            drop_last(&bench.driver, weights);
            assert_eq!(bench.driver.held_bytes(), 700 * MIB);
            call(&bench);
            assert_eq!(bench.driver.held_bytes(), 0, "{options:?}: {what}");
            assert_eq!(bench.driver.violations(), []);
        }
    }
}

#[test]
fn the_cache_goes_back_in_whatever_order_handles_are_dropped() {
    for options in BACKINGS {
        for order in 0..24_usize {
            let Bench { driver, device, memory, stream } = bench(options);
            let weights = load(&memory, &stream);
            let mut handles: Vec<Box<dyn Any>> =
                vec![Box::new(memory), Box::new(weights), Box::new(stream), Box::new(device)];
            let mut number = order;
            for left in (1..=4).rev() {
                drop(handles.remove(number % left));
                number /= left;
            }
            // If the last buffer goes last, no handle is left to make calls with.
            let is_over = || driver.held_bytes() == 0;
            let soon = || {
                drop(Device::new(SimDriver::new(SimConfig::default())));
                std::thread::sleep(Duration::from_millis(1));
                is_over()
            };
            assert!(is_over() || (0..5000).any(|_| soon()), "{options:?}: order {order}");
            assert_eq!(driver.violations(), []);
            assert_eq!(driver.live_objects().streams, DEFAULT_STREAMS);
        }
    }
}

/// No other thread has part in that.
#[test]
fn the_last_handle_of_a_device_gives_the_cache_back() {
    for options in BACKINGS {
        let Bench { driver, device, memory, stream } = bench(options);
        let weights = load(&memory, &stream);
        // What is kept for it is dropped, too.
        let raw = memory.alloc_raw_ready(MIB).unwrap();
        memory.free_raw(raw).unwrap();
        drop(memory);
        let clone = device.clone();
        std::thread::spawn(move || drop(weights)).join().unwrap();
        drop((stream, device));
        assert_ne!(driver.held_bytes(), 0);
        drop(clone);
        assert_eq!((driver.held_bytes(), driver.live_objects().streams), (0, DEFAULT_STREAMS), "{options:?}");
    }
}

#[test]
fn memory_that_work_uses_stays_and_nothing_waits_for_it() {
    for options in BACKINGS {
        for elsewhere in [false, true] {
            let Bench { driver, device, memory, stream } = bench(options);
            let (weights, side) = (load(&memory, &stream), device.stream().unwrap());
            let user = if elsewhere { &side } else { &stream };
            device.synchronize().unwrap();
            driver.stall(user.raw(), Duration::from_secs(5)).unwrap();
            user.fill(weights.ptr(), 1, weights.bytes()).unwrap();
            if elsewhere {
                weights.record_stream(&side).unwrap();
            }
            drop(memory);
            drop_last(&driver, weights);
            drop(device.stream().unwrap());
            device.memory_info().unwrap();
            assert!(driver.now_ns() < 4_000_000_000, "nothing waits");
            assert_eq!(driver.held_bytes(), 700 * MIB);
            driver.advance(Duration::from_secs(6));
            device.memory_info().unwrap();
            assert_eq!(driver.held_bytes(), 0, "{options:?}");
            assert_eq!(driver.violations(), []);
        }
    }
}

/// The driver waits for all work when it frees a segment.
#[test]
fn other_work_is_not_waited_for() {
    for options in BACKINGS {
        let Bench { driver, device, memory, stream } = bench(options);
        let (weights, side) = (load(&memory, &stream), device.stream().unwrap());
        device.synchronize().unwrap();
        driver.stall(side.raw(), Duration::from_secs(5)).unwrap();
        drop((memory, weights));
        stream.synchronize().unwrap();
        device.memory_info().unwrap();
        assert!(driver.now_ns() < 4_000_000_000, "nothing waits");
        assert_eq!(driver.held_bytes() > 0, options == "backing:segments");
        side.synchronize().unwrap();
        assert_eq!(driver.held_bytes(), 0);
    }
}

#[test]
fn other_owners_of_memory_may_be_the_last() {
    type Owner = fn(&Allocator, &Stream) -> Box<dyn Any>;
    let owners: [Owner; 4] = [
        |memory, stream| Box::new(memory.alloc_exportable(64 * MIB, HandleKind::PosixFd, stream).unwrap()),
        |memory, stream| {
            let mut growable = memory.growable(128 * MIB, stream).unwrap();
            growable.grow_to(64 * MIB, stream).unwrap();
            Box::new(growable)
        },
        |memory, stream| {
            let block = memory.alloc_bytes(64 * MIB, stream).unwrap();
            Box::new((memory.pin_mapping(&block).unwrap(), block))
        },
        |memory, stream| {
            let pool = memory.create_pool(PoolOptions::default()).unwrap();
            Box::new(pool.alloc_bytes(64 * MIB, stream).unwrap())
        },
    ];
    for (number, owner) in owners.into_iter().enumerate() {
        let Bench { driver, device, memory, stream } = bench("");
        let weights = load(&memory, &stream);
        let last = owner(&memory, &stream);
        device.synchronize().unwrap();
        drop((memory, weights));
        assert!(driver.held_bytes() > 0);
        drop_last(&driver, last);
        device.memory_info().unwrap();
        assert_eq!(driver.held_bytes(), 0, "{number}");
    }
}

#[test]
fn nothing_goes_back_while_a_stream_captures() {
    for options in BACKINGS {
        let Bench { driver, device, memory, stream } = bench(options);
        let (weights, side) = (load(&memory, &stream), device.stream().unwrap());
        device.synchronize().unwrap();
        drop(memory);
        let capture = side.begin_capture().unwrap();
        drop_last(&driver, weights);
        let before = device.driver_calls();
        device.memory_info().unwrap();
        stream.synchronize().unwrap();
        drop(device.stream().unwrap());
        let calls = device.driver_calls().since(&before);
        assert_eq!((calls.of(Operation::Unmap), calls.of(Operation::Free)), (0, 0));
        drop(capture.end().unwrap());
        device.memory_info().unwrap();
        assert_eq!(driver.held_bytes(), 0, "{options:?}");
    }
}

#[test]
fn memory_of_a_graph_stays_until_its_launches_are_done() {
    for options in BACKINGS {
        let Bench { driver, device, memory, stream } = bench(options);
        let (pool, side) = (memory.create_pool(PoolOptions::default()).unwrap(), device.stream().unwrap());
        let capture = stream.begin_capture().unwrap();
        let route = memory.capture(&stream, &pool).unwrap();
        let scratch = memory.alloc_bytes(64 * MIB, &stream).unwrap();
        stream.fill(scratch.ptr(), 7, 64 * MIB).unwrap();
        drop((scratch, route));
        let graph = capture.end().unwrap();
        drop((pool, memory));
        // Nothing was ever allocated for this stream.
        driver.stall(side.raw(), Duration::from_secs(5)).unwrap();
        graph.launch(&side).unwrap();
        drop(graph);
        device.memory_info().unwrap();
        assert!(driver.held_bytes() >= 64 * MIB, "{options:?}");
        driver.advance(Duration::from_secs(6));
        device.memory_info().unwrap();
        assert_eq!(driver.held_bytes(), 0, "{options:?}");
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn allocations_keep_no_cache_beside_them() {
    for options in BACKINGS {
        let Bench { driver, device, memory, stream } = bench(options);
        let side = device.stream().unwrap();
        let block = memory.alloc_bytes(400 * MIB, &stream).unwrap();
        drop(memory.alloc_bytes(200 * MIB, &stream).unwrap());
        let used = memory.alloc_bytes(100 * MIB, &stream).unwrap();
        side.wait_for(&stream.tick()).unwrap();
        driver.stall(side.raw(), Duration::from_secs(1)).unwrap();
        side.fill(used.ptr(), 1, 100 * MIB).unwrap();
        used.record_stream(&side).unwrap();
        drop(used);
        drop(memory);
        assert_eq!(driver.held_bytes(), 400 * MIB, "{options:?}");
        drop_last(&driver, block);
        device.memory_info().unwrap();
        assert_eq!(driver.held_bytes(), 0, "{options:?}");
        assert_eq!(driver.violations(), []);
    }
}
