//! Defects of pinned memory that users of other libraries reported; see `reported.rs`.

use aquifer_tests::prelude::*;
use aquifer_tests::random::pattern;

use super::{Bench, to_pinned};

/// A pinned buffer was written or reused while a copy from it was in flight.
#[test]
fn page_locked_memory_in_flight_is_neither_written_nor_reused_130785() {
    let bench = Bench::new();
    let mut buffers = Vec::new();
    let mut host = bench.transfer.pinned().alloc::<u8>(1 << 20).unwrap();
    for round in 0..4 {
        let mut buffer = bench.alloc(1 << 20);
        host.write().unwrap().fill(round);
        drop(buffer.upload(&host, &bench.transfer).unwrap());
        if round == 2 {
            // Dropped in flight, and asked for again.
            drop(std::mem::replace(&mut host, bench.transfer.pinned().alloc::<u8>(1 << 20).unwrap()));
        }
        buffers.push(buffer);
    }
    for (round, buffer) in buffers.iter().enumerate() {
        let back = bench.read(buffer);
        assert!(back.iter().all(|&byte| usize::from(byte) == round), "round {round}");
    }
    drop((buffers, host));
    bench.finish();
}

/// Each buffer that came back took an event of its own, and creating events stalled other threads.
#[test]
fn page_locked_memory_in_flight_needs_no_new_events_68906_69299() {
    let bench = Bench::new();
    let mut buffer = bench.alloc(4096);
    let mut round = |seed| {
        let host = bench.transfer.pinned().alloc_from(&pattern(seed, 4096)).unwrap();
        buffer.upload(&host, &bench.transfer).unwrap().wait().unwrap();
    };
    (0..10).for_each(&mut round);
    let before = bench.device.driver_calls();
    (0..1000).for_each(&mut round);
    let calls = bench.device.driver_calls().since(&before);
    assert_eq!((calls.of(Operation::CreateEvent), calls.of(Operation::HostAlloc)), (0, 0));
    assert!(calls.of(Operation::Record) <= 1000, "{}", calls.of(Operation::Record));
    drop(buffer);
    bench.finish();
}

/// Each request asked about every copy in flight before it took anything, unless a thread did so
/// all the time.
#[test]
fn page_locked_memory_comes_back_without_questions_or_threads_135524() {
    let bench = Bench::new();
    let pool = bench.transfer.pinned();
    let mut buffer = bench.alloc(1 << 20);
    let unused = pool.alloc::<u8>(1 << 20).unwrap();
    let on = bench.transfer.on(&bench.stream).unwrap();
    bench.driver.stall(&bench.stream, Duration::from_secs(1)).unwrap();
    for _ in 0..100 {
        let host = pool.alloc_zeroed::<u8>(1 << 20).unwrap();
        drop(buffer.upload(&host, &on).unwrap());
    }
    drop(unused);
    let before = bench.device.driver_calls();
    (0..1000).for_each(|_| drop(pool.alloc::<u8>(1 << 20).unwrap()));
    assert_eq!(bench.device.driver_calls().since(&before).total(), 0);
    drop((buffer, on));
    bench.finish();
}

/// Memory that a busy stream used kept back later memory whose streams were done.
#[test]
fn memory_used_by_a_busy_stream_delays_no_other_memory_71616_71745() {
    let bench = Bench::new();
    let pool = bench.transfer.pinned();
    let other = bench.device.stream().unwrap();
    let mut buffers = [bench.alloc(1 << 20), bench.alloc(1 << 20)];
    bench.device.synchronize().unwrap();
    let hosts = [pool.alloc_zeroed::<u8>(1 << 20).unwrap(), pool.alloc_zeroed::<u8>(1 << 20).unwrap()];
    let addresses = hosts.each_ref().map(|host| host.read().unwrap().as_ptr());
    bench.driver.stall(&bench.stream, Duration::from_secs(1)).unwrap();
    let last = bench.stream.tick();
    drop(buffers[0].upload(&hosts[0], &bench.transfer.on(&bench.stream).unwrap()).unwrap());
    let quick = buffers[1].upload(&hosts[1], &bench.transfer.on(&other).unwrap()).unwrap();
    drop(hosts);
    quick.wait().unwrap();
    let slabs = pool.stats().num_host_alloc;
    let again = pool.alloc::<u8>(1 << 20).unwrap();
    assert_eq!((again.read().unwrap().as_ptr(), pool.stats().num_host_alloc), (addresses[1], slabs));
    if Subject::is_simulated() {
        assert!(!last.is_done().unwrap(), "the busy stream is still busy");
    }
    drop((again, buffers, last, other));
    bench.finish();
}

/// Device memory that copies on other streams had used stayed away for long, so that programs of
/// many copies took more and more.
#[test]
fn copies_on_other_streams_do_not_keep_memory_147168_deepep_455() {
    let bench = Bench::new();
    let content = pattern(3, 4 << 20);
    let mut most = 0;
    for round in 0..50 {
        let buffer = bench.send(content.len(), content.clone());
        let host = to_pinned(&bench.transfer, &buffer).unwrap();
        drop(buffer);
        assert_eq!(host.wait().unwrap().read().unwrap(), content);
        let reserved = bench.transfer.allocator().memory_reserved();
        most = if round < 2 { reserved } else { most };
        assert!(reserved <= most, "round {round}: {reserved}, {most} before");
    }
    bench.finish();
}
