//! The driver's own stream-ordered pool (`cuMemAllocAsync`) as a subject, for comparison.
//!
//! A block that another stream uses is freed on its own stream after that use. The pool is the
//! device's default one with the driver's settings: its release threshold is 0, so unused memory
//! is released whenever the host waits, which does not happen during a pass. PyTorch
//! (`backend:cudaMallocAsync`) and RMM raise the threshold to the maximum; [`Driver`] has no call
//! for it.
//!
//! [`Driver`]: aquifer_device::Driver

use aquifer::device::{DeviceError, DevicePtr, Tick};
use aquifer::{Device, Error, Stream};
use aquifer_device::PoolUsage;

use crate::subject::{Refused, Subject, streams_of};

/// The pool as a [`Subject`], with the streams of a program.
#[derive(Debug)]
pub struct DriverPool {
    device: Device,
    streams: Vec<Stream>,
    /// The first free that failed; every later call reports it.
    failed: Option<DeviceError>,
}

/// A live block.
#[derive(Debug)]
pub struct PoolBlock {
    ptr: DevicePtr,
    stream: u16,
    /// Uses by other streams.
    uses: Vec<Tick>,
}

impl DriverPool {
    /// The pool of a device, and `streams` streams: stream 0 is the default stream.
    ///
    /// # Errors
    /// Errors of the driver; not supported where it has no pool.
    pub fn new(device: Device, streams: usize) -> Result<DriverPool, DeviceError> {
        device.driver().pool_usage()?;
        Ok(DriverPool { streams: streams_of(&device, streams)?, device, failed: None })
    }

    /// The memory in use and reserved.
    ///
    /// # Errors
    /// Errors of the driver, and of a free that failed before.
    pub fn usage(&self) -> Result<PoolUsage, Error> {
        self.check()?;
        Ok(self.device.driver().pool_usage()?)
    }

    /// Releases unused memory to the device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn give_back(&self) -> Result<(), DeviceError> {
        self.device.synchronize()?;
        self.device.driver().trim_pool(0)
    }
}

impl Subject for DriverPool {
    type Handle = PoolBlock;

    #[inline]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<PoolBlock, Refused> {
        let raw = self.streams[usize::from(stream)].raw();
        // The driver has no allocation of 0 bytes.
        match self.device.driver().alloc_async(bytes.max(1), raw) {
            Ok(ptr) => Ok(PoolBlock { ptr, stream, uses: Vec::new() }),
            Err(error) if error.is_out_of_memory() => Err(Refused::OutOfMemory(None)),
            Err(error) => Err(Refused::Failed(Box::new(error.into()))),
        }
    }

    #[inline]
    fn free(&mut self, block: PoolBlock) {
        let stream = &self.streams[usize::from(block.stream)];
        let ordered = block.uses.iter().try_for_each(|tick| stream.wait_for(tick));
        if let Err(error) = ordered.and_then(|()| self.device.driver().free_async(block.ptr, stream.raw())) {
            self.device.free_later(block.ptr);
            self.failed.get_or_insert(error);
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), |error| Err(error.into()))
    }

    #[inline]
    fn record_stream(&mut self, block: &mut PoolBlock, stream: u16) -> Result<(), Refused> {
        block.uses.push(self.streams[usize::from(stream)].tick());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_back_after_the_last_use() {
        let device = aquifer::open("sim:1GiB").unwrap();
        let mut pool = DriverPool::new(device.clone(), 2).unwrap();
        let mut block = pool.alloc(3 << 20, 1).unwrap();
        let empty = pool.alloc(0, 0).unwrap();
        pool.record_stream(&mut block, 0).unwrap();
        assert!(matches!(pool.alloc(2 << 30, 0), Err(Refused::OutOfMemory(_))));
        pool.free(block);
        pool.free(empty);
        device.synchronize().unwrap();
        let usage = pool.usage().unwrap();
        assert_eq!((usage.used, usage.used_peak), (0, (3 << 20) + 1));
        assert_eq!(device.driver().take_violation(), None);
    }

    #[test]
    fn a_free_that_fails_is_reported() {
        let device = aquifer::open("sim:1GiB,fault=cuMemFreeAsync#1:999").unwrap();
        let mut pool = DriverPool::new(device, 1).unwrap();
        let block = pool.alloc(512, 0).unwrap();
        pool.free(block);
        assert!(pool.usage().is_err());
    }
}
