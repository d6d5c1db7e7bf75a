//! Captures: a call that breaks one is refused before it reaches the driver, and the calls around
//! it leave it alone.

use std::sync::Arc;
use std::time::Duration;

use aquifer_cuda::CudaDriver;
use aquifer_device::{
    CaptureStatus, Code, Device, Driver, ErrorKind, PhysicalOptions, RawStream, Reservation, Result, StreamFlags,
};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use crate::bench::{Bench, MIB, code, kind, standin};

#[test]
fn a_graph_runs_the_captured_work() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let memory = driver.alloc(4096).unwrap();
    driver.begin_capture(stream).unwrap();
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::Active);
    driver.memset(memory, 5, 4096, stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);
    bench.upload(memory, &[0; 4096], stream).unwrap();
    for _ in 0..2 {
        driver.launch_graph(graph, stream).unwrap();
        assert_eq!(bench.download(memory, 4096, stream).unwrap(), [5; 4096]);
    }
    driver.destroy_graph(graph).unwrap();
    assert_eq!(code(driver.launch_graph(graph, stream)), Code::INVALID_HANDLE);
    bench.assert_no_violation();
}

#[test]
fn calls_that_would_break_a_capture_are_refused() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let memory = driver.alloc(4096).unwrap();
    let pool = driver.alloc_async(4096, stream).unwrap();
    let mut registered = vec![0_u8; 4096];
    // SAFETY: the memory outlives its registration.
    let host = unsafe { driver.host_register(registered.as_mut_ptr(), 4096) }.unwrap();
    driver.synchronize().unwrap();
    driver.begin_capture(stream).unwrap();
    let breaks = |result: Result<()>| assert_eq!(kind(result), ErrorKind::Capture);
    breaks(driver.synchronize());
    breaks(driver.synchronize_stream(stream));
    breaks(driver.query_stream(stream).map(drop));
    breaks(driver.free(memory));
    breaks(driver.alloc_async(4096, stream).map(drop));
    breaks(driver.free_async(pool, stream));
    // SAFETY: refused, because a stream captures.
    breaks(unsafe { driver.host_unregister(host) });
    breaks(driver.begin_capture(stream));
    breaks(bench.upload(memory, &[1; 16], stream));
    breaks(bench.download(memory, 16, stream).map(drop));
    // SAFETY: refused before anything is copied.
    breaks(unsafe { driver.copy_batch(&[], stream) });
    let graph = driver.end_capture(stream).unwrap();
    driver.destroy_graph(graph).unwrap();
    // SAFETY: it was registered above, and nothing uses it.
    unsafe { driver.host_unregister(host) }.unwrap();
    driver.free(memory).unwrap();
    driver.free_async(pool, stream).unwrap();
    driver.synchronize().unwrap();
    assert_eq!(bench.used(), 0);
}

/// The graph would use the borrowed memory whenever it is launched.
#[test]
fn blocking_copies_of_page_locked_memory_are_kept_out_of_captures() {
    let bench = Bench::new();
    let device = Device::new(bench.driver.clone());
    let (stream, memory) = (device.stream().unwrap(), device.alloc(4096).unwrap());
    let host = device.driver().host_alloc(4096).unwrap();
    // SAFETY: 4096 bytes of pinned memory that nothing else uses, freed below.
    let slice = unsafe { std::slice::from_raw_parts_mut(host.as_ptr(), 4096) };
    let capture = stream.begin_capture().unwrap();
    assert_eq!(kind(stream.download_blocking(slice, memory)), ErrorKind::Capture);
    assert_eq!(kind(stream.upload_blocking(memory, slice)), ErrorKind::Capture);
    let graph = capture.end().unwrap();
    // SAFETY: nothing uses it any more.
    unsafe { device.driver().host_free(host) }.unwrap();
    graph.launch(&stream).unwrap();
    device.synchronize().unwrap();
    device.free(memory).unwrap();
    bench.assert_no_violation();
}

