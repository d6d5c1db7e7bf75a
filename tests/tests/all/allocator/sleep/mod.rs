//! Sleep and wake: memory goes and comes back, addresses and contents stay, and no failure loses
//! anything.

mod meanwhile;

use std::ops::Deref;

use aquifer_tests::prelude::*;

const CAPACITY: u64 = 256 * MIB;

/// An allocator with live memory.
struct Sleeper {
    bench: Bench,
    /// Live allocations of many sizes, each filled with its number.
    live: Vec<Allocation>,
    cache: Growable,
}

impl Deref for Sleeper {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.bench
    }
}

fn sleeper() -> Sleeper {
    let bench = Bench::new(CAPACITY, "");
    let mut live = Vec::new();
    for (at, bytes) in [512, 70_000, MIB, 3 * MIB, 2 * MIB + 512, 1000].into_iter().enumerate() {
        let stream = if at % 2 == 0 { &bench.stream } else { &bench.side };
        drop(bench.alloc_on(stream, bytes * 2));
        let block = bench.alloc_on(stream, bytes);
        stream.fill(block.ptr(), u8::try_from(at).unwrap(), bytes).unwrap();
        live.push(block);
    }
    let mut cache = bench.growable(64 * MIB);
    cache.grow_to(3 * MIB, &bench.stream).unwrap();
    bench.stream.fill(cache.ptr(), 99, 3 * MIB).unwrap();
    Sleeper { bench, live, cache }
}

impl Sleeper {
    fn assert_contents(&self) {
        self.device.synchronize().unwrap();
        for (at, block) in self.live.iter().enumerate() {
            let ends = [block.ptr(), block.ptr().offset(block.bytes() - 1)].map(|ptr| self.byte(ptr));
            assert_eq!(ends, [u8::try_from(at).unwrap(); 2], "block {at}");
        }
        assert_eq!(self.byte(self.cache.ptr().offset(3 * MIB - 1)), 99);
    }

    /// Allocates and grows, and gives everything back.
    fn assert_usable_and_returned(mut self) {
        let stream = self.stream.clone();
        self.cache.grow_to(30 * MIB, &stream).unwrap();
        let more = self.written(100 * MIB);
        drop((more, self.live, self.cache));
        self.bench.assert_returned();
    }
}

#[test]
fn contents_and_addresses_survive() {
    let bench = sleeper();
    let pointers: Vec<_> = bench.live.iter().map(Allocation::ptr).collect();
    let (allocated, in_use) = (bench.allocator.memory_allocated(), bench.allocator.stats().allocation);
    drop(bench.alloc(10 * MIB));
    let held = CAPACITY - bench.device_free();
    let given = bench.allocator.sleep(Contents::SaveToHost).unwrap();
    assert_eq!(given, held, "cached memory included");
    assert!(bench.allocator.is_asleep());
    assert_eq!((bench.allocator.memory_reserved(), bench.device_free()), (0, CAPACITY));
    assert_eq!(bench.allocator.memory_allocated(), allocated);
    assert!(pointers.iter().all(|&ptr| bench.driver.mapping_at(ptr).is_none()));
    assert_eq!(bench.allocator.sleep(Contents::Discard).unwrap(), 0, "asleep already");
    bench.allocator.wake().unwrap();
    bench.allocator.wake().unwrap();
    assert!(!bench.allocator.is_asleep());
    let held = CAPACITY - bench.device_free();
    assert_eq!(bench.allocator.memory_reserved(), held);
    assert!(allocated <= held && held <= given - 10 * MIB, "cached memory does not come back: {held} of {given}");
    assert_eq!(bench.allocator.stats().allocation.all.current, in_use.all.current);
    bench.assert_contents();
    bench.assert_usable_and_returned();
}

#[test]
fn discarded_contents_are_not_saved() {
    let bench = sleeper();
    let copies = |bench: &Bench| bench.calls(Operation::CopyToHost);
    let before = copies(&bench);
    bench.allocator.sleep(Contents::Discard).unwrap();
    bench.allocator.wake().unwrap();
    assert_eq!(copies(&bench), before);
    let block = &bench.live[4];
    if Subject::has_simulated_device() {
        assert_eq!(bench.byte(block.ptr()), 0xCD, "memory that was not written has this value on a simulated device");
        // Where the device knows of the allocator's blocks, it reports the read.
        let found = bench.device.driver().take_violation();
        assert!(found.is_none_or(|found| found.contains("never written")));
    }
    bench.stream.fill(block.ptr(), 5, block.bytes()).unwrap();
    assert_eq!(bench.byte(block.ptr()), 5);
    bench.assert_usable_and_returned();
}

