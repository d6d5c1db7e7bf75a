//! Snapshots taken while other threads allocate, free and release.

use std::sync::atomic::{AtomicBool, Ordering};

use aquifer_allocator::{Allocator, HistoryOptions};

use super::machine::allocator;
use super::replay::{check_history, check_segments};

/// Allocates and frees both sizes of segments, and releases them again and again.
fn work(allocator: &Allocator, rounds: u64) {
    let stream = allocator.device().default_stream();
    for round in 0..rounds {
        let held: Vec<_> =
            (1..6).map(|n| allocator.alloc_bytes(n * (round % 7 + 1) * 300_000, stream).unwrap()).collect();
        drop(held);
        allocator.empty_cache().unwrap();
    }
}

#[test]
fn snapshots_agree_with_their_history_beside_other_threads() {
    let (_driver, allocator) = allocator(aquifer_allocator::Config::default(), 1);
    allocator.record_history(HistoryOptions { entries: 500, ..HistoryOptions::default() });
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            work(&allocator, 5000);
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) && !worker.is_finished() {
            let snapshot = allocator.snapshot();
            check_segments(&snapshot).unwrap();
            check_history(&snapshot).unwrap();
        }
    });
}

/// A segment was listed twice, once with the blocks of both, and blocks did not add up.
#[test]
fn a_snapshot_is_of_one_moment() {
    for config in ["", "backing:segments"] {
        let (_driver, allocator) = allocator(config.parse().unwrap(), 1);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (allocator, done) = (&allocator, &done);
                scope.spawn(move || {
                    let streams = [(); 3].map(|()| allocator.device().stream().unwrap());
                    for round in thread..600 {
                        let held: Vec<_> = (0..4)
                            .zip(streams.iter().cycle())
                            .map(|(n, stream)| allocator.alloc_bytes((2 + (round + n) % 5) << 20, stream).unwrap())
                            .collect();
                        drop(held);
                        if round % 3 == 0 {
                            allocator.empty_cache().unwrap();
                        }
                    }
                    done.store(true, Ordering::Relaxed);
                });
            }
            while !done.load(Ordering::Relaxed) {
                check_segments(&allocator.snapshot()).unwrap();
            }
        });
    }
}

/// Peaks of several threads were a few percent high.
#[test]
fn peaks_are_exact_whatever_threads_allocate() {
    const BYTES: u64 = 3 << 20;
    let (_driver, allocator) = allocator(aquifer_allocator::Config::default(), 1);
    // Each thread has one block at a time, and the barrier has all of them have theirs at once.
    let barrier = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stream = allocator.device().stream().unwrap();
                (0..500).for_each(|_| drop(allocator.alloc_bytes(BYTES, &stream).unwrap()));
                let block = allocator.alloc_bytes(BYTES, &stream).unwrap();
                barrier.wait();
                drop(block);
                (0..500).for_each(|_| drop(allocator.alloc_bytes(BYTES, &stream).unwrap()));
            });
        }
    });
    let stats = allocator.stats();
    assert_eq!((stats.allocation.all.peak, stats.allocated_bytes.all.peak), (3, 3 * BYTES));
    assert_eq!((stats.allocation.all.current, stats.allocation.all.allocated), (0, 3003));
    assert!(stats.requested_bytes.all.peak <= stats.allocated_bytes.all.peak);
}
