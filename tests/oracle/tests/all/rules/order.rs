//! What orders work: streams, events, and the host's waits.

use std::thread;
use std::time::Duration;

use aquifer_device::{AccessKind, Device, Driver, RawStream, StreamFlags};
use aquifer_oracle::Judged;
use aquifer_oracle::RaceKind::Work;
use aquifer_sim::{Fault, SimConfig, SimDriver};

use crate::bench::{BYTES, Bench, LEGACY, MINE};

#[test]
fn work_of_one_stream_is_ordered() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.read(bench.free[0]);
    bench.write(bench.free[0]);
    bench.races_nowhere();
}

#[test]
fn streams_are_not_ordered() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.read(bench.blocking[1]);
    bench.races(Work);
}

#[test]
fn readers_do_not_race() {
    let bench = Bench::new();
    bench.read(bench.free[0]);
    bench.read(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn a_writer_waits_for_every_reader() {
    let bench = Bench::new();
    bench.read(bench.free[0]);
    bench.read(bench.free[1]);
    bench.order(bench.free[0], bench.blocking[0]);
    bench.write(bench.blocking[0]);
    bench.races(Work);
}

#[test]
fn ranges_that_meet_in_one_byte_race() {
    let bench = Bench::new();
    bench.both.memset(bench.memory, 1, 65, bench.free[0]).unwrap();
    bench.both.memset(bench.memory.offset(64), 1, 64, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn adjacent_ranges_do_not_race() {
    let bench = Bench::new();
    bench.both.memset(bench.memory, 1, 64, bench.free[0]).unwrap();
    bench.both.memset(bench.memory.offset(64), 1, 64, bench.free[1]).unwrap();
    bench.races_nowhere();
}

#[test]
fn a_wait_orders_what_was_recorded() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.order(bench.free[0], bench.free[1]);
    bench.read(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn a_wait_does_not_order_work_after_the_record() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.both.record(event, bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.both.wait(bench.free[1], event).unwrap();
    bench.read(bench.free[1]);
    bench.races(Work);
}

#[test]
fn order_passes_through_a_third_stream() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.order(bench.free[0], bench.blocking[0]);
    bench.order(bench.blocking[0], bench.free[1]);
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn a_wait_keeps_the_record_it_was_made_for() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    bench.both.wait(bench.free[1], event).unwrap();
    bench.both.record(event, bench.blocking[0]).unwrap();
    bench.read(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn a_later_record_replaces_the_earlier_one() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    bench.both.record(event, bench.blocking[0]).unwrap();
    bench.both.wait(bench.free[1], event).unwrap();
    bench.read(bench.free[1]);
    bench.races(Work);
}

#[test]
fn an_event_never_recorded_orders_nothing() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.wait(LEGACY, event).unwrap();
    bench.both.wait(bench.blocking[1], event).unwrap();
    bench.both.synchronize_event(event).unwrap();
    bench.read(bench.blocking[1]);
    bench.races(Work);
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.write(LEGACY);
    bench.read(bench.blocking[1]);
    bench.read(MINE);
    bench.write(RawStream(0));
    bench.races_nowhere();
}

#[test]
fn non_blocking_streams_do_not_wait_for_the_legacy_stream() {
    let bench = Bench::new();
    bench.write(LEGACY);
    bench.write(bench.free[0]);
    bench.races(Work);
}

#[test]
fn the_legacy_stream_does_not_wait_for_non_blocking_streams() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.write(LEGACY);
    bench.races(Work);
}

#[test]
fn a_record_on_the_legacy_stream_orders_blocking_streams() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.record(event, LEGACY).unwrap();
    bench.write(bench.blocking[1]);
    bench.races_nowhere();
}

#[test]
fn a_wait_of_the_legacy_stream_orders_blocking_streams() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.order(bench.free[0], LEGACY);
    bench.write(bench.blocking[1]);
    bench.races_nowhere();
}

#[test]
fn the_legacy_stream_waits_for_a_destroyed_stream() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.both.destroy_stream(bench.blocking[0]).unwrap();
    bench.write(LEGACY);
    bench.races_nowhere();
}

#[test]
fn the_work_of_a_destroyed_stream_still_runs() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.destroy_stream(bench.free[0]).unwrap();
    // It may get the handle of the destroyed one.
    let new = bench.both.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    bench.write(new);
    bench.races(Work);
}