#[test]
fn an_allocator_that_sleeps_takes_memory_back_but_gives_none() {
    let mut bench = sleeper();
    let exported = |bench: &Bench| bench.allocator.alloc_exportable(MIB, HandleKind::PosixFd, &bench.stream).map(drop);
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    for bytes in [1, 100 * MIB] {
        assert!(matches!(bench.allocator.alloc_bytes(bytes, &bench.stream), Err(AllocError::Asleep)));
    }
    assert!(matches!(exported(&bench), Err(AllocError::Asleep)));
    assert!(matches!(bench.cache.grow_to(50 * MIB, &bench.bench.stream), Err(AllocError::Asleep)));
    assert!(bench.allocator.alloc_bytes(0, &bench.stream).is_ok());
    let allocated = bench.allocator.memory_allocated();
    let last = bench.live.pop().unwrap();
    drop(last);
    assert!(bench.allocator.memory_allocated() < allocated);
    bench.cache.shrink_to(3 * MIB - 1, &bench.bench.stream).unwrap();
    assert_eq!(bench.allocator.empty_cache().unwrap(), 0);
    bench.allocator.wake().unwrap();
    exported(&bench).unwrap();
    bench.cache.grow_to(3 * MIB, &bench.bench.stream).unwrap();
    bench.stream.fill(bench.cache.ptr().offset(3 * MIB - 1), 99, 1).unwrap();
    bench.assert_contents();
    bench.assert_usable_and_returned();
}

#[test]
fn nothing_grows_asleep_not_even_within_its_last_granule() {
    let mut bench = sleeper();
    let asleep = |grown: Result<(), AllocError>| assert!(matches!(grown, Err(AllocError::Asleep)), "{grown:?}");
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    let (cache, stream) = (&mut bench.cache, &bench.bench.stream);
    for bytes in [3 * MIB + 1, 4 * MIB, 4 * MIB + 1] {
        asleep(cache.grow_to(bytes, stream));
    }
    asleep(cache.grow_to(MIB, stream)); // it is larger, but its memory is away
    assert!(matches!(cache.grow_to(65 * MIB, stream), Err(AllocError::BeyondCapacity { .. })));
    cache.shrink_to(MIB, stream).unwrap();
    asleep(cache.grow_to(3 * MIB, stream)); // to what it gave up meanwhile
    assert_eq!(cache.bytes(), MIB);
    bench.allocator.wake().unwrap();
    bench.cache.grow_to(3 * MIB, &bench.bench.stream).unwrap();
    bench.stream.fill(bench.cache.ptr(), 99, 3 * MIB).unwrap();
    bench.assert_contents();
    bench.assert_usable_and_returned();
}

#[test]
fn without_memory_the_allocator_stays_asleep_and_can_be_woken_later() {
    let bench = sleeper();
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    bench.driver.set_other_process_bytes(CAPACITY - 8 * MIB);
    for _ in 0..2 {
        let error = bench.allocator.wake().unwrap_err();
        assert!(error.is_out_of_memory() && bench.allocator.is_asleep());
        assert_eq!((bench.allocator.memory_reserved(), bench.device_free()), (0, 8 * MIB));
    }
    bench.driver.set_other_process_bytes(0);
    bench.allocator.wake().unwrap();
    bench.assert_contents();
    bench.assert_usable_and_returned();
}

#[test]
fn pinned_exported_and_segment_memory_stays() {
    let bench = sleeper();
    let Bench { allocator, device, stream, .. } = &*bench;
    let pin = allocator.pin_mapping(&bench.live[3]).unwrap();
    let shared = allocator.alloc_exportable(5 * MIB, HandleKind::PosixFd, stream).unwrap();
    let pool = allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let segment = pool.alloc_bytes(MIB, stream).unwrap();
    allocator.sleep(Contents::Discard).unwrap();
    let stay = pin.range().end - pin.range().start + 6 * MIB + 2 * MIB;
    assert_eq!((allocator.memory_reserved(), CAPACITY - bench.device_free()), (stay, stay));
    assert_eq!(bench.byte(bench.live[3].ptr()), 3);
    stream.fill(shared.ptr(), 1, 5 * MIB).unwrap();
    stream.fill(segment.ptr(), 1, MIB).unwrap();
    device.synchronize().unwrap();
    allocator.wake().unwrap();
    drop((pin, shared, segment, pool));
    bench.assert_usable_and_returned();
}

#[test]
fn peers_and_observers_see_memory_come_back() {
    let bench = sleeper();
    let Bench { allocator, driver, .. } = &*bench;
    let reported = Arc::new(Mutex::new(0_i64));
    let sum = reported.clone();
    let _registration = allocator.observe_mappings(move |change| {
        *sum.lock().unwrap() += match *change {
            MappingChange::Mapped { bytes, .. } => bytes.cast_signed(),
            MappingChange::BeforeUnmap { bytes, .. } => -bytes.cast_signed(),
            _ => 0,
        }
    });
    let reserved = allocator.memory_reserved().cast_signed();
    allocator.sleep(Contents::SaveToHost).unwrap();
    assert_eq!(*reported.lock().unwrap(), -reserved);
    let peers = Subject::peers(1);
    peers.iter().for_each(|peer| allocator.enable_peer_access(peer.ordinal()).unwrap());
    let mut devices: Vec<_> = [driver].into_iter().chain(&peers).map(Subject::ordinal).collect();
    devices.sort_unstable();
    allocator.wake().unwrap();
    assert_eq!(*reported.lock().unwrap(), allocator.memory_reserved().cast_signed() - reserved);
    for ptr in bench.live.iter().map(Allocation::ptr).chain([bench.cache.ptr()]) {
        assert_eq!(driver.mapping_at(ptr).unwrap().devices, devices);
    }
    bench.assert_contents();
}

