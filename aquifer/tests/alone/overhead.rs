//! The host's time for a copy beyond the driver's calls: at most a microsecond. A measurement, so
//! it is ignored: `cargo test --release -p aquifer --test alone overhead -- --ignored
//! --nocapture`.
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::time::{Duration, Instant};

use aquifer::transfer::{Direction, Transfer};
use aquifer::{Allocator, Buffer, PinnedBuffer};
use aquifer_allocator::Config;
use aquifer_device::{Device, HostPtr};
use aquifer_sim::{SimConfig, SimDriver};

const COPIES: u32 = 500;
const ROUNDS: usize = 40;
/// The most time of a copy beyond the driver's calls.
const OVERHEAD_MAX_NS: f64 = 1000.0;
fn each(elapsed: Duration, copies: u32) -> f64 {
    elapsed.as_nanos() as f64 / f64::from(copies)
}

/// Nanoseconds a copy. The device is idle before and after.
fn time(device: &Device, mut copy: impl FnMut()) -> f64 {
    device.synchronize().unwrap();
    let start = Instant::now();
    for _ in 0..COPIES {
        copy();
    }
    let elapsed = start.elapsed();
    device.synchronize().unwrap();
    each(elapsed, COPIES)
}

/// Prints the time of a copy beyond `raw`, the same driver calls. The median of all rounds, which
/// alternate between both.
fn compare(device: &Device, name: &str, mut ours: impl FnMut(), mut raw: impl FnMut()) {
    let mut over: Vec<(f64, f64)> = (0..ROUNDS).map(|_| (time(device, &mut ours), time(device, &mut raw))).collect();
    over.sort_by(|left, right| (left.0 - left.1).total_cmp(&(right.0 - right.1)));
    let (ours, raw) = over[ROUNDS / 2];
    println!("{name}: {ours:.0} ns, its driver calls alone: {raw:.0} ns, overhead {:.0} ns", ours - raw);
    // Unoptimised code takes longer.
    assert!(cfg!(debug_assertions) || ours - raw <= OVERHEAD_MAX_NS, "{name}: more than {OVERHEAD_MAX_NS} ns");
}

#[test]
#[ignore = "a measurement"]
fn host_overhead_of_a_copy() {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30).jitter(false)));
    let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
    let stream = transfer.next_stream(Direction::Upload).clone();
    let on = transfer.on(&stream).unwrap();
    let mut buffer: Buffer<u8> = transfer.allocator().alloc(64, &stream).unwrap();
    let mut other: Buffer<u8> = transfer.allocator().alloc(64, &stream).unwrap();
    let mut host: PinnedBuffer<u8> = transfer.pinned().alloc_zeroed(64).unwrap();
    let (ptr, other_ptr) = (buffer.ptr(), other.ptr());
    let host_ptr = HostPtr(host.read().unwrap().as_ptr().expose_provenance());
    // The same driver calls are a copy, and an event after it.
    let upload = || {
        // SAFETY: the memory is pinned, lives until the device was waited for, and nothing
        // writes it.
        unsafe { stream.upload(ptr, host_ptr, 64) }.unwrap();
        stream.tick().cover().unwrap();
    };
    compare(&device, "an upload", || drop(buffer.upload(&host, &on).unwrap()), upload);
    let download = || {
        // SAFETY: the memory is pinned, lives until the device was waited for, and nothing
        // else touches it.
        unsafe { stream.download(host_ptr, ptr, 64) }.unwrap();
        stream.tick().cover().unwrap();
    };
    compare(&device, "a download", || drop(buffer.download(&mut host, &on).unwrap()), download);
    let copy = || {
        stream.copy(other_ptr, ptr, 64).unwrap();
        stream.tick().cover().unwrap();
    };
    compare(&device, "a copy on the device", || drop(on.copy(&buffer, &mut other).unwrap()), copy);
    assert!(device.driver().take_violation().is_none());
}
