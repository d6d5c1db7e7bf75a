//! Programs on several OS threads. The checks hold under every interleaving.

use std::ops::RangeInclusive;
use std::sync::mpsc;
use std::time::Instant;

use aquifer_tests::prelude::*;

/// Allocates, uses and gives back on a stream of its own; passes some blocks on to be freed by
/// others.
fn hammer(allocator: &Allocator, stream: &Stream, seed: u64, away: &mpsc::Sender<Allocation>) {
    let mut held: Vec<Allocation> = Vec::new();
    for x in random::numbers(seed).take(1500) {
        let bytes = if x % 10 == 0 { x % (30 * MIB) + 1 } else { x % (600 * KIB) + 1 };
        match allocator.alloc_bytes(bytes, stream) {
            Ok(block) => {
                stream.fill(block.ptr(), u8::try_from(seed).unwrap(), block.bytes()).unwrap();
                held.push(block);
            }
            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
        }
        if held.len() > 12 {
            let at = usize::try_from(x >> 33).unwrap() % held.len();
            let block = held.swap_remove(at);
            let mut found = [0; 4];
            match x % 8 {
                0 => away.send(block).unwrap(),
                1 if block.bytes() >= 64 => {
                    stream.download_blocking(&mut found, block.ptr()).unwrap();
                    assert_eq!(found, [u8::try_from(seed).unwrap(); 4]);
                }
                _ => drop(block),
            }
        }
        if x % 400 == 0 {
            allocator.empty_cache().unwrap();
        }
    }
}

/// Runs `work` on a thread for each number, while another thread frees blocks sent to it.
fn on_threads(numbers: RangeInclusive<u64>, work: impl Fn(u64, mpsc::Sender<Allocation>) + Sync) {
    let (sender, receiver) = mpsc::channel::<Allocation>();
    std::thread::scope(|scope| {
        for number in numbers {
            let (away, work) = (sender.clone(), &work);
            scope.spawn(move || work(number, away));
        }
        drop(sender);
        scope.spawn(move || receiver.into_iter().for_each(drop));
    });
}

#[test]
fn four_threads_hammer_one_allocator() {
    for options in ["", "cross_stream:wait", "cross_stream:off,history:100", "backing:segments"] {
        let bench = Bench::new(200 * MIB, options);
        on_threads(1..=4, |seed, away| hammer(&bench.allocator, &bench.new_stream(), seed, &away));
        check::statistics(&bench.allocator, (0, 0));
        bench.assert_returned();
    }
}

#[test]
fn threads_with_default_streams_of_their_own_free_each_others_blocks() {
    let bench = Bench::new(GIB, "");
    on_threads(1..=3, |seed, away| hammer(&bench.allocator, &bench.device.per_thread_stream(), seed, &away));
    // The threads and their streams are gone; their memory serves this thread.
    let held = bench.alloc_on(&bench.device.per_thread_stream(), 100 * MIB);
    write_on(&bench.device.per_thread_stream(), held.ptr(), held.bytes());
    drop(held);
    check::statistics(&bench.allocator, (0, 0));
    bench.assert_returned();
}

#[test]
fn threads_that_come_and_go_use_each_others_memory() {
    let bench = Bench::new(GIB, "");
    let serve = |away: &mpsc::Sender<Allocation>, seed| {
        let stream = bench.device.per_thread_stream();
        assert!(stream.id() < 100, "{}", stream.id());
        for x in random::numbers(seed).take(20) {
            let block = bench.written_on(&stream, x % (2 * MIB) + 1);
            if x % 5 == 0 {
                away.send(block).unwrap();
            }
        }
    };
    on_threads(1..=3, |worker, away| {
        for request in 0..100 {
            std::thread::scope(|scope| scope.spawn(|| serve(&away, worker * 1000 + request)).join().unwrap());
        }
    });
    check::statistics(&bench.allocator, (0, 0));
    bench.assert_returned();
}

/// Blocks that another thread gave back, and that the allocating thread has not yet taken note of.
fn given_back_elsewhere(bench: &Bench, count: usize, bytes: u64) -> Vec<u64> {
    let blocks: Vec<Allocation> = (0..count).map(|_| bench.alloc(bytes)).collect();
    blocks.iter().for_each(|block| write_on(&bench.stream, block.ptr(), bytes));
    let places = blocks.iter().map(|block| block.ptr().0).collect();
    std::thread::scope(|scope| scope.spawn(move || drop(blocks)).join().unwrap());
    places
}

#[test]
fn nothing_grows_while_another_thread_has_given_enough_back() {
    for options in ["", "backing:segments"] {
        for (count, bytes) in [(1, 600 * KIB), (7, 600 * KIB), (15, 512), (200, 4 * KIB), (3, 9 * MIB)] {
            let bench = Bench::new(64 * MIB, options);
            given_back_elsewhere(&bench, count, bytes);
            let reserved = bench.allocator.memory_reserved();
            let again: Vec<_> = (0..count).map(|_| bench.alloc(bytes)).collect();
            again.iter().for_each(|block| write_on(&bench.stream, block.ptr(), bytes));
            assert_eq!(bench.allocator.memory_reserved(), reserved, "{count} of {bytes} with {options:?}");
            drop(again);
            bench.assert_returned();
        }
    }
}

