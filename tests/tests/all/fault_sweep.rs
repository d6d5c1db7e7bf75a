//! A fault at every single driver call of a program, one after the other: the allocator stays
//! consistent and usable, and nothing is leaked. What must hold is checked after every step, and at
//! the end as after any program.

use aquifer_tests::interpreter::Interpreter;
use aquifer_tests::op::{FreeHow, Op, op};
use aquifer_tests::prelude::*;
use aquifer_tests::setup::{Ending, Setup, setup};
use proptest::collection::vec;
use proptest::strategy::Strategy;

/// Codes that leave the device alive, and one that loses it.
const CODES: [Code; 5] = [Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code::CAPTURE_IMPLICIT, Code(999), Code(214)];

fn alloc(stream: usize, bytes: u64) -> Op {
    Op::Alloc { stream, bytes, align: 0, on_thread: false }
}

fn free(pick: usize) -> Op {
    Op::Free { pick, how: FreeHow::Drop, verify: false }
}

fn free_on(pick: usize, stream: usize) -> Op {
    Op::Free { pick, how: FreeHow::DropOn(stream), verify: false }
}

fn used(pick: usize, stream: usize, record: bool) -> Op {
    Op::Use { pick, stream, write: true, record }
}

/// A program that goes through every kind of driver call that the allocator makes: growth, events
/// and waits between streams, `record_stream`, borrowing, private pools, destroyed streams, and
/// every rung of the ladder up to out of memory.
fn program() -> Vec<Op> {
    vec![
        alloc(2, 5 * MIB),
        alloc(2, 5 * MIB),
        alloc(2, 12 * MIB),
        alloc(3, KIB),
        used(0, 3, true),
        used(2, 3, false),
        Op::Stall(3, 20_000),
        free(0),
        alloc(2, 6 * MIB),
        free_on(1, 3),
        Op::Advance(30_000),
        alloc(3, 4 * MIB),
        free(0),
        Op::Free { pick: 0, how: FreeHow::DropOn(0), verify: true },
        Op::CreatePool { use_on_oom: true, no_split: false },
        Op::CreatePool { use_on_oom: false, no_split: true },
        Op::AllocFrom { pool: 0, stream: 2, bytes: 12 * MIB },
        Op::AllocFrom { pool: 1, stream: 3, bytes: 700 },
        Op::AllocRaw { stream: 2, bytes: 45 * MIB },
        free(2),
        free(3),
        alloc(3, 70 * MIB),
        alloc(2, 30 * MIB),
        Op::NewStream { stream: 3, blocking: true },
        used(0, 3, true),
        used(1, 2, true),
        Op::Stall(3, 50_000),
        free(0),
        free(0),
        alloc(3, 60 * MIB),
        alloc(0, 500 * MIB),
        Op::EmptyPool(0),
        Op::TrimTo(30),
        Op::DropPool(1),
        Op::OtherProcess(10),
        alloc(1, 20 * MIB),
        alloc(2, 100 * MIB),
        Op::Alloc { stream: 3, bytes: 2 * MIB, align: 21, on_thread: true },
        Op::Free { pick: 0, how: FreeHow::OnThread, verify: true },
        Op::NewStream { stream: 2, blocking: false },
        alloc(2, 8 * MIB),
        Op::EmptyCache,
        alloc(2, 8 * MIB),
        Op::Stall(3, 900_000),
        used(0, 3, true),
        used(1, 3, true),
        used(2, 3, true),
        free(0),
        free(0),
        free(0),
        alloc(2, 400 * MIB),
    ]
}

/// Runs a program without a fault and counts the driver calls, then with a fault at each of them;
/// on a GPU at some of them, at others with each code.
fn sweep(setup: &Setup, program: &[Op]) -> u64 {
    let mut interpreter = Interpreter::new(setup);
    let before = interpreter.calls_made();
    interpreter.steps(program);
    let calls = interpreter.calls_made() - before;
    interpreter.finish(setup.ending);
    // Each call with every code, or with one of them where the allocator goes first.
    let codes = if setup.ending == Ending::AllocatorFirst { CODES.len() as u64 } else { 1 };
    let step = codes.max(calls.div_ceil(Subject::share(calls).max(1)));
    for (first, code) in (0..).zip(CODES) {
        for nth in (1 + first * step / 5..=calls).step_by(usize::try_from(step).unwrap()) {
            let _at = At(format!("{code:?} at call {nth}"));
            let mut interpreter = Interpreter::new(setup);
            interpreter.inject(nth, code);
            interpreter.steps(program);
            interpreter.finish(setup.ending);
        }
    }
    calls
}

fn sweep_with(options: &str) {
    for backing in BACKINGS {
        // Larger granules take fewer calls, so that there are fewer places to fail at.
        let options = format!("{options},granule_mb:4");
        let mut setup = Setup::new(128 * MIB, &on(backing, &options));
        for ending in [Ending::FreeFirst, Ending::AllocatorFirst] {
            setup.ending = ending;
            let calls = sweep(&setup, &program());
            println!("{options} on {backing}: {calls} calls");
            assert!((60..=1000).contains(&calls), "{calls} calls");
        }
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
        let mut interpreter = Interpreter::new(&Setup::new(128 * MIB, &options));
        interpreter.steps(&program());
        let counts = interpreter.device().driver_calls();
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
    BACKINGS.into_iter().for_each(random_programs_on);
}

fn random_programs_on(backing: Backing) {
    let longer = runner::count(0) > 0;
    let strategy = (setup(backing), vec(op(false), if longer { 100..200 } else { 20..40 }))
        .prop_filter("the statistics of long histories", |(setup, _)| setup.config.history < 100);
    let few = if Subject::is_simulated() { 6 } else { 2 };
    let programs = if longer { runner::count(0).div_ceil(400) } else { few };
    runner::run_exactly(&format!("fault sweep on {backing}"), programs, (0, 1), &strategy, |(setup, program)| {
        sweep(&setup, &program);
    });
}
