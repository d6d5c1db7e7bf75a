//! Growable memory: one address, memory as needed, nothing reused before it is done, nothing lost
//! in a failure.

use std::sync::Arc;
use std::time::Duration;

use aquifer::device::sim::Fault;
use aquifer::device::{AccessKind, DevicePtr, RequestError};
use aquifer::memory::{AccessGuard, AllocError, Config, Growable, TagScope};
use aquifer::{Allocator, Device, Stream};
use aquifer_allocator::size_class::PoolKind;
use aquifer_device::{Code, HandleKind, Operation};
use aquifer_tests::check::readers;
use aquifer_tests::{Bench, MIB, Subject};
use proptest::prelude::*;

const CAPACITY: u64 = 128 * MIB;

struct Setup {
    driver: Subject,
    device: Device,
    allocator: Allocator,
    stream: Stream,
    side: Stream,
}

fn setup(options: &str) -> Setup {
    let driver = Subject::new(CAPACITY);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    let (stream, side) = (device.stream().unwrap(), device.stream().unwrap());
    Setup { driver, device, allocator, stream, side }
}

impl Setup {
    fn growable(&self, capacity: u64) -> Growable {
        self.allocator.growable(capacity, &self.stream).unwrap()
    }

    fn assert_returned(&self) {
        self.allocator.empty_cache().unwrap();
        self.device.settle();
        assert_eq!((self.allocator.memory_allocated(), self.allocator.memory_reserved()), (0, 0));
        assert_eq!(self.device.memory_info().unwrap().free, CAPACITY);
        self.driver.assert_no_violation();
    }
}

fn read(stream: &Stream, ptr: DevicePtr) -> u8 {
    let mut byte = [0];
    stream.download_blocking(&mut byte, ptr).unwrap();
    byte[0]
}

#[test]
fn it_grows_in_place_and_keeps_its_contents() {
    let setup = setup("");
    let Setup { allocator, stream, .. } = &setup;
    let mut cache = setup.growable(200 * MIB);
    assert_eq!((cache.bytes(), allocator.memory_reserved()), (0, 0));
    let ptr = cache.ptr();
    cache.grow_to(3 * MIB, stream).unwrap();
    stream.fill(ptr, 7, 3 * MIB).unwrap();
    for mib in [4, 9, 60, 100] {
        cache.grow_to(mib * MIB, stream).unwrap();
        let last = ptr.offset(mib * MIB - 1);
        stream.fill(last, 9, 1).unwrap();
        assert_eq!((cache.ptr(), read(stream, ptr), read(stream, last)), (ptr, 7, 9));
        assert_eq!((cache.range(), cache.capacity()), (ptr.0..ptr.0 + mib * MIB, 200 * MIB));
        assert_eq!(allocator.memory_allocated(), mib.next_multiple_of(2) * MIB);
        assert_eq!(allocator.memory_reserved(), allocator.memory_allocated());
    }
    cache.grow_to(5 * MIB, stream).unwrap(); // it is larger
    assert_eq!(cache.bytes(), 100 * MIB);
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.current, stats.requested_bytes.all.current), (1, 100 * MIB));
    let snapshot = allocator.snapshot();
    assert_eq!((snapshot.segments.len(), snapshot.segments[0].total_size), (1, 100 * MIB));
    assert_eq!((snapshot.segments[0].address, snapshot.segments[0].active_size), (ptr.0, 100 * MIB));
    drop(cache);
    setup.assert_returned();
}

#[test]
fn what_it_gives_up_serves_others_once_it_is_done() {
    let setup = setup("");
    let Setup { driver, allocator, stream, side, .. } = &setup;
    let mut cache = setup.growable(CAPACITY);
    cache.grow_to(120 * MIB, stream).unwrap();
    driver.stall(side, Duration::from_secs(1)).unwrap();
    side.wait_for(&stream.tick()).unwrap();
    side.fill(cache.ptr(), 1, 120 * MIB).unwrap();
    let calls = driver.calls_made();
    cache.shrink_to(20 * MIB, side).unwrap();
    assert_eq!(driver.calls_made(), calls, "shrinking makes no driver call");
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (20 * MIB, 120 * MIB));
    assert!(driver.mapping_at(cache.ptr().offset(100 * MIB)).is_some(), "its last use is not done");
    let small = allocator.alloc_bytes(6 * MIB, stream).unwrap();
    let large = allocator.alloc_bytes(90 * MIB, stream).unwrap(); // waits
    stream.fill(large.ptr(), 2, 90 * MIB).unwrap();
    assert!(driver.now_ns() >= 1_000_000_000);
    assert_eq!(read(stream, cache.ptr()), 1);
    drop((small, large, cache));
    setup.assert_returned();
}

