//! T1 to T4 with one thread: cost, recycling of events, and numbers of streams.

use aquifer_tests::prelude::*;

use super::common::{Bench, LONG, kind};

#[test]
fn a_tick_costs_no_driver_call() {
    let bench = Bench::new();
    let stream = bench.stream();
    let calls = bench.device.driver_calls().total();
    let tick = stream.tick();
    assert!(stream.is_ordered_after(&tick), "later work of a stream comes after its own ticks");
    assert!(!tick.is_done().unwrap(), "no event covers it, so nothing is known");
    stream.wait_for(&tick).unwrap();
    assert_eq!(bench.device.driver_calls().total(), calls);
    assert_eq!(bench.cost(), (0, 0));
}

#[test]
fn t1_one_event_covers_all_ticks_before_it_and_none_after() {
    let (bench, [one, two]) = Bench::with_streams();
    let early = bench.long_work(&one);
    bench.fill(&one);
    let late = one.tick();
    two.wait_for(&late).unwrap();
    assert_eq!(bench.cost(), (1, 1));
    two.wait_for(&early).unwrap();
    assert!(two.is_ordered_after(&early) && two.is_ordered_after(&late));
    assert_eq!(bench.cost(), (1, 1));
    bench.fill(&one);
    let after = one.tick();
    assert!(!two.is_ordered_after(&after));
    assert!(after.n() > late.n());
    two.wait_for(&after).unwrap();
    assert_eq!(bench.cost(), (2, 2));
    bench.fill_without_race(&two);
}

