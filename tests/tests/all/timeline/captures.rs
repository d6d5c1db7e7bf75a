//! T5: ticks order nothing across the border of a capture.

use aquifer_tests::prelude::*;

use super::common::{Bench, kind};

#[test]
fn t5_ticks_open_at_the_start_stay_open_and_covered_ones_are_answered() {
    let (bench, [one, two]) = Bench::with_streams();
    let covered = bench.long_work(&one);
    covered.cover().unwrap();
    let open = one.tick();
    let capture = one.begin_capture().unwrap();
    assert_eq!(kind(open.cover()), ErrorKind::Capture);
    assert_eq!(kind(open.synchronize()), ErrorKind::Capture);
    assert_eq!(kind(two.wait_for(&open)), ErrorKind::Capture);
    assert!(!open.is_done().unwrap());
    two.wait_for(&covered).unwrap();
    bench.pass();
    assert!(covered.is_done().unwrap() && !open.is_done().unwrap());
    capture.end().unwrap();
    assert_eq!(bench.cost(), (1, 1));
    two.wait_for(&open).unwrap();
    assert_eq!(bench.cost(), (2, 2));
    bench.fill_without_race(&two);
}

#[test]
fn t5_a_capturing_stream_waits_for_no_tick_and_the_capture_survives_the_attempt() {
    let (bench, [one, two]) = Bench::with_streams();
    let outside = bench.long_work(&two);
    let capture = one.begin_capture().unwrap();
    assert_eq!(kind(one.wait_for(&outside)), ErrorKind::Capture);
    bench.fill(&one);
    let graph = capture.end().unwrap();
    assert_eq!(bench.cost(), (0, 0));
    one.wait_for(&outside).unwrap();
    graph.launch(&one).unwrap();
    bench.assert_no_race();
    assert_eq!(bench.cost(), (1, 1));
}

/// CUDA answers 900 and breaks the capture, so the launch is refused before the driver sees it.
#[test]
fn a_graph_is_not_launched_into_a_capture_which_goes_on() {
    let bench = Bench::new();
    let stream = bench.stream();
    let capture = stream.begin_capture().unwrap();
    bench.fill(&stream);
    let graph = capture.end().unwrap();
    let capture = stream.begin_capture().unwrap();
    assert_eq!(kind(graph.launch(&stream)), ErrorKind::Capture);
    bench.fill(&stream);
    let second = capture.end().unwrap();
    graph.launch(&stream).unwrap();
    second.launch(&stream).unwrap();
    bench.assert_no_race();
}

#[test]
fn t5_ticks_taken_inside_are_ticks_of_the_stream_once_it_is_over() {
    let (bench, [one, two]) = Bench::with_streams();
    let capture = one.begin_capture().unwrap();
    bench.fill(&one);
    let inside = one.tick();
    assert_eq!(kind(two.wait_for(&inside)), ErrorKind::Capture);
    assert!(!inside.is_done().unwrap());
    let graph = capture.end().unwrap();
    graph.launch(&one).unwrap();
    let after = one.tick();
    two.wait_for(&after).unwrap();
    bench.fill_without_race(&two);
    assert_eq!(bench.cost(), (1, 1));
}

#[test]
fn t5_an_event_recorded_in_a_capture_orders_no_stream() {
    let (bench, [one, two]) = Bench::with_streams();
    let before = bench.long_work(&one);
    let (fork, join) = (bench.device.create_event(false).unwrap(), bench.device.create_event(false).unwrap());
    let capture = one.begin_capture().unwrap();
    fork.record(&one).unwrap();
    two.wait_event(&fork).unwrap();
    assert!(!two.is_ordered_after(&before), "it waits within the graph only");
    bench.fill(&two);
    join.record(&two).unwrap();
    let two_inside = two.tick();
    one.wait_event(&join).unwrap();
    assert!(!one.is_ordered_after(&two_inside));
    bench.fill(&one);
    capture.end().unwrap();
    assert!(!two.is_ordered_after(&before));
    two.wait_for(&before).unwrap();
    assert_eq!(bench.cost(), (1, 1));
    bench.fill_without_race(&two);
}

#[test]
fn t5_a_stream_that_joined_a_capture_is_capturing_until_its_end() {
    let (bench, [one, two, three]) = Bench::with_streams();
    bench.fill(&three);
    let outside = three.tick();
    let open = two.tick();
    let (fork, join) = (bench.device.create_event(false).unwrap(), bench.device.create_event(false).unwrap());
    let capture = one.begin_capture().unwrap();
    fork.record(&one).unwrap();
    two.wait_event(&fork).unwrap();
    assert_eq!(kind(two.wait_for(&outside)), ErrorKind::Capture);
    assert_eq!(kind(three.wait_for(&open)), ErrorKind::Capture);
    assert_eq!(kind(open.cover()), ErrorKind::Capture);
    join.record(&two).unwrap();
    one.wait_event(&join).unwrap();
    capture.end().expect("none of the refused calls reached the driver");
    assert_eq!(bench.cost(), (0, 0));
    two.wait_for(&outside).unwrap();
    three.wait_for(&open).unwrap();
    assert_eq!(bench.cost(), (2, 2));
}

#[test]
fn t5_an_event_of_a_capture_that_is_over_orders_nothing() {
    let (bench, [one, two]) = Bench::with_streams();
    let before = one.tick();
    let event = bench.device.create_event(false).unwrap();
    let capture = one.begin_capture().unwrap();
    event.record(&one).unwrap();
    drop(capture);
    let calls = bench.calls(Operation::Wait);
    assert_eq!(kind(two.wait_event(&event)), ErrorKind::Capture);
    assert_eq!(bench.calls(Operation::Wait), calls, "the driver was not asked");
    assert!(!two.is_ordered_after(&before));
    two.wait_for(&before).unwrap();
    assert_eq!(bench.cost(), (1, 1), "the stream did not get stuck in the capture");
}

