//! A device of the stand-in and the driver under test on it.

use std::sync::Arc;

use aquifer_cuda::CudaDriver;
use aquifer_device::{
    AccessKind, AccessRange, Attempt, Code, DeviceError, DevicePtr, Driver, ErrorKind, KernelArg, Launch, RawModule,
    RawStream, Result, StreamFlags,
};
use aquifer_standin::{Standin, StandinDevice};

pub(crate) const MIB: u64 = 1 << 20;

/// A module with a kernel of the set, as the stand-in runs it, and one that it does not know.
pub(crate) const PTX: &str = "
.version 7.0
.target sm_75
.address_size 64
.visible .entry fill(.param .u64 to, .param .u64 bytes, .param .u64 pattern) { ret; }
.visible .entry unknown() { ret; }
";

/// The loaded stand-in.
pub(crate) fn standin() -> &'static Standin {
    aquifer_standin::load().unwrap_or_else(|error| panic!("{error}"))
}

/// A device of 1 GiB and its driver, which goes first.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) driver: Arc<CudaDriver>,
    pub(crate) device: StandinDevice,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::without(&[])
    }

    /// A driver that lacks functions.
    pub(crate) fn without(missing: &[&str]) -> Bench {
        Bench::on("1GiB", missing)
    }

    pub(crate) fn on(config: &str, missing: &[&str]) -> Bench {
        let device = standin().add_device(config).unwrap();
        let driver = CudaDriver::open_without(device.ordinal(), missing).unwrap();
        Bench { driver, device }
    }

    pub(crate) fn stream(&self) -> RawStream {
        self.driver.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap()
    }

    /// Bytes that the device lacks.
    pub(crate) fn used(&self) -> u64 {
        let info = self.driver.memory_info().unwrap();
        info.total - info.free
    }

    pub(crate) fn upload(&self, to: DevicePtr, bytes: &[u8], stream: RawStream) -> Result<()> {
        // SAFETY: the bytes are borrowed, and pageable memory is taken before the call returns.
        unsafe { self.driver.copy_to_device(to, bytes.as_ptr(), bytes.len(), stream) }
    }

    pub(crate) fn download(&self, from: DevicePtr, bytes: usize, stream: RawStream) -> Result<Vec<u8>> {
        let mut taken = vec![0; bytes];
        // SAFETY: the memory is pageable and writable, and filled before the call returns.
        unsafe { self.driver.copy_to_host(taken.as_mut_ptr(), from, bytes, stream) }?;
        Ok(taken)
    }

    /// Panics if the race detector found anything.
    pub(crate) fn assert_no_violation(&self) {
        assert_eq!(self.device.violations(), Vec::<String>::new());
    }
}

/// A launch of the kernel `fill`.
pub(crate) fn fill(module: Option<RawModule>, ptr: DevicePtr, bytes: u64, pattern: u64) -> Launch {
    Launch {
        name: "fill",
        module,
        block: [128, 1, 1],
        args: vec![KernelArg::Ptr(ptr), KernelArg::U64(bytes), KernelArg::U64(pattern)],
        accesses: vec![AccessRange { ptr, bytes, kind: AccessKind::Write }],
        ..Launch::default()
    }
}

/// The code of an error, and that it says something about itself.
pub(crate) fn code<T: std::fmt::Debug>(result: Result<T>) -> Code {
    let error: DeviceError = result.unwrap_err();
    let named = if let Attempt::Function(function) = error.attempt { function } else { error.operation.name() };
    assert!(error.to_string().contains(named), "{error}");
    error.code
}

pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}
