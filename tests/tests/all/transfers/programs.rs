//! Random programs of transfers.
//!
//! Buffers carry the ticks of their uses. So a program that calls from one thread sees the effects
//! in the order of its calls, on all streams and devices, even if it drops, forgets, cancels or
//! never waits for transfers, and if its buffers are spilled.

use aquifer::transfer::{Direction, SpillStats};
use aquifer_tests::prelude::*;
use aquifer_tests::random::pattern;
use proptest::collection::vec;
use proptest::prelude::*;

use super::interpreter::Interpreter;
use super::op::op;
use super::{Bench, to_vec};

/// The least number of programs that spill and bring back on every driver.
const FEWEST: u64 = 24;

/// Plays programs; tells how often their buffers were spilled and came back.
fn programs(faults: bool, few: u64) -> (u64, u64) {
    let moves = std::cell::Cell::new((0, 0));
    let strategy = (any::<u64>(), vec(op(faults), 1..60));
    let name = if faults { "transfers with faults" } else { "transfers" };
    runner::run(name, few, &strategy, |(seed, program)| {
        let mut interpreter = Interpreter::new(seed, faults);
        program.iter().for_each(|op| interpreter.step(op));
        let SpillStats { spills, returns, .. } = interpreter.spiller.stats();
        moves.set((moves.get().0 + spills, moves.get().1 + returns));
        interpreter.finish();
    });
    moves.get()
}

#[test]
fn transfer_programs_see_effects_in_the_order_of_their_calls() {
    let (spills, returns) = programs(false, (runner::count(1000) / 20).max(FEWEST));
    assert!(spills > 0 && returns > 0, "no program spilled: {spills}, {returns}");
}

#[test]
fn transfer_programs_survive_faults() {
    programs(true, (runner::count(1000) / 20).max(FEWEST));
}

/// Recording an event after a copy failed: the copy is under way, and asking about it must come to
/// an end.
#[test]
fn a_copy_that_no_event_covers_is_done_some_time() {
    let bench = Bench::new();
    let host = bench.transfer.pinned().alloc_from(&pattern(1, 1000)).unwrap();
    let mut buffer = bench.alloc(1000);
    bench.driver.inject(Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code::OUT_OF_MEMORY });
    // On the stream that the memory was allocated for, so that the event after the copy is the
    // first one.
    let pending = buffer.upload(&host, &bench.transfer.on(&bench.stream).unwrap()).unwrap();
    let mut asked = 0;
    while !pending.is_done().unwrap() {
        asked += 1;
        assert!(asked < 1_000_000, "it is never done");
        std::thread::yield_now();
    }
    pending.wait().unwrap();
    drop((host, buffer));
    bench.finish();
}

/// Dropped transfers can be waited for as well as held ones, whether they succeed or fail.
#[test]
fn all_that_was_begun_can_be_waited_for() {
    let bench = Bench::new();
    let (transfer, own) = (&bench.transfer, bench.transfer.on(&bench.stream).unwrap());
    let (mut one, mut two, mut three) = (bench.alloc(8 << 20), bench.alloc(8 << 20), bench.alloc(4096));
    let page_locked = transfer.pinned().alloc_from(&pattern(3, 4096)).unwrap();
    bench.driver.stall(&bench.stream, Duration::from_millis(30)).unwrap();
    // Threads go on with these, one of them after the stall; one is left out.
    drop(one.upload(pattern(1, 8 << 20), &transfer).unwrap());
    drop(two.upload(pattern(2, 8 << 20), &own).unwrap());
    to_vec(transfer, &two).unwrap().cancel();
    drop(three.upload(&page_locked, &own).unwrap());
    let tick = bench.stream.tick();
    tick.cover().unwrap();
    let back = to_vec(transfer, &one).unwrap();
    transfer.synchronize().unwrap();
    assert!(back.is_done().unwrap());
    assert!(tick.is_done().unwrap());
    let waits = transfer.counters().synchronisations;
    transfer.synchronize().unwrap();
    assert_eq!(transfer.counters().synchronisations, waits, "all is complete");
    assert!(back.wait().unwrap() == pattern(1, 8 << 20) && two.to_vec(&transfer).unwrap() == pattern(2, 8 << 20));
    // The wait does not report a transfer that fails.
    bench.driver.inject(Fault::Nth { operation: Some(Operation::CopyToDevice), nth: 1, code: Code(999) });
    let failing = one.upload(pattern(4, 8 << 20), &transfer).unwrap();
    transfer.synchronize().unwrap();
    assert!(failing.is_done().unwrap());
    failing.wait().unwrap_err();
    drop((one, two, three, page_locked));
    bench.finish();
}

/// Only the calls of this test let time pass: no thread works on a copy of pinned memory.
#[test]
fn waiting_for_all_that_was_begun_is_counted_where_there_is_something_to_wait_for() {
    let bench = Bench::new();
    let (transfer, own) = (&bench.transfer, bench.transfer.on(&bench.stream).unwrap());
    let waits = || transfer.counters().synchronisations;
    transfer.synchronize().unwrap();
    assert_eq!(waits(), 0, "nothing was begun");
    let mut buffer = bench.alloc(4096);
    let page_locked = transfer.pinned().alloc_from(&pattern(3, 4096)).unwrap();
    bench.driver.stall(&bench.stream, Duration::from_secs(1)).unwrap();
    drop(buffer.upload(&page_locked, &own).unwrap());
    let tick = bench.stream.tick();
    tick.cover().unwrap();
    transfer.synchronize().unwrap();
    assert!(tick.is_done().unwrap());
    assert_eq!(waits(), 1);
    transfer.synchronize().unwrap();
    assert_eq!(waits(), 1, "all is complete");
    drop((buffer, page_locked));
    bench.finish();
}

#[test]
fn directions_have_streams_of_their_own() {
    let bench = Bench::new();
    let ids = [Direction::Upload, Direction::Download, Direction::OnDevice]
        .map(|direction| [bench.transfer.next_stream(direction).id(), bench.transfer.next_stream(direction).id()]);
    let mut all = ids.concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 6);
    bench.finish();
}
