//! Models of the allocator state under a scheduler that explores interleavings; every access to its
//! lock, its queue and its flags, and every driver call, is a point where another thread
//! may run. Run by `ci/schedules`.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};
use shuttle::thread;

use super::{AllocatorState, IDLE};
use crate::{ALIGNMENT, Allocation, Allocator, Config};

const SIZE: u64 = 4096;
const LONG: Duration = Duration::from_secs(1);

/// Explores `model` at random, and with few but well-placed switches.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = model.clone();
    shuttle::check_random(move || model(), 3000);
    shuttle::check_pct(move || again(), 1500, 3);
}

fn device() -> (Arc<SimDriver>, Device) {
    let sim = SimDriver::new(SimConfig::new(1 << 28));
    (sim.clone(), Device::new(sim))
}

fn open(device: &Device) -> Allocator {
    Allocator::new(device, Config::default()).unwrap()
}

fn assert_idle_once(state: &'static AllocatorState) {
    let entries = IDLE.lock().iter().filter(|idle| std::ptr::eq(**idle, state)).count();
    assert_eq!(entries, 1, "a state that no handle uses is idle, once");
    assert!(state.is_empty(), "a free was left behind");
    assert!(state.shared().device().is_none());
}

fn drop_in_thread(allocation: Allocation) -> thread::JoinHandle<()> {
    thread::spawn(move || drop(allocation))
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn frees_that_race_with_an_allocation_and_readers_are_all_counted() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let stream = device.stream().unwrap();
        let [one, two, kept] = [0; 3].map(|_| allocator.alloc_bytes(SIZE, &stream).unwrap());
        let (allocating, reading) = (allocator.clone(), allocator.clone());
        let threads = [
            drop_in_thread(one),
            drop_in_thread(two),
            thread::spawn(move || drop(allocating.alloc_bytes(SIZE, &stream).unwrap())),
            thread::spawn(move || {
                let bytes = reading.memory_allocated();
                assert!((SIZE..=4 * SIZE).contains(&bytes), "{bytes}");
            }),
        ];
        join(threads);
        assert_eq!(allocator.memory_allocated(), SIZE, "exact with no call in flight");
        let state = allocator.state();
        assert_eq!(state.lock().live(), 1);
        drop(kept);
        assert_eq!(allocator.memory_allocated(), 0);
        drop(allocator);
        assert_idle_once(state);
    });
}

#[test]
fn frees_that_race_with_each_other_and_with_the_last_handle() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let stream = device.stream().unwrap();
        let [one, two] = [0; 2].map(|_| allocator.alloc_bytes(SIZE, &stream).unwrap());
        let state = allocator.state();
        join([drop_in_thread(one), drop_in_thread(two), thread::spawn(move || drop(allocator))]);
        assert_idle_once(state);
    });
}

/// They keep the allocator open, and each may be the last to.
#[test]
fn storages_that_race_with_each_other_and_with_the_last_handle() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let stream = device.stream().unwrap();
        let [one, two, three] = [0; 3].map(|_| allocator.alloc_storage(SIZE, ALIGNMENT, &stream).unwrap());
        let state = allocator.state();
        join([
            thread::spawn(move || drop(one)),
            thread::spawn(move || drop(allocator)),
            thread::spawn(move || {
                let again = two.allocator();
                assert!(std::ptr::eq(again.state(), state));
                drop(two);
                drop(again.alloc_storage(SIZE, ALIGNMENT, &stream).unwrap());
            }),
            thread::spawn(move || drop(three)),
        ]);
        assert_idle_once(state);
    });
}

/// The queue of a model holds two.
#[test]
fn a_thread_that_frees_more_than_a_queue_holds_while_others_allocate_and_close() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let stream = device.stream().unwrap();
        let blocks = [0; 5].map(|_| allocator.alloc_bytes(SIZE, &stream).unwrap());
        let state = allocator.state();
        join([
            thread::spawn(move || drop(blocks)),
            thread::spawn(move || {
                let [one, two] = [0; 2].map(|_| allocator.alloc_bytes(SIZE, &stream).unwrap());
                drop((allocator, one, two));
            }),
        ]);
        assert_idle_once(state);
    });
}

