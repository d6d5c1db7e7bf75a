//! The pool on a simulated device, with copies in flight, as the copies of the runtime make them.

use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{AccessKind, Device, DevicePtr, Stream};

use super::{HostPart, PinnedBuffer, PinnedConfig, PinnedPool};
use crate::error::TransferError;

pub(super) fn device() -> Device {
    Device::new(SimDriver::new(SimConfig::parse("1GiB,seed=1").unwrap()))
}

pub(super) fn pool_of(device: &Device, config: PinnedConfig) -> PinnedPool {
    PinnedPool::new(device, config).unwrap()
}

/// Enqueues a copy of a part to the device.
#[allow(unsafe_code, reason = "raw driver copies, as the runtime makes them")]
pub(super) fn upload(part: HostPart<'_>, to: DevicePtr, stream: &Stream, device: &Device) -> Result<(), TransferError> {
    let _turn = part.memory.turn(stream, AccessKind::Read)?;
    // SAFETY: the turn keeps everybody from writing the part, or reusing it, before the copy is done.
    unsafe { device.driver().copy_to_device(to, part.ptr.as_ptr(), part.bytes, stream.raw())? };
    Ok(stream.tick().cover()?)
}

/// Enqueues a copy of device memory to a part.
#[allow(unsafe_code, reason = "raw driver copies, as the runtime makes them")]
pub(super) fn download(
    part: HostPart<'_>,
    from: DevicePtr,
    stream: &Stream,
    device: &Device,
) -> Result<(), TransferError> {
    let _turn = part.memory.turn(stream, AccessKind::Write)?;
    // SAFETY: the turn keeps everybody from touching the part, or reusing it, before the copy is done.
    unsafe { device.driver().copy_to_host(part.ptr.as_ptr(), from, part.bytes, stream.raw())? };
    Ok(stream.tick().cover()?)
}

pub(super) fn address(buffer: &PinnedBuffer<u8>) -> usize {
    buffer.as_slice().part().ptr.0
}

#[test]
fn what_is_uploaded_comes_back() {
    let device = device();
    let pool = pool_of(&device, PinnedConfig::default());
    let (up, down) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let memory = device.alloc(4096).unwrap();
    let values: Vec<u32> = (0..1024).collect();
    let source = pool.alloc_from(&values).unwrap();
    let mut target = pool.alloc_zeroed::<u32>(1024).unwrap();
    upload(source.as_slice().part(), memory, &up, &device).unwrap();
    down.wait_for(&up.tick()).unwrap();
    download(target.as_slice_mut().part(), memory, &down, &device).unwrap();
    assert!(!target.is_idle().unwrap());
    assert_eq!(target.read().unwrap(), values);
    assert!(target.is_idle().unwrap());
    assert_eq!(pool.stats().num_waits, 1);
    assert!(device.driver().take_violation().is_none());
}

/// test_caching_pinned_memory.
#[test]
fn memory_comes_back_at_once_when_idle_and_not_while_a_copy_is_in_flight() {
    let device = device();
    let pool = pool_of(&device, PinnedConfig::default());
    let stream = device.create_stream().unwrap();
    let memory = device.alloc(1 << 20).unwrap();
    let buffer = pool.alloc::<u8>(1 << 20).unwrap();
    let first = address(&buffer);
    drop(buffer);
    let buffer = pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    assert_eq!(address(&buffer), first, "idle memory is reused");
    upload(buffer.as_slice().part(), memory, &stream, &device).unwrap();
    let calls = device.driver_calls();
    drop(buffer);
    assert_eq!(device.driver_calls().since(&calls).total(), 0, "dropping makes no driver call");
    let other = pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    assert_ne!(address(&other), first, "a copy is in flight");
    stream.synchronize().unwrap();
    let again = pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    assert_eq!(address(&again), first, "the copy is done");
    assert!(device.driver().take_violation().is_none());
}

#[test]
fn writing_waits_for_uploads_and_reading_does_not() {
    let device = device();
    let pool = pool_of(&device, PinnedConfig::default());
    let stream = device.create_stream().unwrap();
    let memory = device.alloc(1 << 20).unwrap();
    let mut buffer = pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    upload(buffer.as_slice().part(), memory, &stream, &device).unwrap();
    assert_eq!(buffer.read().unwrap()[5], 0);
    assert_eq!(pool.stats().num_waits, 0);
    buffer.write().unwrap().fill(9);
    assert_eq!(pool.stats().num_waits, 1);
    let mut bytes = [1; 4];
    stream.download_blocking(&mut bytes, memory).unwrap();
    assert_eq!(bytes, [0; 4]);
    assert!(device.driver().take_violation().is_none());
}

#[test]
fn memory_of_another_device_and_captures_are_refused() {
    let (device, other) = (device(), device());
    let pool = pool_of(&device, PinnedConfig::default());
    let buffer = pool.alloc::<u8>(10).unwrap();
    let part = buffer.as_slice().part();
    let wrong = part.memory.turn(other.default_stream(), AccessKind::Read).unwrap_err();
    assert!(matches!(wrong, TransferError::WrongDevice { .. }), "{wrong}");
    let stream = device.create_stream().unwrap();
    let capture = stream.begin_capture().unwrap();
    let refused = part.memory.turn(&stream, AccessKind::Read).unwrap_err();
    assert!(refused.to_string().contains("capture"), "{refused}");
    drop(capture);
    part.memory.turn(&stream, AccessKind::Read).map(drop).unwrap();
}

#[test]
fn the_pool_outlives_its_handles_and_leaves_its_memory_to_the_device() {
    let device = device();
    let pool = pool_of(&device, PinnedConfig::default());
    let stream = device.create_stream().unwrap();
    let memory = device.alloc(1 << 20).unwrap();
    let buffer = pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    upload(buffer.as_slice().part(), memory, &stream, &device).unwrap();
    drop(pool);
    let calls = device.driver_calls();
    drop(buffer);
    assert_eq!(device.driver_calls().since(&calls).total(), 0);
    device.settle();
    assert_eq!(device.driver_calls().since(&calls).of(aquifer_device::Operation::HostFree), 1);
    assert!(device.driver().take_violation().is_none());
}
