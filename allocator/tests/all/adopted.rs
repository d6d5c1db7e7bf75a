//! Streams of other libraries, found by their handles at each call.
#![expect(unsafe_code, reason = "adopting a stream is a promise")]

use aquifer_allocator::{Allocator, Config};
use aquifer_device::{Device, StreamFlags};
use aquifer_sim::{SimConfig, SimDriver};

const MIB: u64 = 1 << 20;

/// The output of a call is given back after the owner of the stream worked with it.
#[test]
fn a_stream_found_for_each_call_reuses_its_memory() {
    let driver = SimDriver::new(SimConfig::new(1024 * MIB));
    let device = Device::new(driver.clone());
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let raw = device.driver().create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    let mut last = None;
    for call in 0..200_u8 {
        // SAFETY: the stream is forgotten below, before it is destroyed.
        let stream = unsafe { device.stream_from_raw(raw) }.unwrap();
        let output = allocator.alloc_bytes(3 * MIB, &stream).unwrap();
        stream.fill(output.ptr(), call, output.bytes()).unwrap();
        device.driver().memset(output.ptr(), call, MIB, raw).unwrap();
        drop(last.replace(output));
    }
    drop(last);
    assert!(allocator.memory_reserved() <= 8 * MIB, "{} bytes", allocator.memory_reserved());
    device.forget_stream(raw).unwrap();
    device.driver().destroy_stream(raw).unwrap();
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_reserved(), driver.violations()), (0, vec![]));
}
