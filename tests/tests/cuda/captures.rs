//! Captures that cudarc begins: announced they are as good as our own, unannounced they are noticed
//! where it matters.

use aquifer::device::cuda;
use aquifer_device::CaptureStatus;
use aquifer_tests::prelude::*;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaStream, DriverError};

use crate::support::{Gpu, MIB, kind, standin};

const MODE: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

/// A stream of cudarc's, adopted.
fn adopted(gpu: &Gpu) -> (Arc<CudaStream>, Stream) {
    let theirs = gpu.context().new_stream().unwrap();
    let stream = cuda::stream(&gpu.device, &theirs).unwrap();
    (theirs, stream)
}

fn allocator(gpu: &Gpu) -> Allocator {
    Allocator::new(&gpu.device, Config::default()).unwrap()
}

fn is_capture_error(error: &AllocError) -> bool {
    matches!(error, AllocError::Device(error) if error.kind == ErrorKind::Capture)
}

#[test]
fn an_unannounced_capture_is_noticed_before_it_is_broken() {
    let gpu = Gpu::new();
    let (theirs, stream) = adopted(&gpu);
    let (allocator, other) = (allocator(&gpu), gpu.device.stream().unwrap());
    let (tick, elsewhere) = (stream.tick(), other.tick());
    theirs.begin_capture(MODE).unwrap();
    let noticed = tick.cover().unwrap_err();
    assert!(noticed.kind == ErrorKind::Capture && noticed.to_string().contains("announce"), "{noticed}");
    assert_eq!(kind(stream.wait_for(&elsewhere)), ErrorKind::Capture);
    assert_eq!(kind(stream.synchronize()), ErrorKind::Capture);
    let error = allocator.alloc_bytes(MIB, &stream).unwrap_err();
    assert!(is_capture_error(&error), "{error}");
    assert!(theirs.end_capture(FLAGS).is_ok(), "none of this broke it");
    tick.cover().unwrap();
    drop(allocator.alloc_bytes(MIB, &stream).unwrap());
}

#[test]
fn a_capture_that_is_announced_allocates_from_its_pool() {
    let gpu = Gpu::new();
    let (theirs, stream) = adopted(&gpu);
    let allocator = allocator(&gpu);
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let outside = allocator.alloc_bytes(MIB, &stream).unwrap();
    drop(outside);
    theirs.begin_capture(MODE).unwrap();
    let route = allocator.capture(&stream, &pool).unwrap();
    assert!(stream.is_capturing() && gpu.device.is_capturing());
    assert_eq!(kind(gpu.device.synchronize()), ErrorKind::Capture);
    assert_eq!(kind(stream.tick().cover()), ErrorKind::Capture);
    let inside = allocator.alloc_bytes(MIB, &stream).unwrap();
    let ptr = inside.ptr();
    stream.fill(ptr, 9, MIB).unwrap();
    drop(inside);
    let graph = theirs.end_capture(FLAGS).unwrap().expect("a graph");
    drop(route);
    assert!(!stream.is_capturing() && !gpu.device.is_capturing());
    // What others allocate now is not the graph's memory, so launching it overwrites nothing.
    let others: Vec<_> = (0..8).map(|_| allocator.alloc_bytes(MIB, &stream).unwrap()).collect();
    assert!(others.iter().all(|other| other.ptr().0.abs_diff(ptr.0) >= MIB));
    graph.launch().unwrap();
    let mut bytes = [0; 4];
    stream.download_blocking(&mut bytes, ptr).unwrap();
    assert_eq!(bytes, [9; 4]);
    gpu.assert_no_violation();
}

/// PyTorch routes a thread to a pool before it begins the capture, and says that it has begun at a
/// second call.
#[test]
fn a_pool_may_be_chosen_before_the_capture_begins() {
    let gpu = Gpu::new();
    let (theirs, stream) = adopted(&gpu);
    let allocator = allocator(&gpu);
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let route = pool.route_thread();
    theirs.begin_capture(MODE).unwrap();
    let announced = stream.announce_capture().unwrap();
    let inside = allocator.alloc_bytes(MIB, &stream).unwrap();
    let ptr = inside.ptr();
    stream.fill(ptr, 9, MIB).unwrap();
    drop(inside);
    let graph = theirs.end_capture(FLAGS).unwrap().expect("a graph");
    assert!(stream.is_capturing(), "its end was not announced");
    drop((announced, route));
    assert!(!stream.is_capturing());
    let other = allocator.alloc_bytes(MIB, &stream).unwrap();
    assert!(other.ptr().0.abs_diff(ptr.0) >= MIB, "the pool keeps it for the graph");
    graph.launch().unwrap();
    let mut bytes = [0; 4];
    stream.download_blocking(&mut bytes, ptr).unwrap();
    assert_eq!(bytes, [9; 4]);
    gpu.assert_no_violation();
}