#[test]
fn waiting_for_the_device_covers_destroyed_streams() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.destroy_stream(bench.free[0]).unwrap();
    bench.both.synchronize().unwrap();
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn threads_have_default_streams_of_their_own() {
    let bench = Bench::new();
    bench.write(MINE);
    thread::scope(|scope| scope.spawn(|| bench.write(MINE)).join()).unwrap();
    bench.races(Work);
}

#[test]
fn the_legacy_stream_waits_for_the_stream_of_an_ended_thread() {
    let bench = Bench::new();
    thread::scope(|scope| scope.spawn(|| bench.write(MINE)).join()).unwrap();
    bench.write(LEGACY);
    bench.races_nowhere();
}

#[test]
fn what_one_thread_waited_for_is_known_to_the_next_caller() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    thread::scope(|scope| scope.spawn(|| bench.both.synchronize_stream(bench.free[0])).join()).unwrap().unwrap();
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn waiting_for_a_stream_on_the_host_orders_others() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.synchronize_stream(bench.free[0]).unwrap();
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn waiting_for_an_event_covers_the_record_alone() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.fill(bench.other, bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.both.synchronize_event(event).unwrap();
    bench.fill(bench.other, bench.free[1]);
    bench.both.assert_found(&[]);
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn a_query_tells_only_when_it_is_true() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    let is_done = || bench.both.query_event(event).unwrap() && bench.both.query_stream(bench.free[0]).unwrap();
    assert!(!is_done());
    bench.both.sim.advance(Duration::from_secs(1));
    assert!(is_done());
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn a_query_that_is_false_orders_nothing() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    assert!(!bench.both.query_event(event).unwrap() && !bench.both.query_stream(bench.free[0]).unwrap());
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn an_elapsed_time_tells_that_both_events_are_complete() {
    let bench = Bench::new();
    let [start, end] = [(); 2].map(|()| bench.both.create_event(true).unwrap());
    bench.both.record(start, bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(end, bench.free[0]).unwrap();
    bench.both.sim.advance(Duration::from_secs(1));
    bench.both.elapsed_ms(start, end).unwrap();
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn freeing_device_memory_waits_for_all_work() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.free(bench.other).unwrap();
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn calls_that_fail_do_nothing() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    let not_a_stream = RawStream(0xdead);
    bench.both.synchronize_stream(not_a_stream).unwrap_err();
    bench.both.free(bench.memory.offset(1)).unwrap_err();
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn the_work_of_a_lost_device_never_happens() {
    let bench = Bench::new();
    bench.download(64, bench.free[0]);
    bench.both.sim.inject(Fault::LostAt { nth: 1 });
    assert!(bench.both.create_event(false).unwrap_err().is_device_lost());
    bench.host_access(AccessKind::Write);
    bench.races_nowhere();
}

#[test]
fn devices_work_over_the_decorator() {
    let bench = Bench::new();
    let device = Device::new(bench.both.judged.clone());
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    one.fill(bench.memory, 1, BYTES).unwrap();
    two.wait_for(&one.tick()).unwrap();
    two.fill(bench.memory, 2, BYTES).unwrap();
    bench.both.assert_found(&[]);
    one.fill(bench.memory, 3, BYTES).unwrap();
    bench.both.assert_found(&[Work]);
    let race = bench.both.judged.races()[0].to_string();
    assert!(race.starts_with("unordered work: `cuMemsetD8Async` on stream 0x"), "{race}");
}

#[test]
fn peers_invent_no_races() {
    let bench = Bench::new();
    let peer = Judged::new(SimDriver::new(SimConfig::new(64 << 20).ordinal(1)));
    let (theirs, event) = (peer.create_stream(StreamFlags::default()).unwrap(), peer.create_event(false).unwrap());
    let memory = peer.alloc(BYTES).unwrap();
    bench.write(bench.free[0]);
    let ours = bench.both.create_event(false).unwrap();
    bench.both.record(ours, bench.free[0]).unwrap();
    peer.wait_peer(theirs, &*bench.both.judged, ours).unwrap();
    peer.record(event, theirs).unwrap();
    bench.both.wait_peer(bench.free[1], &*peer, event).unwrap();
    bench.both.copy_peer(bench.memory, &*peer, memory, BYTES, bench.free[1]).unwrap();
    bench.both.assert_found(&[]);
    bench.write(bench.free[0]);
    bench.races(Work);
}
