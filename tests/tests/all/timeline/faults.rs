//! T2 when driver calls fail: a failed record or wait changes no clock, and trying again works.

use aquifer_tests::prelude::*;

use super::common::{Bench, kind};

#[test]
fn t2_a_wait_that_fails_at_any_call_changes_no_clock_and_can_be_repeated() {
    for failing in [Operation::CreateEvent, Operation::Record, Operation::Wait] {
        let (bench, [one, two]) = Bench::with_streams();
        let tick = bench.long_work(&one);
        bench.fail_next(failing);
        assert_eq!(kind(two.wait_for(&tick)), ErrorKind::Other);
        let is_recorded = failing == Operation::Wait;
        assert_eq!((two.is_ordered_after(&tick), two.timeline().clock().get(one.id())), (false, 0));
        assert_eq!((bench.cost(), tick.timeline().is_covered(tick.n())), ((u64::from(is_recorded), 0), is_recorded));
        let between = one.tick();
        two.wait_for(&tick).unwrap();
        assert!(two.is_ordered_after(&tick));
        assert_eq!(two.is_ordered_after(&between), !is_recorded, "an event covers all ticks before its record");
        assert_eq!(bench.cost(), (1, 1));
        assert!(failing == Operation::CreateEvent || bench.calls(Operation::CreateEvent) == 1);
        bench.fill_without_race(&two);
    }
}

#[test]
fn t2_a_user_event_keeps_its_earlier_record_when_recording_fails() {
    let (bench, [one, two, three]) = Bench::with_streams();
    let event = bench.device.create_event(false).unwrap();
    let first = one.tick();
    event.record(&one).unwrap();
    let second = two.tick();
    bench.fail_next(Operation::Record);
    assert_eq!(kind(event.record(&two)), ErrorKind::Other);
    bench.fail_next(Operation::Wait);
    assert_eq!(kind(three.wait_event(&event)), ErrorKind::Other);
    assert!(!three.is_ordered_after(&first));
    three.wait_event(&event).unwrap();
    assert!(three.is_ordered_after(&first) && !three.is_ordered_after(&second));
}

#[test]
fn a_failed_query_or_host_wait_leaves_the_event_to_be_asked_again() {
    let bench = Bench::new();
    let stream = bench.stream();
    let tick = bench.long_work(&stream);
    tick.cover().unwrap();
    bench.fail_next(Operation::QueryEvent);
    assert_eq!(kind(tick.is_done()), ErrorKind::Other);
    bench.fail_next(Operation::SynchronizeEvent);
    assert_eq!(kind(tick.synchronize()), ErrorKind::Other);
    assert!(!tick.is_known_done());
    assert!(!tick.is_done().unwrap());
    tick.synchronize().unwrap();
    assert!(tick.is_known_done());
    assert_eq!(bench.cost(), (1, 0));
}

/// What is asked on the way is about other ticks.
#[test]
fn a_host_wait_succeeds_if_a_later_query_fails() {
    let bench = Bench::new();
    let stream = bench.stream();
    let stalled_and_covered = || {
        let tick = bench.long_work(&stream);
        tick.cover().unwrap();
        tick
    };
    let [first, second] = [stalled_and_covered(), stalled_and_covered()];
    let before = bench.calls(Operation::QueryEvent);
    bench.fail_next(Operation::QueryEvent);
    first.synchronize().unwrap();
    assert_eq!(bench.calls(Operation::QueryEvent), before + 1, "it failed");
    assert!(first.is_known_done());
    second.synchronize().unwrap();
}

#[test]
fn t3_a_failed_host_wait_recycles_nothing() {
    let bench = Bench::new();
    let stream = bench.stream();
    bench.stall(&stream);
    let tick = stream.tick();
    bench.fail_next(Operation::SynchronizeEvent);
    assert_eq!(kind(tick.synchronize()), ErrorKind::Other);
    stream.tick().cover().unwrap();
    assert_eq!(bench.calls(Operation::CreateEvent), 2, "the first is still pending");
}

#[test]
fn t4_ticks_of_a_stream_destroyed_by_other_code_are_answered_by_the_device() {
    let (bench, [one, two]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    bench.drop_destroyed(one);
    assert_eq!(kind(two.wait_for(&tick)), ErrorKind::InvalidUse);
    assert_eq!(kind(tick.cover()), ErrorKind::InvalidUse);
    assert!(!tick.is_done().unwrap());
    bench.fail_next(Operation::Synchronize);
    assert_eq!(kind(tick.synchronize()), ErrorKind::Other);
    assert!(!tick.is_done().unwrap());
    tick.synchronize().unwrap();
    assert!(tick.is_done().unwrap());
    assert_eq!((bench.cost(), bench.calls(Operation::Synchronize)), ((0, 0), 2));
    two.wait_for(&tick).unwrap();
    bench.fill_without_race(&two);
}

#[test]
fn a_lost_device_answers_every_question_with_its_loss() {
    let (bench, [one, two]) = Bench::with_streams();
    bench.busy(&one);
    let (covered, tick) = (one.tick(), one.tick());
    covered.cover().unwrap();
    bench.fill(&one);
    let open = one.tick();
    bench.subject.inject(Fault::LostAt { nth: 1 });
    assert_eq!(kind(two.wait_for(&open)), ErrorKind::DeviceLost);
    assert_eq!(kind(tick.is_done()), ErrorKind::DeviceLost);
    assert_eq!(kind(tick.synchronize()), ErrorKind::DeviceLost);
    assert_eq!(kind(open.cover()), ErrorKind::DeviceLost);
    assert!(!two.is_ordered_after(&tick) && !tick.is_known_done());
    drop(one);
    assert_eq!(kind(open.synchronize()), ErrorKind::DeviceLost);
}

#[test]
fn t4_ticks_without_a_last_event_are_answered_by_the_device() {
    for failing in [Operation::Record, Operation::CreateEvent] {
        let bench = Bench::new();
        let one = bench.stream();
        bench.fill(&one);
        let tick = one.tick();
        bench.fail_next(failing);
        drop(one);
        assert_eq!(bench.calls(Operation::DestroyStream), 1, "{failing:?}");
        assert_eq!(kind(tick.cover()), ErrorKind::InvalidUse);
        bench.device.synchronize().unwrap();
        assert!(tick.is_done().unwrap());
    }
}