#[test]
fn t1_an_event_for_the_host_serves_streams_too() {
    let (bench, [one, two, three]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    tick.cover().unwrap();
    tick.cover().unwrap();
    assert!(tick.timeline().is_covered(tick.n()));
    assert_eq!(bench.cost(), (1, 0));
    two.wait_for(&tick).unwrap();
    three.wait_for(&tick).unwrap();
    assert_eq!(bench.cost(), (1, 2));
}

#[test]
fn t2_the_same_dependency_is_never_paid_twice() {
    let (bench, [one, two]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    for _ in 0..10 {
        two.wait_for(&tick).unwrap();
    }
    assert_eq!(bench.cost(), (1, 1));
    assert_eq!((bench.calls(Operation::Record), bench.calls(Operation::Wait)), (1, 1));
    bench.fill_without_race(&two);
}

#[test]
fn t2_knowledge_is_transitive() {
    let bench = Bench::new();
    let streams = [bench.stream(), bench.stream(), bench.stream(), bench.stream()];
    let first = bench.long_work(&streams[0]);
    for pair in streams.windows(2) {
        pair[1].wait_for(&pair[0].tick()).unwrap();
    }
    assert_eq!(bench.cost(), (3, 3));
    assert!(streams[3].is_ordered_after(&first));
    streams[3].wait_for(&first).unwrap();
    assert_eq!(bench.cost(), (3, 3));
    bench.fill_without_race(&streams[3]);
}

#[test]
fn t2_an_event_has_the_clock_of_its_stream_at_the_record() {
    let (bench, [one, two, three]) = Bench::with_streams();
    let first = bench.long_work(&one);
    // Covered before the second stream learns of the first.
    let second = two.tick();
    second.cover().unwrap();
    two.wait_for(&first).unwrap();
    three.wait_for(&second).unwrap();
    assert!(three.is_ordered_after(&second));
    assert!(!three.is_ordered_after(&first), "the event is older than what its stream knows now");
    three.wait_for(&first).unwrap();
    assert_eq!(bench.cost(), (2, 3));
    bench.fill_without_race(&three);
}

#[test]
fn t2_a_failed_record_after_many_copies_leaves_what_was_covered() {
    let (bench, [one]) = Bench::with_streams();
    bench.busy(&one);
    let copy = || {
        bench.fill(&one);
        let tick = one.tick();
        tick.timeline().cover_copy(tick.n()).map(|()| tick)
    };
    (0..199).for_each(|_| drop(copy().unwrap()));
    let last = copy().unwrap();
    bench.subject.inject(Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code(999) });
    copy().unwrap_err();
    assert!(last.timeline().is_covered(last.n()));
    bench.pass();
    assert!(last.is_done().unwrap());
}

#[test]
fn t2_user_events_order_streams_as_ticks_do() {
    let (bench, [one, two, three]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    two.wait_for(&tick).unwrap();
    let event = bench.device.create_event(false).unwrap();
    event.record(&two).unwrap();
    let later = two.tick();
    three.wait_event(&event).unwrap();
    assert!(three.is_ordered_after(&tick));
    assert!(!three.is_ordered_after(&later), "taken after the record");
    assert_eq!(bench.cost(), (1, 1), "user events are not counted");
    bench.fill_without_race(&three);
}

#[test]
fn t2_a_user_event_recorded_again_orders_by_its_latest_record() {
    let (bench, [one, two, three]) = Bench::with_streams();
    let event = bench.device.create_event(false).unwrap();
    let (first, second) = (one.tick(), two.tick());
    event.record(&one).unwrap();
    event.record(&two).unwrap();
    three.wait_event(&event).unwrap();
    assert!(!three.is_ordered_after(&first));
    assert!(three.is_ordered_after(&second));
}

#[test]
fn ticks_known_done_order_every_stream_without_cost() {
    let (bench, [one, two]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    tick.cover().unwrap();
    assert!(!tick.is_done().unwrap());
    bench.pass();
    assert!(tick.is_done().unwrap());
    assert_eq!(bench.cost(), (1, 0));
    let queries = bench.calls(Operation::QueryEvent);
    assert!(tick.is_done().unwrap());
    two.wait_for(&tick).unwrap();
    tick.cover().unwrap();
    tick.synchronize().unwrap();
    assert_eq!(bench.calls(Operation::QueryEvent), queries, "what is known is not asked again");
    assert_eq!(bench.cost(), (1, 0));
    bench.fill_without_race(&two);
}

#[test]
fn asking_never_records() {
    let bench = Bench::new();
    let stream = bench.stream();
    bench.fill(&stream);
    let tick = stream.tick();
    bench.pass();
    assert!(!tick.is_done().unwrap(), "done on the device, and not known");
    assert_eq!(bench.cost(), (0, 0));
    tick.cover().unwrap();
    bench.pass();
    assert!(tick.is_done().unwrap());
    assert_eq!(bench.cost(), (1, 0));
}

#[test]
fn synchronize_waits_for_the_oldest_event_that_covers_the_tick() {
    let bench = Bench::new();
    let stream = bench.stream();
    let early = bench.long_work(&stream);
    early.cover().unwrap();
    let between = bench.subject.now_ns();
    let late = bench.long_work(&stream);
    late.cover().unwrap();
    early.synchronize().unwrap();
    let waited = bench.subject.now_ns() - between;
    let long = u64::try_from(LONG.as_nanos()).unwrap();
    assert!((long / 2..long + long / 2).contains(&waited), "{waited} ns");
    assert!(early.is_done().unwrap() && !late.is_done().unwrap());
    late.synchronize().unwrap();
    assert!(late.is_done().unwrap());
    assert_eq!(bench.cost(), (2, 0));
}

#[test]
fn synchronize_records_where_nothing_covers_the_tick() {
    let (bench, [one, two]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    tick.synchronize().unwrap();
    assert_eq!((bench.cost(), bench.calls(Operation::SynchronizeEvent)), ((1, 0), 1));
    tick.synchronize().unwrap();
    assert_eq!(bench.calls(Operation::SynchronizeEvent), 1);
    bench.fill_without_race(&two);
}

#[test]
fn t3_events_are_recycled_when_complete_and_not_before() {
    let (bench, [one, two]) = Bench::with_streams();
    bench.stall(&one);
    for _ in 0..5 {
        one.tick().cover().unwrap();
    }
    assert_eq!(bench.calls(Operation::CreateEvent), 5, "none of them is complete");
    bench.pass();
    assert!(one.timeline().is_done(4).unwrap());
    for _ in 0..5 {
        two.tick().cover().unwrap();
    }
    assert_eq!(bench.calls(Operation::CreateEvent), 5, "all of them were recycled");
    assert_eq!(bench.calls(Operation::DestroyEvent), 0);
}

#[test]
fn t3_steady_use_needs_a_bounded_number_of_events() {
    let (bench, [one, two]) = Bench::with_streams();
    for _ in 0..1000 {
        bench.fill(&one);
        let tick = one.tick();
        two.wait_for(&tick).unwrap();
        bench.fill(&two);
        let back = two.tick();
        one.wait_for(&back).unwrap();
        bench.pass();
        tick.is_done().unwrap();
        back.is_done().unwrap();
    }
    assert_eq!(bench.cost(), (2000, 2000));
    assert_eq!(bench.calls(Operation::CreateEvent), 2);
    assert!(bench.calls(Operation::QueryEvent) <= 2000, "at most one query each");
    let frontier = one.timeline().frontier();
    assert!(frontier >= 998, "it is known how far the stream got: {frontier}");
    bench.assert_no_race();
}

#[test]
fn t3_an_event_that_is_not_complete_is_destroyed_at_a_later_call() {
    let bench = Bench::new();
    let two = bench.stream();
    let one = bench.stream();
    bench.busy(&one);
    one.tick().cover().unwrap();
    // A timeline ends with its stream if its number cannot be used again and no tick is held.
    bench.drop_destroyed(one);
    assert_eq!(bench.calls(Operation::DestroyEvent), 0, "the pending event goes without a call");
    two.tick().cover().unwrap();
    assert_eq!(bench.calls(Operation::DestroyEvent), 1);
}

#[test]
fn t3_events_of_a_destroyed_stream_are_used_again() {
    let (bench, [one, two]) = Bench::with_streams();
    bench.busy(&one);
    one.tick().cover().unwrap();
    let calls = bench.device.driver_calls();
    drop(one);
    let spent = bench.device.driver_calls().since(&calls);
    assert_eq!((spent.of(Operation::Record), spent.of(Operation::DestroyStream)), (1, 1), "its last event");
    bench.pass();
    let _new = bench.stream();
    let calls = bench.device.driver_calls();
    two.tick().cover().unwrap();
    assert_eq!(bench.device.driver_calls().since(&calls).of(Operation::CreateEvent), 0);
}

#[test]
fn t4_ticks_of_a_destroyed_stream_stay_answerable() {
    let (bench, [one, two]) = Bench::with_streams();
    let tick = bench.long_work(&one);
    drop(one);
    assert!(!tick.timeline().is_open());
    assert_eq!(bench.cost(), (1, 0), "its last event");
    assert!(!tick.is_done().unwrap());
    two.wait_for(&tick).unwrap();
    assert_eq!(bench.cost(), (1, 1));
    bench.fill_without_race(&two);
    bench.pass();
    assert!(tick.is_done().unwrap());
}

#[test]
fn t4_a_new_stream_with_the_same_handle_is_another_one() {
    let bench = Bench::new();
    let one = bench.stream();
    let old = bench.long_work(&one);
    let (raw, id) = (one.raw(), one.id());
    drop(one);
    let new = bench.stream();
    assert!(new.raw() == raw || !Subject::has_simulated_device(), "the driver reuses handles");
    assert_ne!(new.id(), id);
    assert!(!new.is_ordered_after(&old));
    let cost = bench.cost();
    new.wait_for(&old).unwrap();
    assert_eq!(bench.cost(), (cost.0, cost.1 + 1));
    bench.fill_without_race(&new);
    let tick = new.tick();
    tick.cover().unwrap();
    bench.pass();
    assert!(old.is_done().unwrap() && tick.is_done().unwrap());
}

#[test]
fn t4_the_handle_reused_before_the_old_ticks_are_asked() {
    let bench = Bench::new();
    let old = {
        let one = bench.stream();
        bench.subject.stall(&one, LONG / 4).unwrap();
        bench.fill(&one);
        one.tick()
    };
    let new = bench.stream();
    let pending = bench.long_work(&new);
    pending.cover().unwrap();
    bench.subject.advance(LONG / 2);
    assert!(old.is_done().unwrap(), "the work of the destroyed stream alone counts");
    assert!(!pending.is_done().unwrap());
    let raced = !bench.subject.violations().is_empty();
    assert!(raced || !Subject::has_simulated_device(), "the fills are not ordered, and the test relies on nothing");
}

#[test]
fn t4_a_number_goes_to_a_new_stream_once_all_its_work_is_done() {
    let (bench, [one, two]) = Bench::with_streams();
    two.wait_for(&one.tick()).unwrap();
    bench.fill(&one);
    let (id, before) = (one.id(), one.tick());
    let timeline = one.timeline().clone();
    drop(one);
    let after = timeline.now();
    bench.pass();
    let new = bench.stream();
    assert_eq!(new.id(), id);
    assert!(timeline.is_open() && before.is_done().unwrap() && timeline.is_known_done(after));
    let pending = bench.long_work(&new);
    assert!(!two.is_ordered_after(&pending), "what it waited for is the work of the stream before");
    pending.cover().unwrap();
    assert!(!pending.is_done().unwrap(), "ticks count on");
    two.wait_for(&pending).unwrap();
    bench.fill_without_race(&two);
}

#[test]
fn t4_numbers_of_streams_that_come_and_go_stay_small() {
    let bench = Bench::new();
    let keep = bench.stream();
    for _ in 0..100 {
        let flags = [false, true].map(|non_blocking| StreamFlags { non_blocking, priority: 0 });
        let streams = flags.map(|flags| bench.device.stream_with(flags).unwrap());
        for stream in &streams {
            stream.wait_for(&keep.tick()).unwrap();
            bench.fill(stream);
            keep.wait_for(&stream.tick()).unwrap();
            bench.fill(&keep);
        }
        assert!(streams.iter().all(|stream| stream.id() <= keep.id() + 2), "{streams:?}");
        drop(streams);
        bench.pass();
    }
    bench.assert_no_race();
}

#[test]
fn t4_a_number_without_a_last_event_is_not_given_out_again() {
    let bench = Bench::new();
    let one = bench.stream();
    bench.fill(&one);
    let id = one.id();
    bench.drop_destroyed(one);
    bench.pass();
    assert_ne!(bench.stream().id(), id);
}

#[test]
fn the_legacy_stream_is_ordered_through_ticks_like_any_other() {
    let bench = Bench::new();
    let (legacy, two) = (bench.device.default_stream().clone(), bench.stream());
    let tick = bench.long_work(&legacy);
    assert!(!two.is_ordered_after(&tick), "a stream that does not block does not wait for it");
    two.wait_for(&tick).unwrap();
    bench.fill(&two);
    legacy.wait_for(&two.tick()).unwrap();
    bench.fill(&legacy);
    assert_eq!(bench.cost(), (2, 2));
    bench.assert_no_race();
}

#[test]
fn events_are_recorded_and_compared_on_their_own_device() {
    let (bench, other) = (Bench::new(), Bench::new());
    let (here, there) = (bench.stream(), other.stream());
    assert_eq!(here.id(), there.id(), "numbers are per device, so they say nothing across devices");
    let event = other.device.create_event(true).unwrap();
    assert_eq!(kind(event.record(&here)), ErrorKind::InvalidUse);
    event.record(&there).unwrap();
    assert_eq!(kind(event.elapsed_ms(&bench.device.create_event(true).unwrap())), ErrorKind::InvalidUse);
    assert_eq!((bench.cost(), other.cost()), ((0, 0), (0, 0)));
}
