//! Advice of out-of-memory reports is true: who follows it is served.

use aquifer::device::sim::Fault;
use aquifer::memory::{Allocation, OomReport, PoolOptions, TagScope};
use aquifer_allocator::{Advice, Refusal};
use aquifer_device::{Code, Operation};
use aquifer_tests::{BACKINGS, Bench, GIB, MIB, Subject, on};

fn refused(bench: &Bench, bytes: u64) -> OomReport {
    bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap_err().report().unwrap().clone()
}

fn frees(report: &OomReport) -> bool {
    report.to_string().contains("after freeing")
}

#[test]
fn nothing_is_to_be_freed_where_nothing_is_live() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, "limit_mb:1"));
        let report = refused(&bench, 512);
        assert_eq!(report.advice, [Advice::RaiseLimit { to: 2 * MIB }], "{report}");

        let bench = Bench::new(64 * MIB, &on(backing, "headroom_mb:60"));
        let report = refused(&bench, 20 * MIB);
        assert_eq!(report.advice, [Advice::LowerHeadroom { to: 44 * MIB }], "{report}");

        let bench = Bench::new(64 * MIB, &on(backing, ""));
        bench.driver.set_other_process_bytes(60 * MIB);
        let report = refused(&bench, 20 * MIB);
        assert_eq!(report.advice, [Advice::OthersHold { held: 60 * MIB, missing: 16 * MIB }], "{report}");
    }
}

#[test]
fn what_helps_only_together_is_said_together() {
    let bench = Bench::new(64 * MIB, "limit_mb:10");
    bench.driver.set_other_process_bytes(60 * MIB);
    let report = refused(&bench, 20 * MIB);
    let [Advice::All(both)] = &report.advice[..] else { panic!("{report}") };
    assert_eq!(*both, [Advice::RaiseLimit { to: 20 * MIB }, Advice::OthersHold { held: 60 * MIB, missing: 16 * MIB },]);
    let text = "it would fit: with a limit of at least 20.00 MiB, and if others, who hold 60.00 MiB, freed 16.00 MiB";
    assert!(report.to_string().contains(text), "{report}");

    let bench = Bench::new(64 * MIB, "");
    bench.driver.set_other_process_bytes(30 * MIB);
    let held = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap();
    let report = refused(&bench, 54 * MIB);
    let text =
        "it would fit: after freeing at least 10.00 MiB more, and if others, who hold 30.00 MiB, freed 30.00 MiB";
    assert!(report.to_string().contains(text), "{report}");
    drop(held);
}

#[test]
fn freeing_is_not_said_to_help_where_private_pools_hold_too_much() {
    for backing in BACKINGS {
        let bench = Bench::new(64 * MIB, &on(backing, ""));
        let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
        drop(pool.alloc_bytes(22 * MIB, &bench.stream).unwrap());
        let held = bench.allocator.alloc_bytes(22 * MIB, &bench.stream).unwrap();
        let report = refused(&bench, 60 * MIB);
        let Some(Advice::All(all)) = report.advice.last() else { panic!("{report}") };
        let free = Advice::FreeMore { bytes: 18 * MIB, largest: None };
        assert_eq!(*all, [Advice::ReleasePools { held: 22 * MIB }, free], "{report}");
        drop((pool, held));
        drop(bench.allocator.alloc_bytes(60 * MIB, &bench.stream).unwrap());
    }
}

#[test]
fn a_tag_is_named_only_if_it_holds_most() {
    let bench = Bench::new(64 * MIB, "");
    let tiny = {
        let _scope = TagScope::new("tiny");
        bench.allocator.alloc_bytes(512, &bench.stream).unwrap()
    };
    let untagged = bench.allocator.alloc_bytes(30 * MIB, &bench.stream).unwrap();
    let report = refused(&bench, 50 * MIB);
    assert!(frees(&report) && !report.to_string().contains("most is held"), "{report}");
    drop(untagged);
    let _scope = TagScope::new("weights");
    let tagged = bench.allocator.alloc_bytes(30 * MIB, &bench.stream).unwrap();
    let report = refused(&bench, 50 * MIB);
    assert!(report.to_string().contains("; most is held by \"weights\" (30.00 MiB)"), "{report}");
    drop((tiny, tagged));
}

