//! Random programs of one thread on this driver; see `aquifer_machine`. Those of several threads run
//! under a schedule, in `tests/machine`.

use std::cell::RefCell;

use aquifer_machine::{Counts, Plan, Step, run_free, shrink};
use aquifer_tests::prelude::*;

/// Runs programs `first, first + step, …` below the count, `few` by default; one that fails is made
/// small and printed.
fn programs(name: &str, few: u64, part: (u64, usize), plan: impl Fn(u64) -> Plan, ran: impl Fn(Counts)) {
    let run = |plan: &Plan| run_free(plan, || false);
    runner::each(name, runner::count(few), part, |number| {
        let ended = run(&plan(number));
        ended.map(&ran).map_err(|failure| {
            let (plan, failure) = shrink(plan(number), failure, run);
            format!("{}\n{plan}", failure.what)
        })
    });
}

/// The tests share the programs, so that they run side by side.
fn part(number: u64) {
    programs("programs", 1200, (number, 4), Plan::single, drop);
}

#[test]
fn programs_of_the_first_part() {
    part(0);
}

#[test]
fn programs_of_the_second_part() {
    part(1);
}

#[test]
fn programs_of_the_third_part() {
    part(2);
}

#[test]
fn programs_of_the_fourth_part() {
    part(3);
}

/// So many small blocks that their records do not fit the processor's caches (`heap/deferred.rs` of
/// the allocator).
#[test]
fn programs_with_many_small_blocks() {
    let crowd = |n: u32| {
        // Most are one stream's.
        let stream = if n.is_multiple_of(8) { n / 8 } else { 2 };
        Step::AllocRaw { stream, bytes: 1 + u64::from(n) * 611 % 6000, align: 1 }
    };
    let plan = |number| {
        let mut plan = Plan::single(number);
        let caches = |option: &&str| !option.starts_with("no_cache");
        plan.options = plan.options.split(',').filter(caches).collect::<Vec<_>>().join(",");
        plan.threads[0].truncate(40);
        plan.threads[0].splice(0..0, (0..6000).map(crowd));
        plan
    };
    programs("programs of many blocks", 24, (0, 1), plan, drop);
}

#[test]
fn programs_reach_every_rung() {
    for backing in BACKINGS {
        let sums = RefCell::new([0; 8]);
        let count = |counts: Counts| {
            let stats = counts.stats;
            let reached = [
                stats.num_ooms,
                stats.num_alloc_retries,
                stats.num_sync_all_streams,
                stats.num_device_free,
                stats.num_oom_rejections,
                stats.cross_stream_reuses,
                stats.cross_stream_waits,
                // What only one of them has.
                if backing == Backing::Paged { stats.remaps } else { stats.segment.all.freed },
            ];
            sums.borrow_mut().iter_mut().zip(reached).for_each(|(sum, n)| *sum += n);
        };
        let plan = |number| Plan::single(number).on(backing);
        programs(&format!("programs that count on {backing}"), 150, (0, 1), plan, count);
        println!("reached: {:?}", sums.borrow());
        // Drivers of real time run fewer programs.
        let is_judged = runner::count(150) >= 150;
        assert!(!is_judged || sums.borrow().iter().all(|&sum| sum > 0), "{:?}", sums.borrow());
    }
}
