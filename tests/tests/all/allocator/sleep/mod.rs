//! Sleep and wake: memory goes and comes back, addresses and contents stay, and no failure loses
//! anything.

mod live;
mod meanwhile;

use std::sync::Arc;

use aquifer::device::sim::Fault;
use aquifer::device::{DevicePtr, ErrorKind};
use aquifer::memory::{AllocError, Allocation, Config, Contents, Growable, PoolOptions};
use aquifer::{Allocator, Device, Stream};
use aquifer_device::{Code, HandleKind, Operation};
use aquifer_tests::{Bench, MIB, Subject};

const CAPACITY: u64 = 256 * MIB;

struct Setup {
    driver: Subject,
    device: Device,
    allocator: Allocator,
    stream: Stream,
    /// Live allocations of many sizes, each filled with its number.
    live: Vec<Allocation>,
    cache: Growable,
}

fn setup() -> Setup {
    let driver = Subject::new(CAPACITY);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let (stream, side) = (device.stream().unwrap(), device.stream().unwrap());
    let mut live = Vec::new();
    for (at, bytes) in [512, 70_000, MIB, 3 * MIB, 2 * MIB + 512, 1000].into_iter().enumerate() {
        let stream = if at % 2 == 0 { &stream } else { &side };
        drop(allocator.alloc_bytes(bytes * 2, stream).unwrap());
        let block = allocator.alloc_bytes(bytes, stream).unwrap();
        stream.fill(block.ptr(), u8::try_from(at).unwrap(), bytes).unwrap();
        live.push(block);
    }
    let mut cache = allocator.growable(64 * MIB, &stream).unwrap();
    cache.grow_to(3 * MIB, &stream).unwrap();
    stream.fill(cache.ptr(), 99, 3 * MIB).unwrap();
    Setup { driver, device, allocator, stream, live, cache }
}

impl Setup {
    fn byte(&self, ptr: DevicePtr) -> u8 {
        let mut byte = [0];
        self.stream.download_blocking(&mut byte, ptr).unwrap();
        byte[0]
    }

    fn assert_contents(&self) {
        self.device.synchronize().unwrap();
        for (at, block) in self.live.iter().enumerate() {
            let ends = [block.ptr(), block.ptr().offset(block.bytes() - 1)].map(|ptr| self.byte(ptr));
            assert_eq!(ends, [u8::try_from(at).unwrap(); 2], "block {at}");
        }
        assert_eq!(self.byte(self.cache.ptr().offset(3 * MIB - 1)), 99);
    }

    fn device_free(&self) -> u64 {
        self.device.memory_info().unwrap().free
    }

    /// Everything works as ever, and everything goes back.
    fn assert_usable_and_returned(mut self) {
        self.cache.grow_to(30 * MIB, &self.stream).unwrap();
        let more = self.allocator.alloc_bytes(100 * MIB, &self.stream).unwrap();
        self.stream.fill(more.ptr(), 1, more.bytes()).unwrap();
        let Setup { driver, device, allocator, .. } = self;
        drop((more, self.live, self.cache));
        allocator.empty_cache().unwrap();
        device.settle();
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0));
        assert_eq!(device.memory_info().unwrap().free, CAPACITY);
        driver.assert_no_violation();
    }
}

#[test]
fn contents_and_addresses_survive() {
    let setup = setup();
    let pointers: Vec<_> = setup.live.iter().map(Allocation::ptr).collect();
    let (allocated, in_use) = (setup.allocator.memory_allocated(), setup.allocator.stats().allocation);
    drop(setup.allocator.alloc_bytes(10 * MIB, &setup.stream).unwrap());
    let held = CAPACITY - setup.device_free();
    let given = setup.allocator.sleep(Contents::SaveToHost).unwrap();
    assert_eq!(given, held, "cached memory included");
    assert!(setup.allocator.is_asleep());
    assert_eq!((setup.allocator.memory_reserved(), setup.device_free()), (0, CAPACITY));
    assert_eq!(setup.allocator.memory_allocated(), allocated);
    assert!(pointers.iter().all(|&ptr| setup.driver.mapping_at(ptr).is_none()));
    assert_eq!(setup.allocator.sleep(Contents::Discard).unwrap(), 0, "asleep already");
    setup.allocator.wake().unwrap();
    setup.allocator.wake().unwrap();
    assert!(!setup.allocator.is_asleep());
    let held = CAPACITY - setup.device_free();
    assert_eq!(setup.allocator.memory_reserved(), held);
    assert!(allocated <= held && held <= given - 10 * MIB, "cached memory does not come back: {held} of {given}");
    assert_eq!(setup.allocator.stats().allocation.all.current, in_use.all.current);
    setup.assert_contents();
    setup.assert_usable_and_returned();
}

