//! Models of what changes mappings on several threads, under a scheduler that explores
//! interleavings. Run by `ci/schedules`.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{AccessKind, Code, Device, Operation, Stream};
use aquifer_sim::{Fault, SimConfig, SimDriver};
use shuttle::thread;

use crate::{AccessGuard, AllocError, Allocator, Config, Contents, Part, PoolOptions, SleepOptions, Storage};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 64 * MIB;

struct Setup {
    sim: Arc<SimDriver>,
    allocator: Allocator,
    streams: [Stream; 2],
}

/// Explores `model` at random, and with few but well-placed switches. Afterwards everything is
/// given back.
fn explore(model: impl Fn(&Setup) + Send + Sync + 'static) {
    explore_with("", model);
}

fn explore_with(options: &'static str, model: impl Fn(&Setup) + Send + Sync + 'static) {
    let run = move || {
        let sim = SimDriver::new(SimConfig::new(CAPACITY));
        let device = Device::new(sim.clone());
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let streams = [0; 2].map(|_| device.stream().unwrap());
        let setup = Setup { sim, allocator, streams };
        model(&setup);
        let Setup { sim, allocator, .. } = setup;
        assert_eq!(allocator.memory_allocated(), 0);
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.memory_reserved(), 0);
        assert_eq!(device.memory_info().unwrap().free, CAPACITY);
        assert_eq!(sim.violations(), []);
    };
    let run = Arc::new(run);
    let again = run.clone();
    shuttle::check_random(move || run(), 500);
    shuttle::check_pct(move || again(), 300, 3);
}

#[test]
fn no_mapping_is_missed_by_a_peer() {
    explore(|setup| {
        let threads = setup.streams.clone().map(|stream| {
            let allocator = setup.allocator.clone();
            thread::spawn(move || allocator.alloc_bytes(3 * MIB, &stream).unwrap())
        });
        let (allocator, _peer) = (setup.allocator.clone(), SimDriver::new(SimConfig::default().ordinal(1)));
        let peer = thread::spawn(move || allocator.enable_peer_access(1).unwrap());
        let blocks = threads.map(|thread| thread.join().unwrap());
        peer.join().unwrap();
        for block in &blocks {
            assert_eq!(setup.sim.mapping_at(block.ptr()).unwrap().devices, [0, 1]);
        }
    });
}

#[test]
fn allocation_is_served_or_told_while_another_thread_sleeps_and_wakes() {
    explore(|setup| {
        let stream = setup.streams[0].clone();
        let held = setup.allocator.alloc_bytes(3 * MIB, &stream).unwrap();
        let (allocating, sleeping) = (setup.allocator.clone(), setup.allocator.clone());
        let alloc = thread::spawn(move || match allocating.alloc_bytes(5 * MIB, &stream) {
            Ok(block) => Some(block),
            Err(AllocError::Asleep) => None,
            Err(error) => panic!("{error}"),
        });
        let sleep = thread::spawn(move || {
            sleeping.sleep(SleepOptions::all(Contents::Discard).waiting(Duration::MAX)).unwrap();
            sleeping.wake().unwrap();
        });
        let block = alloc.join().unwrap();
        sleep.join().unwrap();
        for block in block.iter().chain([&held]) {
            assert!(setup.sim.mapping_at(block.ptr()).is_some());
            setup.streams[0].fill(block.ptr(), 1, block.bytes()).unwrap();
        }
    });
}

#[test]
fn work_comes_before_sleep_or_is_refused() {
    explore(|setup| {
        let stream = setup.streams[0].clone();
        let buffer: Arc<Storage> = setup.allocator.alloc_storage(3 << 20, 1, &stream).unwrap();
        let storage = buffer.clone();
        let work = thread::spawn(move || match AccessGuard::acquire(&stream, &[(&storage, AccessKind::Write)]) {
            Ok(_access) => {
                thread::yield_now();
                stream.fill(storage.ptr(), 7, 3 * MIB).unwrap();
            }
            Err(error) => assert!(matches!(error, AllocError::Asleep), "{error}"),
        });
        let sleeping = setup.allocator.clone();
        let sleep = thread::spawn(move || {
            sleeping.sleep(SleepOptions::all(Contents::SaveToHost).waiting(Duration::MAX)).unwrap();
            sleeping.wake().unwrap();
        });
        work.join().unwrap();
        sleep.join().unwrap();
        setup.streams[0].fill(buffer.ptr(), 1, buffer.bytes()).unwrap();
    });
}

