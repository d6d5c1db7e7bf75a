//! What the tests share: a device of the stand-in with a context on it, and the driver's answers as numbers.

use std::sync::Arc;

use aquifer_standin::{Standin, StandinDevice, load};
use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError};

pub(crate) const MIB: usize = 1 << 20;

/// The stand-in.
pub(crate) fn standin() -> &'static Standin {
    load().unwrap_or_else(|error| panic!("{error}"))
}

/// A device, and a context that is current in this thread.
pub(crate) struct Card {
    // Dropped first: the context belongs to the device.
    pub(crate) context: Arc<CudaContext>,
    pub(crate) device: StandinDevice,
}

impl Card {
    /// A device of 1 GiB.
    pub(crate) fn new() -> Card {
        Card::with("1GiB")
    }

    /// A device as configured.
    pub(crate) fn with(config: &str) -> Card {
        let device = standin().add_device(config).unwrap();
        let context = CudaContext::new(device.ordinal() as usize).unwrap();
        Card { context, device }
    }

    /// The handle of the device.
    pub(crate) fn handle(&self) -> i32 {
        i32::try_from(self.device.ordinal()).unwrap()
    }
}

/// The number of an answer of `sys`.
pub(crate) fn number(answer: CUresult) -> u32 {
    answer as u32
}

/// The number of an error of cudarc.
pub(crate) fn refused<T>(answer: Result<T, DriverError>) -> u32 {
    answer.map_or_else(|error| error.0 as u32, |_| 0)
}