#[test]
fn statistics_include_blocks_freed_by_another_thread() {
    let bench = Bench::new(64 * MIB, "history:100");
    let allocator = &bench.allocator;
    given_back_elsewhere(&bench, 9, 4 * KIB);
    assert_eq!(allocator.memory_allocated(), 0);
    given_back_elsewhere(&bench, 9, 4 * KIB);
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.current, stats.allocation.all.freed), (0, 18));
    given_back_elsewhere(&bench, 9, 4 * KIB);
    check::statistics(allocator, (0, 0));
    let places = given_back_elsewhere(&bench, 1, 4 * KIB);
    let history: Vec<_> = allocator.snapshot().device_traces.into_iter().flatten().collect();
    let freed = history.iter().rfind(|entry| entry.action == Action::FreeCompleted).unwrap();
    assert_eq!(freed.addr, Some(places[0]));
    given_back_elsewhere(&bench, 9, 4 * KIB);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.memory_reserved(), 0);
}

#[test]
fn a_thread_that_only_frees_is_not_waited_for() {
    let bench = Bench::new(GIB, "");
    let allocator = &bench.allocator;
    // Far more than a queue holds, and no thread empties it.
    given_back_elsewhere(&bench, 5000, 4 * KIB);
    assert_eq!(allocator.memory_allocated(), 0);
    // And again, after the allocator was closed.
    let Bench { driver, device, allocator, stream, side } = bench;
    let blocks: Vec<Allocation> = (0..5000).map(|_| allocator.alloc_bytes(4 * KIB, &stream).unwrap()).collect();
    drop(allocator);
    std::thread::scope(|scope| scope.spawn(move || drop(blocks)).join().unwrap());
    assert_eq!(held(&device), 0);
    drop((stream, side));
    driver.assert_all_free();
}

#[test]
fn blocks_that_other_streams_used_are_given_back_by_another_thread() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    let (allocator, stream, side) = (&bench.allocator, &bench.stream, &bench.side);
    let block = allocator.alloc_bytes(2 * MIB, stream).unwrap();
    let place = block.ptr();
    write_on(stream, place, block.bytes());
    side.wait_for(&stream.tick()).unwrap();
    write_on(side, place, block.bytes());
    block.record_stream(side).unwrap();
    std::thread::scope(|scope| scope.spawn(move || drop(block)).join().unwrap());
    // A request takes note of a large block that was given back, and then of its other streams.
    // They are idle when the next one asks.
    let others = [(); 2].map(|()| allocator.alloc_bytes(2 * MIB, stream).unwrap());
    bench.device.synchronize().unwrap();
    let again = [(); 2].map(|()| allocator.alloc_bytes(2 * MIB, stream).unwrap());
    assert!(again.iter().any(|block| block.ptr() == place), "it is used again");
    again.iter().for_each(|block| write_on(stream, block.ptr(), block.bytes()));
    drop((others, again));
    bench.assert_returned();
}

#[test]
fn the_last_handles_go_on_other_threads() {
    let bench = Bench::new(GIB, "");
    let Bench { driver, device, allocator, stream, side } = bench;
    let blocks: Vec<Allocation> = (1..200).map(|i| allocator.alloc_bytes(i * 10 * KIB, &stream).unwrap()).collect();
    blocks.iter().for_each(|block| write_on(&stream, block.ptr(), block.bytes()));
    let mut parts: Vec<Vec<Allocation>> = (0..4).map(|_| Vec::new()).collect();
    blocks.into_iter().enumerate().for_each(|(i, block)| parts[i % 4].push(block));
    std::thread::scope(|scope| {
        scope.spawn(move || drop(allocator));
        parts.into_iter().for_each(|part| drop(scope.spawn(move || drop(part))));
    });
    // Nothing is live: the device takes the segments back on request.
    assert_eq!(held(&device), 0);
    drop((stream, side, device));
    drop(Bench::new(MIB, ""));
    driver.assert_all_free();
    driver.assert_no_violation();
}

/// Bytes that are held from the device after another call.
fn held(device: &Device) -> u64 {
    device.settle();
    let memory = device.memory_info().unwrap();
    memory.total - memory.free
}

