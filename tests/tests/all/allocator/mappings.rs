//! Observers of mappings see every change in time, and the changes add up to the mapped memory.

use std::collections::BTreeSet;
use std::ops::Deref;

use aquifer_tests::prelude::*;

const GRANULE: u64 = 2 * MIB;

/// An allocator with an observer of its mappings.
struct Observed {
    bench: Bench,
    /// Granules that have memory, as reported to the observer.
    reported: Arc<Mutex<BTreeSet<u64>>>,
    registration: Option<Registration>,
}

impl Deref for Observed {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

fn observed() -> Observed {
    let bench = Bench::new(256 * MIB, "");
    let reported = Arc::new(Mutex::new(BTreeSet::new()));
    let (seen, below) = (reported.clone(), bench.driver.clone());
    let registration = bench.allocator.observe_mappings(move |change| {
        let mut seen = seen.lock().unwrap();
        let granules = |addr: u64, bytes: u64| (addr..addr + bytes).step_by(usize::try_from(GRANULE).unwrap());
        match *change {
            MappingChange::BeforeUnmap { addr, bytes } => granules(addr, bytes).for_each(|at| {
                assert!(seen.remove(&at), "{at:#x} was not mapped");
                assert!(below.mapping_at(DevicePtr(at)).is_some(), "{at:#x} is unmapped already");
            }),
            MappingChange::Mapped { addr, bytes } => granules(addr, bytes).for_each(|at| {
                assert!(seen.insert(at), "{at:#x} was mapped already");
                assert_eq!(
                    below.mapping_at(DevicePtr(at)).unwrap().devices,
                    [below.ordinal()],
                    "{at:#x} cannot be accessed yet"
                );
            }),
            _ => unreachable!(),
        }
    });
    Observed { bench, reported, registration: Some(registration) }
}

impl Observed {
    fn reported_bytes(&self) -> u64 {
        self.reported.lock().unwrap().len() as u64 * GRANULE
    }

    /// Live and free blocks alternate, so that a larger request must move memory.
    fn fragment(&self) -> Vec<Allocation> {
        let blocks: Vec<_> = (0..24).map(|_| self.alloc(10 * MIB)).collect();
        blocks.into_iter().enumerate().filter(|(at, _)| at % 2 == 0).map(|(_, block)| block).collect()
    }
}

#[test]
fn growth_remaps_and_trims_are_reported() {
    let bench = observed();
    let live = bench.fragment();
    assert_eq!(bench.reported_bytes(), bench.allocator.memory_reserved());
    let moved = bench.alloc(90 * MIB);
    assert_eq!(bench.reported_bytes(), bench.allocator.memory_reserved());
    assert!(bench.allocator.stats().remaps > 0);
    drop((live, moved));
    bench.allocator.empty_cache().unwrap();
    assert_eq!((bench.reported_bytes(), bench.allocator.memory_reserved()), (0, 0));
    bench.driver.assert_no_violation();
}

#[test]
fn memory_that_the_driver_did_not_unmap_is_reported_again() {
    let bench = observed();
    drop(bench.fragment());
    bench.fail(Operation::Unmap, 1, Code(999));
    bench.allocator.empty_cache().unwrap_err();
    assert_eq!(bench.reported_bytes(), 240 * MIB);
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.reported_bytes(), 0);
}

#[test]
fn mappings_that_never_became_usable_are_not_reported() {
    for grows in [false, true] {
        let bench = observed();
        let stream = &bench.stream;
        let mut cache = bench.allocator.growable(64 * MIB, stream).unwrap();
        for operation in [Operation::SetAccess, Operation::Unmap] {
            bench.fail(operation, 1, Code(999));
        }
        if grows {
            cache.grow_to(7 * MIB, stream).unwrap_err();
        } else {
            bench.allocator.alloc_bytes(7 * MIB, stream).unwrap_err();
        }
        assert_eq!((bench.reported_bytes(), bench.allocator.memory_reserved()), (0, 8 * MIB));
        assert_eq!(bench.allocator.sleep(Contents::SaveToHost).unwrap(), 8 * MIB);
        bench.allocator.wake().unwrap();
        cache.grow_to(7 * MIB, stream).unwrap();
        assert_eq!(bench.reported_bytes(), 8 * MIB);
        drop(cache);
        bench.allocator.empty_cache().unwrap();
        assert_eq!((bench.reported_bytes(), bench.allocator.memory_reserved()), (0, 0));
        bench.driver.assert_no_violation();
    }
}

