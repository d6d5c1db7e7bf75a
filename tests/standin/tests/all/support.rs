//! What the tests share: a device of the stand-in with a context on it, and the driver's answers as
//! numbers.

use std::sync::Arc;

use aquifer_standin::{Standin, StandinDevice, load};
use cudarc::driver::sys::{self, CUcontext, CUresult, CUstream};
use cudarc::driver::{CudaContext, DriverError};

pub(crate) const MIB: usize = 1 << 20;

/// Makes a raw call of the driver: its answer as a number, 0 for success.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: pointers are null or to live values of the function's types; handles are checked
        // by the stand-in.
        let answer = unsafe { cudarc::driver::sys::$name($($argument),*) };
        $crate::support::number(answer)
    }};
}
pub(crate) use call;

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

    /// Allocates memory.
    pub(crate) fn alloc(&self, bytes: usize) -> u64 {
        let mut ptr = 0;
        assert_eq!(call!(cuMemAlloc_v2(&mut ptr, bytes)), 0);
        ptr
    }

    /// Creates a stream with the given flags.
    pub(crate) fn stream(&self, flags: u32) -> CUstream {
        let mut stream = std::ptr::null_mut();
        assert_eq!(call!(cuStreamCreate(&mut stream, flags)), 0);
        stream
    }

    /// Creates an event with the given flags.
    pub(crate) fn event(&self, flags: u32) -> sys::CUevent {
        let mut event = std::ptr::null_mut();
        assert_eq!(call!(cuEventCreate(&mut event, flags)), 0);
        event
    }

    /// The bytes at an address.
    pub(crate) fn read(&self, ptr: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        assert_eq!(call!(cuMemcpyDtoH_v2(read.as_mut_ptr().cast(), ptr, bytes)), 0);
        read
    }

    pub(crate) fn assert_no_violation(&self) {
        assert_eq!(self.device.violations(), [""; 0]);
    }
}

/// The number of an answer of `sys`.
pub(crate) fn number(answer: CUresult) -> u32 {
    answer as u32
}

/// The number of an error of cudarc; 0 for none.
pub(crate) fn refused<T>(answer: Result<T, DriverError>) -> u32 {
    answer.map_or_else(|error| error.0 as u32, |_| 0)
}

/// A handle that was never given out.
pub(crate) fn wild<T>() -> *mut T {
    std::ptr::without_provenance_mut(0xDEAD_BEEF)
}

/// The calling thread's current context.
pub(crate) fn current() -> CUcontext {
    let mut context = std::ptr::null_mut();
    assert_eq!(call!(cuCtxGetCurrent(&mut context)), 0);
    context
}
