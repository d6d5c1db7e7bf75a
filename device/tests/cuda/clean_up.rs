//! Clean-up within the driver that a failing call cut short is tried again.

use std::thread;

use aquifer_device::{CaptureStatus, Code, Device, Driver, ErrorKind};
use aquifer_standin::Number;
use cudarc::driver::{CudaContext, result};

use crate::bench::{Bench, kind, standin};

/// CUDA does not say what becomes of a capture whose stream is destroyed; in the stand-in it goes on, and nobody can end it.
#[test]
fn a_capture_is_ended_before_its_stream_is_destroyed() {
    let bench = Bench::new();
    let objects = bench.device.number(Number::LiveObjects);
    for fails in 0..3 {
        let stream = bench.stream();
        bench.driver.begin_capture(stream).unwrap();
        for nth in 1..=fails {
            standin().fail("cuStreamEndCapture", nth, Code(999)).unwrap();
        }
        for _ in 0..fails {
            assert_eq!(kind(bench.driver.destroy_stream(stream)), ErrorKind::Other);
            assert_eq!(bench.driver.capture_status(stream).unwrap(), CaptureStatus::Active, "it is tried again");
        }
        bench.driver.destroy_stream(stream).unwrap();
        bench.driver.synchronize().unwrap();
        assert_eq!(bench.device.number(Number::LiveObjects), objects);
    }
    // Of a stream that a device owns, and of which nobody said that it captures.
    let device = Device::new(bench.driver.clone());
    let stream = device.stream().unwrap();
    device.driver().begin_capture(stream.raw()).unwrap();
    drop(stream);
    device.synchronize().unwrap();
    // The driver's own end.
    let captures = bench.stream();
    bench.driver.begin_capture(captures).unwrap();
    let Bench { driver, device: standin } = bench;
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    drop(device);
    drop(driver);
    context.synchronize().expect("nothing captures in the context any more");
}

#[test]
fn what_a_graph_was_made_from_is_destroyed_later() {
    let bench = Bench::new();
    let stream = bench.stream();
    let objects = bench.device.number(Number::LiveObjects);
    bench.driver.begin_capture(stream).unwrap();
    standin().fail("cuGraphDestroy", 1, Code(999)).unwrap();
    let graph = bench.driver.end_capture(stream).expect("the graph itself is there");
    bench.driver.destroy_graph(graph).unwrap();
    let calls = bench.device.calls("cuGraphDestroy").unwrap();
    bench.driver.synchronize().unwrap();
    assert_eq!(bench.device.calls("cuGraphDestroy").unwrap(), calls + 1);
    assert_eq!(bench.device.number(Number::LiveObjects), objects);
    bench.driver.synchronize().unwrap();
    assert_eq!(bench.device.calls("cuGraphDestroy").unwrap(), calls + 1, "it is gone");
}

#[test]
fn a_context_that_could_not_be_taken_off_a_thread_is_taken_off_later() {
    let bench = Bench::new();
    let on_thread = || {
        let current = || result::ctx::get_current().unwrap().map_or(0, |context| context as u64);
        assert_eq!(current(), 0);
        standin().fail("cuCtxPopCurrent_v2", 1, Code(999)).unwrap();
        bench.driver.memory_info().unwrap();
        assert_ne!(current(), 0, "the call failed");
        bench.driver.memory_info().unwrap();
        assert_eq!(current(), 0);
        bench.driver.memory_info().unwrap();
        assert_eq!(current(), 0);
    };
    thread::scope(|scope| scope.spawn(on_thread).join().unwrap());
}

#[test]
fn a_capture_mode_that_could_not_be_restored_is_restored_later() {
    let bench = Bench::new();
    let on_thread = || {
        let theirs = CudaContext::new(bench.device.ordinal() as usize).unwrap();
        // The first call of two sets the mode, and the second one restores it.
        standin().fail("cuThreadExchangeStreamCaptureMode", 2, Code(999)).unwrap();
        bench.driver.memory_info().unwrap();
        bench.driver.memory_info().unwrap();
        // The thread's own mode again: a capture of its own forbids it calls that may wait.
        let stream = theirs.new_stream().unwrap();
        stream.begin_capture(cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        // SAFETY: allocates memory, and nothing uses it.
        let forbidden = unsafe { result::malloc_sync(512) };
        assert!(forbidden.is_err(), "the thread is in the relaxed mode still");
    };
    thread::scope(|scope| scope.spawn(on_thread).join().unwrap());
}

#[test]
fn errors_name_the_function_that_failed() {
    let bench = Bench::new();
    for (function, text) in [
        ("cuCtxPushCurrent_v2", "cuCtxPushCurrent failed: CUDA_ERROR_UNKNOWN (999): cuMemAlloc was not called"),
        ("cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode failed"),
        ("cuMemAlloc_v2", "cuMemAlloc failed: CUDA_ERROR_UNKNOWN (999): 512 bytes asked for"),
    ] {
        standin().fail(function, 1, Code(999)).unwrap();
        let error = bench.driver.alloc(512).unwrap_err();
        assert!(error.to_string().starts_with(text), "{function}: {error}");
    }
    let stream = bench.stream();
    bench.driver.begin_capture(stream).unwrap();
    standin().fail("cuGraphInstantiateWithFlags", 1, Code(999)).unwrap();
    let error = bench.driver.end_capture(stream).unwrap_err();
    assert!(error.to_string().starts_with("cuGraphInstantiateWithFlags failed"), "{error}");
    let error = bench.driver.free(aquifer_device::DevicePtr(512)).unwrap_err();
    assert!(error.to_string().starts_with("cuMemFree was not called: CUDA_ERROR_INVALID_VALUE (1)"), "{error}");
}