#[test]
fn mappings_of_a_failed_growth_are_reported_when_they_come_and_go() {
    let bench = observed();
    let stream = &bench.stream;
    let mut cache = bench.allocator.growable(64 * MIB, stream).unwrap();
    cache.grow_to(20 * MIB, stream).unwrap();
    cache.shrink_to(0, stream).unwrap();
    let block = bench.alloc_on(stream, 6 * MIB);
    bench.fail(Operation::SetAccess, 1, Code(999));
    bench.fail(Operation::Unmap, 2, Code(999));
    cache.grow_to(30 * MIB, stream).unwrap_err();
    bench.device.synchronize().unwrap();
    drop((cache, block));
    bench.driver.clear_faults();
    bench.allocator.empty_cache().unwrap();
    assert_eq!((bench.reported_bytes(), bench.allocator.memory_reserved()), (0, 0));
}

#[test]
fn an_observer_may_free() {
    let bench = observed();
    let held = Mutex::new(bench.fragment());
    let (live, first) = (held.lock().unwrap().len() as u64, bench.reported_bytes());
    let _registration = bench.allocator.observe_mappings(move |_| drop(held.lock().unwrap().pop()));
    drop(bench.alloc(90 * MIB));
    assert!(bench.reported_bytes() >= first && bench.allocator.memory_allocated() < live * 10 * MIB);
    bench.driver.assert_no_violation();
}

/// Where it would have to wait for itself, or be called again without end, it gets an error.
#[test]
fn an_observer_may_use_the_allocator() {
    let bench = observed();
    let live = bench.fragment();
    let spare = bench.alloc(MIB);
    let (allocator, stream) = (bench.allocator.clone(), bench.new_stream());
    let cached = bench.stream.clone();
    let mut cache = allocator.growable(64 * MIB, &stream).unwrap();
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    drop(pool.alloc_bytes(4 * MIB, &stream).unwrap());
    let (answers, found) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let other = Allocator::new(&bench.device, Config::default()).unwrap();
    let (reported, small, mut pool) = (answers.clone(), found.clone(), Some(pool));
    let use_it = move || {
        // What is free already serves.
        small.lock().unwrap().push(allocator.alloc_bytes(1000, &cached).map(drop));
        small.lock().unwrap().push(other.alloc_bytes(5 * MIB, &stream).map(drop));
        reported.lock().unwrap().extend([
            allocator.alloc_bytes(100 * MIB, &stream).map(drop),
            allocator.empty_cache().map(drop),
            allocator.trim_to(0).map(drop),
            cache.grow_to(3 * MIB, &stream),
            allocator.alloc_exportable(MIB, HandleKind::PosixFd, &stream).map(drop),
            allocator.pin_mapping(&spare).map(drop),
            allocator.sleep(Contents::Discard).map(drop),
            allocator.wake(),
            allocator.enable_peer_access(allocator.device().info().ordinal),
        ]);
        drop(pool.take());
    };
    let may_use = Mutex::new(use_it);
    let registration = bench.allocator.observe_mappings(move |_| may_use.lock().unwrap()());
    let moved = bench.alloc(90 * MIB);
    bench.allocator.empty_cache().unwrap();
    drop(registration);
    let (answers, found) = (answers.lock().unwrap(), found.lock().unwrap());
    assert!(answers.len() > 9, "a move and memory given back are reported");
    assert!(answers.iter().all(|answer| matches!(answer, Err(AllocError::Observing))), "{answers:?}");
    assert!(found.iter().all(Result::is_ok), "{found:?}");
    drop((live, moved));
    bench.allocator.empty_cache().unwrap();
    assert_eq!((bench.reported_bytes(), bench.allocator.memory_reserved()), (0, 0));
    bench.driver.assert_no_violation();
}

#[test]
fn nothing_is_reported_after_the_end_of_a_registration() {
    let mut bench = observed();
    bench.registration = None;
    let _live = bench.fragment();
    assert_eq!(bench.reported_bytes(), 0);
}
