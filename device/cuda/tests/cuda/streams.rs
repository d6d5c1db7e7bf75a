//! Streams that another library owns.

use std::sync::{Arc, Barrier};
use std::thread;

use aquifer_cuda::{self as cuda, CudaDriver};
use aquifer_device::{Code, Device, Driver, ErrorKind, RawStream, StreamFlags};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUgraphInstantiate_flags;

use crate::bench::{Bench, code, kind, standin};

const FLAGS: CUgraphInstantiate_flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

#[test]
fn an_adopted_stream_takes_calls_until_it_is_released() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let owner = CudaDriver::open(bench.device.ordinal()).unwrap();
    let theirs = owner.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    let memory = driver.alloc(4096).unwrap();
    assert_eq!(code(driver.memset(memory, 1, 4096, theirs)), Code::INVALID_HANDLE, "it was not adopted");
    // SAFETY: the stream lives until it is released below.
    unsafe { driver.adopt_stream(theirs) };
    driver.memset(memory, 1, 4096, theirs).unwrap();
    assert_eq!(bench.download(memory, 4, theirs).unwrap(), [1; 4]);
    assert_eq!(code(driver.destroy_stream(theirs)), Code::INVALID_HANDLE, "it is not ours to destroy");
    driver.release_stream(theirs);
    assert_eq!(code(driver.memset(memory, 1, 4096, theirs)), Code::INVALID_HANDLE);
    owner.destroy_stream(theirs).unwrap();
    bench.assert_no_violation();
}

#[test]
fn adopting_a_stream_of_the_device_changes_nothing() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let ours = bench.stream();
    for stream in [ours, RawStream::LEGACY, RawStream::PER_THREAD] {
        // SAFETY: the streams live as long as the driver.
        unsafe { driver.adopt_stream(stream) };
        driver.release_stream(stream);
        assert!(driver.query_stream(stream).unwrap());
    }
    driver.release_stream(RawStream(0xdead));
    driver.destroy_stream(ours).unwrap();
}

/// A device and a context of cudarc's on the same GPU.
fn with_cudarc(bench: &Bench) -> (Device, Arc<CudaContext>) {
    (Device::new(bench.driver.clone()), CudaContext::new(bench.device.ordinal() as usize).unwrap())
}

#[test]
fn a_stream_of_cudarcs_is_adopted_once_and_kept_until_it_is_forgotten() {
    let bench = Bench::new();
    let (device, context) = with_cudarc(&bench);
    let theirs = context.new_stream().unwrap();
    let stream = cuda::stream(&device, &theirs).unwrap();
    assert_eq!(cuda::stream(&device, &theirs).unwrap().id(), stream.id());
    // SAFETY: the stream lives to the end of the test.
    assert_eq!(unsafe { device.stream_from_raw(stream.raw()) }.unwrap().id(), stream.id());
    assert!(Arc::ptr_eq(&cuda::stream_of(&stream).unwrap(), &theirs));
    let held = Arc::strong_count(&theirs);
    cuda::forget_stream(&device, &theirs).unwrap();
    assert_eq!(Arc::strong_count(&theirs), held - 1);
    assert_eq!(kind(stream.is_idle()), ErrorKind::InvalidUse);
    assert_ne!(cuda::stream(&device, &theirs).unwrap().id(), stream.id());
    drop(device);
    assert_eq!(Arc::strong_count(&theirs), held - 1);
    bench.assert_no_violation();
}

#[test]
fn a_stream_that_was_adopted_by_its_handle_is_kept_alive_once_cudarc_gives_it() {
    let bench = Bench::new();
    let (device, context) = with_cudarc(&bench);
    let theirs = context.new_stream().unwrap();
    let raw = RawStream(theirs.cu_stream() as u64);
    // SAFETY: the stream lives to the end of the test.
    let stream = unsafe { device.stream_from_raw(raw) }.unwrap();
    assert!(cuda::stream_of(&stream).is_err(), "its owner may destroy it");
    assert_eq!(cuda::stream(&device, &theirs).unwrap().id(), stream.id());
    assert!(Arc::ptr_eq(&cuda::stream_of(&stream).unwrap(), &theirs));
    drop(theirs);
    assert!(stream.is_idle().unwrap());
    device.forget_stream(raw).unwrap();
    assert_eq!(device.driver().query_stream(raw).unwrap_err().kind, ErrorKind::InvalidUse, "it was destroyed");
}

#[test]
fn a_stream_that_is_lent_to_cudarc_is_the_devices_own_while_it_lives() {
    let bench = Bench::new();
    let (device, _context) = with_cudarc(&bench);
    let stream = device.stream().unwrap();
    let lent = cuda::stream_of(&stream).unwrap();
    assert_eq!(cuda::stream(&device, &lent).unwrap().id(), stream.id());
    cuda::forget_stream(&device, &lent).unwrap();
    assert!(stream.is_idle().unwrap());
    // Its last handle is gone, and cudarc still has it: adopted from then on.
    let raw = stream.raw();
    drop(stream);
    let adopted = cuda::stream(&device, &lent).unwrap();
    assert!(adopted.raw() == raw && adopted.is_idle().unwrap());
    let destroyed = bench.device.calls("cuStreamDestroy_v2").unwrap();
    drop(lent);
    drop(device.stream().unwrap());
    assert!(adopted.is_idle().unwrap(), "the device keeps it");
    device.forget_stream(raw).unwrap();
    drop(device.stream().unwrap());
    assert_eq!(bench.device.calls("cuStreamDestroy_v2").unwrap(), destroyed + 3);
    bench.assert_no_violation();
}