#[test]
fn discarded_contents_are_not_saved() {
    let setup = setup();
    let copies = |setup: &Setup| setup.device.driver_calls().of(Operation::CopyToHost);
    let before = copies(&setup);
    setup.allocator.sleep(Contents::Discard).unwrap();
    setup.allocator.wake().unwrap();
    assert_eq!(copies(&setup), before);
    let block = &setup.live[4];
    if Subject::has_race_detector() {
        assert_eq!(
            setup.byte(block.ptr()),
            0xCD,
            "nobody wrote it since: a simulated device tells such memory by its value"
        );
        // Where the device knows of the allocator's blocks, it reports the read.
        let found = setup.device.driver().take_violation();
        assert!(found.is_none_or(|found| found.contains("never written")));
    }
    setup.stream.fill(block.ptr(), 5, block.bytes()).unwrap();
    assert_eq!(setup.byte(block.ptr()), 5);
    setup.assert_usable_and_returned();
}

#[test]
fn asleep_it_takes_memory_back_but_gives_none() {
    let mut setup = setup();
    let exported = |setup: &Setup| setup.allocator.alloc_exportable(MIB, HandleKind::PosixFd, &setup.stream).map(drop);
    setup.allocator.sleep(Contents::SaveToHost).unwrap();
    for bytes in [1, 100 * MIB] {
        assert!(matches!(setup.allocator.alloc_bytes(bytes, &setup.stream), Err(AllocError::Asleep)));
    }
    assert!(matches!(exported(&setup), Err(AllocError::Asleep)));
    assert!(matches!(setup.cache.grow_to(50 * MIB, &setup.stream), Err(AllocError::Asleep)));
    assert!(setup.allocator.alloc_bytes(0, &setup.stream).is_ok());
    let allocated = setup.allocator.memory_allocated();
    let last = setup.live.pop().unwrap();
    drop(last);
    assert!(setup.allocator.memory_allocated() < allocated);
    setup.cache.shrink_to(3 * MIB - 1, &setup.stream).unwrap();
    assert_eq!(setup.allocator.empty_cache().unwrap(), 0);
    setup.allocator.wake().unwrap();
    exported(&setup).unwrap();
    setup.cache.grow_to(3 * MIB, &setup.stream).unwrap();
    setup.stream.fill(setup.cache.ptr().offset(3 * MIB - 1), 99, 1).unwrap();
    setup.assert_contents();
    setup.assert_usable_and_returned();
}

#[test]
fn asleep_nothing_grows_not_even_within_its_last_granule() {
    let mut setup = setup();
    let asleep = |grown: Result<(), AllocError>| assert!(matches!(grown, Err(AllocError::Asleep)), "{grown:?}");
    setup.allocator.sleep(Contents::SaveToHost).unwrap();
    let (cache, stream) = (&mut setup.cache, &setup.stream);
    for bytes in [3 * MIB + 1, 4 * MIB, 4 * MIB + 1] {
        asleep(cache.grow_to(bytes, stream));
    }
    asleep(cache.grow_to(MIB, stream)); // it is larger, but its memory is away
    assert!(matches!(cache.grow_to(65 * MIB, stream), Err(AllocError::BeyondCapacity { .. })));
    cache.shrink_to(MIB, stream).unwrap();
    asleep(cache.grow_to(3 * MIB, stream)); // to what it gave up meanwhile
    assert_eq!(cache.bytes(), MIB);
    setup.allocator.wake().unwrap();
    setup.cache.grow_to(3 * MIB, &setup.stream).unwrap();
    setup.stream.fill(setup.cache.ptr(), 99, 3 * MIB).unwrap();
    setup.assert_contents();
    setup.assert_usable_and_returned();
}

#[test]
fn without_memory_it_stays_asleep_and_can_be_woken_later() {
    let setup = setup();
    setup.allocator.sleep(Contents::SaveToHost).unwrap();
    setup.driver.set_other_process_bytes(CAPACITY - 8 * MIB);
    for _ in 0..2 {
        let error = setup.allocator.wake().unwrap_err();
        assert!(error.is_out_of_memory() && setup.allocator.is_asleep());
        assert_eq!((setup.allocator.memory_reserved(), setup.device_free()), (0, 8 * MIB));
    }
    setup.driver.set_other_process_bytes(0);
    setup.allocator.wake().unwrap();
    setup.assert_contents();
    setup.assert_usable_and_returned();
}

