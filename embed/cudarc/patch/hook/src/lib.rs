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
use aquifer_cudarc::{Error, graph_of_capture, keep_for_capture};
use cudarc::driver::{CudaContext, CudaStream, DeviceAllocator, DriverError, GraphMemory, sys};

/// Takes the memory of a context's slices from the process's allocator of its device, from now on
/// and for as long as the context lives, which is until the process ends. Installing it again
/// changes nothing. cudarc frees what it allocated before.
///
/// A graph has memory of its own, whether cudarc's functions capture and launch it or the driver's:
/// no other request gets what was allocated for the capture's streams, until the graph is gone,
/// with its clones, its executables and their launches. What was allocated before, and is dropped
/// in the capture, is kept as long. Several graphs share no memory. Drivers before CUDA 11.3 do not
/// tell when a graph is gone: there, requests in captures are refused.
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
        let ours = self.stream(stream)?;
        let ptr = match graph_of_capture(&self.0, stream)? {
            Some(graph) => graph.pool().alloc_raw(num_bytes as u64, &ours),
            None => self.0.alloc_raw(num_bytes as u64, &ours),
        };
        Ok(ptr.map_err(Error::from)?.0)
    }

    fn free(&self, ptr: sys::CUdeviceptr, _: usize, stream: &Arc<CudaStream>) -> Result<bool, DriverError> {
        let (ours, ptr) = (self.stream(stream)?, DevicePtr(ptr));
        if self.0.size_of_raw(ptr).is_err() {
            return Ok(false);
        }
        if !keep_for_capture(&self.0, stream, ptr)? {
            self.0.free_raw_on(ptr, &ours).map_err(Error::from)?;
        }
        Ok(true)
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
        graph::end(&self.0, stream, end)
    }
}
