//! While a stream captures, some memory cannot go back to the device. Reports say so, and what helps.

use aquifer::memory::{AllocError, OomReport, PoolOptions};
use aquifer_allocator::Advice;
use aquifer_tests::{Bench, MIB};

fn report<T>(refused: Result<T, AllocError>) -> OomReport {
    let Err(error) = refused else { panic!("served") };
    error.report().unwrap_or_else(|| panic!("{error}")).clone()
}

/// 100 MiB that a stream used last are cached on a device of 128 MiB.
fn cached(options: &str, used_by_side: bool) -> Bench {
    let bench = Bench::new(128 * MIB, options);
    let stream = if used_by_side { &bench.side } else { &bench.stream };
    drop(bench.allocator.alloc_bytes(100 * MIB, stream).unwrap());
    bench
}

#[test]
fn cached_memory_is_told_to_be_kept_while_a_stream_captures() {
    let settings = ["backing:segments", "no_cache:True"].map(|options| (options, [false, true]));
    for (options, used_by_side) in settings.into_iter().chain([("", [false, false])]) {
        for used_by_side in used_by_side {
            let bench = cached(options, used_by_side);
            let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
            let capture = bench.stream.begin_capture().unwrap();
            let refused = report(pool.alloc_bytes(40 * MIB, &bench.stream));
            let kept = 100 * MIB;
            assert_eq!(refused.advice, [Advice::AfterCapture { cached: kept }], "{options} {used_by_side}: {refused}");
            assert_eq!(refused.kept_by_captures, kept);
            let text = refused.to_string();
            for part in [
                "a stream captures: 100.00 MiB of unused memory cannot go back to the device meanwhile",
                "it would fit: once no stream captures, or with empty_cache() called before the capture began \
                 (100.00 MiB of cached memory cannot go back meanwhile)",
            ] {
                assert!(text.contains(part), "not {part:?}: {text}");
            }
            drop(capture);
            drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
            drop(pool);

            let bench = cached(options, used_by_side);
            let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
            bench.allocator.empty_cache().unwrap();
            let capture = bench.stream.begin_capture().unwrap();
            drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
            drop((capture, pool));
        }
    }
}

#[test]
fn live_memory_is_to_be_freed_only_together_with_the_end_of_the_capture() {
    let bench = Bench::new(128 * MIB, "backing:segments");
    let live = bench.allocator.alloc_bytes(90 * MIB, &bench.side).unwrap();
    drop(bench.allocator.alloc_bytes(12 * MIB, &bench.side).unwrap());
    let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    let refused = report(pool.alloc_bytes(60 * MIB, &bench.stream));
    let free = Advice::FreeMore { bytes: 22 * MIB, largest: None };
    assert_eq!(refused.advice, [Advice::All(vec![free, Advice::AfterCapture { cached: 12 * MIB }])], "{refused}");
    drop(live);
    let again = report(pool.alloc_bytes(60 * MIB, &bench.stream));
    assert_eq!(again.advice, [Advice::AfterCapture { cached: 102 * MIB }], "{again}");
    drop(capture);
    drop(pool.alloc_bytes(60 * MIB, &bench.stream).unwrap());
}

#[test]
fn memory_given_back_waits_for_the_capture_of_a_stream_that_used_it() {
    let bench = Bench::new(128 * MIB, "");
    let shared = bench.allocator.alloc_bytes(60 * MIB, &bench.stream).unwrap();
    shared.record_stream(&bench.side).unwrap();
    drop(shared);
    let capture = bench.side.begin_capture().unwrap();
    let refused = report(bench.allocator.alloc_bytes(100 * MIB, &bench.stream));
    assert_eq!(refused.advice, [Advice::AfterCapture { cached: 60 * MIB }], "{refused}");
    drop(capture);
    drop(bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap());
}

#[test]
fn granules_are_kept_as_segments_are() {
    let bench = Bench::new(128 * MIB, "");
    let live = bench.allocator.alloc_bytes(60 * MIB, &bench.stream).unwrap();
    drop(bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap());
    let capture = bench.side.begin_capture().unwrap();
    let refused = report(bench.allocator.alloc_bytes(100 * MIB, &bench.stream));
    let free = Advice::FreeMore { bytes: 32 * MIB, largest: None };
    assert_eq!(refused.advice, [Advice::All(vec![free, Advice::AfterCapture { cached: 40 * MIB }])], "{refused}");
    assert_eq!(refused.kept_by_captures, 40 * MIB);
    // Freed beside the free granules, its memory serves the request where it is.
    drop(live);
    drop(bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap());
    drop(capture);
}

#[test]
fn under_a_limit_that_refuses_at_once_both_are_told() {
    let bench = Bench::new(128 * MIB, "backing:segments,limit_mb:110,throw_on_cudamalloc_oom:True");
    drop(bench.allocator.alloc_bytes(100 * MIB, &bench.side).unwrap());
    let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
    let capture = bench.stream.begin_capture().unwrap();
    let refused = report(pool.alloc_bytes(20 * MIB, &bench.stream));
    let cached = 100 * MIB;
    let both = Advice::All(vec![Advice::AfterCapture { cached }, Advice::EmptyCache { cached }]);
    assert_eq!(refused.advice, [Advice::RaiseLimit { to: 120 * MIB }, both], "{refused}");
    drop(capture);
    bench.allocator.empty_cache().unwrap();
    drop(pool.alloc_bytes(20 * MIB, &bench.stream).unwrap());
}
