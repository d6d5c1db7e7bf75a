//! Pinned memory of Aquifer's in copies of cudarc's.

use std::fmt;
use std::mem::ManuallyDrop;
use std::slice;
use std::sync::Arc;

use aquifer::PinnedBuffer;
use bytemuck::Pod;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, HostSlice, SyncOnDrop, sys};

use crate::Error;

/// A [`PinnedBuffer`] that copies of cudarc's read and write, which return at once: the host waits
/// for them when it looks at the content.
///
/// ```no_run
/// use aquifer::prelude::*;
/// use aquifer_cudarc::{AllocatorExt, HostPinned};
/// use cudarc::driver::CudaContext;
///
/// let context = CudaContext::new(0)?;
/// let (memory, stream) = (aquifer_cudarc::allocator(&context)?, context.new_stream()?);
/// let batch = HostPinned::new(memory.pinned_from_slice(&[1.0_f32; 1000])?, &context)?;
/// let mut slice = memory.alloc_slice_zeros::<f32>(1000, &stream)?;
/// stream.memcpy_htod(&batch, &mut *slice)?; // does not wait for the copy
/// assert_eq!(batch.as_slice()?[0], 1.0); // does
/// # Ok::<(), aquifer_cudarc::Error>(())
/// ```
///
/// Threads cannot share it. Each copy waits for the event of the last use and then records the
/// event anew, so of copies that two threads begin at once, one would be lost:
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>() {}
/// shared::<aquifer_cudarc::HostPinned<f32>>();
/// ```
pub struct HostPinned<T> {
    /// Nothing but cudarc uses it, so it is idle as far as Aquifer knows.
    buffer: ManuallyDrop<PinnedBuffer<T>>,
    /// Where its elements are.
    start: *mut T,
    len: usize,
    /// After the last use by cudarc, whichever stream that was on.
    used: CudaEvent,
}

// SAFETY: `start` points into `buffer`, which is owned.
unsafe impl<T: Send> Send for HostPinned<T> {}

impl<T: Pod> HostPinned<T> {
    /// Takes a buffer, once work that uses it is done, for copies in `context`.
    ///
    /// # Errors
    /// A buffer that a graph uses, whose launches would not know of cudarc's copies; when the
    /// buffer's last work failed, or cudarc cannot create an event.
    pub fn new(mut buffer: PinnedBuffer<T>, context: &Arc<CudaContext>) -> Result<HostPinned<T>, Error> {
        let used = context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING))?;
        buffer.refuse_graphs()?;
        let mut elements = buffer.write()?;
        let (start, len) = (elements.as_mut_ptr(), elements.len());
        drop(elements);
        Ok(HostPinned { buffer: ManuallyDrop::new(buffer), start, len, used })
    }

    /// The content, once copies that use it are done.
    ///
    /// # Errors
    /// When the driver cannot wait, because work failed.
    pub fn as_slice(&self) -> Result<&[T], Error> {
        self.used.synchronize()?;
        // SAFETY: the buffer has so many elements there, which copies may read but not write while
        // `self` is borrowed.
        Ok(unsafe { slice::from_raw_parts(self.start, self.len) })
    }

    /// The content to be changed, once copies that use it are done.
    ///
    /// # Errors
    /// When the driver cannot wait, because work failed.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T], Error> {
        self.used.synchronize()?;
        // SAFETY: the buffer has so many elements there, and nothing else uses them while `self` is
        // borrowed mutably.
        Ok(unsafe { slice::from_raw_parts_mut(self.start, self.len) })
    }

    /// Returns the buffer, once copies that use it are done.
    ///
    /// # Errors
    /// When the driver cannot wait, because work failed. The memory is lost then, because it may be
    /// in use.
    pub fn into_inner(self) -> Result<PinnedBuffer<T>, Error> {
        let mut this = ManuallyDrop::new(self);
        let waited = this.used.synchronize();
        // SAFETY: neither field is used afterwards, nor dropped another time: `this` is not
        // dropped.
        unsafe { std::ptr::drop_in_place(&raw mut this.used) };
        waited?;
        // SAFETY: as above.
        Ok(unsafe { ManuallyDrop::take(&mut this.buffer) })
    }
}

impl<T> HostPinned<T> {
    /// Orders `stream` after the copies that used the memory before. What the caller drops once it
    /// has enqueued its copy notes that; where cudarc does not record events, it waits instead.
    fn begin<'a>(&'a self, stream: &'a CudaStream) -> SyncOnDrop<'a> {
        let ordered = stream.wait(&self.used);
        if ordered.is_ok() && stream.context().is_managing_stream_synchronization() {
            return SyncOnDrop::Record(Some((&self.used, stream)));
        }
        stream.context().record_err(ordered);
        SyncOnDrop::Sync(Some(stream))
    }
}

impl<T> HostSlice<T> for HostPinned<T> {
    fn len(&self) -> usize {
        self.len
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        let noted = self.begin(stream);
        // SAFETY: the buffer has so many elements there; the caller uses them with `stream` alone.
        (unsafe { slice::from_raw_parts(self.start, self.len) }, noted)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        let (start, len) = (self.start, self.len);
        let noted = self.begin(stream);
        // SAFETY: as above; `self` is borrowed mutably, and what notes the use does not look at the
        // elements.
        (unsafe { slice::from_raw_parts_mut(start, len) }, noted)
    }
}

impl<T> Drop for HostPinned<T> {
    fn drop(&mut self) {
        // Memory that may be in use is better lost than reused.
        if self.used.synchronize().is_ok() {
            // SAFETY: it is dropped here alone.
            unsafe { ManuallyDrop::drop(&mut self.buffer) };
        }
    }
}

impl<T> fmt::Debug for HostPinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPinned").field("len", &self.len).finish_non_exhaustive()
    }
}
