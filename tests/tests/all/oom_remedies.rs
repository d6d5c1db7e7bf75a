//! What helps is told where it is not what mostly does: pins, pools, options, memory of one's own, larger devices.

use aquifer::memory::{AllocError, OomReport, PoolOptions};
use aquifer_allocator::Advice;
use aquifer_allocator::config::Backing;
use aquifer_device::HandleKind;
use aquifer_tests::{BACKINGS, Bench, GIB, MIB, on};

fn report<T>(refused: Result<T, AllocError>) -> OomReport {
    let Err(error) = refused else { panic!("served") };
    error.report().unwrap_or_else(|| panic!("{error}")).clone()
}

fn says(report: &OomReport, text: &str) {
    assert!(report.to_string().contains(text), "not {text:?}: {report}");
}

#[test]
fn a_larger_device_is_large_enough_with_the_same_options() {
    for backing in BACKINGS {
        let headroom = Bench::new(64 * MIB, &on(backing, "headroom_mb:16"));
        let refused = report(headroom.allocator.alloc_bytes(70 * MIB, &headroom.stream));
        assert_eq!(refused.advice, [Advice::LargerDevice { bytes: 86 * MIB }], "{refused}");
        let larger = Bench::new(86 * MIB, &on(backing, "headroom_mb:16"));
        drop(larger.allocator.alloc_bytes(70 * MIB, &larger.stream).unwrap());

        for options in ["limit_mb:32", "per_process_memory_fraction:0.5"] {
            let limited = Bench::new(64 * MIB, &on(backing, options));
            let refused = report(limited.allocator.alloc_bytes(70 * MIB, &limited.stream));
            let both = vec![Advice::LargerDevice { bytes: 70 * MIB }, Advice::RaiseLimit { to: 70 * MIB }];
            assert_eq!(refused.advice, [Advice::All(both)], "{refused}");
            let larger = Bench::new(70 * MIB, &on(backing, options));
            larger.allocator.set_limit(Some(70 * MIB));
            drop(larger.allocator.alloc_bytes(70 * MIB, &larger.stream).unwrap());
        }
    }
}