#[test]
fn growing_again_takes_back_what_was_not_recycled() {
    let setup = setup("");
    let Setup { driver, allocator, stream, side, .. } = &setup;
    let mut cache = setup.growable(CAPACITY);
    cache.grow_to(100 * MIB, stream).unwrap();
    stream.fill(cache.ptr(), 5, 100 * MIB).unwrap();
    cache.shrink_to(MIB, stream).unwrap();
    let calls = driver.calls_made();
    cache.grow_to(50 * MIB, stream).unwrap();
    assert_eq!(driver.calls_made(), calls, "nothing to ask the driver on the same stream");
    assert_eq!(allocator.memory_reserved(), 100 * MIB);
    // Another stream waits for the last use, on the device.
    cache.grow_to(100 * MIB, side).unwrap();
    side.fill(cache.ptr().offset(60 * MIB), 6, MIB).unwrap();
    side.synchronize().unwrap();
    drop(cache);
    setup.assert_returned();
}

/// Whichever stream uses the end before it is given up, and wherever in a granule that is: who
/// grows it again comes later, and so does who grows further within the same granule.
#[test]
fn what_it_grows_by_again_comes_after_its_last_uses() {
    for (large, small) in [(8, 4), (8, 5), (8, 7), (7, 6), (9, 5)] {
        let setup = setup("");
        let Setup { driver, device, stream, side, .. } = &setup;
        let third = device.stream().unwrap();
        let mut cache = setup.growable(CAPACITY);
        cache.grow_to(large * MIB, stream).unwrap();
        driver.stall(side, Duration::from_secs(1)).unwrap();
        side.wait_for(&stream.tick()).unwrap();
        cache.record_stream(side).unwrap();
        side.fill(cache.ptr().offset(small * MIB), 1, (large - small) * MIB).unwrap();
        cache.shrink_to(small * MIB, side).unwrap();
        let middle = small * MIB + MIB / 2;
        cache.grow_to(middle, stream).unwrap();
        stream.fill(cache.ptr().offset(small * MIB), 2, MIB / 2).unwrap();
        cache.grow_to(large * MIB, &third).unwrap();
        third.fill(cache.ptr().offset(middle), 3, large * MIB - middle).unwrap();
        device.synchronize().unwrap();
        assert_eq!(read(stream, cache.ptr().offset(small * MIB)), 2);
        assert_eq!(read(stream, cache.ptr().offset(large * MIB - 1)), 3);
        drop(cache);
        setup.assert_returned();
    }
}

#[test]
fn turns_come_after_growth_of_any_size() {
    for (from, to) in [(7, 8), (7, 9), (5, 6)] {
        let setup = setup("");
        let Setup { driver, device, stream, side, .. } = &setup;
        let mut cache = setup.growable(CAPACITY);
        cache.grow_to(from * MIB, stream).unwrap();
        let write = |cache: &Growable| {
            let buffer = cache.buffer::<u8>();
            let _access = AccessGuard::acquire(side, &[(buffer.storage(), AccessKind::Write)]).unwrap();
            side.fill(buffer.ptr(), 1, buffer.bytes()).unwrap();
        };
        write(&cache);
        // Work on bare addresses, and then growth on the same stream.
        driver.stall(stream, Duration::from_secs(1)).unwrap();
        stream.wait_for(&side.tick()).unwrap();
        stream.fill(cache.ptr(), 2, from * MIB).unwrap();
        cache.grow_to(to * MIB, stream).unwrap();
        write(&cache);
        device.synchronize().unwrap();
        assert_eq!(read(side, cache.ptr()), 1);
        drop(cache);
        setup.assert_returned();
    }
}

