//! What page-locked memory costs, measured: `cargo test --release -p aquifer-transfer --test pinned_cost -- --ignored --nocapture`.

#![allow(clippy::unwrap_used, reason = "a failed call fails the measurement")]

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{Device, DeviceSpec};
use aquifer_transfer::{PinnedBuffer, PinnedConfig, PinnedPool, SlabSource};

/// The device named by `AQUIFER_TEST_DEVICE`, or a simulated one.
fn device() -> Device {
    match std::env::var("AQUIFER_TEST_DEVICE") {
        Ok(spec) => spec.parse::<DeviceSpec>().unwrap().open().unwrap(),
        Err(_) => Device::new(SimDriver::new(SimConfig::default())),
    }
}

const ROUNDS: u32 = 1_000_000;

#[test]
#[ignore = "measures"]
fn a_pair_of_taking_and_giving_back() {
    let device = device();
    for bytes in [512, 64 << 10, 16 << 20] {
        for threads in [1, 2] {
            let pool = PinnedPool::new(&device, PinnedConfig::default()).unwrap();
            let pairs = || {
                drop(pool.alloc::<u8>(bytes).unwrap());
                let begun = Instant::now();
                (0..ROUNDS).for_each(|_| drop(black_box(pool.alloc::<u8>(black_box(bytes)).unwrap())));
                begun.elapsed() / ROUNDS
            };
            let calls = device.driver_calls();
            let slowest = thread::scope(|scope| {
                let running: Vec<_> = (0..threads).map(|_| scope.spawn(pairs)).collect();
                running.into_iter().map(|running| running.join().unwrap()).max().unwrap()
            });
            let calls = device.driver_calls().since(&calls).total();
            println!("{bytes:>9} bytes, {threads} threads: {slowest:?} a pair, {calls} driver calls");
            assert!(calls <= threads, "slabs and nothing else");
        }
    }
}

#[test]
#[ignore = "measures"]
fn mixed_sizes_with_ten_thousand_alive() {
    let device = device();
    let pool = PinnedPool::new(&device, PinnedConfig::default()).unwrap();
    let mut random = 1_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let mut live: Vec<PinnedBuffer<u8>> = (0..10_000).map(|_| pool.alloc(1 + next(40_000)).unwrap()).collect();
    let begun = Instant::now();
    for _ in 0..ROUNDS {
        let (place, bytes) = (next(live.len()), 1 + next(40_000));
        live[place] = pool.alloc(bytes).unwrap();
    }
    let pair = begun.elapsed() / ROUNDS;
    let stats = pool.stats();
    let held = stats.allocated_bytes.current as f64 / stats.active_bytes.peak as f64;
    println!("mixed: {pair:?} a pair; held / peak of use {held:.3} after {} slabs", stats.num_host_alloc);
    drop(live);
    assert_eq!(pool.stats().active_bytes.current, 0);
}

#[test]
#[ignore = "measures"]
fn a_large_slab_from_the_driver_and_touched_by_threads() {
    let device = device();
    let bytes = 1 << 30;
    let sources = std::iter::once(SlabSource::DriverAlloc)
        .chain([1, 2, 4, 8, 16].map(|threads| SlabSource::Registered { threads: NonZeroUsize::new(threads).unwrap() }));
    for source in sources {
        let best = (0..3).map(|_| {
            let pool = PinnedPool::new(&device, PinnedConfig::default().slabs(source.clone())).unwrap();
            drop(pool.alloc::<u8>(bytes).unwrap());
            pool.empty_cache().unwrap();
            let stats = pool.stats();
            (Duration::from_micros(stats.host_alloc_time.total), Duration::from_micros(stats.host_free_time.total))
        });
        let (taken, given) = best.min().unwrap();
        println!("1 GiB, {source:?}: {taken:?} to get, {given:?} to give back");
        assert!(taken > Duration::ZERO);
    }
}
