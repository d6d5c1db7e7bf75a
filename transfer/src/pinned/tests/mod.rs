//! The pool on a simulated device, with copies in flight, as the copies of the runtime make them.

mod copies;
mod faults;
mod gone;
mod limits;
mod outside;
mod random;
mod statistics;

use std::sync::Arc;

use aquifer_device::{AccessKind, CallCounts, Device, DevicePtr, HostPtr, Operation, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use bytemuck::Pod;

use super::{HostPart, PinnedBuffer, PinnedPool, Returned};
use crate::error::TransferError;

/// A simulated device, the pool, a stream, and device memory to copy to and from.
struct Bench {
    sim: Arc<SimDriver>,
    device: Device,
    pool: PinnedPool,
    stream: Stream,
    memory: DevicePtr,
}

/// Length of [`Bench::memory`].
const MEMORY: usize = 64 << 20;

impl Bench {
    fn limited(bytes: u64) -> Bench {
        let bench = Bench::new();
        bench.pool.set_limit(Some(bytes));
        bench
    }

    fn new() -> Bench {
        let sim = SimDriver::new(SimConfig::parse("1GiB,seed=1").unwrap());
        let device = Device::new(sim.clone());
        let pool = PinnedPool::new(&device);
        let (stream, memory) = (device.stream().unwrap(), device.alloc(MEMORY as u64).unwrap());
        Bench { sim, device, pool, stream, memory }
    }

    fn upload<T: Pod>(&self, from: &PinnedBuffer<T>) -> Result<(), TransferError> {
        upload(from.as_slice().host(), self.memory, &self.stream, &self.device)
    }

    fn download<T: Pod>(&self, to: &mut PinnedBuffer<T>) -> Result<(), TransferError> {
        download(to.as_slice_mut().host(), self.memory, &self.stream, &self.device)
    }

    fn calls_in(&self, run: impl FnOnce()) -> CallCounts {
        let before = self.device.driver_calls();
        run();
        self.device.driver_calls().since(&before)
    }

    /// Asserts, when no buffer is alive, that all memory goes back and that nothing raced.
    fn check_over(&self) {
        self.device.synchronize().unwrap();
        self.pool.empty_cache().unwrap();
        let stats = self.pool.stats();
        assert_eq!((stats.active_bytes.current, stats.active_requests.current), (0, 0));
        assert_eq!((stats.allocated_bytes.current, stats.allocations.current), (0, 0));
        self.device.settle();
        assert_eq!(self.sim.take_violations(), []);
    }
}

/// Enqueues a copy of a part to the device.
#[allow(unsafe_code, reason = "raw driver copies, as the runtime makes them")]
fn upload(part: HostPart<'_>, to: DevicePtr, stream: &Stream, device: &Device) -> Result<(), TransferError> {
    let access = part.memory.access(stream, AccessKind::Read)?;
    // SAFETY: the access guard keeps others from writing the part, or reusing it, before the copy
    // is done.
    unsafe { device.driver().copy_to_device(to, part.ptr.as_ptr(), part.bytes, stream.raw())? };
    drop(access);
    Ok(stream.tick().cover()?)
}

/// Enqueues a copy of device memory to a part.
fn download(part: HostPart<'_>, from: DevicePtr, stream: &Stream, device: &Device) -> Result<(), TransferError> {
    let access = part.memory.access(stream, AccessKind::Write)?;
    raw_download(part.ptr.0, from, part.bytes, stream, device)?;
    drop(access);
    Ok(stream.tick().cover()?)
}

/// Enqueues a copy to pinned memory that the caller has an access guard on.
#[allow(unsafe_code, reason = "raw driver copies, as the runtime makes them")]
fn raw_download(
    to: usize,
    from: DevicePtr,
    bytes: usize,
    stream: &Stream,
    device: &Device,
) -> Result<(), TransferError> {
    // SAFETY: the caller's access guard keeps others from touching the part, or reusing it, before
    // the copy is done.
    unsafe { device.driver().copy_to_host(HostPtr(to).as_ptr(), from, bytes, stream.raw())? };
    Ok(())
}

fn address<T: Pod>(buffer: &PinnedBuffer<T>) -> usize {
    buffer.as_slice().host().ptr.0
}
