//! Streams of other libraries, found again by their handles.

use std::any::Any;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use aquifer_device::{Device, Driver, ErrorKind, RawStream, Stream, StreamFlags};

use crate::common::{Bench, MIB, kind};

/// The device's stream for a handle.
fn find(bench: &Bench, raw: RawStream) -> Stream {
    // SAFETY: streams of these tests live until they are forgotten or their device is closed; those
    // of the test of streams that do not are destroyed while nothing uses them, and the simulated
    // device checks handles.
    unsafe { bench.device.stream_from_raw(raw) }.unwrap()
}

#[test]
fn a_stream_is_adopted_once_and_found_from_then_on() {
    let bench = Bench::new();
    let raw = bench.theirs();
    let stream = find(&bench, raw);
    bench.fill(&stream);
    let (tick, same) = (stream.tick(), find(&bench, raw));
    assert_eq!((same.id(), same.raw()), (stream.id(), raw));
    assert!(same.is_ordered_after(&tick), "one stream");
    drop((stream, same));
    assert_eq!(find(&bench, raw).id(), tick.timeline().id(), "the device keeps it");
    // What its owner enqueues is covered.
    bench.driver.memset(bench.ptr, 2, MIB, raw).unwrap();
    let other = bench.device.stream().unwrap();
    other.wait_for(&find(&bench, raw).tick()).unwrap();
    bench.fill(&other);
    bench.assert_no_violation();
}

#[test]
fn streams_of_the_device_are_found_by_their_handles() {
    let bench = Bench::new();
    let (ours, legacy, own) =
        (bench.device.stream().unwrap(), bench.device.default_stream(), bench.device.per_thread_stream());
    assert_eq!(find(&bench, ours.raw()).id(), ours.id());
    for (raw, same) in [(RawStream(0), legacy), (RawStream::LEGACY, legacy), (RawStream::PER_THREAD, &own)] {
        assert_eq!(find(&bench, raw).id(), same.id());
    }
    // Forgetting them does nothing.
    for stream in [&ours, legacy, &own] {
        bench.device.forget_stream(stream.raw()).unwrap();
        stream.fill(bench.ptr, 1, 64).unwrap();
        bench.device.synchronize().unwrap();
    }
    // They are not kept.
    let raw = ours.raw();
    drop(ours);
    assert_eq!(kind(bench.driver.query_stream(raw)), ErrorKind::InvalidUse);
}

#[test]
fn a_stream_that_is_forgotten_and_found_again_has_another_number() {
    let bench = Bench::new();
    let raw = bench.theirs();
    let stream = find(&bench, raw);
    bench.fill(&stream);
    let tick = stream.tick();
    bench.device.forget_stream(raw).unwrap();
    bench.device.forget_stream(raw).expect("once is enough");
    assert_eq!(kind(stream.fill(bench.ptr, 1, MIB)), ErrorKind::InvalidUse);
    let again = find(&bench, raw);
    assert_ne!(again.id(), stream.id());
    bench.fill(&again);
    bench.device.forget_stream(raw).unwrap();
    bench.driver.destroy_stream(raw).unwrap();
    tick.synchronize().unwrap();
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}

/// Its owner did not say that it was destroyed.
#[test]
fn a_handle_that_came_back_for_another_stream_finds_that_one() {
    let bench = Bench::new();
    let raw = bench.theirs();
    let old = find(&bench, raw);
    bench.driver.stall(raw, Duration::from_secs(1)).unwrap();
    bench.fill(&old);
    let tick = old.tick();
    bench.driver.destroy_stream(raw).unwrap();
    assert_eq!(bench.theirs(), raw, "the handle came back");
    let new = find(&bench, raw);
    assert_ne!(new.id(), old.id());
    assert!(!tick.timeline().is_open() && new.timeline().is_open());
    assert_eq!(kind(old.fill(bench.ptr, 1, MIB)), ErrorKind::InvalidUse);
    assert_eq!(find(&bench, raw).id(), new.id());
    // Nothing covers the work of the old one, so nothing says that it is done before the device was
    // waited for.
    assert!(!tick.is_done().unwrap());
    tick.synchronize().unwrap();
    bench.fill(&new);
    bench.device.forget_stream(raw).unwrap();
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}

#[test]
fn a_handle_that_came_back_for_a_stream_of_the_device_finds_that_one() {
    let bench = Bench::new();
    let raw = bench.theirs();
    let old = find(&bench, raw);
    bench.driver.destroy_stream(raw).unwrap();
    let new = bench.device.stream().unwrap();
    assert_eq!(new.raw(), raw, "the handle came back");
    assert_eq!(find(&bench, raw).id(), new.id());
    assert!(!old.timeline().is_open());
    bench.device.forget_stream(raw).expect("the device's own stream is not released");
    bench.fill(&new);
    drop(find(&bench, raw));
    bench.fill(&new);
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}

#[test]
fn numbers_of_streams_that_were_not_forgotten_serve_later_ones() {
    let bench = Bench::new();
    let ids: Vec<u32> = std::iter::repeat_with(|| {
        let raw = bench.theirs();
        let stream = find(&bench, raw);
        bench.fill(&stream);
        bench.driver.destroy_stream(raw).unwrap();
        bench.device.synchronize().unwrap();
        stream.id()
    })
    .take(20)
    .collect();
    assert!(ids.iter().max() < ids.iter().min().map(|least| least + 4).as_ref(), "{ids:?}");
}