#[test]
fn addresses_of_those_that_were_dropped_come_back() {
    let setup = setup("");
    let most = setup.driver.addresses().unwrap() / CAPACITY;
    (0..most + 10).for_each(|_| drop(setup.growable(CAPACITY)));
    setup.assert_returned();
}

#[test]
fn it_takes_free_granules_before_it_buys() {
    let setup = setup("");
    let Setup { device, allocator, stream, .. } = &setup;
    drop(allocator.alloc_bytes(100 * MIB, stream).unwrap());
    let created = device.driver_calls().of(Operation::CreatePhysical);
    let mut cache = setup.growable(CAPACITY);
    cache.grow_to(100 * MIB, stream).unwrap();
    assert_eq!(device.driver_calls().of(Operation::CreatePhysical), created);
    assert_eq!(allocator.memory_reserved(), 100 * MIB);
    cache.shrink_to(0, stream).unwrap();
    stream.synchronize().unwrap();
    let block = allocator.alloc_bytes(100 * MIB, stream).unwrap();
    assert_eq!(device.driver_calls().of(Operation::CreatePhysical), created);
    drop((block, cache));
    setup.assert_returned();
}

#[test]
fn the_limit_holds_and_growth_makes_room() {
    let setup = setup("limit_mb:64");
    let Setup { allocator, stream, .. } = &setup;
    let held = Arc::new(std::sync::Mutex::new(Some(allocator.alloc_bytes(30 * MIB, stream).unwrap())));
    let scope = TagScope::new("keys and values");
    let mut cache = setup.growable(CAPACITY);
    drop(scope);
    cache.grow_to(20 * MIB, stream).unwrap();
    let error = cache.grow_to(50 * MIB, stream).unwrap_err();
    let report = error.report().unwrap();
    assert_eq!((report.limit, report.requested), (Some(64 * MIB), 30 * MIB));
    assert!(report.largest_tags.contains(&(Some("keys and values".to_owned()), 20 * MIB)));
    assert_eq!((cache.bytes(), allocator.memory_allocated()), (20 * MIB, 50 * MIB));
    let freed = held.clone();
    let _reclaimer =
        allocator.register_reclaimer(0, "drop it", move |_| freed.lock().unwrap().take().map_or(0, |old| old.bytes()));
    cache.grow_to(50 * MIB, stream).unwrap();
    assert!(allocator.memory_reserved() <= 64 * MIB);
    assert!(matches!(cache.grow_to(CAPACITY + 1, stream), Err(AllocError::BeyondCapacity { .. })));
    drop(cache);
    setup.assert_returned();
}

#[test]
fn a_stream_that_never_allocated_gets_a_report() {
    let setup = setup("limit_mb:20");
    let mut cache = setup.growable(CAPACITY);
    let error = cache.grow_to(30 * MIB, &setup.side).unwrap_err();
    assert_eq!(error.report().unwrap().stream_id, setup.side.id());
    assert_eq!((cache.bytes(), setup.allocator.memory_reserved()), (0, 0));
}

#[test]
fn it_is_refused_where_it_cannot_be() {
    let Setup { allocator, stream, device, .. } = &setup("backing:segments");
    assert!(matches!(allocator.growable(MIB, stream), Err(AllocError::NotMapped { .. })));
    let Setup { allocator, .. } = &setup("");
    assert!(matches!(allocator.growable(MIB, stream), Err(AllocError::Request(RequestError::WrongDevice { .. }))));
    let own = allocator.device().default_stream();
    assert!(matches!(allocator.growable(1 << 60, own), Err(AllocError::TooLarge { .. })));
    assert!(matches!(
        allocator.growable(MIB, own).unwrap().grow_to(MIB, device.default_stream()),
        Err(AllocError::Request(RequestError::WrongDevice { .. }))
    ));
}

#[test]
fn more_than_any_device_has_is_refused_before_it_is_laid_out() {
    let setup = setup("");
    let mut cache = setup.growable(setup.driver.addresses().unwrap());
    let calls = setup.driver.calls_made();
    assert!(cache.grow_to(cache.capacity(), &setup.stream).unwrap_err().is_out_of_memory());
    let made = setup.driver.calls_made() - calls;
    assert!(made < 10, "{made} calls");
    drop(cache);
    setup.assert_returned();
}