/// Each thread finds memory of the other one's stream, known done or not.
#[test]
fn streams_that_reuse_each_others_memory_race_with_closing() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let streams = [0; 2].map(|_| device.stream().unwrap());
        streams.iter().for_each(|stream| drop(allocator.alloc_bytes(SIZE, stream).unwrap()));
        let state = allocator.state();
        let threads = streams.map(|stream| {
            let allocator = allocator.clone();
            thread::spawn(move || {
                let [one, two] = [0; 2].map(|_| allocator.alloc_bytes(1 << 21, &stream).unwrap());
                drop((one, two));
                drop(allocator.alloc_bytes(1 << 21, &stream).unwrap());
            })
        });
        drop(allocator);
        join(threads);
        assert_idle_once(state);
    });
}

#[test]
fn the_last_handles_race_with_each_other_and_with_a_reader() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let stream = device.stream().unwrap();
        let last = allocator.alloc_bytes(SIZE, &stream).unwrap();
        let state = allocator.state();
        let (clone, reading) = (allocator.clone(), allocator.clone());
        join([
            drop_in_thread(last),
            thread::spawn(move || drop(clone)),
            thread::spawn(move || assert!(reading.memory_allocated() <= SIZE)),
            thread::spawn(move || drop(allocator)),
        ]);
        assert_idle_once(state);
    });
}

#[test]
fn a_shell_is_not_shared_by_allocators_that_open_while_others_close() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let stream = device.stream().unwrap();
        let last = allocator.alloc_bytes(SIZE, &stream).unwrap();
        let live = |device: &Device| {
            let device = device.clone();
            thread::spawn(move || {
                let allocator = open(&device);
                let stream = device.stream().unwrap();
                let kept = allocator.alloc_bytes(SIZE, &stream).unwrap();
                assert_eq!(allocator.memory_allocated(), SIZE);
                drop(allocator.alloc_bytes(SIZE, &stream).unwrap());
                assert_eq!(allocator.memory_allocated(), SIZE, "no other thread allocates from it");
                drop(kept);
                assert_eq!(allocator.memory_allocated(), 0);
            })
        };
        let threads = [live(&device), drop_in_thread(last), live(&device), thread::spawn(move || drop(allocator))];
        join(threads);
        let mut idle: Vec<*const AllocatorState> = IDLE.lock().iter().map(|&state| std::ptr::from_ref(state)).collect();
        let count = idle.len();
        idle.sort_unstable();
        idle.dedup();
        assert_eq!(idle.len(), count, "a shell is in the list once");
    });
}

#[test]
fn memory_shared_by_two_streams_is_reused_without_a_race() {
    explore(|| {
        let (sim, device) = device();
        let allocator = open(&device);
        let streams = [0; 2].map(|_| device.stream().unwrap());
        let work = |own: usize| {
            let (allocator, streams) = (allocator.clone(), streams.clone());
            thread::spawn(move || {
                let (own, other) = (&streams[own], &streams[1 - own]);
                for _ in 0..2 {
                    let block = allocator.alloc_bytes(SIZE, own).unwrap();
                    own.fill(block.ptr(), 1, SIZE).unwrap();
                    other.wait_for(&own.tick()).unwrap();
                    block.record_stream(other).unwrap();
                    other.fill(block.ptr(), 2, SIZE).unwrap();
                    drop(block);
                }
            })
        };
        join([work(0), work(1)]);
        let found = sim.violations();
        assert!(found.is_empty(), "{}", found[0]);
        assert_eq!(allocator.memory_allocated(), 0);
        let blocks = streams.each_ref().map(|stream| allocator.alloc_bytes(SIZE, stream).unwrap());
        for (block, stream) in blocks.iter().zip(&streams) {
            stream.fill(block.ptr(), 3, SIZE).unwrap();
        }
        assert_eq!(sim.violations(), []);
    });
}