/// What it holds is in use, and its context cannot be waited for.
#[test]
fn a_device_that_goes_while_another_of_its_context_captures_takes_nothing_from_pending_work() {
    let bench = Bench::new();
    let ordinal = bench.device.ordinal();
    let open = || Device::new(CudaDriver::open(ordinal).unwrap());
    let (going, other) = (open(), open());
    let granule = going.info().granularity_bytes.unwrap();
    let (stream, capturing) = (going.stream().unwrap(), other.stream().unwrap());
    let before = bench.used();
    let ptr = going.driver().reserve(granule, 0).unwrap();
    let physical = going.driver().create_physical(granule, PhysicalOptions::default()).unwrap();
    going.driver().map(ptr, granule, physical).unwrap();
    going.driver().set_access(ptr, granule, &[ordinal]).unwrap();
    let host = going.driver().host_alloc(4096).unwrap();
    bench.device.stall(stream.raw().0, Duration::from_secs(1)).unwrap();
    stream.fill(ptr, 1, granule).unwrap();
    // SAFETY: the memory is left to the device below, with a tick that covers this.
    unsafe { stream.download(host, ptr, 4096) }.unwrap();
    // SAFETY: allocated above, and nothing else uses it.
    unsafe { going.host_free_later(host, 4096, vec![stream.tick()]) };
    going.unreserve_later(Reservation { ptr, bytes: granule, mapped: vec![(ptr, granule, Some(physical))] });
    let capture = capturing.begin_capture().unwrap();
    drop((stream, going));
    bench.assert_no_violation();
    assert_eq!(bench.used() - before, granule);
    drop(capture.end().unwrap());
    other.settle();
    assert_eq!(bench.used(), before, "it goes when the capture has ended");
    bench.assert_no_violation();
}

#[test]
fn events_are_not_recorded_in_unannounced_captures() {
    let bench = Bench::new();
    let device = Device::new(bench.driver.clone());
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    let (tick, event) = (one.tick(), device.create_event(false).unwrap());
    device.driver().begin_capture(one.raw()).unwrap();
    assert_eq!(kind(event.record(&one)), ErrorKind::Capture);
    two.wait_event(&event).unwrap();
    assert!(!two.is_ordered_after(&tick) && !two.is_capturing());
    let announced = one.announce_capture().unwrap();
    event.record(&one).unwrap();
    two.wait_event(&event).unwrap();
    assert!(!two.is_ordered_after(&tick) && two.is_capturing());
    event.record(&two).unwrap();
    one.wait_event(&event).unwrap();
    let graph = device.driver().end_capture(one.raw()).unwrap();
    drop(announced);
    device.driver().destroy_graph(graph).unwrap();
}

/// PyTorch 2.11 does not tell an allocator of a capture that failed.
#[test]
fn an_announced_capture_is_over_once_the_other_library_ended_it() {
    let bench = Bench::new();
    let device = Device::new(bench.driver.clone());
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    for begun in [&one, &two] {
        device.driver().begin_capture(begun.raw()).unwrap();
        let announced = begun.announce_capture().unwrap();
        assert_eq!(kind(device.synchronize()), ErrorKind::Capture);
        let graph = device.driver().end_capture(begun.raw()).unwrap();
        // Another stream's calls notice it, too.
        one.wait_for(&two.tick()).unwrap();
        device.synchronize().unwrap();
        assert!(!begun.is_capturing());
        // A later capture is another one.
        let later = begun.begin_capture().unwrap();
        drop(announced);
        assert!(begun.is_capturing());
        drop(later);
        device.driver().destroy_graph(graph).unwrap();
    }
}