#[test]
fn every_failing_call_leaves_it_as_it_was() {
    let operations =
        [Operation::CreatePhysical, Operation::Map, Operation::SetAccess, Operation::Unmap, Operation::ReleasePhysical];
    let codes = [Code(999), Code::OUT_OF_MEMORY];
    for (operation, code, nth) in operations
        .into_iter()
        .flat_map(|operation| codes.map(|code| (operation, code)))
        .flat_map(|(operation, code)| [1, 2, 7].map(|nth| (operation, code, nth)))
    {
        let setup = setup("");
        let Setup { driver, allocator, stream, .. } = &setup;
        let mut cache = setup.growable(CAPACITY);
        cache.grow_to(10 * MIB, stream).unwrap();
        stream.fill(cache.ptr(), 3, 10 * MIB).unwrap();
        let blocks: Vec<_> = (0..8).map(|_| allocator.alloc_bytes(12 * MIB, stream).unwrap()).collect();
        drop(blocks);
        stream.synchronize().unwrap();
        driver.inject(Fault::Nth { operation: Some(operation), nth, code });
        driver.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 3, code });
        let grown = cache.grow_to(100 * MIB, stream);
        let bytes = if grown.is_ok() { 100 * MIB } else { 10 * MIB };
        assert_eq!((cache.bytes(), allocator.memory_allocated()), (bytes, bytes), "{operation:?} {code:?} {nth}");
        driver.clear_faults();
        cache.grow_to(90 * MIB, stream).unwrap();
        assert_eq!(read(stream, cache.ptr()), 3);
        stream.fill(cache.ptr(), 4, cache.bytes()).unwrap();
        cache.shrink_to(3 * MIB, stream).unwrap();
        drop(cache);
        setup.assert_returned();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Grow(usize, u64, bool),
    Shrink(usize, u64, bool),
    Alloc(u64, bool),
    Free(usize),
    Replace(usize),
    Stall(bool),
    Trim(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let mib = || 0..61_u64;
    prop_oneof![
        4 => (0..3_usize, mib(), any::<bool>()).prop_map(|(which, mib, side)| Step::Grow(which, mib, side)),
        3 => (0..3_usize, mib(), any::<bool>()).prop_map(|(which, mib, side)| Step::Shrink(which, mib, side)),
        4 => (1..40_u64, any::<bool>()).prop_map(|(mib, side)| Step::Alloc(mib, side)),
        3 => any::<usize>().prop_map(Step::Free),
        1 => (0..3_usize).prop_map(Step::Replace),
        1 => any::<bool>().prop_map(Step::Stall),
        1 => mib().prop_map(Step::Trim),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: u32::try_from(Subject::share(200)).unwrap(), ..ProptestConfig::default() })]
    /// Growables and blocks share memory on two streams: nobody meets another's work, and the sums
    /// are right.
    #[test]
    fn programs(steps in prop::collection::vec(step(), 1..80), faults in prop::option::weighted(0.3, 0.005..0.05_f64)) {
        let setup = setup("");
        let Setup { driver, allocator, stream, side, .. } = &setup;
        if let Some(rate) = faults {
            for operation in [Operation::CreatePhysical, Operation::Map, Operation::SetAccess] {
                driver.inject(Fault::Rate { operation: Some(operation), rate, code: Code(999) });
            }
        }
        let mut caches: Vec<Growable> = (0..3).map(|_| setup.growable(60 * MIB)).collect();
        let mut blocks = Vec::new();
        let pick = |is_side: bool| if is_side { side } else { stream };
        let order = |user: &Stream| {
            user.wait_for(&stream.tick()).unwrap();
            user.wait_for(&side.tick()).unwrap();
        };
        for step in steps {
            match step {
                Step::Grow(which, mib, is_side) => {
                    let user = pick(is_side);
                    let _ = caches[which].grow_to(mib * MIB, user);
                    order(user);
                    if caches[which].bytes() > 0 {
                        user.fill(caches[which].ptr(), 1, caches[which].bytes()).unwrap();
                    }
                }
                Step::Shrink(which, mib, is_side) => {
                    caches[which].shrink_to(mib * MIB, pick(is_side)).unwrap();
                }
                Step::Alloc(mib, is_side) => {
                    if let Ok(block) = allocator.alloc_bytes(mib * MIB, pick(is_side)) {
                        pick(is_side).fill(block.ptr(), 2, block.bytes()).unwrap();
                        blocks.push(block);
                    }
                }
                Step::Free(which) if !blocks.is_empty() => drop(blocks.swap_remove(which % blocks.len())),
                Step::Free(_) => {}
                Step::Replace(which) => match allocator.growable(60 * MIB, stream) {
                    Ok(cache) => caches[which] = cache,
                    Err(error) => prop_assert!(matches!(error, AllocError::Device(error) if error.operation == Operation::Reserve)),
                },
                Step::Stall(is_side) => driver.stall(pick(is_side), Duration::from_millis(1)).unwrap(),
                Step::Trim(mib) => {
                    let _ = allocator.trim_to(mib * MIB);
                }
            }
            let grown: u64 = caches.iter().map(|cache| cache.bytes().next_multiple_of(2 * MIB)).sum();
            let held: u64 = blocks.iter().map(|block| block.bytes()).sum();
            prop_assert_eq!(allocator.memory_allocated(), grown + held);
            let reserved: u64 = allocator.snapshot().segments.iter().map(|segment| segment.total_size).sum();
            prop_assert!(reserved <= allocator.memory_reserved() && allocator.memory_reserved() <= CAPACITY);
            prop_assert!(driver.violations().is_empty());
        }
        driver.clear_faults();
        drop((caches, blocks));
        setup.assert_returned();
    }
}

