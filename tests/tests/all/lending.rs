//! Memory lent between streams, and allocators, pools and streams that end while memory of theirs
//! is in use.

use std::any::Any;
use std::time::Duration;

use aquifer::device::sim::{Fault, SimConfig};
use aquifer::memory::{Config, PoolOptions};
use aquifer::{Allocator, Stream};
use aquifer_device::{Code, HandleKind, Operation};
use aquifer_tests::{BACKINGS, Bench, GIB, MIB, Subject, on, write_on};

/// A segment of 20 MiB of which another stream used 6 MiB in between; nothing is live any more.
fn lent_in_between(bench: &Bench) {
    let low = bench.allocator.alloc_bytes(6 * MIB, &bench.stream).unwrap();
    let middle = bench.allocator.alloc_bytes(6 * MIB, &bench.stream).unwrap();
    let place = middle.ptr();
    drop(middle);
    bench.stream.synchronize().unwrap();
    let lent = bench.allocator.alloc_bytes(6 * MIB, &bench.side).unwrap();
    assert_eq!(lent.ptr(), place);
    write_on(&bench.side, lent.ptr(), lent.bytes());
    bench.driver.stall(&bench.side, Duration::from_millis(5)).unwrap();
    drop((low, lent));
}

#[test]
fn memory_that_was_lent_goes_back_to_the_device() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    lent_in_between(&bench);
    assert_eq!(bench.allocator.empty_cache().unwrap(), 20 * MIB);
    bench.assert_returned();
}

#[test]
fn memory_that_was_lent_serves_a_request_for_all_of_it() {
    let bench = Bench::new(20 * MIB, "backing:segments");
    lent_in_between(&bench);
    let whole = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap();
    write_on(&bench.stream, whole.ptr(), whole.bytes());
    drop(whole);
    bench.assert_returned();
}

#[test]
fn a_segment_that_could_not_be_released_keeps_its_order() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    let block = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap();
    bench.driver.stall(&bench.stream, Duration::from_millis(5)).unwrap();
    write_on(&bench.stream, block.ptr(), block.bytes());
    drop(block);
    bench.driver.inject(Fault::Nth { operation: Some(Operation::Free), nth: 1, code: Code(999) });
    bench.allocator.empty_cache().unwrap_err();
    let next = bench.allocator.alloc_bytes(20 * MIB, &bench.side).unwrap();
    write_on(&bench.side, next.ptr(), next.bytes());
    drop(next);
    bench.assert_returned();
}

#[test]
fn a_closed_pool_serves_nobody_even_if_a_route_is_left() {
    let bench = Bench::new(64 * MIB, "");
    let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
    let inside = pool.alloc_bytes(1000, &bench.stream).unwrap();
    let route = pool.route_thread();
    drop(pool);
    let outside = bench.allocator.alloc_bytes(1000, &bench.stream).unwrap();
    assert!(outside.ptr().0.abs_diff(inside.ptr().0) >= 2 * MIB - 1024, "served from the closed pool");
    drop((inside, outside, route));
    bench.assert_returned();
}

#[test]
fn a_capture_gets_no_memory_that_others_get_next() {
    for backing in ["backing:paged", "backing:segments"] {
        let bench = Bench::new(64 * MIB, backing);
        // There is some at hand, and without a capture it would be handed out.
        drop(bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap());
        let capture = bench.stream.begin_capture().unwrap();
        for bytes in [MIB, 4 * MIB] {
            let refused = bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap_err();
            assert!(refused.to_string().contains("Allocator::capture"), "{refused}");
        }
        let beside = bench.allocator.alloc_bytes(MIB, &bench.side).unwrap();
        let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
        let route = bench.allocator.capture(&bench.stream, &pool).unwrap();
        let scratch = bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap();
        write_on(&bench.stream, scratch.ptr(), scratch.bytes());
        drop((scratch, route));
        let graph = capture.end().unwrap();
        let next = bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap();
        write_on(&bench.side, beside.ptr(), beside.bytes());
        write_on(&bench.stream, next.ptr(), next.bytes());
        graph.launch(&bench.stream).unwrap();
        bench.stream.synchronize().unwrap();
        drop((graph, pool, beside, next));
        bench.assert_returned();
    }
}

