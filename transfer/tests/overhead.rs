//! What a copy costs the host beside the driver's calls: at most a microsecond. A measurement, so it is ignored:
//! `cargo test --release -p aquifer-transfer --test overhead -- --ignored --nocapture`.
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::time::Instant;

use aquifer_allocator::{Allocator, Config, DeviceBuffer};
use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{Device, HostPtr, Stream};
use aquifer_transfer::{Direction, PinnedBuffer, Transfer};

const COPIES: u32 = 500;
const ROUNDS: usize = 40;
/// What a copy may cost beside the driver's calls.
const OVERHEAD_MAX_NS: f64 = 1000.0;

/// Nanoseconds a copy. The device is idle before and after.
fn time(device: &Device, mut copy: impl FnMut()) -> f64 {
    device.synchronize().unwrap();
    let start = Instant::now();
    for _ in 0..COPIES {
        copy();
    }
    let elapsed = start.elapsed();
    device.synchronize().unwrap();
    elapsed.as_nanos() as f64 / f64::from(COPIES)
}

/// The same driver calls: a copy, and an event after it.
fn raw(stream: &Stream, to: &DeviceBuffer<u8>, from: HostPtr) {
    // SAFETY: the memory is page-locked, lives until the device was waited for, and nobody writes it.
    unsafe { stream.upload(to.ptr(), from, 64) }.unwrap();
    stream.tick().cover().unwrap();
}

#[test]
#[ignore = "a measurement"]
fn host_overhead_of_a_copy() {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30).jitter(false)));
    let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
    let stream = transfer.next_stream(Direction::Upload).clone();
    let on = transfer.on(&stream).unwrap();
    let mut buffer: DeviceBuffer<u8> = transfer.allocator().alloc_buffer(64, &stream).unwrap();
    let host: PinnedBuffer<u8> = transfer.pinned().alloc_zeroed(64).unwrap();
    let from = HostPtr(host.read().unwrap().as_ptr().expose_provenance());
    let mut over: Vec<(f64, f64)> = (0..ROUNDS)
        .map(|_| {
            let ours = time(&device, || drop(on.upload(&host, &mut buffer).unwrap()));
            (ours, time(&device, || raw(&stream, &buffer, from)))
        })
        .collect();
    over.sort_by(|left, right| (left.0 - left.1).total_cmp(&(right.0 - right.1)));
    let (ours, raw) = over[ROUNDS / 2];
    println!("a copy: {ours:.0} ns, its driver calls alone: {raw:.0} ns, overhead {:.0} ns", ours - raw);
    // What is compiled without optimisation takes longer, and nobody measures it.
    assert!(cfg!(debug_assertions) || ours - raw <= OVERHEAD_MAX_NS, "more than {OVERHEAD_MAX_NS} ns");
    assert!(device.driver().take_violation().is_none());
}