#[test]
fn limits_hold_while_threads_grow() {
    let bench = Bench::new(GIB, "limit_mb:64");
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let bench = &bench;
            scope.spawn(move || {
                for x in random::numbers(seed).take(300) {
                    let held = bench.allocator.alloc_bytes(x % (40 * MIB) + 1, &bench.stream);
                    assert!(bench.allocator.memory_reserved() <= 64 * MIB);
                    assert!(bench.device_free() >= GIB - 64 * MIB, "the device gave more than the limit");
                    if let Err(error) = held {
                        assert!(error.is_out_of_memory(), "{error}");
                    }
                }
            });
        }
    });
    bench.assert_returned();
}

/// What goes back to the device may be counted by another thread, which gets it, before this thread
/// could take it off its count.
#[test]
fn memory_that_threads_give_back_and_take_is_counted_once() {
    for options in ["", "backing:segments", "no_cache:True"] {
        let bench = Bench::new(64 * MIB, options);
        std::thread::scope(|scope| {
            for seed in 1..=3 {
                let bench = &bench;
                scope.spawn(move || {
                    let stream = bench.new_stream();
                    let mut held = Vec::new();
                    for x in random::numbers(seed).take(300) {
                        match bench.allocator.alloc_bytes(x % (16 * MIB) + 1, &stream) {
                            Ok(block) => held.push(block),
                            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                        }
                        held.truncate(usize::try_from(x >> 33).unwrap() % 5);
                        if x % 20 == 0 {
                            bench.allocator.empty_cache().unwrap();
                        }
                    }
                });
            }
        });
        let reserved = bench.allocator.stats().reserved_bytes.all;
        assert!(reserved.peak <= 64 * MIB, "{} of 64 MiB with {options:?}", reserved.peak);
        check::statistics(&bench.allocator, (0, 0));
        bench.assert_returned();
    }
}

#[test]
fn memory_on_its_way_to_the_device_is_not_counted() {
    let bench = Bench::new(64 * MIB, "");
    drop(bench.alloc(10 * MIB));
    let (allocator, (sender, counted)) = (bench.allocator.clone(), mpsc::channel());
    let observer = bench.allocator.observe_mappings(move |change| {
        if let MappingChange::BeforeUnmap { .. } = change {
            let listed: u64 = allocator.snapshot().segments.iter().map(|segment| segment.total_size).sum();
            sender.send((allocator.memory_reserved(), listed)).unwrap();
        }
    });
    bench.allocator.empty_cache().unwrap();
    assert_eq!(counted.try_iter().collect::<Vec<_>>(), [(0, 0)]);
    drop(observer);
    bench.assert_returned();
}

#[test]
fn addresses_that_are_freed_and_given_out_again_are_counted_once() {
    let bench = Bench::new(GIB, "");
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let bench = &bench;
            scope.spawn(move || {
                for x in random::numbers(seed).take(400) {
                    drop(bench.alloc(10 * MIB + x % MIB));
                    bench.allocator.empty_cache().unwrap();
                }
            });
        }
    });
    check::statistics(&bench.allocator, (0, 0));
    bench.assert_returned();
}

/// They all know how much is free when they wait for the thread that changes mappings.
#[test]
fn threads_that_grow_together_keep_the_headroom() {
    const HEADROOM: u64 = 30 * MIB;
    let bench = Bench::new(64 * MIB, "headroom_mb:30,backing:paged");
    let streams = [(); 3].map(|()| bench.new_stream());
    // So that the streams have addresses.
    let held = [1, 2].map(|stream| bench.alloc_on(&streams[stream], 2 * MIB));
    let mut cache = bench.allocator.growable(8 * MIB, &streams[0]).unwrap();
    cache.grow_to(4 * MIB, &streams[0]).unwrap();
    cache.shrink_to(2 * MIB, &streams[0]).unwrap();
    streams[0].synchronize().unwrap();
    let device = bench.device.clone();
    let asked = move || device.driver_calls().of(Operation::MemoryInfo);
    let (unmapping, unmaps) = mpsc::channel();
    let observed = asked.clone();
    let observer = bench.allocator.observe_mappings(move |change| {
        if let MappingChange::BeforeUnmap { .. } = change {
            let before = observed();
            unmapping.send(()).unwrap();
            // With a limit: threads that wait for the gate query later.
            let limit = Instant::now() + Duration::from_millis(500);
            while observed() < before + 2 && Instant::now() < limit {
                std::thread::yield_now();
            }
        }
    });
    let blocks = std::thread::scope(|scope| {
        let recycler = scope.spawn(|| bench.allocator.trim_to(64 * MIB).unwrap());
        unmaps.recv().unwrap();
        let growing = [1, 2].map(|stream| {
            let (allocator, stream) = (&bench.allocator, &streams[stream]);
            scope.spawn(move || allocator.alloc_bytes(20 * MIB, stream))
        });
        recycler.join().unwrap();
        growing.map(|thread| thread.join().unwrap())
    });
    assert!(bench.device.memory_info().unwrap().free >= HEADROOM);
    assert_eq!(blocks.iter().filter(|block| block.is_ok()).count(), 1, "there is room for one");
    drop((observer, blocks, held, cache));
}
