//! Making buffers.

use aquifer_allocator::{Allocation, PrivatePool};
use aquifer_device::{DevicePtr, RequestError, Stream, Tick};
use bytemuck::Pod;

use crate::allocator::Allocator;
use crate::buffer::Buffer;
use crate::error::Error;

#[allow(clippy::wrong_self_convention, reason = "the allocator makes the buffer")]
impl Allocator {
    /// Allocates memory for `len` values of `T`, for work of `stream` and of others. The content is
    /// undefined until it is written.
    ///
    /// # Errors
    /// When memory runs out ([`Error::is_out_of_memory`]), a length whose bytes overflow, a stream
    /// of another device, and errors of the driver.
    #[track_caller]
    #[inline]
    pub fn alloc<T: Copy>(&self, len: usize, stream: &Stream) -> Result<Buffer<T>, Error> {
        let (bytes, alignment) = size_of_values::<T>(len)?;
        Ok(Buffer::new(self.untyped().alloc_storage(bytes, alignment, stream)?, len))
    }

    /// Allocates memory for `len` values of `T` of which every byte is zero.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn alloc_zeros<T: Copy>(&self, len: usize, stream: &Stream) -> Result<Buffer<T>, Error> {
        let buffer = self.alloc(len, stream)?;
        if buffer.bytes() > 0 {
            buffer.storage().write_first(stream, || {
                stream.fill(buffer.ptr(), 0, buffer.bytes())?;
                Ok::<_, Error>(())
            })?;
        }
        Ok(buffer)
    }

    /// As [`Allocator::alloc`], from a private pool of this allocator.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn alloc_in<T: Copy>(&self, pool: &PrivatePool, len: usize, stream: &Stream) -> Result<Buffer<T>, Error> {
        let (bytes, alignment) = size_of_values::<T>(len)?;
        Ok(Buffer::new(pool.alloc_storage(bytes, alignment, stream)?, len))
    }

    /// A buffer with a copy of `values`, which the caller may reuse when this returns. The copy may
    /// still be in flight then: calls that use the buffer come after it.
    ///
    /// # Errors
    /// When device memory or pinned memory runs out, a stream of another device or that
    /// captures, and errors of the driver.
    #[track_caller]
    pub fn from_slice<T: Pod + Send + Sync>(&self, values: &[T], stream: &Stream) -> Result<Buffer<T>, Error> {
        let mut buffer = self.alloc(values.len(), stream)?;
        // All that can fail did, or is the device's.
        let _in_flight = buffer.upload(values, stream)?;
        Ok(buffer)
    }

    /// Makes a buffer of an allocation of this allocator: as many whole values as it holds. The
    /// memory counts as written by the work enqueued on `stream` until now, so earlier work of
    /// other streams with it must be ordered before that.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let allocation = memory.alloc_bytes(4000, &stream)?;
    /// stream.fill(allocation.ptr(), 0, 4000)?;
    /// let zeros = memory.buffer_of::<f32>(allocation, &stream)?;
    /// assert_eq!(zeros.len(), 1000);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the stream belongs to another device, or the allocation to another allocator. The
    /// allocation is then dropped.
    pub fn buffer_of<T: Copy>(&self, allocation: Allocation, stream: &Stream) -> Result<Buffer<T>, Error> {
        Ok(Buffer::of(&self.untyped().storage_of(allocation, stream)?))
    }

    /// Makes a buffer of memory that another library owns. The allocator is the one that
    /// [`Buffer::like`] uses; it does not count the memory.
    ///
    /// When the last handle is dropped, `release` gets the ticks of work that may still use the
    /// memory. It must see to it that the memory is not reused before: by making the owner's stream
    /// wait for them ([`Stream::wait_for`]), or by waiting on the host ([`Tick::synchronize`]). It
    /// must not panic.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// # let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let theirs = memory.alloc_bytes(4000, &stream)?; // stands for memory of another library
    /// let (ptr, owner) = (theirs.ptr(), stream.clone());
    /// let buffer = memory.import::<f32>(ptr, 1000, &stream, move |ticks| {
    ///     ticks.iter().for_each(|tick| owner.wait_for(tick).expect("the device is there"));
    ///     drop(theirs); // it goes back in the order of its stream
    /// })?;
    /// assert_eq!(buffer.len(), 1000);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// It is up to the caller that there are `len` values of `T` at `ptr`, aligned, in memory of
    /// this allocator's device that lives until `release` is called; that earlier work on it comes
    /// before what is enqueued on `stream` from now on; and that only the buffer uses it until
    /// then.
    ///
    /// # Errors
    /// A stream of another device, and a length whose bytes overflow. `release` is called with no
    /// ticks then.
    pub fn import<T: Copy>(
        &self,
        ptr: DevicePtr,
        len: usize,
        stream: &Stream,
        release: impl FnOnce(&[Tick]) + Send + 'static,
    ) -> Result<Buffer<T>, Error> {
        match size_of_values::<T>(len) {
            Ok((bytes, _)) => {
                let storage = self.untyped().import(ptr, bytes, stream, release)?;
                Ok(Buffer::new(storage, len))
            }
            Err(error) => {
                release(&[]);
                Err(error)
            }
        }
    }
}

/// The bytes of `len` values, and their alignment.
#[inline]
fn size_of_values<T>(len: usize) -> Result<(u64, u64), Error> {
    let (count, size) = (len as u64, size_of::<T>() as u64);
    let bytes = count.checked_mul(size).ok_or(RequestError::LengthOverflow { len: count, size })?;
    Ok((bytes, (align_of::<T>() as u64).max(aquifer_allocator::ALIGNMENT)))
}