#[test]
fn measures_of_fragmentation_count_it() {
    let setup = setup("");
    let Setup { allocator, stream, .. } = &setup;
    let mut cache = setup.growable(CAPACITY);
    cache.grow_to(50 * MIB - 1, stream).unwrap();
    let shared = allocator.alloc_exportable(6 * MIB, HandleKind::PosixFd, stream).unwrap();
    readers(allocator);
    let found = allocator.fragmentation_in(PoolKind::Large, 1);
    assert_eq!((found.reserved_bytes, found.allocated_bytes, found.internal_waste), (56 * MIB, 56 * MIB, 1));
    assert_eq!((found.segments, found.address_bytes), (2, CAPACITY + 6 * MIB));
    assert_eq!(allocator.fragmentation_in(PoolKind::Small, 1).reserved_bytes, 0);
    cache.shrink_to(20 * MIB, stream).unwrap();
    readers(allocator);
    let found = allocator.fragmentation(1);
    assert_eq!((found.free_bytes, found.releasable_bytes, found.releasable_segments), (30 * MIB, 30 * MIB, 0));
    drop((cache, shared));
    setup.assert_returned();
}

/// A full cache of frames of several granules, from which a growable takes its memory, is grown and
/// shrunk by one granule at a time.
fn shrinks_by_granules(options: &str, capacity: u64) {
    let bench = Bench::new(capacity, options);
    drop(
        (0..capacity / (8 * MIB))
            .map(|_| bench.allocator.alloc_bytes(8 * MIB, &bench.stream).unwrap())
            .collect::<Vec<_>>(),
    );
    bench.stream.tick().synchronize().unwrap();
    let most = capacity / (4 * MIB);
    let mut cache = bench.allocator.growable(capacity, &bench.stream).unwrap();
    cache.grow_to(2 * most * MIB, &bench.stream).unwrap();
    for left in (0..most).rev() {
        cache.shrink_to(2 * left * MIB, &bench.stream).unwrap();
        bench.stream.tick().synchronize().unwrap();
        bench.allocator.empty_cache().unwrap();
        assert_eq!(bench.allocator.memory_reserved(), 2 * left * MIB, "{options}");
    }
    cache.grow_to(6 * MIB, &bench.stream).unwrap();
    drop(cache);
    bench.assert_returned();
}

#[test]
fn a_growable_takes_larger_frames_apart() {
    shrinks_by_granules("backing:paged,frame_mb:4", 64 * MIB);
    shrinks_by_granules("backing:paged", 1024 * MIB);
}