#[test]
fn a_handle_that_came_back_for_another_stream_is_adopted_anew() {
    let bench = Bench::new();
    let device = Device::new(bench.driver.clone());
    let owner = CudaDriver::open(bench.device.ordinal()).unwrap();
    let flags = StreamFlags { non_blocking: true, priority: 0 };
    let theirs = owner.create_stream(flags).unwrap();
    // SAFETY: a broken promise: the stream is destroyed before it is forgotten. The stand-in
    // answers wild handles, too.
    let old = unsafe { device.stream_from_raw(theirs) }.unwrap();
    owner.destroy_stream(theirs).unwrap();
    assert_eq!(owner.create_stream(flags).unwrap(), theirs, "the stand-in reuses handles");
    // SAFETY: the new stream lives until it is forgotten.
    let new = unsafe { device.stream_from_raw(theirs) }.unwrap();
    assert_ne!(new.id(), old.id());
    assert!(new.is_idle().unwrap());
    assert_eq!(kind(old.is_idle()), ErrorKind::InvalidUse);
    device.forget_stream(theirs).unwrap();
    owner.destroy_stream(theirs).unwrap();
    bench.assert_no_violation();
}

#[test]
fn threads_that_ask_for_a_stream_of_cudarcs_at_the_same_time_get_one() {
    let bench = Bench::new();
    let (device, context) = with_cudarc(&bench);
    let (theirs, barrier) = (context.new_stream().unwrap(), Barrier::new(2));
    let find = || {
        barrier.wait();
        let stream = cuda::stream(&device, &theirs).unwrap();
        assert!(stream.is_idle().unwrap());
        barrier.wait();
        stream.id()
    };
    for round in 0..300 {
        let [one, two] =
            thread::scope(|scope| [scope.spawn(find), scope.spawn(find)].map(|thread| thread.join().unwrap()));
        assert_eq!(one, two, "round {round}");
        let forget = || cuda::forget_stream(&device, &theirs);
        thread::scope(|scope| [scope.spawn(forget), scope.spawn(forget)].map(|thread| thread.join().unwrap().unwrap()));
        assert_eq!(Arc::strong_count(&theirs), 1);
    }
    bench.assert_no_violation();
}

#[test]
fn a_stream_that_captures_is_forgotten_once_the_capture_has_ended() {
    let bench = Bench::new();
    let (device, context) = with_cudarc(&bench);
    let theirs = context.new_stream().unwrap();
    let stream = cuda::stream(&device, &theirs).unwrap();
    let capture = stream.begin_capture().unwrap();
    assert_eq!(cuda::stream(&device, &theirs).unwrap().id(), stream.id());
    assert_eq!(kind(cuda::forget_stream(&device, &theirs)), ErrorKind::Capture);
    assert!(theirs.end_capture(FLAGS).is_ok(), "its owner ends it");
    cuda::forget_stream(&device, &theirs).unwrap();
    assert!(capture.end().is_err() && !device.is_capturing());
    bench.assert_no_violation();
}

/// The driver may refuse to end it, and its owner ends it then.
#[test]
fn a_capture_on_an_adopted_stream_is_ended_when_its_device_is_closed() {
    for fails in [false, true] {
        let bench = Bench::new();
        let (device, context) = with_cudarc(&bench);
        let theirs = context.new_stream().unwrap();
        let stream = cuda::stream(&device, &theirs).unwrap();
        let capture = stream.begin_capture().unwrap();
        if fails {
            (1..=8).for_each(|nth| standin().fail("cuStreamEndCapture", nth, Code(999)).unwrap());
        }
        drop(device);
        assert_eq!((capture.end().map(drop).is_err(), stream.is_capturing()), (true, false));
        standin().clear_orders();
        assert_eq!(theirs.end_capture(FLAGS).is_ok(), fails);
        theirs.synchronize().expect("it was ended");
        bench.assert_no_violation();
    }
}

#[test]
fn a_stream_that_a_caller_releases_may_be_asked_for_meanwhile() {
    let bench = Bench::new();
    let (device, context) = with_cudarc(&bench);
    let theirs = context.new_stream().unwrap();
    let raw = RawStream(theirs.cu_stream() as u64);
    for round in 0..300 {
        // SAFETY: the stream lives to the end of the test.
        let mut external = unsafe { device.adopt_stream(raw) };
        thread::scope(|scope| {
            scope.spawn(|| external.release().unwrap());
            scope.spawn(|| cuda::stream(&device, &theirs).map(drop));
        });
        let stream = cuda::stream(&device, &theirs).unwrap();
        assert!(stream.is_idle().unwrap(), "round {round}");
        cuda::forget_stream(&device, &theirs).unwrap();
        assert_eq!(Arc::strong_count(&theirs), 1);
    }
    bench.assert_no_violation();
}
