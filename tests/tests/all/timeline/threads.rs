//! T3 and T4 with several threads: per-thread default streams, and events that are waited for while
//! others recycle.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_tests::prelude::*;

use super::common::{Bench, MIB, kind};

#[test]
fn t4_ticks_of_a_per_thread_stream_are_covered_by_its_owner_on_it() {
    let bench = Bench::new();
    let (own, two) = (bench.device.per_thread_stream(), bench.stream());
    assert_eq!(own.id(), bench.device.per_thread_stream().id());
    bench.busy(&own);
    two.wait_for(&own.tick()).unwrap();
    bench.fill(&two);
    own.wait_for(&two.tick()).unwrap();
    bench.fill_without_race(&own);
    assert_eq!(bench.cost(), (2, 2));
}

#[test]
fn t4_ticks_of_a_per_thread_stream_are_covered_by_others_through_the_legacy_stream() {
    let bench = Bench::new();
    let tick = in_thread(|| bench.long_work(&bench.device.per_thread_stream()));
    let two = bench.stream();
    assert!(!tick.is_done().unwrap());
    two.wait_for(&tick).unwrap();
    assert_eq!(bench.cost(), (1, 1));
    bench.fill_without_race(&two);
    bench.pass();
    assert!(tick.is_done().unwrap());
}

#[test]
fn t4_another_threads_stream_takes_no_work_no_records_and_no_waits() {
    let bench = Bench::new();
    let own = bench.device.per_thread_stream();
    bench.busy(&own);
    let two = bench.stream();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mine = bench.device.per_thread_stream();
            assert_eq!(mine.raw(), own.raw(), "the same handle");
            assert_ne!(mine.id(), own.id(), "another stream");
            let calls = bench.device.driver_calls();
            assert_eq!(kind(own.fill(bench.ptr, 1, MIB)), ErrorKind::InvalidUse);
            assert_eq!(kind(own.synchronize()), ErrorKind::InvalidUse);
            assert_eq!(kind(own.is_idle()), ErrorKind::InvalidUse);
            assert_eq!(kind(own.wait_for(&two.tick())), ErrorKind::InvalidUse);
            assert_eq!(kind(own.begin_capture()), ErrorKind::InvalidUse);
            assert_eq!(kind(own.download_blocking(&mut [0; 4], bench.ptr)), ErrorKind::InvalidUse);
            let made = bench.device.driver_calls().since(&calls);
            assert_eq!(made.total(), 0, "none reached the driver: {made:?}");
            let event = bench.device.create_event(false).unwrap();
            assert_eq!(kind(event.record(&own)), ErrorKind::InvalidUse);
            event.record(&two).unwrap();
            assert_eq!(kind(own.wait_event(&event)), ErrorKind::InvalidUse);
            mine.wait_for(&own.tick()).unwrap();
            bench.fill(&mine);
        });
    });
    bench.assert_no_race();
}

#[test]
fn t4_a_thread_that_exits_leaves_its_ticks_answerable() {
    let bench = Bench::new();
    let spawn = || {
        in_thread(|| {
            let own = bench.device.per_thread_stream();
            bench.fill(&own);
            (own.id(), own.tick())
        })
    };
    let (first_id, first) = spawn();
    first.synchronize().unwrap();
    let (second_id, second) = spawn();
    assert_ne!(first_id, second_id);
    assert!(!second.is_done().unwrap());
    second.synchronize().unwrap();
    assert_eq!(bench.cost(), (2, 0));
    bench.assert_no_race();
}

/// Runs in a thread of its own, which has ended when this returns.
fn in_thread<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[test]
fn t4_numbers_of_threads_that_come_and_go_stay_small() {
    let bench = Bench::new();
    let keep = bench.stream();
    let mut ticks = Vec::new();
    for _ in 0..200 {
        let (id, tick) = in_thread(|| {
            let own = bench.device.per_thread_stream();
            own.wait_for(&keep.tick()).unwrap();
            bench.fill(&own);
            (own.id(), own.tick())
        });
        keep.wait_for(&tick).unwrap();
        bench.fill(&keep);
        assert!(id <= keep.id() + 40, "{id}");
        ticks.push(tick);
        bench.pass();
    }
    ticks.iter().for_each(|tick| assert!(tick.is_done().unwrap()));
    bench.assert_no_race();
}

#[test]
fn t4_a_thread_does_not_get_the_number_of_one_whose_work_is_not_done() {
    let bench = Bench::new();
    let stalled = in_thread(|| {
        let own = bench.device.per_thread_stream();
        bench.long_work(&own)
    });
    let ids =
        |bench: &Bench| -> Vec<u32> { (0..60).map(|_| in_thread(|| bench.device.per_thread_stream().id())).collect() };
    let before = ids(&bench);
    assert!(!before.contains(&stalled.timeline().id()), "its work is pending");
    assert!(!stalled.is_done().unwrap());
    let two = bench.stream();
    two.wait_for(&stalled).unwrap();
    bench.fill(&two);
    bench.pass();
    let after = ids(&bench);
    assert!(after.contains(&stalled.timeline().id()));
    assert!(after.iter().all(|id| *id < two.id() || before.contains(id)), "no thread needed a new number");
    assert!(stalled.is_done().unwrap());
    bench.assert_no_race();
}