#[test]
fn the_allocator_may_end_asleep() {
    for fault in [None, Some(Operation::Map), Some(Operation::SetAccess), Some(Operation::CopyToDevice)] {
        let bench = sleeper();
        bench.allocator.sleep(Contents::SaveToHost).unwrap();
        if let Some(operation) = fault {
            bench.fail(operation, 2, Code(999));
            bench.allocator.wake().unwrap_err();
            assert!(bench.allocator.is_asleep());
        }
        let Sleeper { bench: Bench { driver, device, allocator, stream, side }, live, cache } = bench;
        drop((allocator, live, cache, stream, side));
        device.settle();
        assert_eq!(device.memory_info().unwrap().free, CAPACITY, "{fault:?}");
        driver.assert_no_violation();
    }
}

/// A second fault, in addition to the one at the nth call.
#[derive(Clone, Copy)]
enum Second {
    None,
    /// So many calls later.
    After(u64),
    /// At the first call that maps memory: memory that was given up cannot come back.
    AtMap,
}

/// A fault at every single driver call of falling asleep and of waking up, and at two of them.
#[test]
fn no_failing_call_loses_anything() {
    let falls_asleep = |bench: &Bench| bench.allocator.sleep(Contents::SaveToHost).map(drop);
    let wakes = |bench: &Bench| bench.allocator.wake();
    let (mut asleep, mut undone, mut woken) = (0, 0, 0);
    let seconds = [Second::None, Second::After(1), Second::After(3), Second::AtMap].map(|second| (Code(999), second));
    for (code, second) in seconds.into_iter().chain([(Code::OUT_OF_MEMORY, Second::None)]) {
        for nth in 1.. {
            let bench = sleeper();
            let first_call = bench.driver.calls_made();
            let inject = |operation, nth| bench.driver.inject(Fault::Nth { operation, nth, code });
            inject(None, nth);
            match second {
                Second::None => {}
                Second::After(calls) => inject(None, nth + calls),
                Second::AtMap => inject(Some(Operation::Map), 1),
            }
            let mut results = vec![falls_asleep(&bench)];
            match (results[0].is_err(), bench.allocator.is_asleep()) {
                (true, true) => asleep += 1,
                (true, false) => undone += 1,
                (false, is_asleep) => {
                    assert!(is_asleep);
                    results.push(wakes(&bench));
                    woken += u32::from(results[1].is_err());
                }
            }
            assert_eq!(bench.allocator.stats().allocated_bytes.all.current, bench.allocator.memory_allocated());
            let last_call = bench.driver.calls_made() - first_call;
            bench.driver.clear_faults();
            let held = CAPACITY - bench.device_free();
            assert!(bench.allocator.memory_reserved() >= held, "call {nth}: {results:?}");
            bench.allocator.wake().unwrap();
            bench.assert_contents();
            bench.assert_usable_and_returned();
            if nth > last_call {
                break;
            }
        }
    }
    assert!(asleep > 0 && undone > 10 && woken > 10, "{asleep} {undone} {woken}");
}

#[test]
fn a_lost_device_is_an_error() {
    let bench = sleeper();
    bench.driver.inject(Fault::LostAt { nth: 40 });
    let error =
        (0..40).find_map(|_| bench.allocator.sleep(Contents::SaveToHost).and_then(|_| bench.allocator.wake()).err());
    assert!(matches!(error, Some(AllocError::Device(error)) if error.kind == ErrorKind::DeviceLost));
}

#[test]
fn measures_count_the_memory_held_asleep() {
    let bench = sleeper();
    let Bench { allocator, stream, .. } = &*bench;
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
    bench.assert_usable_and_returned();
}

#[test]
fn peaks_that_begin_asleep_include_allocated_memory() {
    let bench = sleeper();
    let allocator = &bench.allocator;
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
    let bench = sleeper();
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    assert!(bench.alloc(0).range().is_empty());
    assert!(bench.allocator.alloc_bytes_zeroed(0, &bench.stream).unwrap().range().is_empty());
    bench.allocator.wake().unwrap();
    bench.assert_contents();
    bench.assert_usable_and_returned();
}

/// Memory given up asleep is mapped again at waking, and goes back later.
#[test]
fn snapshots_show_growable_memory_given_up_asleep() {
    for shrinks in [false, true] {
        let bench = Bench::new(128 * MIB, "history:1000");
        let mut growable = bench.growable(20 * MIB);
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