#[test]
fn an_allocator_that_is_dropped_leaves_nothing_on_the_device() {
    for backing in ["backing:paged", "backing:segments"] {
        let subject = Subject::open(&SimConfig::new(GIB));
        let device = subject.device();
        let free = || device.memory_info().unwrap().free;
        let before = free();
        let allocator = Allocator::new(&device, Config::parse(backing).unwrap()).unwrap();
        let stream = device.stream().unwrap();
        let [one, two] = [(); 2].map(|()| allocator.alloc_bytes(30 * MIB, &stream).unwrap());
        subject.stall(&stream, Duration::from_millis(5)).unwrap();
        write_on(&stream, one.ptr(), one.bytes());
        drop((one, two));
        assert!(free() <= before - 60 * MIB);
        drop(allocator);
        assert_eq!(free(), before, "{backing}");
        // Dropping a buffer makes no driver call, whatever it outlives.
        let allocator = Allocator::new(&device, Config::parse(backing).unwrap()).unwrap();
        let outlives = allocator.alloc_bytes(30 * MIB, &stream).unwrap();
        drop(allocator);
        let calls = device.driver_calls().total();
        drop(outlives);
        assert_eq!(device.driver_calls().total(), calls);
        assert!(free() < before);
        device.settle();
        assert_eq!(free(), before, "{backing}");
        assert!(subject.violations().is_empty());
    }
}

#[test]
fn streams_that_come_and_go_take_over_what_others_left() {
    for backing in ["backing:paged", "backing:segments"] {
        let bench = Bench::new(64 * MIB, backing);
        let keep = bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap();
        let mut reserved = Vec::new();
        for round in 0..60 {
            let stream = bench.device.stream().unwrap();
            assert!(stream.id() < 16, "numbers grow with streams that are gone: {}", stream.id());
            bench.driver.stall(&stream, Duration::from_micros(round * 7 % 50)).unwrap();
            let (small, large) = (5000, (round % 3 + 1) * MIB);
            let blocks = [small, large].map(|bytes| bench.allocator.alloc_bytes(bytes, &stream).unwrap());
            blocks.iter().for_each(|block| write_on(&stream, block.ptr(), block.bytes()));
            // Another stream uses one, and outlives the work.
            blocks[0].record_stream(&bench.side).unwrap();
            bench.side.wait_for(&stream.tick()).unwrap();
            write_on(&bench.side, blocks[0].ptr(), blocks[0].bytes());
            drop((blocks, stream));
            // Where it is not known which work is done by then, all of it is.
            let pause = Duration::from_micros(round * 13 % 60);
            bench.driver.advance(if Subject::keeps_time() { pause } else { Duration::from_secs(1) });
            reserved.push(bench.allocator.memory_reserved());
        }
        assert_eq!(reserved[30], reserved[59], "{backing}: {reserved:?}");
        drop(keep);
        bench.assert_returned();
    }
}

#[test]
fn nobody_makes_another_threads_own_stream_wait() {
    let bench = Bench::new(64 * MIB, "");
    let theirs = std::thread::scope(|scope| scope.spawn(|| bench.device.per_thread_stream()).join().unwrap());
    write_on(&bench.side, bench.device.alloc(1 << 20).unwrap(), 1 << 20);
    let tick = bench.side.tick();
    theirs.wait_for(&tick).unwrap_err();
    assert!(!theirs.is_ordered_after(&tick));
}

#[test]
fn blocks_known_to_be_done_are_lent_too() {
    let bench = Bench::new(64 * MIB, "");
    let blocks = [1, 2].map(|_| bench.allocator.alloc_bytes(10 * MIB, &bench.stream).unwrap());
    drop(blocks);
    bench.stream.synchronize().unwrap();
    let one = bench.allocator.alloc_bytes(10 * MIB, &bench.side).unwrap();
    let other = bench.allocator.alloc_bytes(10 * MIB, &bench.side).unwrap();
    assert_eq!(bench.allocator.memory_reserved(), 20 * MIB);
    drop((one, other));
    bench.assert_returned();
}

#[test]
fn memory_that_was_lent_and_recorded_goes_back_to_the_device() {
    let bench = Bench::new(20 * MIB, "");
    let third = bench.device.stream().unwrap();
    let low = bench.allocator.alloc_bytes(6 * MIB, &bench.stream).unwrap();
    let lent = bench.allocator.alloc_bytes(6 * MIB, &bench.side).unwrap();
    bench.driver.stall(&third, Duration::from_millis(5)).unwrap();
    bench.driver.stall(&bench.side, Duration::from_millis(50)).unwrap();
    lent.record_stream(&third).unwrap();
    drop((low, lent));
    let whole = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap();
    write_on(&bench.stream, whole.ptr(), whole.bytes());
    drop(whole);
    bench.assert_returned();
}

#[test]
fn blocks_given_back_after_their_stream_are_lent() {
    let bench = Bench::new(20 * MIB, "");
    let gone = bench.device.stream().unwrap();
    let keeps = bench.allocator.alloc_bytes(5 * MIB, &gone).unwrap();
    let late = bench.allocator.alloc_bytes(9 * MIB, &gone).unwrap();
    bench.driver.stall(&gone, Duration::from_millis(5)).unwrap();
    write_on(&gone, late.ptr(), late.bytes());
    drop(gone);
    drop(late);
    let lent = bench.allocator.alloc_bytes(9 * MIB, &bench.stream).unwrap();
    write_on(&bench.stream, lent.ptr(), lent.bytes());
    drop((keeps, lent));
    bench.assert_returned();
}

