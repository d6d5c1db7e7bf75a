//! The advice of out-of-memory reports is true, names all that is in the way, and nothing else.

use aquifer_tests::prelude::*;

use crate::oom::says;

fn report<T>(refused: Result<T, AllocError>) -> OomReport {
    let Err(error) = refused else { panic!("served") };
    error.report().unwrap_or_else(|| panic!("{error}")).clone()
}

fn free(least: u64) -> Advice {
    Advice::FreeMore { least, largest: None }
}

#[test]
fn options_and_others_are_named_where_nothing_is_live() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, "limit_mb:1"));
        let report = bench.report(512);
        assert_eq!(report.advice, [Advice::RaiseLimit { to: 2 * MIB }], "{report}");

        let bench = Bench::new(64 * MIB, &on(backing, "headroom_mb:60"));
        let report = bench.report(20 * MIB);
        assert_eq!(report.advice, [Advice::LowerHeadroom { to: 44 * MIB }], "{report}");

        let bench = Bench::new(64 * MIB, &on(backing, ""));
        bench.driver.set_other_process_bytes(60 * MIB);
        let report = bench.report(20 * MIB);
        assert_eq!(report.advice, [Advice::OthersHold { held: 60 * MIB }], "{report}");
        assert_eq!(report.lacking_on_device, 16 * MIB);
    }
}

#[test]
fn lacking_memory_is_reported_for_the_limit_and_the_device() {
    let bench = Bench::new(64 * MIB, "limit_mb:10");
    bench.driver.set_other_process_bytes(60 * MIB);
    let report = bench.report(20 * MIB);
    assert_eq!(report.advice, [Advice::RaiseLimit { to: 20 * MIB }, Advice::OthersHold { held: 60 * MIB }]);
    says(
        &report,
        "lacking: 10.00 MiB below the limit, and 16.00 MiB on the device\n  try: raise the limit to 20.00 MiB\n",
    );
    says(&report, "\n  try: free memory of the device that others than this allocator hold: 60.00 MiB");
}

#[test]
fn the_least_to_be_freed_is_no_more_than_suffices() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let mut held: Vec<_> = (0..6).map(|_| bench.alloc(9 * MIB)).collect();
        for at in [5, 3, 1] {
            drop(held.remove(at));
        }
        let report = bench.report(40 * MIB);
        // With 27 MiB live, that much is lacking, wherever the live blocks are.
        assert!(report.advice.contains(&free(3 * MIB)), "{report}");
        while bench.allocator.alloc_bytes(40 * MIB, &bench.stream).is_err() {
            drop(held.remove(0));
        }
        assert!(!held.is_empty(), "not all had to be freed");
    }
}

#[test]
fn private_pools_are_named_before_other_memory_to_free() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let pool = bench.pool();
        let in_pool = pool.alloc_bytes(22 * MIB, &bench.stream).unwrap();
        let held = bench.alloc(22 * MIB);
        let report = bench.report(60 * MIB);
        assert_eq!(report.lacking_on_device, 40 * MIB);
        assert_eq!(report.advice, [Advice::ReleasePools { held: 22 * MIB }, free(22 * MIB)], "{report}");
        drop((pool, in_pool, held));
        drop(bench.alloc(60 * MIB));
    }
}

#[test]
fn what_pools_lent_is_to_be_freed_by_its_borrowers() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let pool = bench.lending_pool();
        drop(pool.alloc_bytes(44 * MIB, &bench.stream).unwrap());
        let own = bench.alloc(18 * MIB);
        let lent = bench.alloc(44 * MIB);
        let report = bench.report(60 * MIB);
        assert_eq!(report.reserved_by_private_pools, 44 * MIB);
        assert_eq!(report.advice, [free(60 * MIB - 2 * MIB)], "{report}");
        drop((pool, own, lent));
    }
}

#[test]
fn a_tag_is_named_only_if_it_holds_most() {
    let bench = Bench::new(64 * MIB, "");
    let tiny = {
        let _scope = TagScope::new("tiny");
        bench.alloc(512)
    };
    let untagged = bench.alloc(30 * MIB);
    let report = bench.report(50 * MIB);
    assert!(!report.to_string().contains("most is held"), "{report}");
    drop(untagged);
    let _scope = TagScope::new("weights");
    let tagged = bench.alloc(30 * MIB);
    says(&bench.report(50 * MIB), "; most is held by \"weights\" (30.00 MiB)");
    drop((tiny, tagged));
}