#[test]
fn waiting_blocks_are_free_once_their_streams_are_done_whichever_thread_asks() {
    explore(|| {
        let (sim, device) = device();
        let allocator = open(&device);
        let [one, two] = [0; 2].map(|_| device.stream().unwrap());
        let block = allocator.alloc_bytes(SIZE, &one).unwrap();
        block.record_stream(&two).unwrap();
        // The stream gets on in two steps, and the block waits for the second: a sweep between them
        // frees nothing.
        two.tick().cover().unwrap();
        sim.advance(LONG);
        sim.stall(two.raw(), LONG).unwrap();
        two.fill(block.ptr(), 1, SIZE).unwrap();
        drop(block);
        let (tick, asking) = (two.tick(), allocator.clone());
        tick.cover().unwrap();
        join([
            thread::spawn(move || {
                sim.advance(LONG * 2);
                tick.is_done().unwrap();
            }),
            thread::spawn(move || drop(asking.alloc_bytes(SIZE, &one).unwrap())),
        ]);
        allocator.empty_cache().unwrap();
        assert!(allocator.state().shared().waiting().is_empty(), "the stream is known to be done");
    });
}

#[test]
fn memory_handed_to_another_stream_is_freed_in_its_order() {
    explore(|| {
        let (sim, device) = device();
        let allocator = open(&device);
        let [one, two] = [0; 2].map(|_| device.stream().unwrap());
        let block = allocator.alloc_bytes(SIZE, &one).unwrap();
        one.fill(block.ptr(), 1, SIZE).unwrap();
        two.wait_for(&one.tick()).unwrap();
        let (giving, taking) = (two.clone(), allocator.clone());
        join([
            thread::spawn(move || {
                giving.fill(block.ptr(), 2, SIZE).unwrap();
                block.drop_on(&giving).unwrap();
            }),
            thread::spawn(move || {
                let mine = taking.alloc_bytes(SIZE, &one).unwrap();
                one.fill(mine.ptr(), 3, SIZE).unwrap();
            }),
            thread::spawn(move || drop(two.tick().cover())),
        ]);
        let found = sim.violations();
        assert!(found.is_empty(), "{}", found[0]);
        assert_eq!(allocator.memory_allocated(), 0);
    });
}

#[test]
fn blocks_that_other_streams_use_and_the_last_handle() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let [one, two] = [0; 2].map(|_| device.stream().unwrap());
        let blocks = [0; 2].map(|_| allocator.alloc_bytes(SIZE, &one).unwrap());
        blocks.iter().for_each(|block| block.record_stream(&two).unwrap());
        let state = allocator.state();
        let other = allocator.alloc_bytes(SIZE, &two).unwrap();
        let [first, second] = blocks.map(drop_in_thread);
        join([first, second, drop_in_thread(other), thread::spawn(move || drop(allocator))]);
        assert_idle_once(state);
    });
}

#[test]
fn statistics_are_exact_whatever_threads_do_meanwhile() {
    explore(|| {
        let (_, device) = device();
        let allocator = open(&device);
        let streams = [0; 2].map(|_| device.stream().unwrap());
        let [one, two] = streams.each_ref().map(|stream| allocator.alloc_bytes(SIZE, stream).unwrap());
        let work = |stream: usize| {
            let (allocator, stream) = (allocator.clone(), streams[stream].clone());
            thread::spawn(move || {
                let block = allocator.alloc_bytes(SIZE, &stream).unwrap();
                drop(allocator.alloc_bytes(SIZE, &stream).unwrap());
                drop(block);
            })
        };
        let reading = allocator.clone();
        let read = thread::spawn(move || {
            let stats = reading.stats();
            let (blocks, bytes) = (stats.allocation.all, stats.allocated_bytes.all);
            assert_eq!(bytes.current, blocks.current * SIZE);
            assert!(blocks.peak <= 6 && bytes.peak <= stats.reserved_bytes.all.peak);
            reading.reset_peak_stats();
        });
        join([work(0), work(1), drop_in_thread(one), read]);
        let stats = allocator.stats();
        assert_eq!((stats.allocation.all.current, stats.allocated_bytes.all.current), (1, SIZE));
        assert_eq!((stats.allocation.all.allocated, stats.allocation.all.freed), (6, 5));
        drop(two);
        assert_eq!(allocator.memory_allocated(), 0);
    });
}
