//! Work of cudarc's on buffers of Aquifer's.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use aquifer::buffer::{Access, WithError, with};
use cudarc::driver::{CudaSlice, CudaStream, sys::CUdeviceptr};

use crate::graph::may_be_captured;
use crate::{Error, stream};

/// What Aquifer adds to streams of cudarc's.
pub trait StreamExt {
    /// Calls `work` to enqueue work of cudarc's on the stream. It comes after everything that was
    /// enqueued on these buffers before, on any stream, and whatever uses them next comes after it.
    /// They can be dropped when this returns.
    ///
    /// `work` gets the stream and the addresses of the buffers in the order of `accesses`. It
    /// should only enqueue: other threads wait for it when they use the same buffers.
    ///
    /// ```no_run
    /// use aquifer::prelude::*;
    /// use aquifer_cudarc::{AllocatorExt, StreamExt};
    /// use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
    /// use cudarc::nvrtc::Ptx;
    ///
    /// let context = CudaContext::new(0)?;
    /// let (memory, a, b) = (aquifer_cudarc::allocator(&context)?, context.new_stream()?, context.new_stream()?);
    /// let axpy = context.load_module(Ptx::from_file("arithmetic.ptx"))?.load_function("axpy_f32")?;
    /// let x = memory.alloc_zeros_on::<f32>(1000, &a)?;
    /// let mut y = memory.alloc_zeros_on::<f32>(1000, &a)?;
    /// b.with([read(&x), write(&mut y)], |stream, [x, y]| {
    ///     let (y, x, alpha, n) = (y.device_ptr(), x.device_ptr(), 1.0_f32, 1000_u64);
    ///     let mut launch = stream.launch_builder(&axpy);
    ///     // SAFETY: the parameters are those of the kernel, and both buffers have `n` elements.
    ///     unsafe { launch.arg(&y).arg(&x).arg(&alpha).arg(&n).launch(LaunchConfig::for_num_elems(1000)) }.map(drop)
    /// })?;
    /// # Ok::<(), aquifer_cudarc::Error>(())
    /// ```
    ///
    /// # Errors
    /// What `work` returns. If it was not called: a buffer of another device than the stream's, a
    /// thread that is within such a call with one of them, an allocator that sleeps, a stream that
    /// captures and is not ordered after the buffers' last work, or a failing driver.
    fn with<const N: usize, R, E: Into<Error>>(
        &self,
        accesses: [Access<'_>; N],
        work: impl FnOnce(&Arc<CudaStream>, [Bound<'_>; N]) -> Result<R, E>,
    ) -> Result<R, Error>;
}

impl StreamExt for Arc<CudaStream> {
    fn with<const N: usize, R, E: Into<Error>>(
        &self,
        accesses: [Access<'_>; N],
        work: impl FnOnce(&Arc<CudaStream>, [Bound<'_>; N]) -> Result<R, E>,
    ) -> Result<R, Error> {
        let ours = stream(self)?;
        if may_be_captured(&ours, self)? {
            // A capture that the stream joined by an event of cudarc's is known afterwards.
            crate::allocator(self.context())?.followed_graph(&ours)?;
        }
        let done = with(&ours, accesses, |_, accesses| work(self, accesses.map(Bound::of)));
        done.map_err(|error| match error {
            WithError::Order(error) => error.into(),
            WithError::Work(error) => error.into(),
        })
    }
}

/// The memory of a buffer, for as long as work may be enqueued on it.
#[derive(Debug)]
pub struct Bound<'a> {
    ptr: CUdeviceptr,
    bytes: u64,
    access: PhantomData<&'a ()>,
}

impl<'a> Bound<'a> {
    fn of(access: Access<'a>) -> Bound<'a> {
        Bound { ptr: access.ptr().0, bytes: access.bytes(), access: PhantomData }
    }

    /// The first address, as a kernel's argument; null for zero bytes.
    pub fn device_ptr(&self) -> CUdeviceptr {
        self.ptr
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory as a slice of cudarc's, for its copies and libraries. What is
    /// [`read`](aquifer::buffer::read()) must not be written through it.
    ///
    /// With cudarc's event tracking on, this creates two events, for which there is no need here:
    /// prefer [`Bound::device_ptr`] where the address is enough.
    ///
    /// # Errors
    /// [`Error::BadCast`] if the bytes are no whole number of aligned `T`;
    /// [`Error::TrackedCapture`].
    pub fn as_slice<T>(&self, stream: &Arc<CudaStream>) -> Result<Lent<'a, T>, Error> {
        if stream.context().is_managing_stream_synchronization() && crate::stream(stream)?.is_capturing() {
            return Err(Error::TrackedCapture);
        }
        let size = size_of::<T>() as u64;
        if size == 0 || !self.bytes.is_multiple_of(size) || !self.ptr.is_multiple_of(align_of::<T>() as u64) {
            return Err(Error::BadCast { ptr: self.ptr, bytes: self.bytes, to: std::any::type_name::<T>() });
        }
        let len = usize::try_from(self.bytes / size).unwrap_or(usize::MAX);
        // SAFETY: the buffer has so many elements, is alive for `'a`, and `Lent` never lets the
        // slice be freed.
        let slice = unsafe { stream.upgrade_device_ptr(self.ptr, len) };
        Ok(Lent { slice: ManuallyDrop::new(slice), access: PhantomData })
    }
}

/// A buffer's memory as a slice of cudarc's. It is not freed with the slice.
pub struct Lent<'a, T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    access: PhantomData<&'a ()>,
}

impl<T> Deref for Lent<'_, T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        &self.slice
    }
}

impl<T> DerefMut for Lent<'_, T> {
    fn deref_mut(&mut self) -> &mut CudaSlice<T> {
        &mut self.slice
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        // SAFETY: it is taken here alone, and not used afterwards.
        unsafe { ManuallyDrop::take(&mut self.slice) }.leak();
    }
}

impl<T> fmt::Debug for Lent<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("len", &self.slice.len()).finish_non_exhaustive()
    }
}
