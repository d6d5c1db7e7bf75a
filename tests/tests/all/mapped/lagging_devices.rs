//! Memory that moves while devices that lag are at work.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use aquifer_sim::Lagging;
use aquifer_tests::prelude::*;

use crate::allocator::events::Listener;
use tracing::Level;

/// Runs a program on a device that lags by 1000 events; returns its driver and allocator, and how
/// many operations it made.
fn lagging(seed: u64, count: u64, policy: &str) -> (Arc<Lagging>, Device, Allocator, u64) {
    let (subject, driver) = Subject::lagging(&SimConfig::new(GIB).seed(seed), 1000);
    let device = subject.device();
    let options = format!("backing:paged,granule_mb:2,cross_stream:{policy}");
    let allocator = Allocator::new(&device, Config::parse(&options).unwrap()).unwrap();
    let streams: Vec<Stream> = (0..count).map(|_| device.stream().unwrap()).collect();
    let mut held: Vec<Allocation> = Vec::new();
    let mut operations = 0;
    for x in random::numbers(seed + 1).take(20_000) {
        driver.advance();
        let at = usize::try_from(x >> 40).unwrap();
        operations += 1;
        if held.len() > 20 && (x % 2 == 0 || held.len() > 60) {
            let block = held.swap_remove(at % held.len());
            driver.freed(block.ptr());
            continue;
        }
        let bytes = if x % 3 == 0 { x % (900 * KIB) } else { x % (12 * MIB) } + 1;
        if let Ok(block) = allocator.alloc_bytes(bytes, &streams[at % streams.len()]) {
            driver.allocated(block.ptr(), bytes);
            held.push(block);
        }
    }
    (driver, device, allocator, operations)
}

#[test]
fn on_a_device_that_lags_nothing_is_unmapped_early_and_events_are_few() {
    for (streams, policy) in [(1, "ready"), (2, "off"), (2, "ready")] {
        for seed in 0..2 {
            let _at = At(format!("seed {seed}"));
            let (driver, device, allocator, operations) = lagging(seed, streams, policy);
            let violations: Vec<String> =
                std::iter::from_fn(|| aquifer_device::Driver::take_violation(&*driver)).collect();
            assert_eq!(violations, Vec::<String>::new());
            let recorded = device.driver_calls().of(Operation::Record);
            let stats = allocator.stats();
            println!(
                "{streams} streams, {policy}, seed {seed}: {operations} operations, {recorded} events, {} stalls, {} waits, \
                 {} granules moved, {} MiB reserved for {} MiB",
                driver.stalls(),
                stats.cross_stream_waits,
                stats.granules_moved,
                stats.reserved_bytes.all.peak / MIB,
                stats.allocated_bytes.all.peak / MIB,
            );
            assert_eq!((driver.stalls(), stats.cross_stream_waits), (0, 0), "there is room");
            // At most one ahead of need for 200 operations, and 32 at the start of each stream. The
            // others are questions of requests that no free block serves.
            assert!(recorded <= operations / 40 + 33 * streams, "{recorded} events");
            assert!(stats.granules_moved > 0);
        }
    }
}

/// Blocks go from stream to stream, as in a pipeline, while the device is 300 events behind: three
/// times as much memory is in use as the host knows to be needed. That counts as use.
#[test]
fn a_pipeline_on_a_device_that_lags_waits_for_nothing() {
    let (subject, driver) = Subject::lagging(&SimConfig::new(16 * GIB), 300);
    let device = subject.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let streams: Vec<Stream> = (0..4).map(|_| device.stream().unwrap()).collect();
    let mut held: Vec<Allocation> = Vec::new();
    let mut remaps = Vec::new();
    let mut steps = random::numbers(1).enumerate();
    for _ in 0..5 {
        let before = allocator.stats().remaps;
        for (at, x) in steps.by_ref().take(4000) {
            driver.advance();
            let bytes = MIB + x % (30 * MIB);
            let block = allocator.alloc_bytes(bytes, &streams[at % 4]).unwrap();
            driver.allocated(block.ptr(), bytes);
            driver.advance();
            block.record_stream(&streams[(at + 1) % 4]).unwrap();
            driver.used(block.ptr());
            held.push(block);
            if held.len() > 40 {
                driver.advance();
                let block = held.remove(usize::try_from((x >> 40) % 8).unwrap());
                driver.freed(block.ptr());
            }
        }
        remaps.push(allocator.stats().remaps - before);
    }
    let stats = allocator.stats();
    let (reserved, in_use) = (stats.reserved_bytes.all.peak, stats.allocated_bytes.all.peak);
    println!("remaps {remaps:?}, {reserved} bytes held for {in_use}");
    assert!(remaps[4] < remaps[0], "{remaps:?}");
    assert!(reserved < 5 * in_use, "{reserved} for {in_use}");
    assert_eq!((driver.stalls(), stats.cross_stream_waits), (0, 0));
    assert_eq!(aquifer_device::Driver::take_violation(&*driver), None);
}

#[test]
fn a_request_does_not_wait_for_memory_that_another_thread_keeps_using() {
    if !Subject::has_simulated_device() {
        return;
    }
    let Bench { driver, allocator, stream, side, .. } = Bench::new(GIB, "backing:paged,cross_stream:off");
    let (waits, requests) = (Arc::new(AtomicU32::new(0)), allocator.clone());
    let counted = waits.clone();
    // Uses memory on another stream whenever the host is about to wait, as another thread would.
    let use_memory = move || {
        let block = requests.alloc_bytes(64 * MIB, &side).unwrap();
        driver.stall(&side, Duration::from_millis(10)).unwrap();
        drop(block);
    };
    use_memory();
    let waiting = Listener::new(
        |metadata| *metadata.level() == Level::DEBUG && metadata.target() == "aquifer::wait",
        move |_| {
            counted.fetch_add(1, Relaxed);
            use_memory();
        },
    );
    let _block = tracing::subscriber::with_default(waiting, || allocator.alloc_bytes(64 * MIB, &stream)).unwrap();
    assert_eq!(waits.load(Relaxed), 0);
}

/// Other streams work long on memory that was given back, and nearly all of the device is free.
#[test]
fn nothing_waits_while_there_is_room() {
    for options in ["", "cross_stream:off", "backing:segments"] {
        let bench = Bench::new(8 * GIB, options);
        let copies = bench.new_stream();
        for _ in 0..16 {
            let block = bench.alloc(256 * MIB);
            bench.stall(&bench.stream, Duration::from_millis(10));
            bench.stream.fill(block.ptr(), 1, KIB).unwrap();
            copies.wait_for(&bench.stream.tick()).unwrap();
            bench.stall(&copies, Duration::from_millis(100));
            copies.fill(block.ptr(), 2, KIB).unwrap();
            block.record_stream(&copies).unwrap();
        }
        bench.stream.synchronize().unwrap();
        let stats = bench.allocator.stats();
        assert_eq!((stats.cross_stream_waits, stats.num_sync_all_streams), (0, 0), "{options}");
        bench.assert_returned();
    }
}
