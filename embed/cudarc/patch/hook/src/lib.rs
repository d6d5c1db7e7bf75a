//! Programs that use cudarc, candle among them, take their GPU memory from Aquifer without a
//! change: they build against a cudarc with the hook of `cudarc-0.19.10.patch`, and call
//! [`install`] once for each context.
//!
//! ```no_run
//! let context = cudarc::driver::CudaContext::new(0)?;
//! let memory = aquifer_cudarc_hook::install(&context)?;
//! let slice = context.default_stream().alloc_zeros::<f32>(1000)?; // in memory of Aquifer's
//! println!("{}", memory.summary());
//! # Ok::<(), aquifer_cudarc::Error>(())
//! ```

use std::sync::Arc;

use aquifer::Allocator;
use aquifer::device::{DevicePtr, cuda};
use aquifer::memory::AllocError;
use aquifer_cudarc::Error;
use cudarc::driver::{CudaContext, CudaStream, DeviceAllocator, DriverError, sys};

/// Takes the memory of a context's slices from the process's allocator of its device, from now on
/// and for as long as the context lives, which is until the process ends. Installing it again
/// changes nothing. cudarc frees what it allocated before.
///
/// cudarc's error for memory that ran out has room for a code alone; the allocator's observers
/// (`Allocator::observe_oom`) get the report.
///
/// # Errors
/// As [`aquifer_cudarc::allocator`].
pub fn install(context: &Arc<CudaContext>) -> Result<Allocator, Error> {
    let memory = aquifer_cudarc::allocator(context)?;
    // SAFETY: the allocator is that of the context's device, and hands each part of its memory out
    // once.
    unsafe { context.set_allocator(Arc::new(Hook(memory.clone()))) };
    Ok(memory)
}

#[derive(Debug)]
struct Hook(Allocator);

impl Hook {
    fn stream(&self, stream: &Arc<CudaStream>) -> Result<aquifer::Stream, Error> {
        Ok(cuda::stream(self.0.device(), stream)?)
    }
}

impl DeviceAllocator for Hook {
    fn alloc(&self, num_bytes: usize, stream: &Arc<CudaStream>) -> Result<sys::CUdeviceptr, DriverError> {
        let stream = self.stream(stream)?;
        let ptr = self.0.alloc_raw(num_bytes as u64, &stream).map_err(Error::from)?;
        Ok(ptr.0)
    }

    fn free(&self, ptr: sys::CUdeviceptr, _: usize, stream: &Arc<CudaStream>) -> Result<bool, DriverError> {
        let stream = self.stream(stream)?;
        match self.0.free_raw_on(DevicePtr(ptr), &stream) {
            Ok(()) => Ok(true),
            Err(AllocError::InvalidPointer { .. }) => Ok(false),
            Err(error) => Err(Error::from(error).into()),
        }
    }
}