#[test]
fn t4_a_thread_uses_the_number_of_another_as_its_own() {
    let bench = Bench::new();
    let before: Vec<_> = (0..20).map(|_| in_thread(|| bench.device.per_thread_stream().tick())).collect();
    in_thread(|| drop(bench.device.per_thread_stream()));
    bench.pass();
    let two = bench.stream();
    let tick = in_thread(|| {
        let own = bench.device.per_thread_stream();
        let theirs = before.iter().find(|tick| tick.timeline().id() == own.id()).expect("a number was used again");
        assert!(theirs.is_done().unwrap() && theirs.timeline().is_open());
        let tick = own.tick();
        assert!(!tick.is_done().unwrap() && !two.is_ordered_after(&tick));
        bench.busy(&own);
        own.wait_for(&two.tick()).unwrap();
        in_thread(|| assert_eq!(kind(own.fill(bench.ptr, 1, MIB)), ErrorKind::InvalidUse));
        own.tick()
    });
    assert!(!tick.is_done().unwrap());
    two.wait_for(&tick).unwrap();
    bench.fill_without_race(&two);
}

#[test]
fn t4_a_handle_that_outlives_its_thread_keeps_the_number() {
    let bench = Bench::new();
    let held = in_thread(|| bench.device.per_thread_stream());
    for _ in 0..60 {
        assert_ne!(in_thread(|| bench.device.per_thread_stream().id()), held.id());
        bench.pass();
    }
    let id = held.id();
    drop(held);
    let mut ids = (0..60).map(|_| {
        bench.pass();
        in_thread(|| bench.device.per_thread_stream().id())
    });
    assert!(ids.any(|other| other == id));
}

#[test]
fn t4_events_that_fail_to_be_recorded_for_ended_threads_are_recorded_later() {
    let bench = Bench::new();
    let ids: Vec<u32> = (0..16).map(|_| in_thread(|| bench.device.per_thread_stream().id())).collect();
    bench.fail_next(Operation::Record);
    let mut found = Vec::new();
    for _ in 0..60 {
        bench.pass();
        found.push(in_thread(|| bench.device.per_thread_stream().id()));
    }
    assert!(ids.iter().all(|id| found.contains(id)), "{ids:?} {found:?}");
}

/// That of another thread's default stream: the driver would end one of the calling thread's.
#[test]
fn t5_a_capture_of_a_threads_default_stream_ends_on_its_thread_alone() {
    let bench = Bench::new();
    let (own, two) = (bench.device.per_thread_stream(), bench.stream());
    let capture = own.begin_capture().unwrap();
    bench.fill(&own);
    let before = bench.calls(Operation::EndCapture);
    assert_eq!(in_thread(|| kind(capture.end())), ErrorKind::InvalidUse);
    assert_eq!(bench.calls(Operation::EndCapture), before, "the driver was not asked");
    assert!(own.is_capturing() && bench.device.is_capturing());
    assert_eq!(kind(own.tick().cover()), ErrorKind::Capture);
    assert_eq!(kind(two.wait_for(&own.tick())), ErrorKind::Capture);
    assert_eq!(kind(bench.device.synchronize()), ErrorKind::Capture);
    bench.fill(&own);
    let graph = capture.end().expect("none of the refused calls broke it");
    assert!(!own.is_capturing() && !bench.device.is_capturing());
    assert_eq!(kind(capture.end()), ErrorKind::InvalidUse, "once");
    graph.launch(&own).unwrap();
    two.wait_for(&own.tick()).unwrap();
    bench.fill_without_race(&two);
}

#[test]
fn t5_a_capture_dropped_on_another_thread_goes_on_until_its_own_begins_the_next() {
    let bench = Bench::new();
    let own = bench.device.per_thread_stream();
    let capture = own.begin_capture().unwrap();
    bench.fill(&own);
    in_thread(move || drop(capture));
    assert!(own.is_capturing() && bench.device.is_capturing());
    assert_eq!(kind(own.tick().cover()), ErrorKind::Capture);
    let graph = own.begin_capture().expect("the first is ended").end().unwrap();
    assert!(!own.is_capturing() && !bench.device.is_capturing());
    graph.launch(&own).unwrap();
    bench.fill(&own);
    own.tick().synchronize().unwrap();
    bench.device.synchronize().unwrap();
}

type Verb = fn(&Bench, &Stream) -> Result<(), DeviceError>;