#[test]
fn calls_that_captures_in_other_modes_forbid_break_none() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let context = CudaContext::new(bench.device.ordinal() as usize).unwrap();
    let (theirs, other) = (context.new_stream().unwrap(), bench.stream());
    let event = driver.create_event(false).unwrap();
    driver.record(event, other).unwrap();
    let peer = Bench::new();
    let from = peer.driver.alloc(4096).unwrap();
    // The strictest mode: in it, every thread's potentially unsafe calls fail and break the
    // capture.
    theirs.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let memory = driver.alloc(4 * MIB).unwrap();
    let (start, physical) =
        (driver.reserve(4 * MIB, 0).unwrap(), driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap());
    driver.map(start, 2 * MIB, physical).unwrap();
    driver.set_access(start, 2 * MIB, &[driver.info().ordinal]).unwrap();
    driver.query_event(event).unwrap();
    driver.synchronize_event(event).unwrap();
    driver.synchronize_stream(other).unwrap();
    driver.memory_info().unwrap();
    driver.copy_peer(memory, &*peer.driver, from, 4096, other).unwrap();
    let pinned = driver.host_alloc(4096).unwrap();
    // SAFETY: nothing uses the memory.
    unsafe { driver.host_free(pinned) }.unwrap();
    driver.unmap(start, 2 * MIB).unwrap();
    // The thread's own mode is as it was: cudarc's allocation would still break the capture, and
    // ours did not.
    assert!(theirs.capture_status().is_ok());
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    theirs.end_capture(flags).expect("the capture was not broken");
    driver.free(memory).unwrap();
}

/// What seems harmless may load a kernel, or make a context.
#[test]
fn fills_contexts_and_queries_are_relaxed_too() {
    let bench = Bench::new();
    let (driver, stream, ordinal) = (&*bench.driver, bench.stream(), bench.device.ordinal());
    let memory = driver.alloc(4096).unwrap();
    let calls: [(&str, &dyn Fn() -> Result<()>); 2] = [
        ("a fill", &|| driver.memset(memory, 1, 4096, stream)),
        ("an identity", &|| driver.stream_id(stream).map(drop)),
    ];
    for (name, call) in calls {
        standin().fail("cuThreadExchangeStreamCaptureMode", 1, Code(999)).unwrap();
        let refused = call();
        assert_eq!(standin().clear_orders(), 0, "{name} was asked for in the thread's own mode");
        assert_eq!(code(refused), Code(999), "{name}");
        call().unwrap();
    }
    // A thread without a context may not have a mode to set.
    standin().fail("cuThreadExchangeStreamCaptureMode", 1, Code(999)).unwrap();
    drop(CudaDriver::open(ordinal).unwrap());
    assert_eq!(standin().clear_orders(), 0, "the context was made in the thread's own mode");
    driver.synchronize().unwrap();
    bench.assert_no_violation();
}

#[test]
fn a_capture_that_cannot_become_a_graph_ends() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (one, two) = (bench.stream(), bench.stream());
    let (event, memory) = (driver.create_event(false).unwrap(), driver.alloc(4096).unwrap());
    assert_eq!(code(driver.end_capture(one)), Code::INVALID_VALUE);
    driver.begin_capture(one).unwrap();
    driver.record(event, one).unwrap();
    driver.wait(two, event).unwrap();
    driver.memset(memory, 1, 4096, two).unwrap();
    assert_eq!(code(driver.end_capture(one)), Code::CAPTURE_UNJOINED);
    driver.synchronize().expect("no stream captures any more");
    driver.synchronize_stream(two).unwrap();
}

#[test]
fn a_broken_capture_is_reported_and_can_be_ended() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let (one, two) = (bench.stream(), bench.stream());
    let event = driver.create_event(false).unwrap();
    driver.begin_capture(one).unwrap();
    driver.record(event, one).unwrap();
    driver.wait(two, event).unwrap();
    assert_eq!(code(driver.destroy_stream(two)), Code(903), "a stream that joined is destroyed after the capture");
    assert_eq!(driver.capture_status(one).unwrap(), CaptureStatus::Invalidated);
    assert_eq!(code(driver.synchronize_stream(one)), Code::CAPTURE_INVALIDATED);
    assert_eq!(code(driver.end_capture(one)), Code::CAPTURE_INVALIDATED);
    assert_eq!(driver.capture_status(one).unwrap(), CaptureStatus::None);
    driver.synchronize().unwrap();
    driver.destroy_stream(two).unwrap();
}

