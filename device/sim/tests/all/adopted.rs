//! Streams that another library owns, adopted by a device (T4).

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{Code, Device, ErrorKind, Operation, RawStream, Result, StreamFlags};
use aquifer_sim::{Conditional, Fault};

use crate::common::{Bench, MIB, kind};

/// Events recorded and waits inserted so far.
fn cost(device: &Device) -> (u64, u64) {
    let counts = device.timeline_counts();
    (counts.events_recorded, counts.waits_inserted)
}

#[test]
fn t5_a_capturing_stream_stays_adopted_until_its_capture_ends() {
    let bench = Bench::new();
    let raw = bench.device.driver().create_stream(StreamFlags::default()).unwrap();
    // SAFETY: the stream lives to the end of the test, and is adopted once.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    bench.fill(external.stream());
    let tick = external.stream().tick();
    let capture = external.stream().begin_capture().unwrap();
    assert_eq!(kind(external.release()), ErrorKind::Capture);
    assert!(external.stream().is_capturing() && tick.timeline().is_open());
    bench.fill(external.stream());
    let graph = capture.end().unwrap();
    graph.launch(external.stream()).unwrap();
    external.release().unwrap();
    external.release().expect("once is enough");
    assert!(!tick.timeline().is_open());
    tick.synchronize().unwrap();
    assert_eq!((cost(&bench.device), bench.driver.violations()), ((1, 0), vec![]));
}

/// What a graph keeps may be the stream that it was captured on, and go as soon as the capture has
/// ended.
#[test]
fn an_adopted_stream_that_its_own_graph_keeps_goes_with_it() {
    let bench = Bench::new();
    let raw = bench.device.driver().create_stream(StreamFlags::default()).unwrap();
    // SAFETY: the stream lives to the end of the test, and is adopted once.
    let external = unsafe { bench.device.adopt_stream(raw) };
    let stream = external.stream().clone();
    let capture = stream.begin_capture().unwrap();
    let external: Arc<dyn Any + Send + Sync> = Arc::new(external);
    stream.launches_of_capture().unwrap().keep(&external);
    drop(external);
    drop(capture.end().unwrap());
    assert!(!stream.tick().timeline().is_open());
    bench.device.synchronize().unwrap();
}

/// The library that captures the body may have ended it before, or not.
#[test]
fn an_adopted_stream_with_a_body_of_a_graph_ends_the_body_and_not_the_graph() {
    for released in [true, false] {
        let bench = Bench::new();
        let (driver, stream) = (&bench.driver, bench.device.stream().unwrap());
        let raw = bench.device.driver().create_stream(StreamFlags::default()).unwrap();
        // SAFETY: the stream lives to the end of the test, and is adopted once.
        let mut external = unsafe { bench.device.adopt_stream(raw) };
        let capture = stream.begin_capture().unwrap();
        let launches = stream.launches_of_capture().unwrap();
        let node = driver.add_conditional(stream.raw(), Conditional::If, 1, 1).unwrap();
        driver.come_after_conditional(stream.raw(), node).unwrap();
        driver.begin_body(node, 0, raw).unwrap();
        let body = stream.announce_body(external.stream()).unwrap();
        bench.fill(external.stream());
        if released {
            driver.end_body(raw).unwrap();
            external.release().unwrap();
        } else {
            drop(external);
            driver.end_body(raw).unwrap();
        }
        drop(body);
        let graph = capture.end().unwrap();
        assert!(!launches.is_over(), "{released}");
        // The stream that was dropped in a capture has no last event to be ordered after.
        bench.device.synchronize().unwrap();
        graph.launch(&stream).unwrap();
        bench.device.synchronize().unwrap();
        assert_eq!(bench.driver.violations(), vec![], "{released}");
    }
}

#[test]
fn a_body_that_has_ended_keeps_no_stream() {
    let bench = Bench::new();
    let (driver, [stream, side]) = (&bench.driver, [(); 2].map(|()| bench.device.stream().unwrap()));
    let capture = stream.begin_capture().unwrap();
    let node = driver.add_conditional(stream.raw(), Conditional::If, 1, 1).unwrap();
    driver.come_after_conditional(stream.raw(), node).unwrap();
    driver.begin_body(node, 0, side.raw()).unwrap();
    let body = stream.announce_body(&side).unwrap();
    let event = bench.device.create_event(false).unwrap();
    event.record(&side).unwrap();
    driver.end_body(side.raw()).unwrap();
    drop(body);
    drop(capture.end().unwrap());
    let tick = stream.tick();
    drop((capture, stream));
    assert!(!tick.timeline().is_open());
}

