//! After a host wait for a stream or the device, its ticks are known done and cost nothing more.

use super::common::Bench;

#[test]
fn t1_ticks_are_known_done_once_their_stream_was_waited_for() {
    let (bench, [one, two]) = Bench::with_streams();
    bench.fill(&one);
    let (tick, other) = (one.tick(), two.tick());
    let before = bench.device.driver_calls();
    one.synchronize().unwrap();
    assert!(tick.is_known_done() && !other.is_known_done());
    let later = one.tick();
    assert!(!later.is_known_done(), "work may have come since");
    two.wait_for(&tick).unwrap();
    bench.fill(&two);
    assert_eq!((bench.cost(), bench.device.driver_calls().since(&before).total()), ((0, 0), 2), "a wait and a fill");
    bench.pass();
    bench.assert_no_race();
}

#[test]
fn t1_ticks_of_all_streams_are_known_done_once_the_device_was_waited_for() {
    let (bench, [one, two, idle]) = Bench::with_streams();
    bench.fill(&one);
    let ticks = [one.tick(), two.tick(), idle.tick(), bench.device.default_stream().tick()];
    drop(two);
    bench.device.synchronize().unwrap();
    assert!(ticks.iter().all(|tick| tick.is_known_done()));
    // A capture may then use memory that was used before it began.
    let capture = idle.begin_capture().unwrap();
    ticks.iter().for_each(|tick| idle.wait_for(tick).unwrap());
    bench.fill(&idle);
    drop(capture.end().unwrap());
    bench.assert_no_race();
}

#[test]
fn t1_nothing_is_known_after_a_wait_that_failed() {
    let bench = Bench::new();
    let stream = bench.stream();
    let tick = bench.long_work(&stream);
    let capture = bench.stream().begin_capture().unwrap();
    assert!(bench.device.synchronize().is_err());
    drop(capture);
    bench.fail_next(aquifer_device::Operation::SynchronizeStream);
    assert!(stream.synchronize().is_err());
    assert!(!tick.is_known_done());
    stream.synchronize().unwrap();
    assert!(tick.is_known_done());
}

#[test]
fn t4_numbers_go_to_new_streams_after_waits_for_the_device() {
    let bench = Bench::new();
    let mut ids = Vec::new();
    for _ in 0..50 {
        let streams = [bench.stream(), bench.stream()];
        bench.fill(&streams[0]);
        streams[1].wait_for(&streams[0].tick()).unwrap();
        bench.fill(&streams[1]);
        ids.extend(streams.each_ref().map(aquifer::Stream::id));
        // Both orders: streams that are there when the device is waited for, and ones that are
        // gone.
        let [first, second] = streams;
        drop(first);
        bench.device.synchronize().unwrap();
        drop(second);
    }
    bench.pass();
    bench.assert_no_race();
    let most = ids.iter().max().copied();
    assert!(most < Some(8), "{most:?}");
}
