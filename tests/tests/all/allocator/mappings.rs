//! Observers of mappings see every change in time, and what they saw adds up to what is mapped.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use aquifer::device::DevicePtr;
use aquifer::device::sim::Fault;
use aquifer::memory::{AllocError, Config, Contents, PoolOptions, Registration};
use aquifer::{Allocator, Device};
use aquifer_allocator::MappingChange;
use aquifer_device::{Code, HandleKind, Operation};
use aquifer_tests::{MIB, Subject};

const GRANULE: u64 = 2 * MIB;

struct Setup {
    driver: Subject,
    device: Device,
    allocator: Allocator,
    /// Granules that have memory, as the observer was told.
    told: Arc<Mutex<BTreeSet<u64>>>,
    registration: Option<Registration>,
}

fn setup() -> Setup {
    let driver = Subject::new(256 * MIB);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let told = Arc::new(Mutex::new(BTreeSet::new()));
    let (seen, below) = (told.clone(), driver.clone());
    let registration = allocator.observe_mappings(move |change| {
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
    Setup { driver, device, allocator, told, registration: Some(registration) }
}

impl Setup {
    fn told_bytes(&self) -> u64 {
        self.told.lock().unwrap().len() as u64 * GRANULE
    }

    /// Live and free blocks in turn, so that something larger must move memory.
    fn fragment(&self) -> Vec<aquifer::memory::Allocation> {
        let stream = self.device.default_stream();
        let blocks: Vec<_> = (0..24).map(|_| self.allocator.alloc_bytes(10 * MIB, stream).unwrap()).collect();
        blocks.into_iter().enumerate().filter(|(at, _)| at % 2 == 0).map(|(_, block)| block).collect()
    }
}

#[test]
fn growth_remaps_and_trims_are_told() {
    let setup = setup();
    let live = setup.fragment();
    assert_eq!(setup.told_bytes(), setup.allocator.memory_reserved());
    let moved = setup.allocator.alloc_bytes(90 * MIB, setup.device.default_stream()).unwrap();
    assert_eq!(setup.told_bytes(), setup.allocator.memory_reserved());
    assert!(setup.allocator.stats().remaps > 0);
    drop((live, moved));
    setup.allocator.empty_cache().unwrap();
    assert_eq!((setup.told_bytes(), setup.allocator.memory_reserved()), (0, 0));
    setup.driver.assert_no_violation();
}

#[test]
fn memory_that_the_driver_did_not_unmap_is_told_again() {
    let setup = setup();
    drop(setup.fragment());
    setup.driver.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 1, code: Code(999) });
    setup.allocator.empty_cache().unwrap_err();
    assert_eq!(setup.told_bytes(), 240 * MIB);
    setup.allocator.empty_cache().unwrap();
    assert_eq!(setup.told_bytes(), 0);
}

#[test]
fn mappings_that_never_became_usable_are_not_told() {
    for grows in [false, true] {
        let setup = setup();
        let stream = setup.device.default_stream();
        let mut cache = setup.allocator.growable(64 * MIB, stream).unwrap();
        for operation in [Operation::SetAccess, Operation::Unmap] {
            setup.driver.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
        }
        if grows {
            cache.grow_to(7 * MIB, stream).unwrap_err();
        } else {
            setup.allocator.alloc_bytes(7 * MIB, stream).unwrap_err();
        }
        assert_eq!((setup.told_bytes(), setup.allocator.memory_reserved()), (0, 8 * MIB));
        assert_eq!(setup.allocator.sleep(Contents::SaveToHost).unwrap(), 8 * MIB);
        setup.allocator.wake().unwrap();
        cache.grow_to(7 * MIB, stream).unwrap();
        assert_eq!(setup.told_bytes(), 8 * MIB);
        drop(cache);
        setup.allocator.empty_cache().unwrap();
        assert_eq!((setup.told_bytes(), setup.allocator.memory_reserved()), (0, 0));
        setup.driver.assert_no_violation();
    }
}

#[test]
fn what_a_failed_growth_got_is_told_and_told_to_go() {
    let setup = setup();
    let stream = setup.device.default_stream();
    let mut cache = setup.allocator.growable(64 * MIB, stream).unwrap();
    cache.grow_to(20 * MIB, stream).unwrap();
    cache.shrink_to(0, stream).unwrap();
    let block = setup.allocator.alloc_bytes(6 * MIB, stream).unwrap();
    setup.driver.inject(Fault::Nth { operation: Some(Operation::SetAccess), nth: 1, code: Code(999) });
    setup.driver.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 2, code: Code(999) });
    cache.grow_to(30 * MIB, stream).unwrap_err();
    setup.device.synchronize().unwrap();
    drop((cache, block));
    setup.driver.clear_faults();
    setup.allocator.empty_cache().unwrap();
    assert_eq!((setup.told_bytes(), setup.allocator.memory_reserved()), (0, 0));
}

#[test]
fn an_observer_may_free() {
    let setup = setup();
    let held = Mutex::new(setup.fragment());
    let (live, first) = (held.lock().unwrap().len() as u64, setup.told_bytes());
    let _registration = setup.allocator.observe_mappings(move |_| drop(held.lock().unwrap().pop()));
    drop(setup.allocator.alloc_bytes(90 * MIB, setup.device.default_stream()).unwrap());
    assert!(setup.told_bytes() >= first && setup.allocator.memory_allocated() < live * 10 * MIB);
    setup.driver.assert_no_violation();
}

/// Where it would have to wait for itself, or be called again without end, it gets an error.
#[test]
fn an_observer_may_use_the_allocator() {
    let setup = setup();
    let live = setup.fragment();
    let spare = setup.allocator.alloc_bytes(MIB, setup.device.default_stream()).unwrap();
    let (allocator, stream) = (setup.allocator.clone(), setup.device.stream().unwrap());
    let cached = setup.device.default_stream().clone();
    let mut cache = allocator.growable(64 * MIB, &stream).unwrap();
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    drop(pool.alloc_bytes(4 * MIB, &stream).unwrap());
    let (answers, found) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let other = Allocator::new(&setup.device, Config::default()).unwrap();
    let (told, small, mut pool) = (answers.clone(), found.clone(), Some(pool));
    let use_it = move || {
        // What is free already serves.
        small.lock().unwrap().push(allocator.alloc_bytes(1000, &cached).map(drop));
        small.lock().unwrap().push(other.alloc_bytes(5 * MIB, &stream).map(drop));
        told.lock().unwrap().extend([
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
    let registration = setup.allocator.observe_mappings(move |_| may_use.lock().unwrap()());
    let moved = setup.allocator.alloc_bytes(90 * MIB, setup.device.default_stream()).unwrap();
    setup.allocator.empty_cache().unwrap();
    drop(registration);
    let (answers, found) = (answers.lock().unwrap(), found.lock().unwrap());
    assert!(answers.len() > 9, "told of a move and of memory given back");
    assert!(answers.iter().all(|answer| matches!(answer, Err(AllocError::Observing))), "{answers:?}");
    assert!(found.iter().all(Result::is_ok), "{found:?}");
    drop((live, moved));
    setup.allocator.empty_cache().unwrap();
    assert_eq!((setup.told_bytes(), setup.allocator.memory_reserved()), (0, 0));
    setup.driver.assert_no_violation();
}

#[test]
fn nobody_is_told_after_the_end_of_a_registration() {
    let mut setup = setup();
    setup.registration = None;
    let _live = setup.fragment();
    assert_eq!(setup.told_bytes(), 0);
}
