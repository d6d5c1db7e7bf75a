//! Known content of device memory: blocks are filled with a byte each, and verified by samples.

use aquifer::Stream;
use aquifer::device::{DeviceError, DevicePtr};

/// A block that was filled with a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Filled {
    /// Its address.
    pub ptr: DevicePtr,
    /// Its length.
    pub bytes: u64,
    /// The byte.
    pub byte: u8,
}

/// The length of the samples: at the start, in the middle and at the end.
const SAMPLE: u64 = 4096;

impl Filled {
    /// Enqueues filling memory with a byte.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn fill(ptr: DevicePtr, bytes: u64, byte: u8, stream: &Stream) -> Result<Filled, DeviceError> {
        if bytes > 0 {
            stream.fill(ptr, byte, bytes)?;
        }
        Ok(Filled { ptr, bytes, byte })
    }

    /// Whether the samples still have the byte.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_intact(&self, stream: &Stream) -> Result<bool, DeviceError> {
        let length = self.bytes.min(SAMPLE);
        // Bytes that are not read must differ.
        let mut sample = vec![!self.byte; usize::try_from(length).unwrap_or(0)];
        for from in [0, (self.bytes - length) / 2, self.bytes - length] {
            sample.fill(!self.byte);
            if length > 0 {
                stream.download_blocking(&mut sample, self.ptr.offset(from))?;
            }
            if sample.iter().any(|read| *read != self.byte) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer::Device;
    use aquifer::device::sim::{SimConfig, SimDriver};

    #[test]
    fn damage_in_a_sample_is_found() {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let stream = device.default_stream();
        for bytes in [1, 4096, 100_000] {
            let ptr = device.alloc(bytes).unwrap();
            let filled = Filled::fill(ptr, bytes, 7, stream).unwrap();
            assert!(filled.is_intact(stream).unwrap());
            stream.fill(ptr.offset(bytes - 1), 8, 1).unwrap();
            assert!(!filled.is_intact(stream).unwrap());
        }
        assert!(Filled::fill(DevicePtr(0), 0, 1, stream).unwrap().is_intact(stream).unwrap());
    }
}
