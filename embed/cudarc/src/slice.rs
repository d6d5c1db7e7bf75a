//! Slices of cudarc's in memory of Aquifer's.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use aquifer::device::{DevicePtr, RequestError};
use aquifer::memory::PrivatePool;
use aquifer::{Allocator, Buffer};
use cudarc::driver::sys::{CUdeviceptr, CUstreamCaptureMode};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut as _, DeviceRepr, DriverError, ValidAsZeroBits};

use crate::{Capture, Error, graph_of_capture, keep_for_capture};

/// Allocation on streams of cudarc's.
pub trait AllocatorExt {
    /// Begins a capture, in place of `CudaStream::begin_capture`. What this thread allocates until
    /// [`Capture::end`] comes from a pool of the graph's own, which serves no other request while
    /// the graph lives.
    ///
    /// Name the buffers of each launch with [`StreamExt::with`](crate::StreamExt::with): the graph
    /// keeps them, and its launches come after what other streams did with them. Slices need
    /// cudarc's event tracking to be off, since its events cannot be captured.
    ///
    /// ```no_run
    /// use aquifer::prelude::*;
    /// use aquifer_cudarc::{AllocatorExt, StreamExt};
    /// use cudarc::driver::CudaContext;
    /// use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
    ///
    /// let context = CudaContext::new(0)?;
    /// let (memory, stream) = (aquifer_cudarc::allocator(&context)?, context.new_stream()?);
    /// # fn launch(_: u64, _: u64) -> Result<(), aquifer_cudarc::Error> { Ok(()) }
    /// let input = memory.alloc_zeros_on::<f32>(1000, &stream)?;
    /// let capture = memory.begin_capture(&stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    /// let mut output = memory.alloc_on::<f32>(1000, &stream)?; // of the graph's pool
    /// stream.with([read(&input), write(&mut output)], |_, [x, y]| launch(x.device_ptr(), y.device_ptr()))?;
    /// let graph = capture.end(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, output)?;
    /// graph.launch()?;
    /// let host = graph.graph().output().to_vec(&aquifer_cudarc::stream(&stream)?)?;
    /// # Ok::<(), aquifer_cudarc::Error>(())
    /// ```
    ///
    /// # Errors
    /// When cudarc cannot begin; a stream of another context, or one that captures already.
    fn begin_capture(&self, stream: &Arc<CudaStream>, mode: CUstreamCaptureMode) -> Result<Capture<'static>, Error>;

    /// As [`AllocatorExt::begin_capture`], with memory of a pool that several graphs share:
    /// together they need as much as the largest one. Their launches run one after the other.
    /// Allocate what lives on, such as outputs, before the capture: other graphs of the pool may
    /// write in it.
    ///
    /// # Errors
    /// As [`AllocatorExt::begin_capture`], and a pool of another allocator.
    fn begin_capture_in<'p>(
        &self,
        pool: &'p PrivatePool,
        stream: &Arc<CudaStream>,
        mode: CUstreamCaptureMode,
    ) -> Result<Capture<'p>, Error>;

    /// Makes a buffer of a slice that cudarc allocated. When the last handle is dropped, the
    /// slice's own stream waits for what uses it, and cudarc frees it.
    ///
    /// # Errors
    /// A slice of another context than the allocator's.
    fn import_slice<T: DeviceRepr + Copy + Send + 'static>(&self, slice: CudaSlice<T>) -> Result<Buffer<T>, Error>;

    /// Allocates a buffer of `len` elements, which hold anything.
    ///
    /// # Errors
    /// As [`Allocator::alloc`]; a stream of another context; as [`graph_of_capture`].
    fn alloc_on<T: Copy>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<Buffer<T>, Error>;

    /// Allocates a buffer of `len` zeros.
    ///
    /// # Errors
    /// As [`AllocatorExt::alloc_on`].
    fn alloc_zeros_on<T: Copy>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<Buffer<T>, Error>;

    /// Allocates a slice of `len` elements for code that takes cudarc's own.
    ///
    /// # Safety
    /// The elements hold anything, so they must be written before they are read.
    ///
    /// # Errors
    /// As `Allocator::alloc_raw`; a stream of another context; [`Error::Untracked`]; in a capture
    /// [`Error::TrackedCapture`]; as [`graph_of_capture`].
    unsafe fn alloc_slice<T: DeviceRepr>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<PoolSlice<T>, Error>;

    /// Allocates a slice of `len` zeros for code that takes cudarc's own.
    ///
    /// # Errors
    /// As [`AllocatorExt::alloc_slice`], and what cudarc's `memset_zeros` returns.
    fn alloc_slice_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<PoolSlice<T>, Error>;
}