/// No handle is left that could end its capture.
#[test]
fn t5_dropping_an_adopted_stream_ends_its_capture() {
    for fails in [0, 4, 8] {
        let bench = Bench::new();
        let raw = bench.device.driver().create_stream(StreamFlags::default()).unwrap();
        // SAFETY: the stream lives to the end of the test, and is adopted once.
        let external = unsafe { bench.device.adopt_stream(raw) };
        let (tick, capture) = (external.stream().tick(), external.stream().begin_capture().unwrap());
        for nth in 1..=fails {
            bench.driver.inject(Fault::Nth { operation: Some(Operation::EndCapture), nth, code: Code(999) });
        }
        drop(external);
        assert!(!bench.device.is_capturing());
        assert_eq!(kind(capture.end()), ErrorKind::InvalidUse);
        drop(capture);
        bench.driver.clear_faults();
        if fails > 0 {
            // What our driver did not end the owner does.
            bench.device.driver().end_capture(raw).map(drop).unwrap();
        }
        tick.synchronize().unwrap();
        bench.device.synchronize().unwrap();
    }
}

#[test]
fn t4_waiting_for_the_device_answers_no_tick_taken_later() {
    let bench = Bench::new();
    let raw = bench.device.driver().create_stream(StreamFlags::default()).unwrap();
    // SAFETY: the stream lives to the end of the test, and is adopted once.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    let (stream, tick) = (external.stream().clone(), external.stream().tick());
    bench.driver.inject(Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code(999) });
    assert_eq!(kind(external.release()), ErrorKind::Other);
    tick.synchronize().unwrap();
    // The owner goes on.
    bench.device.driver().memset(bench.ptr, 1, MIB, raw).unwrap();
    assert!(!stream.tick().is_done().unwrap());
}

#[test]
fn t4_an_adopted_stream_is_covered_until_released_and_its_ticks_after() {
    let bench = Bench::new();
    let driver = bench.device.driver();
    let raw = driver.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    // SAFETY: live until it is released below, and adopted once.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    bench.driver.stall(raw, Duration::from_secs(1)).unwrap();
    // Enqueued by the owner, behind the timeline's back.
    driver.memset(bench.ptr, 1, 64, raw).unwrap();
    let tick = external.stream().tick();
    external.release().unwrap();
    assert_eq!(cost(&bench.device), (1, 0));
    driver.destroy_stream(raw).unwrap();
    let two = bench.device.stream().unwrap();
    assert_eq!(two.raw(), raw);
    two.wait_for(&tick).unwrap();
    bench.fill(&two);
    bench.assert_no_violation();
    assert_eq!(cost(&bench.device), (1, 1));
}

#[test]
fn t4_an_adopted_stream_dropped_without_release_is_released() {
    let bench = Bench::new();
    let raw = bench.device.driver().create_stream(StreamFlags::default()).unwrap();
    // SAFETY: live until it is dropped below, and adopted once.
    let external = unsafe { bench.device.adopt_stream(raw) };
    bench.fill(external.stream());
    let tick = external.stream().tick();
    drop(external);
    assert!(!tick.timeline().is_open());
    bench.driver.advance(Duration::from_secs(10));
    assert!(tick.is_done().unwrap());
}

/// Its handle may then name another stream.
#[test]
fn t4_a_handle_of_a_released_stream_takes_no_call_of_a_clone() {
    let bench = Bench::new();
    let driver = bench.device.driver();
    let raw = driver.create_stream(StreamFlags::default()).unwrap();
    // SAFETY: live until it is released below, and adopted once.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    let (old, event) = (external.stream().clone(), bench.device.create_event(false).unwrap());
    external.release().unwrap();
    driver.destroy_stream(raw).unwrap();
    let new = bench.device.stream().unwrap();
    assert_eq!(new.raw(), raw, "the handle came back");
    let calls = bench.device.driver_calls();
    let refused = |result: Result<()>| assert_eq!(kind(result), ErrorKind::InvalidUse);
    refused(old.fill(bench.ptr, 1, MIB));
    refused(old.copy(bench.ptr, bench.ptr.offset(64), 64));
    refused(old.upload_blocking(bench.ptr, &[1; 4]));
    refused(old.download_blocking(&mut [1; 4], bench.ptr));
    refused(old.touch("kernel", &[]));
    refused(old.synchronize());
    refused(old.is_idle().map(drop));
    refused(old.wait_for(&new.tick()));
    refused(old.wait_event(&event));
    refused(event.record(&old));
    refused(old.begin_capture().map(drop));
    refused(old.announce_capture().map(drop));
    refused(old.tick().cover());
    assert_eq!(bench.device.driver_calls().since(&calls).total(), 0);
    let said = old.fill(bench.ptr, 1, MIB).unwrap_err().to_string();
    assert!(said.contains("released"), "{said}");
}