#[test]
fn a_part_sleeps_while_others_use_allocate_and_free() {
    explore(|setup| {
        let stream = setup.streams[0].clone();
        let pool = setup.allocator.create_pool(PoolOptions::default()).unwrap();
        let [used, freed] = [(), ()].map(|()| pool.alloc_storage(100_000, 1, &stream).unwrap());
        let other: Arc<Storage> = setup.allocator.alloc_storage(100_000, 1, &stream).unwrap();
        let sleeping = setup.allocator.clone();
        let part = Part::pool(&pool);
        let sleep = thread::spawn(move || {
            let options = SleepOptions::part(part.clone(), Contents::Zero).waiting(Duration::MAX);
            sleeping.sleep(options).unwrap();
            sleeping.wake_parts(&[part]).unwrap();
        });
        let (one, two) = (stream.clone(), used.clone());
        let work = thread::spawn(move || match AccessGuard::acquire(&one, &[(&two, AccessKind::Write)]) {
            Ok(_access) => one.fill(two.ptr(), 7, 100_000).unwrap(),
            Err(error) => assert!(matches!(error, AllocError::Asleep), "{error}"),
        });
        drop(freed);
        // It is served beside what sleeps, and never refused.
        let more = pool.alloc_storage(100_000, 1, &stream).unwrap();
        {
            let _access = AccessGuard::acquire(&stream, &[(&other, AccessKind::Write)]).unwrap();
            stream.fill(other.ptr(), 1, 100_000).unwrap();
        }
        sleep.join().unwrap();
        work.join().unwrap();
        for buffer in [&used, &more, &other] {
            stream.fill(buffer.ptr(), 1, 100_000).unwrap();
        }
    });
}

#[test]
fn memory_given_up_is_recycled_once() {
    explore(|setup| {
        let [one, two] = setup.streams.clone();
        let mut cache = setup.allocator.growable(48 * MIB, &one).unwrap();
        cache.grow_to(40 * MIB, &one).unwrap();
        cache.shrink_to(20 * MIB, &one).unwrap();
        let growing = setup.allocator.clone();
        let threads = [
            thread::spawn(move || drop(cache)),
            // It needs some of the memory that was given up, and waits while the other thread trims
            // it.
            thread::spawn(move || drop(growing.alloc_bytes(30 * MIB, &one).unwrap())),
        ];
        let trimming = setup.allocator.clone();
        let trim = thread::spawn(move || trimming.trim_to(10 * MIB).unwrap());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        trim.join().unwrap();
        drop(setup.allocator.alloc_bytes(50 * MIB, &two).unwrap());
    });
}

#[test]
fn threads_that_grow_together_keep_the_limit() {
    explore(|setup| {
        let limit = 30 * MIB;
        setup.allocator.set_limit(Some(limit));
        let threads = setup.streams.clone().map(|stream| {
            let allocator = setup.allocator.clone();
            thread::spawn(move || match allocator.alloc_bytes(20 * MIB, &stream) {
                Ok(block) => Some(block),
                Err(error) if error.is_out_of_memory() => None,
                Err(error) => panic!("{error}"),
            })
        });
        let blocks = threads.map(|thread| thread.join().unwrap());
        assert!(blocks.iter().any(Option::is_some));
        assert!(setup.allocator.stats().reserved_bytes.all.peak <= limit);
    });
}

#[test]
fn threads_that_grow_together_keep_the_headroom() {
    for options in ["headroom_mb:34", "headroom_mb:34,backing:segments"] {
        explore_with(options, |setup| {
            let threads = setup.streams.clone().map(|stream| {
                let allocator = setup.allocator.clone();
                thread::spawn(move || match allocator.alloc_bytes(20 * MIB, &stream) {
                    Ok(block) => Some(block),
                    Err(error) if error.is_out_of_memory() => None,
                    Err(error) => panic!("{error}"),
                })
            });
            let blocks = threads.map(|thread| thread.join().unwrap());
            assert!(blocks.iter().any(Option::is_some));
            assert!(setup.allocator.device().memory_info().unwrap().free >= 34 * MIB);
        });
    }
}

#[test]
fn memory_in_the_hands_of_another_thread_is_waited_for() {
    explore(|setup| {
        let [one, _] = setup.streams.clone();
        drop(setup.allocator.alloc_bytes(40 * MIB, &one).unwrap());
        let (trimming, growing) = (setup.allocator.clone(), setup.allocator.clone());
        let threads = [
            thread::spawn(move || assert!(trimming.trim_to(0).unwrap() <= CAPACITY)),
            thread::spawn(move || drop(growing.alloc_bytes(50 * MIB, &one).unwrap())),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn memory_that_could_not_be_recycled_is_not_grown_into() {
    explore(|setup| {
        let [one, two] = setup.streams.clone();
        let mut cache = setup.allocator.growable(48 * MIB, &one).unwrap();
        cache.grow_to(8 * MIB, &one).unwrap();
        cache.shrink_to(4 * MIB, &one).unwrap();
        one.tick().synchronize().unwrap();
        setup.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 1, code: Code(999) });
        let other = setup.allocator.clone();
        // It recycles what was given up, which fails once.
        let recycling = thread::spawn(move || drop(other.alloc_bytes(10 * MIB, &two)));
        let grown = cache.grow_to(8 * MIB, &one);
        recycling.join().unwrap();
        setup.sim.clear_faults();
        setup.allocator.empty_cache().unwrap();
        if grown.is_ok() {
            assert!(setup.sim.mapping_at(cache.ptr().offset(6 * MIB)).is_some());
        }
    });
}