/// The calls that enqueue work on a stream. Each writes 2 to the first byte of the bench's memory.
const VERBS: [(&str, Verb); 6] = [
    ("fill", |bench, stream| stream.fill(bench.ptr, 2, 1)),
    ("copy", |bench, stream| {
        stream.fill(bench.ptr.offset(512), 2, 1)?;
        stream.copy(bench.ptr, bench.ptr.offset(512), 1)
    }),
    ("upload", |bench, stream| stream.upload_blocking(bench.ptr, &[2])),
    ("record, and a fill", |bench, stream| {
        bench.device.create_event(false)?.record(stream)?;
        stream.fill(bench.ptr, 2, 1)
    }),
    ("wait, and a fill", |bench, stream| {
        stream.wait_for(&bench.stream().tick())?;
        stream.fill(bench.ptr, 2, 1)
    }),
    ("a graph", |bench, stream| {
        let other = bench.stream();
        let capture = other.begin_capture()?;
        other.fill(bench.ptr, 2, 1)?;
        capture.end()?.launch(stream)
    }),
];

fn first_byte(bench: &Bench) -> u8 {
    let mut byte = [0];
    bench.device.synchronize().unwrap();
    bench.stream().download_blocking(&mut byte, bench.ptr).unwrap();
    byte[0]
}

#[test]
fn t5_work_on_a_stream_whose_capture_was_dropped_is_not_lost() {
    for (name, verb) in VERBS {
        let bench = Bench::new();
        let own = bench.device.per_thread_stream();
        bench.fill(&own);
        own.synchronize().unwrap();
        let capture = own.begin_capture().unwrap();
        in_thread(move || drop(capture));
        verb(&bench, &own).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(!own.is_capturing(), "{name}");
        assert_eq!(first_byte(&bench), 2, "{name}");
        bench.assert_no_race();
    }
}

#[test]
fn t5_work_is_refused_while_a_dropped_capture_of_its_stream_cannot_be_ended() {
    for (name, verb) in VERBS {
        let bench = Bench::new();
        let own = bench.device.per_thread_stream();
        let (joined, event) = (bench.stream(), bench.device.create_event(false).unwrap());
        let capture = own.begin_capture().unwrap();
        event.record(&own).unwrap();
        joined.wait_event(&event).unwrap();
        in_thread(|| {
            drop(capture);
            let error = verb(&bench, &joined).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Capture, "{name}: {error}");
            assert!(error.to_string().contains("call `Device::settle` on the thread that began it"), "{name}: {error}");
            assert!(joined.hold_off_captures().is_none(), "{name}");
        });
        // This thread can end it.
        verb(&bench, &joined).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(first_byte(&bench), 2, "{name}");
    }
}

#[test]
fn t5_work_is_refused_as_long_as_the_driver_does_not_end_a_dropped_capture() {
    for (name, verb) in VERBS {
        let bench = Bench::new();
        let stream = bench.stream();
        bench.fill(&stream);
        stream.synchronize().unwrap();
        let capture = stream.begin_capture().unwrap();
        bench.subject.inject(Fault::Rate { operation: Some(Operation::EndCapture), rate: 1.0, code: Code(999) });
        drop(capture);
        verb(&bench, &stream).unwrap_err();
        assert!(stream.is_capturing(), "{name}");
        bench.subject.clear_faults();
        verb(&bench, &stream).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(first_byte(&bench), 2, "{name}");
    }
}

#[test]
fn t5_a_capture_that_a_thread_leaves_open_is_given_up_when_the_device_is_settled() {
    for dropped in [false, true] {
        let bench = Bench::new();
        let one = bench.stream();
        let event = bench.device.create_event(false).unwrap();
        let (capture, own) = in_thread(|| {
            let own = bench.device.per_thread_stream();
            let capture = own.begin_capture().unwrap();
            event.record(&own).unwrap();
            one.wait_event(&event).unwrap();
            let mut capture = Some(capture);
            if dropped {
                in_thread(|| drop(capture.take()));
            }
            assert!(bench.device.is_capturing() && one.is_capturing());
            (capture, own)
        });
        if dropped {
            bench.device.synchronize().unwrap();
        } else {
            assert_eq!(kind(bench.device.synchronize()), ErrorKind::Capture);
            bench.device.settle();
        }
        assert!(!bench.device.is_capturing() && !one.is_capturing() && !own.is_capturing());
        if let Some(capture) = capture {
            assert_eq!(kind(capture.end()), ErrorKind::InvalidUse);
        }
        bench.device.synchronize().unwrap();
        bench.fill(&one);
        one.tick().synchronize().unwrap();
        drop(own);
    }
}

#[test]
fn t3_events_waited_for_by_some_threads_while_others_recycle() {
    let bench = Bench::new();
    let streams = [bench.stream(), bench.stream()];
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..2000 {
                    let stream = &streams[round % 2];
                    let tick = stream.tick();
                    tick.synchronize().unwrap();
                    assert!(tick.is_done().unwrap());
                }
                over.store(true, Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for stream in &streams {
                    let tick = stream.tick();
                    tick.cover().unwrap();
                    tick.is_done().unwrap();
                }
            }
        });
    });
    // Every event in use at a time is one created; they never grow in number with the rounds.
    assert!(bench.calls(Operation::CreateEvent) < 500, "{}", bench.calls(Operation::CreateEvent));
}