#[test]
fn t5_a_capture_changes_no_clock() {
    let (bench, [one, two]) = Bench::with_streams();
    let tick = bench.long_work(&two);
    one.wait_for(&tick).unwrap();
    let clock = one.timeline().clock();
    let capture = one.begin_capture().unwrap();
    drop(capture);
    assert_eq!(one.timeline().clock(), clock);
    assert!(one.is_ordered_after(&tick));
}

#[test]
fn t5_a_capture_that_does_not_begin_changes_nothing() {
    let (bench, [one, two]) = Bench::with_streams();
    bench.fail_next(Operation::BeginCapture);
    assert!(one.begin_capture().is_err());
    two.wait_for(&one.tick()).unwrap();
    assert_eq!(bench.cost(), (1, 1));
    let capture = one.begin_capture().unwrap();
    assert_eq!(kind(one.begin_capture()), ErrorKind::Capture, "it captures already");
    assert_eq!(kind(one.tick().cover()), ErrorKind::Capture, "the first capture goes on");
    capture.end().unwrap();
    one.tick().cover().unwrap();
}

#[test]
fn t5_a_capture_that_fails_to_end_is_over_for_the_timeline() {
    let (bench, [one, two]) = Bench::with_streams();
    let (event, memory) = (bench.device.create_event(false).unwrap(), bench.device.alloc(512).unwrap());
    let capture = one.begin_capture().unwrap();
    // Work of a stream that joined and does not join back breaks it.
    event.record(&one).unwrap();
    two.wait_event(&event).unwrap();
    two.fill(memory, 0, 512).unwrap();
    assert_eq!(kind(bench.device.synchronize()), ErrorKind::Capture, "and what would break it earlier is refused");
    assert_eq!(kind(capture.end()), ErrorKind::Capture);
    one.tick().cover().unwrap();
    assert_eq!(bench.cost(), (1, 0));
}

#[test]
fn t5_a_capture_that_the_driver_does_not_end_goes_on_and_can_be_ended_later() {
    let bench = Bench::new();
    let stream = bench.stream();
    let fail = || bench.fail_next(Operation::EndCapture);
    let capture = stream.begin_capture().unwrap();
    fail();
    let error = capture.end().unwrap_err();
    assert!(error.kind == ErrorKind::Other && error.to_string().ends_with("the capture goes on"), "{error}");
    assert!(stream.is_capturing() && bench.device.is_capturing());
    assert_eq!(kind(stream.tick().cover()), ErrorKind::Capture);
    capture.end().unwrap();
    drop(capture);
    stream.tick().cover().unwrap();
}

/// Some codes sound as if the stream were gone.
#[test]
fn t5_a_capture_that_the_driver_does_not_end_goes_on_with_any_code() {
    for (code, by_drop) in
        [Code::NOT_PERMITTED, Code::INVALID_VALUE].into_iter().flat_map(|code| [(code, false), (code, true)])
    {
        let bench = Bench::new();
        let stream = bench.stream();
        let capture = stream.begin_capture().unwrap();
        bench.subject.inject(Fault::Nth { operation: Some(Operation::EndCapture), nth: 1, code });
        if !by_drop {
            assert_eq!(kind(capture.end()), ErrorKind::InvalidUse);
        }
        drop(capture);
        assert_eq!(stream.is_capturing(), by_drop, "{code:?}");
        // What goes on is ended for the next one.
        stream.begin_capture().unwrap().end().unwrap();
        bench.device.synchronize().unwrap();
        stream.tick().synchronize().unwrap();
    }
}

#[test]
fn t5_the_legacy_stream_is_not_used_while_a_blocking_stream_captures() {
    let bench = Bench::new();
    let (legacy, two) = (bench.device.default_stream().clone(), bench.stream());
    let blocking = bench.device.stream_with(StreamFlags { non_blocking: false, priority: 0 }).unwrap();
    let (tick, other) = (legacy.tick(), two.tick());
    let capture = blocking.begin_capture().unwrap();
    assert_eq!(kind(tick.cover()), ErrorKind::Capture);
    assert_eq!(kind(two.wait_for(&tick)), ErrorKind::Capture);
    assert_eq!(kind(legacy.wait_for(&other)), ErrorKind::Capture);
    capture.end().expect("the refused calls did not break it");
    two.wait_for(&tick).unwrap();
    // A capture of a stream that does not block is no obstacle.
    let capture = bench.stream().begin_capture().unwrap();
    legacy.tick().cover().unwrap();
    legacy.wait_for(&other).unwrap();
    capture.end().unwrap();
}

#[test]
fn t5_a_member_dropped_during_the_capture_is_destroyed_after_it() {
    let (bench, [one, two]) = Bench::with_streams();
    let event = bench.device.create_event(false).unwrap();
    let capture = one.begin_capture().unwrap();
    event.record(&one).unwrap();
    two.wait_event(&event).unwrap();
    let tick = two.tick();
    drop(two);
    assert_eq!(kind(tick.cover()), ErrorKind::Capture);
    assert_eq!(bench.calls(Operation::DestroyStream), 0);
    let ended = capture.end();
    if Subject::has_simulated_device() {
        ended.expect("it did nothing there, so it need not join back");
    }
    tick.synchronize().unwrap();
    one.tick().cover().unwrap();
    bench.device.settle();
    assert_eq!(bench.calls(Operation::DestroyStream), 1);
    assert!(tick.is_done().unwrap());
}
