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

use std::sync::{Arc, Mutex, PoisonError};

use aquifer::Allocator;
use aquifer::device::{DeviceError, DevicePtr, cuda};
use aquifer_cudarc::{Error, graph_of_capture, keep_for_capture};
use aquifer_device::{Code, Operation};
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaStream, DeviceAllocator, DriverError};

/// Takes the memory of a context's slices from the process's allocator of its device, from now on
/// and for as long as the context lives, which is until the process ends. Installing it again
/// changes nothing. cudarc frees what it allocated before.
///
/// `CudaContext::mem_get_info` counts what the allocator has cached as free, and keeps to its limit
/// and headroom. `CudaContext::trim` gives the cache back to the device.
///
/// A graph has memory of its own, whether cudarc's functions capture and launch it or the driver's:
/// no other request gets what was allocated for the capture's streams, until the graph is gone,
/// with its clones, its executables and their launches. What was allocated before, and is dropped
/// in the capture, is kept as long. Several graphs share no memory. Drivers before CUDA 11.3 do not
/// tell when a graph is gone: there, requests in captures are refused.
///
/// cudarc's error has room for a code alone: `DeviceAllocator::last_error` of the context's
/// allocator has the message, for memory that ran out the report.
///
/// # Errors
/// As [`aquifer_cudarc::allocator`].
pub fn install(context: &Arc<CudaContext>) -> Result<Allocator, Error> {
    let memory = aquifer_cudarc::allocator(context)?;
    let hook = Hook { memory: memory.clone(), last_error: Mutex::default() };
    // SAFETY: the allocator is that of the context's device, and hands each part of its memory out
    // once.
    unsafe { context.set_allocator(Arc::new(hook)) };
    Ok(memory)
}

struct Hook {
    memory: Allocator,
    last_error: Mutex<Option<String>>,
}

impl Hook {
    /// Keeps the message of an error, which cudarc's cannot carry.
    fn keep_error<T>(&self, done: Result<T, Error>) -> Result<T, DriverError> {
        done.map_err(|error| {
            *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
            error.into()
        })
    }

    fn stream(&self, stream: &Arc<CudaStream>) -> Result<aquifer::Stream, Error> {
        Ok(cuda::stream(self.memory.device(), stream)?)
    }

    fn alloc(&self, theirs: &Arc<CudaStream>, bytes: usize) -> Result<CUdeviceptr, Error> {
        let stream = self.stream(theirs)?;
        let ptr = match graph_of_capture(&self.memory, theirs)? {
            Some(graph) => graph.pool().alloc_raw(bytes as u64, &stream),
            None => self.memory.alloc_raw(bytes as u64, &stream),
        };
        Ok(ptr?.0)
    }

    fn free(&self, theirs: &Arc<CudaStream>, ptr: DevicePtr) -> Result<bool, Error> {
        if self.memory.size_of_raw(ptr).is_err() {
            return Ok(false);
        }
        let stream = self.stream(theirs)?;
        if !keep_for_capture(&self.memory, theirs, ptr)? {
            self.memory.free_raw_on(ptr, &stream)?;
        }
        Ok(true)
    }

    fn begin_capture(
        &self,
        theirs: &Arc<CudaStream>,
        begin: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        let stream = self.stream(theirs)?;
        let mut failed = None;
        let begun = stream.begin_followed_capture(|| {
            begin().map_err(|error| {
                failed = Some(error);
                DeviceError::new(Operation::BeginCapture, Code(error.0 as u32))
            })
        });
        begun.map_err(|error| failed.map_or_else(|| Error::from(error), Error::from))?;
        // From now on, the graph notes which buffers its work uses.
        self.memory.followed_graph(&stream).map(drop).map_err(|error| {
            let driver = stream.driver();
            let ended = driver.end_capture(stream.raw()).and_then(|graph| driver.destroy_graph(graph));
            ended.err().map_or_else(|| Error::from(error), Error::from)
        })
    }
}

impl DeviceAllocator for Hook {
    fn alloc(&self, stream: &Arc<CudaStream>, len: usize) -> Result<CUdeviceptr, DriverError> {
        self.keep_error(self.alloc(stream, len))
    }

    fn free(&self, stream: &Arc<CudaStream>, ptr: CUdeviceptr) -> Result<bool, DriverError> {
        self.keep_error(self.free(stream, DevicePtr(ptr)))
    }

    fn trim(&self, _: &CudaContext) -> Result<(), DriverError> {
        self.keep_error(self.memory.empty_cache().map(drop).map_err(Error::from))
    }

    fn mem_info(&self, _: &CudaContext) -> Result<(usize, usize), DriverError> {
        let available = self.memory.available().map_err(Error::from);
        let total = self.memory.device().memory_info().map_err(Error::from).map(|memory| memory.total);
        Ok((self.keep_error(available)? as usize, self.keep_error(total)? as usize))
    }

    fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn begin_capture(
        &self,
        stream: &Arc<CudaStream>,
        begin: &mut dyn FnMut() -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        self.keep_error(self.begin_capture(stream, begin))
    }
}
