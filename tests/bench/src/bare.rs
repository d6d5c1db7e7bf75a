//! The driver without an allocator above it (`cuMemAlloc` and `cuMemFree`) as a subject, for
//! comparison. A free waits for all work of the device.

use aquifer::device::{DeviceError, DevicePtr};
use aquifer::{Device, Error};
use aquifer_trace::{Refused, Subject};

/// The driver as a [`Subject`].
#[derive(Debug)]
pub(crate) struct Bare {
    device: Device,
    /// The first free that failed.
    failed: Option<DeviceError>,
}

impl Bare {
    /// The driver of a device.
    pub(crate) fn new(device: Device) -> Bare {
        Bare { device, failed: None }
    }
}

impl Subject for Bare {
    type Handle = DevicePtr;

    #[inline]
    fn alloc(&mut self, bytes: u64, _: u16) -> Result<DevicePtr, Refused> {
        // The driver has no allocation of 0 bytes.
        match self.device.driver().alloc(bytes.max(1)) {
            Ok(ptr) => Ok(ptr),
            Err(error) if error.is_out_of_memory() => Err(Refused::OutOfMemory(None)),
            Err(error) => Err(Refused::Failed(Box::new(error.into()))),
        }
    }

    #[inline]
    fn free(&mut self, ptr: DevicePtr) {
        if let Err(error) = self.device.driver().free(ptr) {
            self.failed.get_or_insert(error);
        }
    }

    fn check(&self) -> Result<(), Error> {
        self.failed.clone().map_or(Ok(()), |error| Err(error.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_asks_the_driver() {
        let device = aquifer::open("sim:1GiB,fault=cuMemFree#2:999").unwrap();
        let mut bare = Bare::new(device.clone());
        let [one, two] = [3 << 20, 0].map(|bytes| bare.alloc(bytes, 0).unwrap());
        assert!(matches!(bare.alloc(2 << 30, 0), Err(Refused::OutOfMemory(_))));
        bare.free(one);
        bare.check().unwrap();
        bare.free(two);
        assert!(bare.check().is_err());
    }
}