/// Launches that others make are not seen here, so memory waits for all that streams have to do.
#[test]
fn memory_of_a_foreign_graph_waits_for_every_stream() {
    let gpu = Gpu::new();
    let (theirs, stream) = adopted(&gpu);
    let (allocator, other) = (allocator(&gpu), gpu.device.stream().unwrap());
    let work = allocator.alloc_bytes(MIB, &other).unwrap();
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    theirs.begin_capture(MODE).unwrap();
    let route = allocator.capture(&stream, &pool).unwrap();
    let scratch = allocator.alloc_bytes(8 * MIB, &stream).unwrap();
    stream.fill(scratch.ptr(), 9, 8 * MIB).unwrap();
    drop((scratch, route));
    let graph = theirs.end_capture(FLAGS).unwrap().expect("a graph");
    graph.launch().unwrap();
    drop(graph);
    gpu.standin.stall(other.raw().0, Duration::from_millis(50)).unwrap();
    other.fill(work.ptr(), 1, MIB).unwrap();
    stream.synchronize().unwrap();
    let held = allocator.memory_reserved();
    drop(pool);
    assert_eq!(allocator.memory_reserved(), held, "the other stream is not done, and may have launched it");
    other.synchronize().unwrap();
    drop(work);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.memory_reserved(), 0);
    gpu.assert_no_violation();
}

/// Begins a capture of cudarc's that is followed.
fn begin_followed(theirs: &CudaStream, stream: &Stream) -> aquifer_device::Result<()> {
    let failed = |error: DriverError| DeviceError::new(Operation::BeginCapture, Code(error.0 as u32));
    stream.begin_followed_capture(|| theirs.begin_capture(MODE).map_err(failed))
}

#[test]
fn memory_of_a_followed_graph_stays_until_the_driver_tells_that_it_is_gone() {
    for is_seen in [false, true] {
        let gpu = Gpu::new();
        let (theirs, stream) = adopted(&gpu);
        let allocator = allocator(&gpu);
        let (before, outside) =
            (allocator.alloc_raw(MIB, &stream).unwrap(), allocator.alloc_raw(MIB, &stream).unwrap());
        stream.fill(outside, 9, MIB).unwrap();
        if is_seen {
            begin_followed(&theirs, &stream).unwrap()
        } else {
            theirs.begin_capture(MODE).unwrap()
        }
        let graph = allocator.followed_graph(&stream).unwrap().expect("it captures");
        assert!(stream.is_capturing() && Arc::ptr_eq(&graph, &allocator.followed_graph(&stream).unwrap().unwrap()));
        let inside = graph.pool().alloc_bytes(MIB, &stream).unwrap();
        stream.copy(inside.ptr(), outside, MIB).unwrap();
        stream.copy(before, inside.ptr(), MIB).unwrap();
        let scratch = inside.ptr();
        drop(inside);
        graph.free_raw_on(&allocator, before, &stream).unwrap();
        let launched = theirs.end_capture(FLAGS).unwrap().expect("a graph");
        assert!(allocator.followed_graph(&stream).unwrap().is_none() && !stream.is_capturing());
        drop(graph);
        let others: Vec<_> = (0..8).map(|_| allocator.alloc_bytes(MIB, &stream).unwrap()).collect();
        let is_apart = |ptr: DevicePtr| others.iter().all(|other| other.ptr().0.abs_diff(ptr.0) >= MIB);
        assert!(is_apart(scratch) && is_apart(before));
        launched.launch().unwrap();
        gpu.standin.hold_destructors();
        drop(launched);
        allocator.empty_cache().unwrap();
        assert!(!allocator.reserved_by_private_pools().is_empty(), "the driver has not told yet");
        stream.synchronize().unwrap();
        gpu.standin.run_destructors();
        drop(others);
        allocator.free_raw(outside).unwrap();
        allocator.empty_cache().unwrap();
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0));
        gpu.assert_no_violation();
    }
}