#[test]
fn names_cannot_write_lines_of_their_own() {
    let bench = Bench::new(64 * MIB, "");
    let _scope = TagScope::new("red \u{1b}[31m\n  try: nothing");
    let held = bench.alloc(40 * MIB);
    let text = bench.report(40 * MIB).to_string();
    assert!(!text.contains('\u{1b}') && !text.contains("\n  try: nothing"), "{text}");
    assert!(text.contains(r#"live: 40.00 MiB "red \u{1b}[31m\n  try: nothing""#), "{text}");
    drop(held);
}

#[test]
fn the_advised_device_has_room_for_live_memory_and_for_other_processes() {
    for backing in BACKINGS {
        let scene = |capacity, options: &str| {
            let bench = Bench::new(capacity, &on(backing, options));
            bench.driver.set_other_process_bytes(6 * MIB);
            let live = bench.alloc(20 * MIB);
            (live, bench)
        };
        let (_live, bench) = scene(64 * MIB, "headroom_mb:16");
        drop(bench.alloc(10 * MIB));
        let report = bench.report(100 * MIB);
        assert_eq!(report.advice, [Advice::LargerDevice { bytes: 142 * MIB }], "{report}");
        let (_live, bench) = scene(142 * MIB, "headroom_mb:16");
        drop(bench.alloc(100 * MIB));

        let (_live, bench) = scene(64 * MIB, "limit_mb:32");
        let both = [Advice::LargerDevice { bytes: 126 * MIB }, Advice::RaiseLimit { to: 120 * MIB }];
        assert_eq!(bench.report(100 * MIB).advice, both);
        let (_live, bench) = scene(126 * MIB, "limit_mb:120");
        drop(bench.alloc(100 * MIB));
    }
}

#[test]
fn memory_that_grows_is_not_to_be_freed_for_its_own_growth() {
    let bench = Bench::new(64 * MIB, "");
    let mut cache = bench.growable(GIB);
    cache.grow_to(20 * MIB, &bench.stream).unwrap();
    let larger = report(cache.grow_to(200 * MIB, &bench.stream));
    assert_eq!(larger.advice, [Advice::LargerDevice { bytes: 200 * MIB }], "{larger}");
    let held = bench.alloc(30 * MIB);
    let refused = report(cache.grow_to(50 * MIB, &bench.stream));
    assert_eq!(refused.advice, [free(16 * MIB)], "{refused}");
    drop(held);
    cache.grow_to(50 * MIB, &bench.stream).unwrap();
}

#[test]
fn a_cache_that_an_option_keeps_is_named() {
    let bench = Bench::new(256 * MIB, "throw_on_cudamalloc_oom:True,limit_mb:50,backing:segments");
    let mut held: Vec<_> = (0..5).map(|_| bench.alloc(10 * MIB)).collect();
    let first = held.remove(0);
    drop(held);
    let report = bench.report(44 * MIB);
    let cached = Advice::EmptyCache { cached: 40 * MIB };
    assert_eq!(report.advice, [cached, Advice::RaiseLimit { to: 94 * MIB }, free(4 * MIB)], "{report}");
    says(&report, "try: call empty_cache(), which gives back what is cached (40.00 MiB), or do without throw_on");
    drop(first);
    bench.allocator.empty_cache().unwrap();
    drop(bench.alloc(44 * MIB));
}

#[test]
fn pins_that_keep_free_memory_are_named() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let blocks: Vec<_> = (0..64).map(|_| bench.alloc(MIB)).collect();
        let pins: Vec<_> = blocks.iter().step_by(2).map(|block| bench.allocator.pin_mapping(block).unwrap()).collect();
        drop(blocks);
        let report = bench.report(40 * MIB);
        assert_eq!(report.advice, [Advice::EndPins { held: 64 * MIB }], "{report}");
        says(&report, "try: drop pins, which keep 64.00 MiB in place");
        let fragmentation = bench.allocator.fragmentation(1);
        assert_eq!((fragmentation.releasable_segments, fragmentation.releasable_bytes), (0, 0));
        assert_eq!(bench.allocator.empty_cache().unwrap(), 0);
        drop(pins);
        assert_eq!(bench.allocator.fragmentation(1).releasable_bytes, 64 * MIB);
        drop(bench.alloc(40 * MIB));
    }
}

