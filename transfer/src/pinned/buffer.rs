//! The handle of a page-locked buffer.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use aquifer_device::{AccessKind, Stream};
use bytemuck::Pod;

use super::memory::PinnedMemory;
use super::pool::PinnedPool;
use super::slices::{PinnedSlice, PinnedSliceMut};
use crate::error::TransferError;
use aquifer_device::RequestError;

/// Page-locked host memory for `len` values of `T`, with one owner.
///
/// # While a copy is in flight
/// A call that begins a copy takes a view of the buffer and returns while the copy goes on. The view's borrow ends at return, so the buffer
/// can be used again. The host and the device are then kept apart because the buffer knows the copies that use it:
///
/// * [`PinnedBuffer::read`] waits for copies *into* the buffer; uploads from it go on;
/// * [`PinnedBuffer::write`] waits for all copies.
///
/// Both *wait visibly*: they document it, they return a `Result`, and [`crate::HostMemoryStats::num_waits`] counts the waits. Where
/// waiting is unwanted, ask [`PinnedBuffer::is_idle`] first. The alternative, a borrow that lasts as long as the copy, would rely on the
/// destructor of a guard, which does not run if the guard is leaked.
///
/// While the `&[T]` or `&mut [T]` is alive, the borrow checker refuses copies that would conflict: a download needs
/// `&mut` of the buffer, and so does `write`.
///
/// Dropping the buffer waits for nothing: the memory goes back to its pool together with the ticks of its copies, and is not handed out again
/// before they are done. Forgetting it leaks memory and does no other harm.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_transfer::{PinnedConfig, PinnedPool};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut buffer = pool.alloc_zeroed::<u32>(8)?;
/// buffer.write()?[3] = 7;
/// assert_eq!(buffer.slice(2..5).read()?, [0, 7, 0]);
/// # Ok::<(), aquifer_transfer::TransferError>(())
/// ```
pub struct PinnedBuffer<T> {
    memory: Arc<PinnedMemory>,
    len: usize,
    element: PhantomData<T>,
}

impl PinnedPool {
    /// Page-locked memory for `len` values of `T`, aligned to 512 bytes, or to 4096 from 32 KiB on. Its contents are left
    /// over from earlier use. Makes no driver call while the pool has unused memory of that size.
    ///
    /// # Errors
    /// [`TransferError::OutOfPinned`], also when the driver refuses more; [`RequestError::LengthOverflow`]; errors of
    /// the driver.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError> {
        let memory = PinnedMemory::alloc(self, bytes_of::<T>(len)?, align_of::<T>())?;
        Ok(PinnedBuffer::new(memory, len))
    }

    /// As [`PinnedPool::alloc`], every byte being zero.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_zeroed<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError> {
        let mut buffer = self.alloc::<T>(len)?;
        bytemuck::fill_zeroes(buffer.write()?);
        Ok(buffer)
    }

    /// As [`PinnedPool::alloc`], holding a copy of `values`.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_from<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, TransferError> {
        let mut buffer = self.alloc::<T>(values.len())?;
        buffer.write()?.copy_from_slice(values);
        Ok(buffer)
    }
}

/// The bytes of `len` values.
pub(super) fn bytes_of<T>(len: usize) -> Result<usize, TransferError> {
    let size = size_of::<T>();
    let overflow = TransferError::Request(RequestError::LengthOverflow { len: len as u64, size: size as u64 });
    len.checked_mul(size).filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or(overflow)
}

impl<T: Pod> PinnedBuffer<T> {
    /// The memory must hold `len` values.
    pub(super) fn new(memory: Arc<PinnedMemory>, len: usize) -> Self {
        PinnedBuffer { memory, len, element: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Whether the memory is page-locked, as it is unless the caller let it be pageable.
    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
    }

    /// Whether no copy is in flight, so that neither [`PinnedBuffer::read`] nor [`PinnedBuffer::write`] would wait.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_idle(&self) -> Result<bool, TransferError> {
        self.memory.is_idle()
    }

    /// The values, after waiting on the host for copies into the buffer.
    ///
    /// # Errors
    /// Errors of the driver: what a lost device was to write will never be there.
    pub fn read(&self) -> Result<&[T], TransferError> {
        self.as_slice().read()
    }

    /// The values, to be changed, after waiting on the host for all copies that use the buffer.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write(&mut self) -> Result<&mut [T], TransferError> {
        self.as_slice_mut().into_write()
    }

    /// Its address, for copies out of it that others enqueue on `stream`, such as cudarc. They come after earlier
    /// copies into the buffer. Later copies into it, and [`PinnedBuffer::write`], come after what is enqueued on
    /// `stream` by then, and so does reuse once the buffer was dropped. Nothing waits for the device.
    ///
    /// Keep the buffer borrowed until the copies are enqueued. The host must not read or write through the address.
    ///
    /// # Errors
    /// When the stream is another device's, or captures; errors of the driver.
    pub fn lend(&self, stream: &Stream) -> Result<*const T, TransferError> {
        self.memory.lend(stream, AccessKind::Read)?;
        Ok(self.memory.ptr().as_ptr().cast::<T>().cast_const())
    }

    /// As [`PinnedBuffer::lend`], for copies into it: they come after all earlier copies, and all later uses come after
    /// them.
    ///
    /// # Errors
    /// As [`PinnedBuffer::lend`].
    pub fn lend_mut(&mut self, stream: &Stream) -> Result<*mut T, TransferError> {
        self.memory.lend(stream, AccessKind::Write)?;
        Ok(self.memory.ptr().as_ptr().cast::<T>())
    }

    /// All of it, to be copied from.
    pub fn as_slice(&self) -> PinnedSlice<'_, T> {
        PinnedSlice::new(&self.memory, self.len)
    }

    /// All of it, to be copied into.
    pub fn as_slice_mut(&mut self) -> PinnedSliceMut<'_, T> {
        PinnedSliceMut::new(&self.memory, self.len)
    }

    /// A part, to be copied from.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> PinnedSlice<'_, T> {
        self.as_slice().slice(range)
    }

    /// A part, to be copied into.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> PinnedSliceMut<'_, T> {
        match self.try_slice_mut(range) {
            Ok(part) => part,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`PinnedBuffer::slice`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Result<PinnedSlice<'_, T>, TransferError> {
        self.as_slice().try_slice(range)
    }

    /// As [`PinnedBuffer::slice_mut`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn try_slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<PinnedSliceMut<'_, T>, TransferError> {
        self.as_slice_mut().into_slice(range)
    }

    /// Its bytes, to be copied from.
    pub fn as_bytes(&self) -> PinnedSlice<'_, u8> {
        self.as_slice().as_bytes()
    }

    /// Its bytes, to be copied into.
    pub fn as_bytes_mut(&mut self) -> PinnedSliceMut<'_, u8> {
        self.as_slice_mut().into_bytes()
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("type", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}