#[test]
fn what_others_know_stays() {
    let setup = setup();
    let Setup { allocator, device, stream, .. } = &setup;
    let pin = allocator.pin_mapping(&setup.live[3]).unwrap();
    let shared = allocator.alloc_exportable(5 * MIB, HandleKind::PosixFd, stream).unwrap();
    let pool = allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let segment = pool.alloc_bytes(MIB, stream).unwrap();
    allocator.sleep(Contents::Discard).unwrap();
    let stay = pin.range().end - pin.range().start + 6 * MIB + 2 * MIB;
    assert_eq!((allocator.memory_reserved(), CAPACITY - setup.device_free()), (stay, stay));
    assert_eq!(setup.byte(setup.live[3].ptr()), 3);
    stream.fill(shared.ptr(), 1, 5 * MIB).unwrap();
    stream.fill(segment.ptr(), 1, MIB).unwrap();
    device.synchronize().unwrap();
    allocator.wake().unwrap();
    drop((pin, shared, segment, pool));
    setup.assert_usable_and_returned();
}

#[test]
fn peers_and_observers_see_it_come_back() {
    let setup = setup();
    let Setup { allocator, driver, .. } = &setup;
    let told = Arc::new(std::sync::Mutex::new(0_i64));
    let sum = told.clone();
    let _registration = allocator.observe_mappings(move |change| {
        *sum.lock().unwrap() += match *change {
            aquifer_allocator::MappingChange::Mapped { bytes, .. } => bytes.cast_signed(),
            aquifer_allocator::MappingChange::BeforeUnmap { bytes, .. } => -bytes.cast_signed(),
            _ => 0,
        }
    });
    let reserved = allocator.memory_reserved().cast_signed();
    allocator.sleep(Contents::SaveToHost).unwrap();
    assert_eq!(*told.lock().unwrap(), -reserved);
    let peers = Subject::peers(1);
    peers.iter().for_each(|peer| allocator.enable_peer_access(peer.ordinal()).unwrap());
    let mut devices: Vec<_> = [driver].into_iter().chain(&peers).map(Subject::ordinal).collect();
    devices.sort_unstable();
    allocator.wake().unwrap();
    assert_eq!(*told.lock().unwrap(), allocator.memory_reserved().cast_signed() - reserved);
    for ptr in setup.live.iter().map(Allocation::ptr).chain([setup.cache.ptr()]) {
        assert_eq!(driver.mapping_at(ptr).unwrap().devices, devices);
    }
    setup.assert_contents();
}

#[test]
fn segments_do_not_sleep() {
    let device = Subject::new(CAPACITY).device();
    let allocator = Allocator::new(&device, Config::parse("backing:segments").unwrap()).unwrap();
    assert!(matches!(allocator.sleep(Contents::Discard), Err(AllocError::NotMapped { .. })));
    allocator.wake().unwrap();
    assert!(!allocator.is_asleep());
}

#[test]
fn the_allocator_may_end_asleep() {
    for fault in [None, Some(Operation::Map), Some(Operation::SetAccess), Some(Operation::CopyToDevice)] {
        let setup = setup();
        setup.allocator.sleep(Contents::SaveToHost).unwrap();
        if let Some(operation) = fault {
            setup.driver.inject(Fault::Nth { operation: Some(operation), nth: 2, code: Code(999) });
            setup.allocator.wake().unwrap_err();
            assert!(setup.allocator.is_asleep());
        }
        let Setup { driver, device, allocator, stream, live, cache } = setup;
        drop((allocator, live, cache, stream));
        device.settle();
        assert_eq!(device.memory_info().unwrap().free, CAPACITY, "{fault:?}");
        driver.assert_no_violation();
    }
}

/// A second fault beside that at the nth call of all.
#[derive(Clone, Copy)]
enum Second {
    None,
    /// So many calls later.
    After(u64),
    /// At the first call that maps memory: what was given up cannot come back.
    AtMap,
}

/// A fault at every single driver call of falling asleep and of waking up, and at two of them.
#[test]
fn no_failing_call_loses_anything() {
    let falls_asleep = |setup: &Setup| setup.allocator.sleep(Contents::SaveToHost).map(drop);
    let wakes = |setup: &Setup| setup.allocator.wake();
    let (mut asleep, mut undone, mut woken) = (0, 0, 0);
    let seconds = [Second::None, Second::After(1), Second::After(3), Second::AtMap].map(|second| (Code(999), second));
    for (code, second) in seconds.into_iter().chain([(Code::OUT_OF_MEMORY, Second::None)]) {
        for nth in 1.. {
            let setup = setup();
            let first_call = setup.driver.calls_made();
            let inject = |operation, nth| setup.driver.inject(Fault::Nth { operation, nth, code });
            inject(None, nth);
            match second {
                Second::None => {}
                Second::After(calls) => inject(None, nth + calls),
                Second::AtMap => inject(Some(Operation::Map), 1),
            }
            let mut results = vec![falls_asleep(&setup)];
            match (results[0].is_err(), setup.allocator.is_asleep()) {
                (true, true) => asleep += 1,
                (true, false) => undone += 1,
                (false, is_asleep) => {
                    assert!(is_asleep);
                    results.push(wakes(&setup));
                    woken += u32::from(results[1].is_err());
                }
            }
            assert_eq!(setup.allocator.stats().allocated_bytes.all.current, setup.allocator.memory_allocated());
            let last_call = setup.driver.calls_made() - first_call;
            setup.driver.clear_faults();
            let held = CAPACITY - setup.device_free();
            assert!(setup.allocator.memory_reserved() >= held, "call {nth}: {results:?}");
            setup.allocator.wake().unwrap();
            setup.assert_contents();
            setup.assert_usable_and_returned();
            if nth > last_call {
                break;
            }
        }
    }
    assert!(asleep > 0 && undone > 10 && woken > 10, "{asleep} {undone} {woken}");
}