#[test]
fn the_legacy_stream_captures_nothing_and_a_destroyed_one_nothing_any_more() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    for legacy in [RawStream(0), RawStream::LEGACY] {
        assert_eq!(kind(driver.begin_capture(legacy)), ErrorKind::Capture);
    }
    let stream = bench.stream();
    driver.begin_capture(stream).unwrap();
    driver.destroy_stream(stream).unwrap();
    driver.synchronize().expect("the capturing stream is gone");
}

#[test]
fn a_graph_that_cannot_be_made_executable_leaves_nothing() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    driver.begin_capture(stream).unwrap();
    standin().fail("cuGraphInstantiateWithFlags", 1, Code::OUT_OF_MEMORY).unwrap();
    assert_eq!(kind(driver.end_capture(stream)), ErrorKind::OutOfMemory);
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);
    driver.begin_capture(stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    driver.destroy_graph(graph).unwrap();
}

#[test]
fn threads_capture_on_their_own_default_streams() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, RawStream::PER_THREAD);
    driver.begin_capture(stream).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);
            driver.begin_capture(stream).unwrap();
            driver.end_capture(stream).unwrap();
        });
    });
    assert_eq!(kind(driver.synchronize()), ErrorKind::Capture, "the first thread still captures");
    driver.end_capture(stream).unwrap();
    driver.synchronize().unwrap();
}

#[test]
fn drivers_of_one_context_leave_each_others_captures_alone() {
    let bench = Bench::new();
    let other = CudaDriver::open(bench.device.ordinal()).unwrap();
    let (mine, theirs) = (Device::new(bench.driver.clone()), Device::new(other.clone()));
    let mut registered = vec![0_u8; 4096];
    // SAFETY: the memory outlives its registration.
    let host = unsafe { other.host_register(registered.as_mut_ptr(), 4096) }.unwrap();
    let memory = theirs.alloc(4096).unwrap();
    let blocking = StreamFlags { non_blocking: false, priority: 0 };
    let stream = mine.stream_with(blocking).unwrap();
    let capture = stream.begin_capture().unwrap();
    let breaks = |result: Result<()>| assert_eq!(kind(result), ErrorKind::Capture);
    breaks(theirs.synchronize());
    breaks(theirs.free(memory));
    breaks(other.synchronize());
    // SAFETY: refused, because a stream captures.
    breaks(unsafe { other.host_unregister(host) });
    breaks(theirs.default_stream().tick().cover());
    assert!(theirs.is_capturing());
    stream.fill(memory, 5, 4096).unwrap();
    let graph = capture.end().expect("no call broke the capture");
    graph.launch(&stream).unwrap();
    theirs.synchronize().unwrap();
    theirs.default_stream().tick().cover().unwrap();
    assert_eq!(bench.download(memory, 4, stream.raw()).unwrap(), [5; 4]);
    // One that only the driver below knows of.
    bench.driver.begin_capture(stream.raw()).unwrap();
    breaks(other.synchronize());
    bench.driver.destroy_graph(bench.driver.end_capture(stream.raw()).unwrap()).unwrap();
    // SAFETY: registered above, and nothing uses it.
    unsafe { other.host_unregister(host) }.unwrap();
    theirs.free(memory).unwrap();
    bench.assert_no_violation();
}