/// Its owner's work after the release is covered by the ticks of the new number alone.
#[test]
fn t4_a_stream_adopted_again_has_another_number() {
    let bench = Bench::new();
    let driver = bench.device.driver();
    let raw = driver.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    let other = bench.device.stream().unwrap();
    // SAFETY: the stream lives to the end of the test, and is adopted once at a time.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    let first = external.stream().clone();
    bench.fill(&first);
    external.release().unwrap();
    driver.memset(bench.ptr, 2, MIB, raw).unwrap();
    // SAFETY: as above.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    assert_ne!(external.stream().id(), first.id());
    assert_eq!(kind(first.fill(bench.ptr, 1, MIB)), ErrorKind::InvalidUse);
    other.wait_for(&external.stream().tick()).unwrap();
    bench.fill(&other);
    external.release().unwrap();
    bench.device.synchronize().unwrap();
    assert!(!first.tick().is_done().unwrap(), "its owner may go on");
    bench.assert_no_violation();
}

/// A program that adopts default streams for each of its calls has those of the device, which go on
/// when they are released.
#[test]
fn t4_default_streams_that_are_adopted_are_the_devices_own() {
    let bench = Bench::new();
    let (legacy, own) = (bench.device.default_stream().clone(), bench.device.per_thread_stream());
    for (raw, same) in [(RawStream(0), &legacy), (RawStream::LEGACY, &legacy), (RawStream::PER_THREAD, &own)] {
        for _ in 0..2 {
            // SAFETY: default streams are always live.
            let mut external = unsafe { bench.device.adopt_stream(raw) };
            assert_eq!(external.stream().id(), same.id());
            external.release().unwrap();
            bench.fill(same);
        }
    }
    assert!(legacy.timeline().is_open() && own.timeline().is_open());
}

#[test]
fn t4_a_stream_with_the_handle_of_a_released_one_is_another() {
    let bench = Bench::new();
    let driver = bench.device.driver();
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let raw = driver.create_stream(StreamFlags::default()).unwrap();
        // SAFETY: live until it is released below, and adopted once.
        let mut external = unsafe { bench.device.adopt_stream(raw) };
        bench.fill(external.stream());
        numbers.push(external.stream().id());
        external.release().unwrap();
        driver.memset(bench.ptr, 2, MIB, raw).unwrap();
        driver.destroy_stream(raw).unwrap();
    }
    assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
}

#[test]
fn t4_forgotten_streams_leave_their_numbers_to_later_ones() {
    let bench = Bench::new();
    let (device, mut highest) = (&bench.device, 0);
    for _ in 0..200 {
        let raw = device.driver().create_stream(StreamFlags::default()).unwrap();
        // SAFETY: the stream lives until it is forgotten.
        let stream = unsafe { device.stream_from_raw(raw) }.unwrap();
        bench.fill(&stream);
        highest = highest.max(stream.id());
        // Memory that is given back after the stream's end has a tick, too.
        device.forget_stream(raw).unwrap();
        let later = stream.tick();
        device.driver().destroy_stream(raw).unwrap();
        drop(stream);
        later.synchronize().unwrap();
    }
    assert!(highest < 8, "{highest}");
    // A handle that is kept keeps the number.
    let raw = device.driver().create_stream(StreamFlags::default()).unwrap();
    // SAFETY: as above.
    let kept = unsafe { device.stream_from_raw(raw) }.unwrap();
    device.forget_stream(raw).unwrap();
    device.driver().destroy_stream(raw).unwrap();
    device.synchronize().unwrap();
    let other = device.stream().unwrap();
    assert_ne!(other.id(), kept.id());
    assert_eq!(kind(kept.fill(bench.ptr, 0, 16)), ErrorKind::InvalidUse);
    assert_eq!(bench.driver.violations(), vec![]);
}