#[test]
fn streams_of_different_devices_are_ordered_by_waiting_alone() {
    let (one, other) = (Bench::new(MIB, ""), Bench::new(MIB, ""));
    assert_eq!(one.stream.id(), other.stream.id(), "numbers are those of their device");
    let tick = one.stream.tick();
    assert!(!other.stream.is_ordered_after(&tick));
    other.stream.wait_for(&tick).unwrap();
    one.assert_no_violation();
    other.assert_no_violation();
}

/// Keys of free blocks had room for 57 bits of address; above, blocks of one size were taken for
/// blocks of another.
#[test]
fn memory_at_the_highest_addresses_serves_as_any() {
    for backing in BACKINGS {
        for ordinal in [63, 64, 100, 4000] {
            let driver = Subject::open(&SimConfig::new(GIB).ordinal(ordinal));
            let device = driver.device();
            let allocator = Allocator::new(&device, Config::parse(&on(backing, "")).unwrap()).unwrap();
            let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
            let [lent, above] = [100, 1].map(|blocks| allocator.alloc_bytes(blocks * 512, &one).unwrap());
            drop(lent);
            one.synchronize().unwrap();
            // One unit larger than what is free, which is not large enough.
            let larger = allocator.alloc_bytes(101 * 512, &two).unwrap();
            let (got, taken) = (larger.ptr().range(larger.bytes()), above.ptr().range(above.bytes()));
            assert!(got.end <= taken.start || taken.end <= got.start, "{got:x?} and {taken:x?}");
            let fitting = allocator.alloc_bytes(100 * 512, &two).unwrap();
            write_on(&two, fitting.ptr(), fitting.bytes());
            assert!(allocator.stats().cross_stream_reuses > 0, "{backing}, ordinal {ordinal}");
            drop([larger, fitting, above]);
            allocator.empty_cache().unwrap();
            assert_eq!(driver.free(), GIB);
            driver.assert_no_violation();
        }
    }
}

/// What was left to the device goes back when nobody needs to wait for it, or when there is no
/// memory without it.
#[test]
fn growth_does_not_wait_for_work_of_others() {
    for options in ["", "backing:segments"] {
        let bench = Bench::new(256 * MIB, options);
        drop(bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap());
        let left = bench.device.alloc(100 * MIB).unwrap();
        write_on(&bench.side, left, 100 * MIB);
        bench.driver.stall(&bench.side, Duration::from_secs(1)).unwrap();
        bench.device.free_later(left);
        let before = bench.device.driver_calls();
        let block = bench.allocator.alloc_bytes(64 * MIB, &bench.stream).unwrap();
        let calls = bench.device.driver_calls().since(&before);
        let waits = [Operation::Free, Operation::Synchronize, Operation::SynchronizeStream];
        assert!(waits.iter().all(|&wait| calls.of(wait) == 0), "{options:?}: {calls:?}");
        let more = bench.allocator.alloc_bytes(150 * MIB, &bench.stream).unwrap();
        drop((block, more));
        bench.assert_returned();
    }
}

#[test]
fn what_keeps_an_allocator_open_is_dropped_without_driver_calls() {
    type Keep = fn(&Allocator, &Stream) -> Box<dyn Any>;
    let keeps: [(&str, Keep); 5] = [
        ("a buffer of growable memory", |allocator, stream| {
            let mut growable = allocator.growable(64 * MIB, stream).unwrap();
            growable.grow_to(4 * MIB, stream).unwrap();
            Box::new(growable.buffer::<u8>())
        }),
        ("growable memory", |allocator, stream| Box::new(allocator.growable(64 * MIB, stream).unwrap())),
        ("exportable memory", |allocator, stream| {
            Box::new(allocator.alloc_exportable(MIB, HandleKind::PosixFd, stream).unwrap())
        }),
        ("a pinned mapping", |allocator, stream| {
            let block = allocator.alloc_bytes(4 * MIB, stream).unwrap();
            let pinned = allocator.pin_mapping(&block).unwrap();
            Box::new((block, pinned))
        }),
        ("a guard", |allocator, _| Box::new(allocator.keep_awake().unwrap())),
    ];
    for (name, keep) in keeps {
        let driver = Subject::new(GIB);
        let device = driver.device();
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let stream = device.stream().unwrap();
        drop(allocator.alloc_bytes(8 * MIB, &stream).unwrap());
        let kept = keep(&allocator, &stream);
        drop(allocator);
        let before = device.driver_calls();
        drop(kept);
        let calls = device.driver_calls().since(&before);
        assert_eq!(calls.iter().map(|(_, count)| count).sum::<u64>(), 0, "{name}: {calls:?}");
        device.settle();
        assert_eq!(driver.free(), GIB, "{name}");
        driver.assert_no_violation();
    }
}
