//! What goes wrong with page-locked memory elsewhere, and cannot here; named as in `pains.rs`.

use std::time::Duration;

use aquifer_device::Operation;

use super::{Bench, pattern};

/// A page-locked buffer was filled again, or given to somebody else, while a copy from it was in
/// flight.
#[test]
fn page_locked_memory_in_flight_is_neither_written_nor_reused_130785() {
    let bench = Bench::new();
    let mut buffers = Vec::new();
    let mut host = bench.transfer.pinned().alloc::<u8>(1 << 20).unwrap();
    for round in 0..4 {
        let mut buffer = bench.alloc(1 << 20);
        host.write().unwrap().fill(round);
        drop(bench.transfer.upload(&host, &mut buffer).unwrap());
        if round == 2 {
            // Dropped in flight, and asked for again.
            drop(std::mem::replace(&mut host, bench.transfer.pinned().alloc::<u8>(1 << 20).unwrap()));
        }
        buffers.push(buffer);
    }
    for (round, buffer) in buffers.iter().enumerate() {
        let back = bench.transfer.to_vec(buffer).unwrap().wait().unwrap();
        assert!(back.iter().all(|&byte| usize::from(byte) == round), "round {round}");
    }
    drop((buffers, host));
    bench.finish();
}

/// A request for a little more than 128 MiB took 256, and one for 5 GB took 8 GiB.
#[test]
fn page_locked_sizes_are_not_rounded_to_powers_of_two_95823_150517_lmcache_1147() {
    let bench = Bench::new();
    let asked = (129 << 20) + (1 << 19);
    let buffer = bench.transfer.pinned().alloc::<u8>(asked).unwrap();
    let held = bench.transfer.pinned().stats().allocated_bytes.current;
    assert!((asked as u64..=144 << 20).contains(&held), "{held}");
    drop(buffer);
    bench.finish();
}

/// The first requests waited for the system to lock pages, and nothing could be had before.
#[test]
fn page_locked_memory_can_be_had_in_advance_181094_164501() {
    let bench = Bench::new();
    let pool = bench.transfer.pinned();
    pool.prewarm(64 << 20).unwrap();
    let buffers = [40_000, 1 << 20, 5 << 20, 40 << 20].map(|bytes| pool.alloc::<u8>(bytes).unwrap());
    let stats = pool.stats();
    assert_eq!((stats.num_host_alloc, stats.allocated_bytes.current), (1, 64 << 20));
    drop(buffers);
    bench.finish();
}

/// Each buffer that came back took an event of its own, and creating events stalled other threads.
#[test]
fn page_locked_memory_in_flight_needs_no_new_events_68906_69299() {
    let bench = Bench::new();
    let mut buffer = bench.alloc(4096);
    let mut round = |seed| {
        let host = bench.transfer.pinned().alloc_from(&pattern(seed, 4096)).unwrap();
        bench.transfer.upload(&host, &mut buffer).unwrap().wait().unwrap();
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
        drop(on.upload(&host, &mut buffer).unwrap());
    }
    drop(unused);
    let before = bench.device.driver_calls();
    (0..1000).for_each(|_| drop(pool.alloc::<u8>(1 << 20).unwrap()));
    assert_eq!(bench.device.driver_calls().since(&before).total(), 0);
    drop((buffer, on));
    bench.finish();
}

/// What a busy stream still used kept back all that came after it, though its streams were done.
#[test]
fn a_busy_stream_keeps_no_other_memory_back_71616_71745() {
    let bench = Bench::new();
    let pool = bench.transfer.pinned();
    let other = bench.device.stream().unwrap();
    let mut buffers = [bench.alloc(1 << 20), bench.alloc(1 << 20)];
    bench.device.synchronize().unwrap();
    let hosts = [pool.alloc_zeroed::<u8>(1 << 20).unwrap(), pool.alloc_zeroed::<u8>(1 << 20).unwrap()];
    let addresses = hosts.each_ref().map(|host| host.read().unwrap().as_ptr());
    bench.driver.stall(&bench.stream, Duration::from_secs(1)).unwrap();
    let last = bench.stream.tick();
    drop(bench.transfer.on(&bench.stream).unwrap().upload(&hosts[0], &mut buffers[0]).unwrap());
    let quick = bench.transfer.on(&other).unwrap().upload(&hosts[1], &mut buffers[1]).unwrap();
    drop(hosts);
    quick.wait().unwrap();
    let slabs = pool.stats().num_host_alloc;
    let again = pool.alloc::<u8>(1 << 20).unwrap();
    assert_eq!((again.read().unwrap().as_ptr(), pool.stats().num_host_alloc), (addresses[1], slabs));
    if aquifer_tests::Subject::is_simulated() {
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
        let buffer = bench.transfer.to_device(content.clone(), &bench.stream).unwrap().wait().unwrap();
        let host = bench.transfer.to_pinned(&buffer).unwrap();
        drop(buffer);
        assert_eq!(host.wait().unwrap().read().unwrap(), content);
        let reserved = bench.transfer.allocator().memory_reserved();
        most = if round < 2 { reserved } else { most };
        assert!(reserved <= most, "round {round}: {reserved}, {most} before");
    }
    bench.finish();
}
