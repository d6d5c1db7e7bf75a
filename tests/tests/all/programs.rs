//! Random programs against the model; see `aquifer_tests::interpreter`.

use std::cell::RefCell;

use aquifer_tests::interpreter::Interpreter;
use aquifer_tests::op::{Op, mixed, op};
use aquifer_tests::prelude::*;
use aquifer_tests::setup::{Ending, Setup, crowded, lagging, setup};
use proptest::collection::vec;
use proptest::prop_oneof;
use proptest::strategy::Strategy as _;

fn programs(backing: Backing, faults: bool, part: (u64, usize)) {
    let strategy = (setup(backing), vec(op(faults), 1..120));
    let name = format!("programs on {backing}{}", if faults { " with faults" } else { "" });
    runner::run(&name, 1000, part, &strategy, |(setup, program)| Interpreter::run(&setup, &program));
}

#[test]
fn programs_on_paged() {
    programs(Backing::Paged, false, (0, 1));
}

#[test]
fn programs_on_segments() {
    programs(Backing::Segments, false, (0, 1));
}

#[test]
fn programs_on_paged_with_faults() {
    programs(Backing::Paged, true, (0, 2));
}

#[test]
fn programs_on_segments_with_faults() {
    programs(Backing::Segments, true, (0, 2));
}

#[test]
fn programs_on_devices_that_lag() {
    for backing in BACKINGS {
        for faults in [false, true] {
            let strategy = (lagging(backing), vec(op(faults), 1..120));
            let name = format!("programs on {backing} that lags{}", if faults { " with faults" } else { "" });
            runner::run(&name, 500, (0, 2), &strategy, |(setup, program)| Interpreter::run(&setup, &program));
        }
    }
}

#[test]
fn programs_with_dedicated_memory() {
    for backing in BACKINGS {
        for faults in [false, true] {
            let setup = prop_oneof![2 => setup(backing), 1 => lagging(backing)];
            // What this memory is of keeps its allocator open.
            let setup = setup.prop_map(|setup| Setup { ending: Ending::FreeFirst, ..setup });
            let strategy = (setup, vec(mixed(faults), 1..120));
            let name =
                format!("programs on {backing} with dedicated memory{}", if faults { " with faults" } else { "" });
            runner::run(&name, 200, (0, 2), &strategy, |(setup, program)| Interpreter::run(&setup, &program));
        }
    }
}

#[test]
fn programs_with_many_small_blocks() {
    for backing in BACKINGS {
        for faults in [false, true] {
            let strategy = (crowded(backing), vec(op(faults), 1..40));
            let name = format!("programs on {backing} of many blocks{}", if faults { " with faults" } else { "" });
            runner::run(&name, 8, (0, 1), &strategy, |(setup, program)| Interpreter::run(&setup, &program));
        }
    }
}

#[test]
fn programs_reach_every_rung() {
    for backing in BACKINGS {
        reach_every_rung(backing);
    }
}

fn reach_every_rung(backing: Backing) {
    let strategy = (setup(backing), vec(op(false), 60..120));
    let sums = RefCell::new([0; 8]);
    runner::run_exactly(&format!("programs that count on {backing}"), 150, (0, 1), &strategy, |(setup, program)| {
        let mut interpreter = Interpreter::new(&setup);
        interpreter.steps(&program);
        let stats = interpreter.stats();
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
        interpreter.finish(setup.ending);
    });
    println!("reached: {:?}", sums.borrow());
    assert!(sums.borrow().iter().all(|&sum| sum > 0), "{:?}", sums.borrow());
}

/// A stream with the number of one that is gone uses a block that the other one had used: the model
/// orders the block's end after both.
#[test]
fn a_program_may_use_a_block_on_two_streams_of_one_number() {
    let setup = Setup::new(48 * MIB, "cross_stream:wait");
    let (alloc, read) = (
        |stream| Op::Alloc { stream, bytes: 1, align: 0, on_thread: false },
        |stream| Op::Use { pick: 0, stream, write: false, record: false },
    );
    let replace = |stream| Op::NewStream { stream, blocking: false };
    let program = [alloc(0), read(2), replace(2), Op::Synchronize(0), replace(4), read(4)];
    Interpreter::run(&setup, &program);
}