#[test]
fn a_lost_device_is_an_error() {
    let setup = setup();
    setup.driver.inject(Fault::LostAt { nth: 40 });
    let error =
        (0..40).find_map(|_| setup.allocator.sleep(Contents::SaveToHost).and_then(|_| setup.allocator.wake()).err());
    assert!(matches!(error, Some(AllocError::Device(error)) if error.kind == ErrorKind::DeviceLost));
}

#[test]
fn measures_tell_what_is_held_while_it_sleeps() {
    let setup = setup();
    let Setup { allocator, stream, .. } = &setup;
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let in_pool = pool.alloc_bytes(5 * MIB, stream).unwrap();
    let shared = allocator.alloc_exportable(4 * MIB, HandleKind::PosixFd, stream).unwrap();
    let held = |allocator: &Allocator| (allocator.memory_reserved(), allocator.fragmentation(1).reserved_bytes);
    let of_pool = |allocator: &Allocator| allocator.reserved_by_private_pools()[&pool.id()];
    let (awake, in_awake) = (held(allocator), of_pool(allocator));
    assert_eq!((awake.0, in_awake), (awake.1, 6 * MIB));
    allocator.sleep(Contents::Discard).unwrap();
    assert_eq!((held(allocator), of_pool(allocator)), ((4 * MIB, 4 * MIB), 0));
    drop(in_pool);
    let fragmentation = allocator.fragmentation(1);
    assert_eq!((fragmentation.releasable_segments, fragmentation.releasable_bytes), (0, 0));
    assert_eq!(fragmentation.reserved_bytes, 4 * MIB);
    allocator.wake().unwrap();
    assert_eq!(held(allocator).0, held(allocator).1);
    drop((pool, shared));
    setup.assert_usable_and_returned();
}

#[test]
fn peaks_that_begin_while_it_sleeps_are_not_below_what_is_allocated() {
    let Setup { allocator, .. } = &setup();
    allocator.sleep(Contents::Discard).unwrap();
    allocator.reset_peak_stats();
    let stats = allocator.stats();
    assert_eq!(stats.reserved_bytes.all.peak, 0);
    for stat in [stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
        let parts = [stat.all, stat.large_pool, stat.small_pool];
        parts.iter().for_each(|part| assert!(part.peak == part.current && part.current > 0, "{stat:?}"));
    }
}

#[test]
fn zero_bytes_take_no_memory_that_sleeps() {
    let setup = setup();
    setup.allocator.sleep(Contents::SaveToHost).unwrap();
    assert!(setup.allocator.alloc_bytes(0, &setup.stream).unwrap().range().is_empty());
    assert!(setup.allocator.alloc_bytes_zeroed(0, &setup.stream).unwrap().range().is_empty());
    setup.allocator.wake().unwrap();
    setup.assert_contents();
    setup.assert_usable_and_returned();
}

/// What shrinks or goes while the allocator sleeps has its memory again when it wakes up, and gives
/// that back later.
#[test]
fn snapshots_show_what_growable_memory_gave_up_meanwhile() {
    for shrinks in [false, true] {
        let bench = Bench::new(128 * MIB, "history:1000");
        let mut growable = bench.allocator.growable(20 * MIB, &bench.stream).unwrap();
        growable.grow_to(6 * MIB, &bench.stream).unwrap();
        bench.allocator.sleep(Contents::Discard).unwrap();
        if shrinks {
            growable.shrink_to(2 * MIB, &bench.stream).unwrap()
        } else {
            drop(growable)
        }
        let shown = || bench.allocator.snapshot().segments.iter().map(|segment| segment.total_size).sum::<u64>();
        let asleep = shown();
        bench.allocator.wake().unwrap();
        assert_eq!((asleep, shown()), (6 * MIB, 6 * MIB), "shrinks: {shrinks}");
    }
}