#[test]
fn a_capture_is_told_from_an_earlier_one_of_the_stream() {
    let gpu = Gpu::new();
    let (theirs, stream) = adopted(&gpu);
    let follow = || stream.follow_capture().unwrap();
    theirs.begin_capture(MODE).unwrap();
    let announced = stream.announce_capture().unwrap();
    let foreign = follow().unwrap();
    assert!(foreign.is_foreign(), "what was announced stays that");
    drop(theirs.end_capture(FLAGS).unwrap());
    theirs.begin_capture(MODE).unwrap();
    let first = follow().unwrap();
    assert!(first.are_followed());
    drop(announced);
    assert_eq!(follow().unwrap().number(), first.number(), "the announcement was of the earlier one");
    drop(theirs.end_capture(FLAGS).unwrap());
    theirs.begin_capture(MODE).unwrap();
    assert!(follow().unwrap().number() > first.number());
    drop(theirs.end_capture(FLAGS).unwrap());
    // Nobody asks again, and the device is not waited for in vain.
    gpu.device.synchronize().unwrap();
    assert!(!stream.is_capturing() && !gpu.device.is_capturing());
}

#[test]
fn streams_that_join_by_calls_of_another_library_are_part_of_the_capture() {
    let gpu = Gpu::new();
    let ((theirs, one), (their_other, two)) = (adopted(&gpu), adopted(&gpu));
    let capture = one.begin_capture().unwrap();
    their_other.join(&theirs).unwrap();
    assert!(!two.is_capturing());
    let launches = two.follow_capture().unwrap().unwrap();
    assert_eq!(one.launches_of_capture().unwrap().number(), launches.number());
    theirs.join(&their_other).unwrap();
    capture.end().unwrap();
    assert!(!one.is_capturing() && !two.is_capturing());
}

#[test]
fn a_capture_that_cannot_be_followed_does_not_begin() {
    let gpu = Gpu::new();
    let (theirs, stream) = adopted(&gpu);
    begin_followed(&theirs, &stream).unwrap();
    drop(theirs.end_capture(FLAGS).unwrap());
    let mut struck = 0;
    for nth in 1.. {
        standin().fail("any", nth, Code(999)).unwrap();
        let begun = begin_followed(&theirs, &stream);
        if standin().clear_orders() > 0 {
            begun.unwrap();
            break;
        }
        if begun.is_err() {
            assert!(!stream.is_capturing());
            assert_eq!(gpu.device.driver().capture_status(stream.raw()).unwrap(), CaptureStatus::None, "call {nth}");
            begin_followed(&theirs, &stream).unwrap_or_else(|error| panic!("after a failure of call {nth}: {error}"));
        }
        drop(theirs.end_capture(FLAGS).unwrap());
        struck = nth;
    }
    assert!(struck > 5, "{struck} calls");
    drop(theirs.end_capture(FLAGS).unwrap());
    gpu.assert_no_violation();
}

#[test]
fn captures_that_cannot_be_announced_are_refused() {
    let (gpu, other) = (Gpu::new(), Gpu::new());
    let (theirs, stream) = adopted(&gpu);
    let (allocator, foreign) = (allocator(&gpu), allocator(&other));
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let error = allocator.capture(&stream, &pool).unwrap_err();
    let AllocError::Device(error) = error else { panic!("{error}") };
    assert!(error.code == Code::INVALID_VALUE && error.to_string().contains("does not capture"), "{error}");
    assert!(matches!(
        foreign.capture(&stream, &pool),
        Err(AllocError::Request(RequestError::WrongDevice { what: "stream", .. }))
    ));
    let elsewhere = other.device.stream().unwrap();
    assert!(matches!(
        foreign.capture(&elsewhere, &pool),
        Err(AllocError::Request(RequestError::WrongDevice { what: "pool", .. }))
    ));
    theirs.begin_capture(MODE).unwrap();
    let announced = stream.announce_capture().unwrap();
    assert_eq!(kind(stream.announce_capture()), ErrorKind::Capture, "it is known already");
    let route = allocator.capture(&stream, &pool).unwrap();
    drop(route);
    assert!(stream.is_capturing(), "another announcement lasts");
    drop(announced);
    theirs.end_capture(FLAGS).unwrap();
}