impl AllocatorExt for Allocator {
    fn begin_capture(&self, stream: &Arc<CudaStream>, mode: CUstreamCaptureMode) -> Result<Capture<'static>, Error> {
        Capture::begin(self, None, stream, mode)
    }

    fn begin_capture_in<'p>(
        &self,
        pool: &'p PrivatePool,
        stream: &Arc<CudaStream>,
        mode: CUstreamCaptureMode,
    ) -> Result<Capture<'p>, Error> {
        Capture::begin(self, Some(pool), stream, mode)
    }

    fn import_slice<T: DeviceRepr + Copy + Send + 'static>(&self, mut slice: CudaSlice<T>) -> Result<Buffer<T>, Error> {
        let (theirs, len) = (slice.stream().clone(), slice.len());
        let home = crate::stream(&theirs)?;
        // Orders the slice's own stream after what cudarc knows of other streams.
        let (ptr, noted) = slice.device_ptr_mut(&theirs);
        drop(noted);
        let owner = home.clone();
        Ok(self.import(DevicePtr(ptr), len, &home, move |ticks| {
            let is_ordered = ticks.iter().all(|tick| owner.wait_for(tick).is_ok());
            // Memory that may be in use is better lost than reused.
            if is_ordered { drop(slice) } else { std::mem::forget(slice) }
        })?)
    }

    #[track_caller]
    fn alloc_on<T: Copy>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<Buffer<T>, Error> {
        let (home, graph) = (crate::stream(stream)?, graph_of_capture(self, stream)?);
        let _route = graph.as_ref().map(|graph| graph.pool().route_thread());
        Ok(self.alloc(len, &home)?)
    }

    #[track_caller]
    fn alloc_zeros_on<T: Copy>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<Buffer<T>, Error> {
        let (home, graph) = (crate::stream(stream)?, graph_of_capture(self, stream)?);
        let _route = graph.as_ref().map(|graph| graph.pool().route_thread());
        Ok(self.alloc_zeros(len, &home)?)
    }

    #[track_caller]
    unsafe fn alloc_slice<T: DeviceRepr>(&self, len: usize, stream: &Arc<CudaStream>) -> Result<PoolSlice<T>, Error> {
        let (home, followed) = (crate::stream(stream)?, graph_of_capture(self, stream)?);
        let _route = followed.as_ref().map(|graph| graph.pool().route_thread());
        let graph = home.launches_of_capture().map(|launches| launches.number());
        if graph.is_some() && stream.context().is_managing_stream_synchronization() {
            return Err(Error::TrackedCapture);
        }
        // The edges of a graph order what its work does.
        if graph.is_none() && !is_ordered(stream) {
            return Err(Error::Untracked);
        }
        let (count, size) = (len as u64, size_of::<T>() as u64);
        let bytes = count.checked_mul(size).ok_or(RequestError::LengthOverflow { len: count, size })?;
        let ptr = self.alloc_raw(bytes, &home)?;
        let has_events = stream.context().is_event_tracking();
        // SAFETY: so many bytes are allocated there, which `free_raw` alone frees.
        let slice = unsafe { stream.upgrade_device_ptr(ptr.0, len) };
        Ok(PoolSlice { slice: ManuallyDrop::new(slice), allocator: self.clone(), has_events })
    }

    #[track_caller]
    fn alloc_slice_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<PoolSlice<T>, Error> {
        // SAFETY: it is written right here.
        let mut slice = unsafe { self.alloc_slice(len, stream) }?;
        stream.memset_zeros(&mut *slice)?;
        Ok(slice)
    }
}

/// True if cudarc orders what streams do with a slice, or there is but one stream.
fn is_ordered(stream: &CudaStream) -> bool {
    stream.context().is_event_tracking() || !stream.context().is_in_multi_stream_mode()
}

/// A slice of cudarc's in memory of Aquifer's: it goes wherever a [`CudaSlice`] goes by reference.
///
/// cudarc orders the streams that use it, by the two events that each slice has while the context's
/// event tracking is on. When it is dropped, its own stream waits for them, and then the memory
/// goes back to the allocator. If tracking was off when it was allocated or is off then, and the
/// context has several streams, the drop waits for the whole context instead; while a stream
/// captures, a later call of the device does.
///
/// Dropped while its stream captures, it goes back to the graph's pool if it was allocated in the
/// capture. Otherwise the graph keeps it: for ever, if another library captured the graph and
/// announced that.
///
/// As for slices of its own, cudarc knows only the last stream that read. Where two streams read a
/// slice, order one after the other, or the slice's own stream after both, before it is written or
/// dropped; or use a [`Buffer`].
///
/// Do not [`std::mem::swap`] it with a slice of cudarc's own: neither is freed then, as each finds
/// a pointer that is not its own.
pub struct PoolSlice<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    allocator: Allocator,
    /// cudarc's event tracking was on when the slice was made.
    has_events: bool,
}

impl<T> PoolSlice<T> {
    /// Gives up the slice and returns its address, to be freed with `Allocator::free_raw`. The
    /// slice's own stream waits for what uses it.
    pub fn leak(self) -> CUdeviceptr {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: neither field is used afterwards, nor dropped another time: `this` is not
        // dropped.
        let slice = unsafe { ManuallyDrop::take(&mut this.slice) };
        // SAFETY: as above.
        unsafe { std::ptr::drop_in_place(&raw mut this.allocator) };
        slice.leak()
    }
}

impl<T> Deref for PoolSlice<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> DerefMut for PoolSlice<T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }
}

impl<T> Drop for PoolSlice<T> {
    fn drop(&mut self) {
        let stream = self.slice.stream().clone();
        let record = |error: Error| stream.context().record_err(Err::<(), DriverError>(error.into()));
        if let Err(error) = graph_of_capture(&self.allocator, &stream) {
            // A graph may use the memory for ever, and waiting for the slice's events would break
            // its capture.
            return record(error);
        }
        // SAFETY: it is taken here alone, and not used afterwards.
        let ptr = DevicePtr(unsafe { ManuallyDrop::take(&mut self.slice) }.leak());
        match keep_for_capture(&self.allocator, &stream, ptr) {
            Ok(false) => {}
            Ok(true) => return,
            Err(error) => return record(error),
        }
        let is_of_capture = crate::stream(&stream).is_ok_and(|stream| stream.is_capturing());
        let is_ordered = is_ordered(&stream) && (self.has_events || !stream.context().is_in_multi_stream_mode());
        if is_ordered || is_of_capture {
            let _ = self.allocator.free_raw(ptr);
        } else {
            drop(self.allocator.freed_once_idle(ptr));
        }
    }
}

impl<T> fmt::Debug for PoolSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolSlice").field("len", &self.slice.len()).finish_non_exhaustive()
    }
}