#[test]
fn asking_for_the_identity_of_an_adopted_stream_breaks_no_capture() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let owner = CudaDriver::open(bench.device.ordinal()).unwrap();
    let theirs = owner.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    // SAFETY: the stream lives until it is released below.
    unsafe { driver.adopt_stream(theirs) };
    let memory = driver.alloc(4096).unwrap();
    owner.begin_capture(theirs).unwrap();
    assert_eq!(driver.capture_status(theirs).unwrap(), CaptureStatus::Active);
    driver.memset(memory, 3, 4096, theirs).unwrap();
    assert_eq!(kind(driver.stream_id(theirs)), ErrorKind::Capture);
    let graph = owner.end_capture(theirs).expect("no call broke the capture");
    owner.launch_graph(graph, theirs).unwrap();
    assert!(driver.stream_id(theirs).unwrap().is_some());
    assert_eq!(bench.download(memory, 4, theirs).unwrap(), [3; 4]);
    driver.release_stream(theirs);
    owner.destroy_graph(graph).unwrap();
    owner.destroy_stream(theirs).unwrap();
    bench.assert_no_violation();
}

#[test]
fn what_is_kept_for_a_graph_comes_back_once_that_is_gone() {
    let bench = Bench::new();
    let (driver, stream) = (&*bench.driver, bench.stream());
    let numbers = || driver.capture_number(stream);
    assert_eq!(numbers().unwrap(), None);
    assert_eq!(code(driver.keep_for_graph(stream, Arc::new("nothing"))), Code::INVALID_VALUE);
    driver.begin_capture(stream).unwrap();
    let first = numbers().unwrap();
    for what in ["one", "two"] {
        driver.keep_for_graph(stream, Arc::new(what)).unwrap();
    }
    let graph = driver.end_capture(stream).unwrap();
    driver.launch_graph(graph, stream).unwrap();
    bench.device.run_destructors();
    assert!(driver.take_kept().is_empty());
    driver.destroy_graph(graph).unwrap();
    driver.synchronize().unwrap();
    bench.device.run_destructors();
    let mut kept: Vec<_> = driver.take_kept().into_iter().map(|what| *what.downcast::<&str>().unwrap()).collect();
    kept.sort_unstable();
    assert_eq!(kept, ["one", "two"]);
    // Of a capture that breaks comes no graph.
    driver.begin_capture(stream).unwrap();
    assert!(numbers().unwrap() > first);
    driver.keep_for_graph(stream, Arc::new("three")).unwrap();
    assert!(CudaContext::new(bench.device.ordinal() as usize).unwrap().synchronize().is_err());
    assert_eq!(code(numbers()), Code::CAPTURE_INVALIDATED);
    assert!(driver.end_capture(stream).is_err());
    bench.device.run_destructors();
    assert_eq!(driver.take_kept().len(), 1);
}

/// The driver takes one call on a graph at a time (CUDA driver API, "Graph object thread safety").
#[test]
fn threads_launch_a_graph_one_after_the_other() {
    let bench = Bench::new();
    let (driver, stream, memory) = (&*bench.driver, bench.stream(), bench.driver.alloc(4096).unwrap());
    driver.begin_capture(stream).unwrap();
    driver.memset(memory, 1, 4096, stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    let launch = || (0..2000).for_each(|_| driver.launch_graph(graph, stream).unwrap());
    std::thread::scope(|scope| [(); 3].map(|()| scope.spawn(launch)).map(|thread| thread.join().unwrap()));
    driver.synchronize().unwrap();
    driver.destroy_graph(graph).unwrap();
    bench.assert_no_violation();
}

/// The driver says no more than a code, and the capture is lost.
#[test]
fn waiting_during_an_unannounced_capture_fails_with_advice() {
    let bench = Bench::new();
    let theirs = CudaContext::new(bench.device.ordinal() as usize).unwrap().new_stream().unwrap();
    theirs.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let error = bench.driver.synchronize().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Capture);
    assert!(error.to_string().contains("announce"), "{error}");
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    assert!(theirs.end_capture(flags).is_err());
    bench.driver.synchronize().unwrap();
}