#[test]
fn names_cannot_write_lines_of_their_own() {
    let bench = Bench::new(64 * MIB, "");
    let _scope = TagScope::new("red \u{1b}[31m\n  it would fit: never");
    let held = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
    let text = refused(&bench, 40 * MIB).to_string();
    assert!(!text.contains('\u{1b}') && !text.contains("\n  it would fit: never"), "{text}");
    assert!(text.contains(r#"live: 40.00 MiB "red \u{1b}[31m\n  it would fit: never""#), "{text}");
    drop(held);
}

#[test]
fn segments_may_be_larger_than_what_there_is() {
    let bench = Bench::new(16 * MIB, "backing:segments");
    let report = refused(&bench, 5 * MIB);
    assert!(report.advice.contains(&Advice::SmallerSegments { to: 16 * MIB }), "{report}");
    assert!(report.to_string().contains("with a large_segment_size_mb of at most 16"), "{report}");
    let bench = Bench::new(16 * MIB, "backing:segments,large_segment_size_mb:16");
    drop(bench.allocator.alloc_bytes(5 * MIB, &bench.stream).unwrap());
}

/// Numbers from 0 up to `end`, the same in each run.
pub(crate) fn draws(mut seed: u64) -> impl FnMut(u64) -> u64 {
    move |end| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % end
    }
}

/// Fills what may be had with blocks of random sizes, and gives some of them back.
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
        let mut draw = draws(seed);
        bench.allocator.set_limit(Some(80 * MIB));
        let held = fill(&bench, &mut draw);
        let report = refused(&bench, 81 * MIB - MIB / 2 * draw(60));
        let to = report.advice.iter().find_map(|advice| match advice {
            Advice::RaiseLimit { to } => Some(*to),
            _ => None,
        });
        let to = to.unwrap_or_else(|| panic!("{report}"));
        bench.allocator.set_limit(Some(to - 1));
        let again = refused(&bench, report.requested);
        bench.allocator.set_limit(Some(to));
        let served = bench.allocator.alloc_bytes(report.requested, &bench.stream);
        drop((served.unwrap_or_else(|error| panic!("{backing} {seed}: {report}\nthen {again}\nthen {error}")), held));
        bench.assert_returned();
    }
}

#[test]
fn who_frees_as_much_as_advised_is_served() {
    for (backing, seed) in BACKINGS.into_iter().flat_map(|backing| (0..20).map(move |seed| (backing, seed))) {
        let bench = Bench::new(96 * MIB, &on(backing, ""));
        let mut draw = draws(seed);
        let mut held = fill(&bench, &mut draw);
        let report = refused(&bench, 97 * MIB - MIB / 2 * (2 + draw(60)));
        assert!(frees(&report) || report.to_string().contains("in one piece"), "{report}");
        // Everything, to be sure that it is in one piece.
        held.clear();
        drop(bench.allocator.alloc_bytes(report.requested, &bench.stream).unwrap());
    }
}

#[test]
fn a_driver_that_refuses_what_it_says_is_free_is_named() {
    for backing in BACKINGS {
        let bench = Bench::new(GIB, &on(backing, ""));
        let live = bench.allocator.alloc_bytes(740 * MIB, &bench.stream).unwrap();
        for operation in [Operation::Alloc, Operation::CreatePhysical] {
            bench.driver.inject(Fault::Rate { operation: Some(operation), rate: 1.0, code: Code::OUT_OF_MEMORY });
        }
        let report = refused(&bench, 20 * MIB);
        assert_eq!(report.advice, [Advice::DriverRefuses { asked: 20 * MIB, free: 284 * MIB }], "{report}");
        assert!(report.to_string().contains("it refused 20.00 MiB of 284.00 MiB"), "{report}");
        bench.driver.clear_faults();
        drop(live);
        bench.assert_returned();
    }
}

#[test]
fn memory_that_reserves_all_addresses_is_named() {
    let bench = Bench::new(64 * MIB, "backing:paged");
    let reserve = || bench.allocator.growable(GIB, &bench.stream).unwrap();
    let caches: Vec<_> = (0..4).map(|_| reserve()).collect();
    let Err(error) = bench.allocator.alloc_bytes(20 * MIB, &bench.stream) else {
        assert!(!Subject::has_race_detector(), "only a GPU has more addresses");
        return;
    };
    let report = error.report().unwrap();
    assert_eq!(report.refusal, Some(Refusal::Addresses), "{report}");
    assert_eq!(report.advice, [Advice::FreeAddresses { held: 4 * GIB }], "{report}");
    drop(caches);
    assert!(bench.allocator.alloc_bytes(20 * MIB, &bench.stream).is_ok());
    bench.assert_returned();
}