#[test]
fn exportable_segments_are_no_pool_of_the_callers() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    let share = |bytes| bench.allocator.alloc_exportable(bytes, HandleKind::PosixFd, &bench.stream);
    let shared = share(3 * MIB).unwrap();
    let taken = (bench.allocator.memory_reserved(), bench.allocator.memory_allocated());
    assert_eq!(taken, (4 * MIB, 4 * MIB), "whole granules, as where memory is mapped");
    let of_block = bench.report(62 * MIB);
    assert_eq!((&of_block.advice[..], of_block.reserved_by_private_pools), (&[free(2 * MIB)][..], 0), "{of_block}");
    let apart = report(share(62 * MIB));
    assert_eq!((apart.pool, apart.growth, apart.is_mapped), (None, 62 * MIB, true));
    assert_eq!(apart.advice, [free(2 * MIB)], "{apart}");
    drop(shared);
    drop(bench.alloc(62 * MIB));
    drop(share(62 * MIB).unwrap());
    bench.assert_returned();
}

#[test]
fn a_pool_is_to_be_emptied_for_its_own_requests_where_the_limit_refuses_at_once() {
    for backing in BACKINGS {
        let bench = Bench::new(128 * MIB, &on(backing, "limit_mb:64,throw_on_cudamalloc_oom:True"));
        let pool = bench.allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
        let held: Vec<_> = (0..5).map(|_| pool.alloc_bytes(10 * MIB, &bench.stream).unwrap()).collect();
        drop(held);
        let report = report(pool.alloc_bytes(40 * MIB, &bench.stream));
        assert_eq!(
            report.advice,
            [Advice::EmptyPool { held: 50 * MIB }, Advice::RaiseLimit { to: 90 * MIB }],
            "{report}"
        );
        pool.empty_cache().unwrap();
        drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn streams_that_use_freed_memory_are_named() {
    for backing in BACKINGS {
        let bench = Bench::new(256 * MIB, &on(backing, "limit_mb:100,throw_on_cudamalloc_oom:True"));
        let used = bench.alloc(80 * MIB);
        bench.drop_in_use(used, Duration::from_secs(1));
        let report = bench.report(70 * MIB);
        assert_eq!(report.advice[0], Advice::WaitFor { stream_id: bench.side.id(), bytes: 80 * MIB }, "{report}");
        assert_eq!((report.allocated, report.requested_live), (0, 0), "what waits is not live");
        says(&report, "which still uses 80.00 MiB of freed memory");
        bench.side.synchronize().unwrap();
        drop(bench.alloc(70 * MIB));
    }
}

/// While a stream captures, some memory cannot go back to the device.
#[test]
fn captures_that_keep_memory_are_named() {
    let settings = ["backing:segments", "no_cache:True"].map(|options| (options, [false, true]));
    for (options, used_by_side) in settings.into_iter().chain([("", [false, false])]) {
        for used_by_side in used_by_side {
            let cached = || {
                let bench = Bench::new(128 * MIB, options);
                let stream = if used_by_side { &bench.side } else { &bench.stream };
                drop(bench.alloc_on(stream, 100 * MIB));
                (bench.pool(), bench)
            };
            let (pool, bench) = cached();
            let capture = bench.stream.begin_capture().unwrap();
            let refused = report(pool.alloc_bytes(40 * MIB, &bench.stream));
            let kept = 100 * MIB;
            assert_eq!(refused.advice, [Advice::AfterCapture { cached: kept }], "{options} {used_by_side}: {refused}");
            assert_eq!(refused.kept_by_captures, kept);
            says(
                &refused,
                "try: wait until no stream captures, or call empty_cache() before a capture begins: meanwhile ",
            );
            says(&refused, "meanwhile 100.00 MiB of unused memory cannot go back to the device");
            drop(capture);
            drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
            drop(pool);

            let (pool, bench) = cached();
            bench.allocator.empty_cache().unwrap();
            let capture = bench.stream.begin_capture().unwrap();
            drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
            drop((capture, pool));
        }
    }
}

#[test]
fn memory_given_back_waits_for_the_capture_of_a_stream_that_used_it() {
    let bench = Bench::new(128 * MIB, "");
    let shared = bench.alloc(60 * MIB);
    shared.record_stream(&bench.side).unwrap();
    drop(shared);
    let capture = bench.side.begin_capture().unwrap();
    let report = bench.report(100 * MIB);
    assert_eq!(report.advice, [Advice::AfterCapture { cached: 60 * MIB }], "{report}");
    drop(capture);
    drop(bench.alloc(100 * MIB));
}

/// Allocates blocks of random sizes up to the limit, and gives some of them back.
fn fill(bench: &Bench, draw: &mut impl FnMut(u64) -> u64) -> Vec<Allocation> {
    let mut held: Vec<Allocation> = Vec::new();
    for _ in 0..60 {
        held.extend(bench.allocator.alloc_bytes(MIB / 2 * (1 + draw(12)), &bench.stream));
        if draw(3) == 0 && !held.is_empty() {
            let at = usize::try_from(draw(held.len() as u64)).unwrap();
            drop(held.swap_remove(at));
        }
    }
    held
}

#[test]
fn the_advised_limit_suffices_and_no_lower_one_does() {
    for (backing, seed) in BACKINGS.into_iter().flat_map(|backing| (0..20).map(move |seed| (backing, seed))) {
        let bench = Bench::new(GIB, &on(backing, ""));
        let mut draw = random::draws(seed);
        bench.allocator.set_limit(Some(80 * MIB));
        let held = fill(&bench, &mut draw);
        let report = bench.report(81 * MIB - MIB / 2 * draw(60));
        let to = report.advice.iter().find_map(|advice| match advice {
            Advice::RaiseLimit { to } => Some(*to),
            _ => None,
        });
        let to = to.unwrap_or_else(|| panic!("{report}"));
        bench.allocator.set_limit(Some(to - 1));
        let again = bench.report(report.requested);
        bench.allocator.set_limit(Some(to));
        let served = bench.allocator.alloc_bytes(report.requested, &bench.stream);
        drop((served.unwrap_or_else(|error| panic!("{backing} {seed}: {report}\nthen {again}\nthen {error}")), held));
        bench.assert_returned();
    }
}

#[test]
fn a_driver_that_refuses_free_memory_is_named() {
    for backing in BACKINGS {
        let bench = Bench::new(GIB, &on(backing, ""));
        let live = bench.alloc(740 * MIB);
        for operation in [Operation::Alloc, Operation::CreatePhysical] {
            bench.driver.inject(Fault::Rate { operation: Some(operation), rate: 1.0, code: Code::OUT_OF_MEMORY });
        }
        let report = bench.report(20 * MIB);
        assert_eq!(report.advice, [Advice::DriverRefuses { asked: 20 * MIB, free: 284 * MIB }], "{report}");
        says(&report, "the driver refused 20.00 MiB, and reports 284.00 MiB as free");
        bench.driver.clear_faults();
        drop(live);
        bench.assert_returned();
    }
}

#[test]
fn memory_that_reserves_all_addresses_is_named() {
    let bench = Bench::new(64 * MIB, "backing:paged");
    let reserve = || bench.growable(GIB);
    let caches: Vec<_> = (0..4).map(|_| reserve()).collect();
    let refused = Fault::Rate { operation: Some(Operation::Alloc), rate: 1.0, code: Code::OUT_OF_MEMORY };
    bench.driver.inject(refused);
    let Err(error) = bench.allocator.alloc_bytes(20 * MIB, &bench.stream) else {
        assert!(!Subject::has_simulated_device(), "only a GPU has more addresses");
        return;
    };
    let report = error.report().unwrap();
    assert_eq!(report.refusal, Some(Refusal::Addresses), "{report}");
    assert_eq!(report.advice, [Advice::UseSegments, Advice::FreeAddresses { held: 4 * GIB }], "{report}");
    bench.driver.clear_faults();
    drop(caches);
    assert!(bench.allocator.alloc_bytes(20 * MIB, &bench.stream).is_ok());
    bench.assert_returned();
}
