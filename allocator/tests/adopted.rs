//! Streams of others, adopted for one call each.
#![expect(unsafe_code, reason = "adopting a stream is a promise")]

use aquifer_allocator::{Allocator, Config};
use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{Device, StreamFlags};

const MIB: u64 = 1 << 20;

/// What a call returns is given back after its stream went back to its owner, who had it work with the memory meanwhile.
#[test]
fn a_stream_adopted_for_each_call_reuses_its_memory() {
    let driver = SimDriver::new(SimConfig::new(1024 * MIB));
    let device = Device::new(driver.clone());
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let raw = device.driver().create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    let mut last = None;
    for call in 0..200_u8 {
        // SAFETY: the stream is destroyed below, and adopted once at a time.
        let mut adopted = unsafe { device.adopt_stream(raw) };
        let output = allocator.alloc_bytes(3 * MIB, adopted.stream()).unwrap();
        adopted.stream().fill(output.ptr(), call, output.bytes()).unwrap();
        adopted.release().unwrap();
        device.driver().memset(output.ptr(), call, MIB, raw).unwrap();
        drop(last.replace(output));
    }
    drop(last);
    assert!(allocator.memory_reserved() <= 8 * MIB, "{} bytes", allocator.memory_reserved());
    device.driver().destroy_stream(raw).unwrap();
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_reserved(), driver.violations()), (0, vec![]));
}
