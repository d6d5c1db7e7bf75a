//! Clean-up within the driver that a failing call cut short is tried again.

use aquifer_device::{CaptureStatus, Code, Device, Driver, ErrorKind};
use aquifer_standin::Number;
use cudarc::driver::CudaContext;

use crate::bench::{Bench, kind, standin};

/// CUDA does not specify the fate of a capture whose stream is destroyed; in the stand-in it goes
/// on, and no call can end it.
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
    // Of a stream that a device owns, and whose capture was not announced.
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
fn a_captured_graph_is_destroyed_at_the_second_attempt() {
    let bench = Bench::new();
    let stream = bench.stream();
    let objects = bench.device.number(Number::LiveObjects);
    bench.driver.begin_capture(stream).unwrap();
    standin().fail("cuGraphDestroy", 1, Code(999)).unwrap();
    let graph = bench.driver.end_capture(stream).expect("the graph itself is there");
    bench.driver.destroy_graph(graph).unwrap();
    assert_eq!(bench.device.number(Number::LiveObjects), objects);
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
