//! Memory that moves while devices are at work: a thousand seeds with the race detector, and
//! devices that lag.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use aquifer::device::sim::SimConfig;
use aquifer::memory::{Allocation, Config};
use aquifer::{Allocator, Device, Stream};
use aquifer_device::Operation;
use aquifer_device::sim::Lagging;
use aquifer_tests::{GIB, KIB, MIB, Subject, check, write_on};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// Numbers that differ by seed.
fn numbers(seed: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1), |&x| {
        let x = x ^ (x << 13);
        let x = x ^ (x >> 7);
        Some(x ^ (x << 17))
    })
}

/// Says which seed failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("with seed {}", self.0);
        }
    }
}

/// A program on three streams that holds up to ten blocks of up to 12 MiB on a device of 64 MiB,
/// and has work enqueued on each when it gives it back, some on another stream. Returns how many
/// granules moved.
fn crowded(seed: u64) -> u64 {
    let driver = Subject::open(&SimConfig::new(64 * MIB).seed(seed));
    let device = driver.device();
    let policy = ["off", "ready", "wait"][usize::try_from(seed % 3).unwrap()];
    let options = format!("backing:paged,granule_mb:2,cross_stream:{policy}");
    let allocator = Allocator::new(&device, Config::parse(&options).unwrap()).unwrap();
    let streams: Vec<Stream> = (0..3).map(|_| device.stream().unwrap()).collect();
    let mut held: Vec<(Allocation, usize)> = Vec::new();
    for x in numbers(seed).take(60) {
        let at = usize::try_from(x >> 40).unwrap();
        let own = at % 3;
        if x % 3 == 0 || held.len() > 10 {
            if held.is_empty() {
                continue;
            }
            let (block, own) = held.swap_remove(at % held.len());
            write_on(&streams[own], block.ptr(), block.bytes());
            if x % 4 == 0 {
                let other = &streams[(own + 1) % 3];
                other.wait_for(&streams[own].tick()).unwrap();
                block.record_stream(other).unwrap();
                write_on(other, block.ptr(), block.bytes());
            }
            continue;
        }
        let bytes = if x % 5 == 0 { x % (900 * KIB) } else { x % (12 * MIB) } + 1;
        if let Ok(block) = allocator.alloc_bytes(bytes, &streams[own]) {
            write_on(&streams[own], block.ptr(), bytes);
            held.push((block, own));
        }
    }
    driver.assert_no_violation();
    let moved = allocator.stats().granules_moved;
    let live = held.iter().fold((0, 0), |(count, bytes), (block, _)| (count + 1, bytes + block.bytes()));
    check::statistics(&allocator, live);
    drop(held);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.memory_reserved(), 0);
    driver.assert_no_violation();
    moved
}

#[test]
fn memory_moves_without_a_race_under_1000_seeds() {
    let mut moved = 0;
    let mut programs = 0;
    let seeds = Subject::share(1000);
    for seed in 0..seeds {
        let _seed = Seed(seed);
        let granules = crowded(seed);
        moved += granules;
        programs += u64::from(granules > 0);
    }
    println!("{programs} of {seeds} programs moved memory, {moved} granules in all");
    assert!(programs > seeds / 2, "only {programs} programs moved memory");
}

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
    for x in numbers(seed + 1).take(20_000) {
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
    // Where streams lend each other memory, they record events for waits, too: those are not
    // milestones.
    for (streams, policy, spacing) in [(1, "ready", 100), (2, "off", 100), (2, "ready", 40)] {
        for seed in 0..2 {
            let _seed = Seed(seed);
            let (driver, device, allocator, operations) = lagging(seed, streams, policy);
            let hazards: Vec<String> =
                std::iter::from_fn(|| aquifer_device::Driver::take_violation(&*driver)).collect();
            assert_eq!(hazards, Vec::<String>::new());
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
            // Beside the advance: 32 events for each of two reasons on each stream at the start.
            assert!(recorded <= operations / spacing + 2 * 33 * streams, "{recorded} events");
            assert!(stats.granules_moved > 0);
        }
    }
}

/// Blocks go from stream to stream, as in a pipeline, while the device is 300 events behind: three
/// times as much memory is in use as the host knows to be needed. So what may be bought instead of
/// moved is no share of the peak in use.
#[test]
fn a_pipeline_on_a_device_that_lags_moves_less_and_less() {
    let (subject, driver) = Subject::lagging(&SimConfig::new(16 * GIB), 300);
    let device = subject.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let streams: Vec<Stream> = (0..4).map(|_| device.stream().unwrap()).collect();
    let mut held: Vec<Allocation> = Vec::new();
    let mut remaps = Vec::new();
    let mut steps = numbers(1).enumerate();
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
    assert!(remaps[0] > 200 && remaps[4] < remaps[0] / 3, "{remaps:?}");
    assert!(reserved < 5 * in_use, "{reserved} for {in_use}");
    assert_eq!(aquifer_device::Driver::take_violation(&*driver), None);
}

/// Uses memory on another stream whenever the host is about to wait, as another thread would.
struct Busy {
    driver: Subject,
    allocator: Allocator,
    other: Stream,
    waits: Arc<AtomicU32>,
}

impl Busy {
    fn use_memory(&self) {
        let block = self.allocator.alloc_bytes(64 * MIB, &self.other).unwrap();
        self.driver.stall(&self.other, Duration::from_millis(10)).unwrap();
        drop(block);
        // The host may wait more often the more was allocated.
        let _held: Vec<_> = (0..1000).map(|_| self.allocator.alloc_bytes(KIB, &self.other).unwrap()).collect();
    }
}

impl Subscriber for Busy {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::DEBUG && metadata.target() == "aquifer::wait"
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        self.waits.fetch_add(1, Relaxed);
        self.use_memory();
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_request_stops_waiting_for_memory_that_another_thread_keeps_using() {
    if !Subject::keeps_time() {
        return;
    }
    let driver = Subject::new(GIB);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::parse("backing:paged,cross_stream:off").unwrap()).unwrap();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let waits = Arc::new(AtomicU32::new(0));
    let busy = Busy { driver, allocator: allocator.clone(), other, waits: waits.clone() };
    busy.use_memory();
    let _block = tracing::subscriber::with_default(busy, || allocator.alloc_bytes(64 * MIB, &stream)).unwrap();
    assert_eq!(waits.load(Relaxed), 8);
}
