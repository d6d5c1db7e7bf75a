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
