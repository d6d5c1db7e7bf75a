//! A fault at every single driver call of a program, one after the other: the allocator stays
//! consistent and usable, and nothing is leaked. What must hold is checked after every step, and at
//! the end as after any program.

use aquifer_machine::{Counts, Freeing, Plan, Step, run_free};
use aquifer_tests::prelude::*;

/// Codes that leave the device alive, and one that loses it.
const CODES: [Code; 5] = [Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code::CAPTURE_IMPLICIT, Code(999), Code(214)];

fn alloc(stream: u32, bytes: u64) -> Step {
    Step::AllocRaw { stream, bytes, align: 1 }
}

fn free(pick: u32) -> Step {
    Step::FreeRaw { pick, how: Freeing::OnItsStream }
}

fn free_on(pick: u32, stream: u32) -> Step {
    Step::FreeRaw { pick, how: Freeing::OnStream(stream) }
}

fn used(pick: u32, stream: u32, is_recorded: bool) -> Step {
    Step::UseRaw { pick, stream, writes: true, is_recorded }
}

/// A program that goes through every kind of driver call that the allocator makes: growth, events
/// and waits between streams, `record_stream`, borrowing, private pools, destroyed streams, and
/// every rung of the ladder up to out of memory.
fn program() -> Vec<Step> {
    vec![
        alloc(2, 5 * MIB),
        alloc(2, 5 * MIB),
        alloc(2, 12 * MIB),
        alloc(3, KIB),
        used(0, 3, true),
        used(2, 3, false),
        Step::Stall { stream: 3, us: 20_000 },
        free(0),
        alloc(2, 6 * MIB),
        free_on(1, 3),
        Step::Advance(30_000),
        alloc(3, 4 * MIB),
        free(0),
        free_on(0, 1),
        Step::CreatePool { lends: true, lends_when_idle: false, no_split: false },
        Step::CreatePool { lends: false, lends_when_idle: false, no_split: true },
        Step::AllocFrom { pool: 0, stream: 2, bytes: 12 * MIB },
        Step::AllocFrom { pool: 1, stream: 3, bytes: 700 },
        Step::AllocRaw { stream: 2, bytes: 45 * MIB, align: 0 },
        Step::Drop(0),
        alloc(3, 70 * MIB),
        alloc(2, 30 * MIB),
        Step::NewStream { stream: 2, blocking: true },
        used(0, 3, true),
        used(1, 2, true),
        Step::Stall { stream: 3, us: 50_000 },
        free(0),
        free(0),
        alloc(3, 60 * MIB),
        alloc(1, 500 * MIB),
        Step::EmptyPool(0),
        Step::TrimTo(30 * MIB),
        Step::DropPool(1),
        Step::OtherProcess(10 * MIB),
        alloc(0, 20 * MIB),
        alloc(2, 100 * MIB),
        Step::AllocRaw { stream: 3, bytes: 2 * MIB, align: 21 },
        free(0),
        Step::NewStream { stream: 1, blocking: false },
        alloc(2, 8 * MIB),
        Step::EmptyCache,
        alloc(2, 8 * MIB),
        Step::Stall { stream: 3, us: 900_000 },
        used(0, 3, true),
        used(1, 3, true),
        used(2, 3, true),
        free(0),
        free(0),
        free(0),
        alloc(2, 400 * MIB),
    ]
}

fn run(plan: &Plan) -> Counts {
    run_free(plan, || false).unwrap_or_else(|failure| panic!("{}\n{plan}", failure.what))
}

/// Runs a program without a fault and counts the driver calls, then with a fault at each of them, of
/// several codes with two in turn; on a GPU at some of them.
fn sweep(plan: &Plan, codes: &[Code]) -> u64 {
    let calls = run(plan).calls;
    let step = usize::try_from(calls.div_ceil(Subject::share(calls).max(1))).unwrap();
    for nth in (1..=calls).step_by(step) {
        for (_, &code) in (nth..).zip(codes).filter(|(turn, _)| codes.len() == 1 || turn % 5 < 2) {
            let _at = At(format!("{code:?} at call {nth}"));
            run(&plan.clone().after(Step::Fault { nth, operation: None, code }));
        }
    }
    calls
}

fn sweep_with(options: &str) {
    for backing in BACKINGS {
        // Larger granules take fewer calls, so that there are fewer places to fail at.
        let options = format!("{options},granule_mb:4");
        let calls = sweep(&Plan::of_steps(128 * MIB, &on(backing, &options), vec![program()]), &CODES);
        println!("{options} on {backing}: {calls} calls");
        assert!((60..=1200).contains(&calls), "{calls} calls");
    }
}

#[test]
fn faults_at_every_call_while_streams_lend() {
    sweep_with("cross_stream:ready,headroom_mb:4,history:20");
}

#[test]
fn faults_at_every_call_while_frames_move_and_are_broken() {
    sweep_with("cross_stream:ready,frame_mb:32");
}

#[test]
fn faults_at_every_call_while_streams_wait() {
    sweep_with("cross_stream:wait,limit_mb:100");
}

#[test]
fn faults_at_every_call_while_streams_keep_to_themselves() {
    sweep_with("cross_stream:off");
}

#[test]
fn the_swept_program_makes_every_call_that_an_allocator_makes() {
    let mut made = [0; Operation::ALL.len()];
    let options = ["cross_stream:ready,headroom_mb:4", "cross_stream:wait"];
    for options in options.into_iter().flat_map(|options| BACKINGS.map(|backing| on(backing, options))) {
        let counts = run(&Plan::of_steps(128 * MIB, &options, vec![program()])).operations.unwrap();
        Operation::ALL.iter().for_each(|&operation| made[operation as usize] += counts.of(operation));
    }
    let needed = [
        Operation::MemoryInfo,
        Operation::Alloc,
        Operation::Free,
        Operation::CreateEvent,
        Operation::Record,
        Operation::Wait,
        Operation::QueryEvent,
        Operation::SynchronizeEvent,
        Operation::CreateStream,
        Operation::DestroyStream,
        Operation::Reserve,
        Operation::Unreserve,
        Operation::CreatePhysical,
        Operation::ReleasePhysical,
        Operation::Map,
        Operation::SetAccess,
        Operation::Unmap,
    ];
    for operation in needed {
        assert!(made[operation as usize] > 0, "{operation} is never called");
    }
}

#[test]
fn faults_at_every_call_of_random_programs() {
    let longer = runner::asked().is_some();
    let few = if Subject::is_simulated() { 12 } else { 4 };
    let programs = if longer { runner::count(0).div_ceil(200) } else { few };
    runner::each("fault sweep", programs, (0, 1), |number| {
        let mut plan = Plan::single(number);
        plan.threads[0].retain(|step| !step.injects_faults());
        plan.threads[0].truncate(if longer { 80 } else { 20 });
        let _at = At(plan.to_string());
        sweep(&plan, &CODES[usize::try_from(number % 5).unwrap()..][..1]);
        Ok(())
    });
}
