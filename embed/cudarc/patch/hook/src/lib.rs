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

mod graph;

use std::sync::Arc;

use aquifer::Allocator;
use aquifer::device::{DevicePtr, cuda};
use aquifer::memory::AllocError;
use aquifer_cudarc::Error;
use cudarc::driver::{CudaContext, CudaStream, DeviceAllocator, DriverError, GraphMemory, sys};

/// Takes the memory of a context's slices from the process's allocator of its device, from now on
/// and for as long as the context lives, which is until the process ends. Installing it again
/// changes nothing. cudarc frees what it allocated before.
///
/// A graph that cudarc captures has memory of its own. While the `CudaGraph` lives, no other request
/// gets what the capturing thread allocates in the capture. What was allocated before, and is dropped
/// in the capture, is kept as long. Launches of several graphs come in the order of their streams.
/// While a stream is captured by other means, requests are refused and drops keep the memory.
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

/// Asks the driver for a capture that was not begun with cudarc's function, nor announced.
fn is_captured_unannounced(ours: &aquifer::Stream, theirs: &CudaStream) -> Result<bool, DriverError> {
    // The legacy default stream, which is null, cannot capture.
    let may_be = !ours.is_capturing() && !theirs.cu_stream().is_null();
    Ok(may_be && theirs.capture_status()? != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl DeviceAllocator for Hook {
    fn alloc(&self, num_bytes: usize, stream: &Arc<CudaStream>) -> Result<sys::CUdeviceptr, DriverError> {
        let ours = self.stream(stream)?;
        if is_captured_unannounced(&ours, stream)? {
            return Err(Error::UnannouncedCapture.into());
        }
        let ptr = self.0.alloc_raw(num_bytes as u64, &ours).map_err(Error::from)?;
        graph::note(&ours, ptr);
        Ok(ptr.0)
    }

    fn free(&self, ptr: sys::CUdeviceptr, _: usize, stream: &Arc<CudaStream>) -> Result<bool, DriverError> {
        let (ours, ptr) = (self.stream(stream)?, DevicePtr(ptr));
        // A graph whose capture nobody announced may use the memory for ever.
        let is_kept = || is_captured_unannounced(&ours, stream).unwrap_or(true) || graph::keep(&self.0, &ours, ptr);
        if self.0.size_of_raw(ptr).is_ok() && is_kept() {
            return Ok(true);
        }
        match self.0.free_raw_on(ptr, &ours) {
            Ok(()) => Ok(true),
            Err(AllocError::InvalidPointer { .. }) => Ok(false),
            Err(error) => Err(Error::from(error).into()),
        }
    }

    fn begin_capture(
        &self,
        stream: &Arc<CudaStream>,
        begin: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        graph::begin(&self.0, &self.stream(stream)?, begin)
    }

    fn end_capture(
        &self,
        stream: &Arc<CudaStream>,
        end: &mut dyn FnMut() -> Result<sys::CUgraphExec, DriverError>,
    ) -> Result<Option<Box<dyn GraphMemory>>, DriverError> {
        graph::end(stream.context(), &self.stream(stream)?, end)
    }
}