#[test]
fn freeing_does_not_help_under_a_limit_that_private_pools_fill() {
    for backing in BACKINGS {
        let bench = Bench::new(256 * MIB, &on(backing, "limit_mb:60"));
        let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
        let in_pool = pool.alloc_bytes(20 * MIB, &bench.stream).unwrap();
        let held = bench.allocator.alloc_bytes(12 * MIB, &bench.stream).unwrap();
        let refused = report(bench.allocator.alloc_bytes(50 * MIB, &bench.stream));
        let free = Advice::FreeMore { bytes: 2 * MIB, largest: None };
        let both = Advice::All(vec![Advice::ReleasePools { held: 20 * MIB }, free]);
        assert_eq!(refused.advice, [Advice::RaiseLimit { to: 82 * MIB }, both], "{refused}");
        drop((in_pool, held, pool));
        drop(bench.allocator.alloc_bytes(50 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn pools_are_named_beside_what_others_hold() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        bench.driver.set_other_process_bytes(20 * MIB);
        let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
        let in_pool = pool.alloc_bytes(14 * MIB, &bench.stream).unwrap();
        let refused = report(bench.allocator.alloc_bytes(60 * MIB, &bench.stream));
        let others = Advice::OthersHold { held: 20 * MIB, missing: 16 * MIB };
        let both = vec![Advice::ReleasePools { held: 14 * MIB }, others];
        assert_eq!(refused.advice, [Advice::All(both)], "{refused}");
        drop((in_pool, pool));
        bench.driver.set_other_process_bytes(4 * MIB);
        drop(bench.allocator.alloc_bytes(60 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn memory_that_grows_is_not_to_be_freed_for_its_own_growth() {
    let bench = Bench::new(64 * MIB, "");
    let mut cache = bench.allocator.growable(GIB, &bench.stream).unwrap();
    cache.grow_to(20 * MIB, &bench.stream).unwrap();
    let refused = report(cache.grow_to(200 * MIB, &bench.stream));
    assert_eq!(refused.advice, [Advice::LargerDevice { bytes: 200 * MIB }], "{refused}");
    let held = bench.allocator.alloc_bytes(30 * MIB, &bench.stream).unwrap();
    let refused = report(cache.grow_to(50 * MIB, &bench.stream));
    assert_eq!(refused.advice, [Advice::FreeMore { bytes: 16 * MIB, largest: None }], "{refused}");
    drop(held);
    cache.grow_to(50 * MIB, &bench.stream).unwrap();

    let bench = Bench::new(180 * MIB, "");
    let mut cache = bench.allocator.growable(GIB, &bench.stream).unwrap();
    cache.grow_to(20 * MIB, &bench.stream).unwrap();
    let refused = report(cache.grow_to(200 * MIB, &bench.stream));
    assert_eq!(refused.advice, [Advice::LargerDevice { bytes: 200 * MIB }], "{refused}");
}

#[test]
fn a_cache_that_an_option_keeps_is_named() {
    let bench = Bench::new(256 * MIB, "throw_on_cudamalloc_oom:True,limit_mb:50,backing:segments");
    let mut held: Vec<_> = (0..5).map(|_| bench.allocator.alloc_bytes(10 * MIB, &bench.stream).unwrap()).collect();
    let first = held.remove(0);
    drop(held);
    let refused = report(bench.allocator.alloc_bytes(40 * MIB, &bench.stream));
    says(&refused, "it would fit: without throw_on_cudamalloc_oom, or after empty_cache() (40.00 MiB is cached)\n");
    says(&refused, "it would fit: with a limit of at least 90.00 MiB");
    assert_eq!(refused.advice.len(), 2, "{refused}");
    // What is freed is cached, too.
    let refused = report(bench.allocator.alloc_bytes(44 * MIB, &bench.stream));
    says(&refused, "after freeing at least 4.00 MiB more, and without throw_on_cudamalloc_oom, or after empty_cache()");
    // No block serves memory apart.
    let refused = report(bench.allocator.alloc_exportable(40 * MIB, HandleKind::PosixFd, &bench.stream));
    assert_eq!(refused.advice.len(), 2, "{refused}");
    drop(first);
    let refused = report(bench.allocator.alloc_bytes(44 * MIB, &bench.stream));
    says(&refused, "or after empty_cache() (50.00 MiB is cached)");
    bench.allocator.empty_cache().unwrap();
    drop(bench.allocator.alloc_bytes(44 * MIB, &bench.stream).unwrap());
}

#[test]
fn pins_that_keep_free_memory_are_named() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let blocks: Vec<_> = (0..64).map(|_| bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap()).collect();
        let pins: Vec<_> = blocks.iter().step_by(2).map(|block| bench.allocator.pin_mapping(block).unwrap()).collect();
        drop(blocks);
        let refused = report(bench.allocator.alloc_bytes(40 * MIB, &bench.stream));
        says(&refused, "it would fit: once pins ended that keep 64.00 MiB of free memory in place");
        let fragmentation = bench.allocator.fragmentation(1);
        assert_eq!((fragmentation.releasable_segments, fragmentation.releasable_bytes), (0, 0));
        assert_eq!(bench.allocator.empty_cache().unwrap(), 0);
        drop(pins);
        assert_eq!(bench.allocator.fragmentation(1).releasable_bytes, 64 * MIB);
        drop(bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn exportable_segments_are_no_pool_of_the_callers() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    let shared = bench.allocator.alloc_exportable(3 * MIB, HandleKind::PosixFd, &bench.stream).unwrap();
    let taken = (bench.allocator.reserved_bytes(), bench.allocator.allocated_bytes());
    assert_eq!(taken, (4 * MIB, 4 * MIB), "whole granules, as where memory is mapped");
    let refused = report(bench.allocator.alloc_bytes(62 * MIB, &bench.stream));
    assert_eq!(refused.advice, [Advice::FreeMore { bytes: 2 * MIB, largest: None }], "{refused}");
    assert_eq!(refused.reserved_by_private_pools, 0);
    let refused = report(bench.allocator.alloc_exportable(62 * MIB, HandleKind::PosixFd, &bench.stream));
    assert_eq!((refused.pool, refused.segment), (None, 62 * MIB));
    assert_eq!(refused.advice, [Advice::FreeMore { bytes: 2 * MIB, largest: None }], "{refused}");
    drop(shared);
    drop(bench.allocator.alloc_bytes(62 * MIB, &bench.stream).unwrap());
    drop(bench.allocator.alloc_exportable(62 * MIB, HandleKind::PosixFd, &bench.stream).unwrap());
    bench.assert_returned();
}

#[test]
fn a_pool_is_to_be_emptied_for_its_own_requests() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let pool = bench.allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
        let held: Vec<_> = (0..5).map(|_| pool.alloc_bytes(10 * MIB, &bench.stream).unwrap()).collect();
        drop(held);
        let refused = report(pool.alloc_bytes(40 * MIB, &bench.stream));
        says(&refused, "it would fit: after PrivatePool::empty_cache() of its own pool, which holds 50.00 MiB");
        pool.empty_cache().unwrap();
        drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn what_may_be_taken_is_told_without_the_headroom() {
    let bench = Bench::new(GIB, "headroom_mb:984,backing:segments");
    let held: Vec<_> = (0..2).map(|_| bench.allocator.alloc_bytes(10 * MIB, &bench.stream).unwrap()).collect();
    let [free, live] = held.try_into().unwrap_or_else(|_| unreachable!());
    let pin = bench.allocator.pin_mapping(&free).unwrap();
    drop(free);
    let refused = report(bench.allocator.alloc_bytes(28 * MIB, &bench.stream));
    let pieces = "20.00 MiB may be taken from the device and 10.00 MiB is cached, in 1 piece of 10.00 MiB";
    says(&refused, pieces);
    drop((pin, live));
}

#[test]
fn pins_keep_the_memory_of_released_pools() {
    for backing in BACKINGS {
        let bench = Bench::new(256 * MIB, &on(backing, "limit_mb:40"));
        let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
        let in_pool = pool.alloc_bytes(30 * MIB, &bench.stream).unwrap();
        let pin = bench.allocator.pin_mapping(&in_pool).unwrap();
        let refused = report(bench.allocator.alloc_bytes(40 * MIB, &bench.side));
        let both = vec![Advice::ReleasePools { held: 30 * MIB }, Advice::EndPins { held: 30 * MIB }];
        assert_eq!(refused.advice, [Advice::RaiseLimit { to: 70 * MIB }, Advice::All(both)], "{refused}");
        drop((in_pool, pool, pin));
        drop(bench.allocator.alloc_bytes(40 * MIB, &bench.side).unwrap());
    }
}

#[test]
fn a_larger_device_has_room_beside_what_is_live_and_what_others_hold() {
    for backing in BACKINGS {
        let scene = |capacity| {
            let bench = Bench::new(capacity, &on(backing, ""));
            bench.driver.set_other_process_bytes(6 * MIB);
            let live = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap();
            (live, bench)
        };
        let (_live, bench) = scene(64 * MIB);
        drop(bench.allocator.alloc_bytes(10 * MIB, &bench.stream).unwrap());
        let refused = report(bench.allocator.alloc_bytes(100 * MIB, &bench.stream));
        assert_eq!(refused.advice, [Advice::LargerDevice { bytes: 126 * MIB }], "{refused}");
        let (_live, bench) = scene(126 * MIB);
        drop(bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap());
    }
}

/// Gives memory of the stream back while another one uses it, and asks for so much more that only waiting, or nothing, helps.
fn refused_while_in_use(bench: &Bench, bytes: u64, asked: u64) -> OomReport {
    let used = bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap();
    bench.side.wait_for(&bench.stream.tick()).unwrap();
    bench.driver.stall(&bench.side, std::time::Duration::from_secs(1)).unwrap();
    bench.side.fill(used.ptr(), 1, bytes).unwrap();
    used.record_stream(&bench.side).unwrap();
    drop(used);
    report(bench.allocator.alloc_bytes(asked, &bench.stream))
}

#[test]
fn waiting_is_advised_where_it_helps() {
    for backing in BACKINGS {
        let bench = Bench::new(256 * MIB, &on(backing, "limit_mb:100,throw_on_cudamalloc_oom:True"));
        let waits = |report: &OomReport| report.advice.iter().any(|advice| matches!(advice, Advice::WaitFor { .. }));
        let beyond = refused_while_in_use(&bench, 20 * MIB, 150 * MIB);
        assert!(!waits(&beyond), "{beyond}");
        assert_eq!(beyond.waiting, [(bench.side.id(), 20 * MIB)]);
        assert_eq!((beyond.allocated, beyond.requested_live), (0, 0), "what waits is not live");
        bench.side.synchronize().unwrap();

        // Where memory moves, the host waits rather than fail.
        if backing == Backing::Paged {
            continue;
        }
        let helps = refused_while_in_use(&bench, 80 * MIB, 70 * MIB);
        assert_eq!(helps.advice[0], Advice::WaitFor { stream_id: bench.side.id(), bytes: 80 * MIB }, "{helps}");
        bench.side.synchronize().unwrap();
        drop(bench.allocator.alloc_bytes(70 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn a_free_block_that_is_large_enough_needs_no_other_split_limit() {
    let bench = Bench::new(256 * MIB, "no_cache:True,limit_mb:40");
    let used = bench.allocator.alloc_bytes(30 * MIB, &bench.stream).unwrap();
    let _pin = bench.allocator.pin_mapping(&used).unwrap();
    drop(used);
    let refused = report(bench.allocator.alloc_bytes(20 * MIB, &bench.stream));
    let relax = |advice: &Advice| matches!(advice, Advice::RelaxSplitLimit { .. });
    assert!(!refused.advice.iter().any(relax), "{refused}");
}

/// What the ladder gave back is cached again when the program runs again, and then the limit refuses before anything goes back.
#[test]
fn a_higher_limit_has_room_for_what_is_cached_where_it_refuses_at_once() {
    let run = |limit: u64, headroom: u64| {
        let options = format!("backing:segments,limit_mb:{limit},headroom_mb:{headroom},throw_on_cudamalloc_oom:True");
        let bench = Bench::new(100 * MIB, &options);
        let small = bench.allocator.alloc_bytes(512, &bench.stream).unwrap();
        drop(bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap());
        let asked = bench.allocator.alloc_bytes(54 * MIB, &bench.stream);
        drop(small);
        asked.map(drop)
    };
    let refused = report(run(50, 60));
    let both = vec![Advice::RaiseLimit { to: 76 * MIB }, Advice::LowerHeadroom { to: 24 * MIB }];
    assert_eq!(refused.released, 20 * MIB);
    assert!(refused.advice.contains(&Advice::All(both)), "{refused}");
    run(76, 24).unwrap();
}
