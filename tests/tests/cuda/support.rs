//! A device of the stand-in for a test of its own.

use aquifer::device::cuda;
use aquifer_standin::{Standin, StandinDevice};
use aquifer_tests::prelude::*;
use cudarc::driver::CudaContext;

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn standin() -> &'static Standin {
    aquifer_standin::load().unwrap_or_else(|error| panic!("{error}"))
}

/// A device of 1 GiB; its handle goes before what it is made of.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) standin: StandinDevice,
}

impl Gpu {
    pub(crate) fn new() -> Gpu {
        let standin = standin().add_device("1GiB").unwrap();
        Gpu { device: cuda::shared(standin.ordinal()).unwrap(), standin }
    }

    /// A context of cudarc's on the same device.
    pub(crate) fn context(&self) -> Arc<CudaContext> {
        CudaContext::new(self.standin.ordinal() as usize).unwrap()
    }

    pub(crate) fn assert_no_violation(&self) {
        assert_eq!(self.standin.violations(), Vec::<String>::new());
    }
}

pub(crate) fn kind<T: std::fmt::Debug>(result: aquifer_device::Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}
