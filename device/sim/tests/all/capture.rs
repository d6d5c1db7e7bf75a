//! Graph capture: the work that it records, and the calls that it forbids.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use aquifer_device::executor::{self, Body};
use aquifer_device::{Code, Driver, ErrorKind, Operation, RawStream, StreamFlags};
use aquifer_sim::{Fault, SimDriver, ViolationKind};

use crate::common::{Bench, MIB, Short, code, device};

#[test]
fn captured_work_runs_when_the_graph_is_launched_each_time() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    driver.memset(memory, 1, MIB, stream).unwrap();
    driver.begin_capture(stream).unwrap();
    driver.copy_on_device(memory.offset(8), memory, 8, stream).unwrap();
    driver.memset(memory, 2, 8, stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.get(memory, 16, stream).unwrap(), [1; 16]);
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(driver.get(memory, 16, stream).unwrap(), [[2; 8], [1; 8]].concat());
    driver.launch_graph(graph, stream).unwrap();
    assert_eq!(driver.get(memory, 16, stream).unwrap(), [2; 16]);
    driver.destroy_graph(graph).unwrap();
    assert_eq!(code(driver.launch_graph(graph, stream)), Code::INVALID_HANDLE);
    assert_eq!(driver.violations(), []);
}

#[test]
fn streams_join_by_waiting_and_must_join_back() {
    for joins_back in [true, false] {
        let driver = device(0);
        let (origin, other, memory) = (driver.stream(), driver.stream(), driver.alloc(MIB).unwrap());
        driver.begin_capture(origin).unwrap();
        driver.order(origin, other);
        driver.memset(memory, 3, MIB, other).unwrap();
        if joins_back {
            driver.order(other, origin);
            let graph = driver.end_capture(origin).unwrap();
            driver.launch_graph(graph, origin).unwrap();
            assert_eq!(driver.get(memory, 1, origin).unwrap(), [3]);
        } else {
            let error = driver.end_capture(origin).unwrap_err();
            assert_eq!((error.code, error.kind), (Code::CAPTURE_UNJOINED, ErrorKind::Capture));
            driver.memset(memory, 4, MIB, other).unwrap();
            assert_eq!(driver.get(memory, 1, other).unwrap(), [4], "the stream is free again");
        }
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn unordered_work_inside_a_capture_is_found() {
    let driver = device(0);
    let (origin, other, memory) = (driver.stream(), driver.stream(), driver.alloc(MIB).unwrap());
    driver.begin_capture(origin).unwrap();
    driver.order(origin, other);
    driver.memset(memory, 1, MIB, origin).unwrap();
    driver.memset(memory, 2, MIB, other).unwrap();
    driver.order(other, origin);
    driver.end_capture(origin).unwrap();
    assert_eq!(driver.violations()[0].kind, ViolationKind::WriteWrite);
}

#[test]
fn accesses_of_a_graph_are_checked_at_each_launch() {
    let driver = device(0);
    let (one, two, memory) = (driver.stream(), driver.stream(), driver.alloc(MIB).unwrap());
    driver.begin_capture(one).unwrap();
    driver.memset(memory, 1, MIB, one).unwrap();
    let graph = driver.end_capture(one).unwrap();
    driver.launch_graph(graph, one).unwrap();
    driver.memset(memory, 2, MIB, two).unwrap();
    assert_eq!(driver.violations().len(), 1, "a launch and a fill without an order");
    driver.free(memory).unwrap();
    driver.launch_graph(graph, one).unwrap();
    assert_eq!(driver.take_violations()[1].kind, ViolationKind::UseAfterFree);
    assert_eq!(code(driver.synchronize()), Code::ILLEGAL_ADDRESS);
}

#[test]
fn launches_of_one_graph_run_one_after_the_other() {
    let driver = device(0);
    let (one, two, memory) = (driver.stream(), driver.stream(), driver.alloc(2 * MIB).unwrap());
    driver.memset(memory, 1, 2 * MIB, one).unwrap();
    driver.synchronize().unwrap();
    driver.begin_capture(one).unwrap();
    driver.copy_on_device(memory.offset(MIB), memory, MIB, one).unwrap();
    driver.memset(memory, 2, MIB, one).unwrap();
    let graph = driver.end_capture(one).unwrap();
    driver.stall(one, Duration::from_millis(1)).unwrap();
    driver.launch_graph(graph, one).unwrap();
    driver.launch_graph(graph, two).unwrap();
    assert_eq!(driver.get(memory.offset(MIB), 1, two).unwrap(), [2], "the second copies what the first wrote");
    assert_eq!(driver.violations(), []);
}

#[test]
fn events_recorded_in_a_capture_cannot_be_waited_for_outside() {
    let driver = device(0);
    let (stream, event) = (driver.stream(), driver.event());
    driver.begin_capture(stream).unwrap();
    driver.record(event, stream).unwrap();
    assert_eq!(code(driver.query_event(event)), Code::CAPTURED_EVENT);
    assert_eq!(code(driver.synchronize_event(event)), Code::CAPTURED_EVENT);
    driver.end_capture(stream).unwrap();
    assert_eq!(code(driver.wait(stream, event)), Code::CAPTURED_EVENT);
    driver.record(event, stream).unwrap();
    driver.synchronize_event(event).unwrap();
}

/// Begins a capture on a stream, makes a forbidden call, and checks that the capture is broken by
/// it.
fn breaks(expected: Code, call: impl Fn(&SimDriver, RawStream) -> aquifer_device::Result<()>) {
    let driver = device(0);
    let stream = driver.blocking_stream();
    driver.begin_capture(stream).unwrap();
    assert_eq!(code(call(&driver, stream)), expected);
    let memory = driver.alloc(MIB).unwrap();
    assert_eq!(code(driver.memset(memory, 1, 1, stream)), Code::CAPTURE_INVALIDATED);
    assert_eq!(code(driver.end_capture(stream)), Code::CAPTURE_INVALIDATED);
    driver.memset(memory, 1, 1, stream).unwrap();
    driver.synchronize().unwrap();
    assert_eq!(driver.violations(), []);
}

#[test]
fn forbidden_calls_break_the_capture() {
    breaks(Code::CAPTURE_UNSUPPORTED, |driver, stream| driver.synchronize_stream(stream));
    breaks(Code::CAPTURE_UNSUPPORTED, |driver, stream| driver.query_stream(stream).map(|_| ()));
    breaks(Code::CAPTURE_UNSUPPORTED, |driver, _| driver.synchronize());
    breaks(Code::CAPTURE_UNSUPPORTED, |driver, _| driver.free(driver.alloc(1)?));
    breaks(Code::INVALID_VALUE, |driver, stream| driver.free_async(driver.alloc(1)?, stream));
    breaks(Code::CAPTURE_UNSUPPORTED, |driver, stream| driver.put(driver.alloc(1)?, &[1], stream));
    breaks(Code::CAPTURE_UNSUPPORTED, |driver, stream| {
        let other = driver.stream();
        driver.begin_capture(other)?;
        let graph = driver.end_capture(other)?;
        driver.launch_graph(graph, stream)
    });
    breaks(Code::CAPTURE_IMPLICIT, |driver, _| driver.record(driver.event(), RawStream::LEGACY));
    breaks(Code::CAPTURE_IMPLICIT, |driver, _| driver.memset(driver.alloc(1)?, 0, 1, RawStream(0)));
    breaks(Code::CAPTURE_ISOLATION, |driver, stream| {
        let (other, event) = (driver.stream(), driver.event());
        driver.record(event, other)?;
        driver.wait(stream, event)
    });
}

#[test]
fn memory_that_a_graph_allocates_lives_from_launch_to_free() {
    let driver = device(0);
    let stream = driver.stream();
    driver.begin_capture(stream).unwrap();
    let [kept, freed] = [(); 2].map(|()| driver.alloc_async(MIB, stream).unwrap());
    driver.memset(kept, 5, MIB, stream).unwrap();
    driver.memset(freed, 6, MIB, stream).unwrap();
    driver.free_async(freed, stream).unwrap();
    assert_eq!(code(driver.free_async(freed, stream)), Code::INVALID_VALUE, "twice, which breaks the capture");
    assert_eq!(code(driver.end_capture(stream)), Code::CAPTURE_INVALIDATED);
    driver.synchronize().unwrap();
    assert_eq!(driver.held_bytes(), 0, "a capture that broke keeps nothing");

    driver.begin_capture(stream).unwrap();
    let [kept, freed] = [(); 2].map(|()| driver.alloc_async(MIB, stream).unwrap());
    driver.memset(kept, 5, MIB, stream).unwrap();
    driver.copy_on_device(freed, kept, MIB, stream).unwrap();
    driver.free_async(freed, stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(code(driver.free_async(kept, stream)), Code::INVALID_VALUE, "it is not allocated before a launch");
    for _ in 0..3 {
        driver.launch_graph(graph, stream).unwrap();
        assert_eq!(driver.get(kept, 4, stream).unwrap(), [5; 4]);
        assert_eq!(code(driver.launch_graph(graph, stream)), Code::INVALID_VALUE, "the memory is still allocated");
        driver.free_async(kept, stream).unwrap();
    }
    let again = driver.copy_graph(graph, true).unwrap();
    driver.destroy_graph(graph).unwrap();
    (0..2).for_each(|_| driver.launch_graph(again, stream).unwrap());
    assert_eq!(driver.violations(), []);
    driver.memset(freed, 7, MIB, stream).unwrap();
    assert_eq!(driver.take_violations()[0].kind, ViolationKind::UseAfterFree, "the graph freed it");
}

#[test]
fn a_graph_gives_its_memory_back_when_it_and_its_copies_are_gone() {
    let driver = device(0);
    let stream = driver.stream();
    driver.begin_capture(stream).unwrap();
    let [kept, freed] = [(); 2].map(|()| driver.alloc_async(MIB, stream).unwrap());
    driver.free_async(freed, stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    let copy = driver.copy_graph(graph, false).unwrap();
    driver.launch_graph(graph, stream).unwrap();
    driver.destroy_graph(graph).unwrap();
    driver.synchronize().unwrap();
    assert_eq!(driver.held_bytes(), 2 * MIB);
    driver.destroy_graph(copy).unwrap();
    driver.synchronize().unwrap();
    assert_eq!(driver.held_bytes(), MIB, "what the launch left allocated is the program's");
    driver.free_async(kept, stream).unwrap();
    driver.synchronize().unwrap();
    assert_eq!((driver.held_bytes(), driver.violations()), (0, Vec::new()));
}

#[test]
fn captures_that_cannot_begin_or_end_are_refused() {
    let driver = device(0);
    let (one, two) = (driver.stream(), driver.stream());
    assert_eq!(code(driver.begin_capture(RawStream::LEGACY)), Code::CAPTURE_UNSUPPORTED);
    assert_eq!(code(driver.end_capture(one)), Code::INVALID_VALUE);
    driver.begin_capture(one).unwrap();
    assert_eq!(code(driver.begin_capture(one)), Code::CAPTURE_UNSUPPORTED);
    driver.order(one, two);
    assert_eq!(code(driver.end_capture(two)), Code(903));
    driver.destroy_stream(one).unwrap();
    assert!(driver.query_stream(two).unwrap(), "the capture is gone with its origin");
    // The legacy stream does not mind a capture on a stream that does not block with it.
    driver.begin_capture(two).unwrap();
    driver.record(driver.event(), RawStream::LEGACY).unwrap();
    driver.host_alloc(64).unwrap();
    driver.end_capture(two).unwrap();
}

#[test]
fn a_read_whose_wait_is_refused_ends_though_a_capture_is_about_to_begin() {
    let (mut reads, mut captures) = (0, 0);
    for seed in 0..200 {
        let bench = Bench::new();
        let legacy = bench.device.default_stream().clone();
        let stream = bench.device.stream_with(StreamFlags { non_blocking: false, priority: 0 }).unwrap();
        bench.fill(&legacy);
        for operation in [Operation::SynchronizeStream, Operation::Synchronize] {
            bench.driver.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
        }
        let (ptr, has_read) = (bench.ptr, Arc::new(Mutex::new(false)));
        let reader: Body = {
            let has_read = has_read.clone();
            Box::new(move || *has_read.lock().unwrap() = legacy.download_blocking(&mut [0_u8], ptr).is_ok())
        };
        // Nobody ends the capture before the read has ended.
        let capture = Arc::new(Mutex::new(None));
        let capturer: Body = {
            let capture = capture.clone();
            Box::new(move || *capture.lock().unwrap() = stream.begin_capture().ok())
        };
        executor::run(seed, 10_000, vec![reader, capturer]).unwrap_or_else(|failure| panic!("{seed}: {failure}"));
        reads += u32::from(*has_read.lock().unwrap());
        captures += u32::from(capture.lock().unwrap().take().is_some());
        bench.assert_no_violation();
    }
    assert!(reads > 50 && captures == 200, "{reads} reads, {captures} captures");
}
