//! Everything that changes mappings at the same time, on several threads: sums agree at the end,
//! and no stream's work raced with another's.

use std::collections::BTreeSet;
use std::thread;

use aquifer_tests::prelude::*;

const CAPACITY: u64 = 192 * MIB;

/// Whether a request was served; it may only fail for these reasons.
fn served<T>(result: Result<T, AllocError>) -> Option<T> {
    match result {
        Ok(served) => Some(served),
        Err(AllocError::Asleep) => None,
        Err(error) if error.is_out_of_memory() => None,
        Err(error) => panic!("{error}"),
    }
}

fn blocks(allocator: &Allocator, stream: &Stream, seed: u64) {
    let mut held = Vec::new();
    for step in 0..150 {
        if let Some(block) = served(allocator.alloc_bytes((1 + (step * seed) % 17) * 900_000, stream)) {
            let pin = (step % 10 == 0).then(|| served(allocator.pin_mapping(&block))).flatten();
            held.push((block, pin));
        }
        if held.len() > 5 {
            drop(held.swap_remove(1));
        }
        if step % 40 == seed {
            allocator.empty_cache().unwrap();
        }
    }
}

fn growables(allocator: &Allocator, stream: &Stream) {
    for round in 0..6 {
        let mut cache = allocator.growable(48 * MIB, stream).unwrap();
        for step in 0..20 {
            served(cache.grow_to((step * 7 + round) % 40 * MIB, stream));
            cache.shrink_to((step * 5) % 30 * MIB, stream).unwrap();
        }
    }
}

fn exports(allocator: &Allocator, stream: &Stream) {
    let mut held = Vec::new();
    for step in 0..60 {
        held.extend(served(allocator.alloc_exportable((1 + step % 9) * MIB, HandleKind::PosixFd, stream)));
        if held.len() > 3 {
            drop(held.swap_remove(0));
        }
    }
}

fn sleeps(allocator: &Allocator, peers: &[Subject]) {
    for (round, contents) in [Contents::SaveToHost, Contents::Discard].into_iter().cycle().take(8).enumerate() {
        allocator.sleep(SleepOptions::all(contents).waiting(Duration::MAX)).unwrap();
        thread::yield_now();
        // Others may have taken the memory: exportable memory is not given up.
        while let Err(error) = allocator.wake() {
            assert!(error.is_out_of_memory(), "{error}");
            thread::yield_now();
        }
        if let Some(peer) = peers.get(round) {
            allocator.enable_peer_access(peer.ordinal()).unwrap();
        }
    }
}

#[test]
fn everything_at_once() {
    for seed in 0..4 {
        let driver = Subject::open(&SimConfig::new(CAPACITY).seed(seed));
        let (device, peers) = (driver.device(), Subject::peers(8));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let told = Arc::new(Mutex::new(BTreeSet::new()));
        let seen = told.clone();
        let _registration = allocator.observe_mappings(move |change| {
            let mut seen = seen.lock().unwrap();
            let granules = |addr: u64, bytes: u64| (addr..addr + bytes).step_by(2 << 20);
            match *change {
                MappingChange::Mapped { addr, bytes } => granules(addr, bytes).for_each(|at| assert!(seen.insert(at))),
                MappingChange::BeforeUnmap { addr, bytes } => {
                    granules(addr, bytes).for_each(|at| assert!(seen.remove(&at)));
                }
                _ => unreachable!(),
            }
        });
        let streams: Vec<Stream> = (0..4).map(|_| device.stream().unwrap()).collect();
        thread::scope(|scope| {
            scope.spawn(|| blocks(&allocator, &streams[0], 5));
            scope.spawn(|| blocks(&allocator, &streams[1], 11));
            scope.spawn(|| growables(&allocator, &streams[2]));
            scope.spawn(|| exports(&allocator, &streams[3]));
            scope.spawn(|| sleeps(&allocator, &peers));
        });
        assert_eq!(allocator.memory_allocated(), 0);
        assert_eq!(told.lock().unwrap().len() as u64 * 2 * MIB, allocator.memory_reserved() - spare(&allocator));
        allocator.empty_cache().unwrap();
        device.settle();
        assert_eq!((allocator.memory_reserved(), told.lock().unwrap().len()), (0, 0));
        assert_eq!(device.memory_info().unwrap().free, CAPACITY);
        driver.assert_no_violation();
    }
}

/// Bytes held that are mapped nowhere.
fn spare(allocator: &Allocator) -> u64 {
    let mapped: u64 = allocator.snapshot().segments.iter().map(|segment| segment.total_size).sum();
    allocator.memory_reserved() - mapped
}