#[test]
fn a_stream_that_captures_is_found_and_not_forgotten() {
    let bench = Bench::new();
    let raw = bench.theirs();
    let stream = find(&bench, raw);
    let capture = stream.begin_capture().unwrap();
    assert_eq!(find(&bench, raw).id(), stream.id());
    assert_eq!(kind(bench.device.forget_stream(raw)), ErrorKind::Capture);
    bench.fill(&stream);
    let graph = capture.end().unwrap();
    graph.launch(&stream).unwrap();
    bench.device.forget_stream(raw).unwrap();
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}

/// What a graph keeps may ask for streams, or forget them, when it is dropped.
#[test]
fn code_of_callers_that_a_release_runs_may_ask_for_streams() {
    struct Asks(Device, RawStream);
    impl Drop for Asks {
        fn drop(&mut self) {
            self.0.forget_stream(self.1).unwrap();
            // SAFETY: the stream lives to the end of the test.
            assert!(unsafe { self.0.stream_from_raw(self.1) }.is_ok());
        }
    }
    let bench = Bench::new();
    let (raw, other) = (bench.theirs(), bench.theirs());
    let stream = find(&bench, raw);
    find(&bench, other);
    let capture = stream.begin_capture().unwrap();
    let asks: Arc<dyn Any + Send + Sync> = Arc::new(Asks(bench.device.clone(), other));
    stream.launches_of_capture().unwrap().keep(&asks);
    drop(asks);
    // Its owner ends the capture, so that forgetting the stream gives it up.
    let graph = bench.driver.end_capture(raw).unwrap();
    bench.device.forget_stream(raw).unwrap();
    assert!(capture.end().is_err() && find(&bench, other).timeline().is_open());
    bench.driver.destroy_graph(graph).unwrap();
}

#[test]
fn a_stream_of_a_caller_who_releases_it_is_found_until_then() {
    let bench = Bench::new();
    let raw = bench.theirs();
    // SAFETY: the stream lives to the end of the test.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    let found = find(&bench, raw);
    assert_eq!(found.id(), external.stream().id());
    bench.device.forget_stream(raw).expect("its release is the caller's");
    bench.fill(&found);
    external.release().unwrap();
    assert_eq!(kind(found.fill(bench.ptr, 1, MIB)), ErrorKind::InvalidUse);
    // Adopted again, by the device now.
    let kept = find(&bench, raw);
    // SAFETY: as above.
    let mut external = unsafe { bench.device.adopt_stream(raw) };
    assert_eq!(kept.id(), external.stream().id());
    external.release().expect("the device keeps it");
    bench.fill(&kept);
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}

#[test]
fn a_closed_device_releases_the_streams_that_it_adopted() {
    let Bench { driver, device, ptr, .. } = Bench::new();
    let raw = driver.create_stream(StreamFlags::default()).unwrap();
    // SAFETY: the stream lives longer than the device.
    let stream = unsafe { device.stream_from_raw(raw) }.unwrap();
    stream.fill(ptr, 1, MIB).unwrap();
    let tick = stream.tick();
    drop(device);
    assert_eq!(kind(stream.fill(ptr, 1, MIB)), ErrorKind::InvalidUse);
    driver.destroy_stream(raw).unwrap();
    driver.advance(Duration::from_secs(10));
    assert!(tick.is_done().unwrap(), "its last event tells");
}

#[test]
fn threads_that_ask_for_a_handle_at_the_same_time_get_one_stream() {
    const THREADS: usize = 4;
    let bench = Bench::new();
    let barrier = Barrier::new(THREADS);
    let raws: Vec<RawStream> = (0..50).map(|_| bench.theirs()).collect();
    let find_all = || {
        raws.iter()
            .map(|&raw| {
                barrier.wait();
                let stream = find(&bench, raw);
                stream.fill(bench.ptr, 1, 64).unwrap();
                stream.id()
            })
            .collect::<Vec<_>>()
    };
    let ids = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(find_all)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(ids.iter().all(|same| *same == ids[0]));
    let mut distinct = ids[0].clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), raws.len(), "and one of its own for each handle");
}

/// A thread may hold a stream that another one forgets: its calls are refused then, and nothing
/// else happens.
#[test]
fn streams_may_be_forgotten_and_found_on_several_threads() {
    let bench = Bench::new();
    let raw = bench.theirs();
    let work = || {
        for _ in 0..300 {
            let stream = find(&bench, raw);
            match stream.fill(bench.ptr, 1, 64) {
                Err(error) => assert_eq!(error.kind, ErrorKind::InvalidUse, "{error}"),
                Ok(()) => drop(stream.tick().cover()),
            }
            bench.device.forget_stream(raw).unwrap();
        }
    };
    thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(work);
        scope.spawn(work);
    });
    let stream = find(&bench, raw);
    bench.fill(&stream);
    drop(stream.begin_capture().expect("captures may begin").end().unwrap());
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}

/// A request while the stream is released gets one that takes calls, unless that is the one
/// being released.
#[test]
fn a_stream_may_be_found_while_a_caller_releases_it() {
    let bench = Bench::new();
    let raw = bench.theirs();
    for _ in 0..300 {
        // SAFETY: the stream lives to the end of the test.
        let mut external = unsafe { bench.device.adopt_stream(raw) };
        thread::scope(|scope| {
            scope.spawn(|| external.release().unwrap());
            scope.spawn(|| find(&bench, raw));
        });
        let stream = find(&bench, raw);
        bench.fill(&stream);
        bench.device.forget_stream(raw).unwrap();
    }
    bench.device.synchronize().unwrap();
    bench.assert_no_violation();
}
