//! Host time of slow paths by the number of things that the allocator keeps track of. Each is measured at two numbers in turn, several times,
//! because other programs may run meanwhile: one quiet round tells that time does not grow faster than it should.

use std::time::{Duration, Instant};

use aquifer_allocator::{Allocation, Allocator, Config, PoolOptions};
use aquifer_device::{Device, Stream};
use aquifer_tests::{MIB, Subject};

const FEW: usize = 64;
/// Eight times as many: what takes as long for each takes 8 times as long for all, and what takes longer by their number, 64 times.
const MANY: usize = 8 * FEW;
const ROUNDS: usize = 5;

struct Setup {
    driver: Subject,
    device: Device,
    allocator: Allocator,
    stream: Stream,
}

fn setup() -> Setup {
    let driver = Subject::new(128 << 30);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let stream = device.create_stream().unwrap();
    Setup { driver, device, allocator, stream }
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// Checks that `measure` takes at most `factor` times as long for [`MANY`] as for [`FEW`].
fn assert_growth(factor: f64, measure: impl Fn(usize) -> Duration) {
    // A real device's memory may not suffice, and its host time is the same.
    if !Subject::is_simulated() {
        return;
    }
    let rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| [FEW, MANY].map(|count| measure(count).as_secs_f64()))
        .map(|[few, many]| many / few)
        .collect();
    assert!(rounds.iter().any(|&growth| growth <= factor), "{MANY} take {rounds:?} times as long as {FEW}");
}

#[test]
fn growables_that_were_shrunk_and_dropped_are_recycled_in_linear_time() {
    assert_growth(24.0, |count| {
        let Setup { allocator, stream, .. } = setup();
        let mut all: Vec<_> = (0..count).map(|_| allocator.growable(64 * MIB, &stream).unwrap()).collect();
        for growable in &mut all {
            growable.grow_to(6 * MIB, &stream).unwrap();
            growable.shrink_to(2 * MIB, &stream).unwrap();
        }
        drop(all);
        timed(|| drop(allocator.alloc(100 * MIB, &stream).unwrap()))
    });
}

#[test]
fn snapshots_and_refusals_take_linear_time_in_private_pools() {
    assert_growth(24.0, |count| {
        let Setup { allocator, stream, .. } = setup();
        let pools: Vec<_> = (0..count).map(|_| allocator.create_pool(PoolOptions::default()).unwrap()).collect();
        let blocks: Vec<Allocation> = pools.iter().map(|pool| pool.alloc(4096, &stream).unwrap()).collect();
        let time = timed(|| {
            assert_eq!(allocator.snapshot().segments.len(), count);
            assert!(allocator.alloc(1 << 40, &stream).is_err());
        });
        drop(blocks);
        time
    });
}

#[test]
fn a_pair_in_one_of_many_private_pools_takes_constant_time() {
    assert_growth(3.0, |count| {
        let Setup { allocator, stream, .. } = setup();
        let pools: Vec<_> = (0..count).map(|_| allocator.create_pool(PoolOptions::default()).unwrap()).collect();
        let blocks: Vec<Allocation> = pools.iter().map(|pool| pool.alloc(4096, &stream).unwrap()).collect();
        let time = timed(|| (0..500).for_each(|_| drop(pools[count - 1].alloc(4096, &stream).unwrap())));
        drop(blocks);
        time
    });
}

/// Blocks that another stream used are freed and come back, while others wait for a stream that makes no progress.
#[test]
fn blocks_that_wait_for_one_stream_do_not_slow_those_of_another() {
    assert_growth(3.0, |count| {
        let Setup { driver, device, allocator, stream } = setup();
        let (stalled, side) = (device.create_stream().unwrap(), device.create_stream().unwrap());
        driver.stall(&stalled, Duration::from_secs(3600)).unwrap();
        let waiting: Vec<_> = (0..4 * count).map(|_| allocator.alloc(4096, &stream).unwrap()).collect();
        waiting.into_iter().for_each(|block| block.record_stream(&stalled).unwrap());
        let time = timed(|| {
            for _ in 0..300 {
                let block = allocator.alloc(4096, &stream).unwrap();
                block.record_stream(&side).unwrap();
                drop(block);
                side.synchronize().unwrap();
            }
        });
        assert!(!stalled.tick().is_done().unwrap());
        time
    });
}
