//! Streams that somebody else owns.

use aquifer_device::cuda::CudaDriver;
use aquifer_device::{Code, Driver, RawStream, StreamFlags};

use crate::bench::{Bench, code};

#[test]
fn an_adopted_stream_takes_calls_until_it_is_released() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let owner = CudaDriver::open(bench.device.ordinal()).unwrap();
    let theirs = owner.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    let memory = driver.alloc(4096).unwrap();
    assert_eq!(code(driver.memset(memory, 1, 4096, theirs)), Code::INVALID_HANDLE, "nobody vouches for it");
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
fn adopting_what_needs_none_changes_nothing() {
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

/// In release builds nobody asks: it would cost a driver call for each use.
#[cfg(debug_assertions)]
#[test]
fn a_handle_that_came_back_for_another_stream_is_noticed() {
    let bench = Bench::new();
    let driver = &*bench.driver;
    let owner = CudaDriver::open(bench.device.ordinal()).unwrap();
    let flags = StreamFlags { non_blocking: true, priority: 0 };
    let theirs = owner.create_stream(flags).unwrap();
    // SAFETY: a broken promise: the stream is destroyed before it is released. The stand-in answers wild handles, too.
    unsafe { driver.adopt_stream(theirs) };
    owner.destroy_stream(theirs).unwrap();
    let again = owner.create_stream(flags).unwrap();
    assert_eq!(again, theirs, "the stand-in reuses handles");
    let error = driver.query_stream(theirs).unwrap_err();
    assert!(error.code == Code::INVALID_HANDLE && error.to_string().contains("destroyed by its owner"), "{error}");
    driver.release_stream(theirs);
    owner.destroy_stream(again).unwrap();
}
