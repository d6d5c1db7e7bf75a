//! Views of pinned memory, for copies.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::panic::UnwindSafe;

use aquifer_device::{AccessKind, HostPtr, RequestError};
use bytemuck::Pod;

use super::borrow::{PinnedRead, PinnedWrite};
use super::memory::HostPart;
use crate::error::TransferError;
use crate::host_memory::zeroed;
use crate::ranges::resolve;

/// A part of a [`crate::PinnedBuffer`] that copies read from. While it is alive nothing can be
/// copied into the buffer.
///
/// ```
/// # use aquifer::prelude::*;
/// # use aquifer::transfer::{PinnedPool, PinnedSlice};
/// # let device = aquifer::open("sim:24GiB")?;
/// # let pool = PinnedPool::new(&device);
/// let buffer = pool.alloc_from(&[1_u16, 2, 3, 4])?;
/// let tail: PinnedSlice<'_, u16> = buffer.slice(2..);
/// assert_eq!((tail.len(), &*tail.read()?), (2, &[3, 4][..]));
/// assert_eq!(PinnedSlice::from(&buffer).cast::<u32>()?.len(), 2);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct PinnedSlice<'a, T = u8> {
    /// It holds `len` values, and is aligned for them.
    part: HostPart<'a>,
    len: usize,
    element: PhantomData<&'a [T]>,
}

/// A part of a [`crate::PinnedBuffer`] that copies write into. While it is alive no other code can
/// name that part.
///
/// ```
/// # use aquifer::prelude::*;
/// # use aquifer::transfer::PinnedPool;
/// # let device = aquifer::open("sim:24GiB")?;
/// # let pool = PinnedPool::new(&device);
/// let mut buffer = pool.alloc_zeroed::<u8>(10)?;
/// let (mut head, mut tail) = buffer.as_slice_mut().split_at(4)?;
/// head.write()?.fill(1);
/// tail.reborrow().write()?.fill(2);
/// assert_eq!(buffer.read()?, [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Debug)]
pub struct PinnedSliceMut<'a, T = u8>(PinnedSlice<'a, T>, PhantomData<&'a mut [T]>);

// Elements are plain numbers, of which every value is valid.
impl<T> UnwindSafe for PinnedSliceMut<'_, T> {}

impl<'a, T: Pod> PinnedSlice<'a, T> {
    /// The part must hold `len` values, and be aligned for them.
    pub(super) fn new(part: HostPart<'a>, len: usize) -> Self {
        PinnedSlice { part, len, element: PhantomData }
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
        self.part.bytes
    }

    /// Its address.
    pub fn ptr(&self) -> HostPtr {
        self.part.ptr
    }

    /// A part of it.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice(self, range: impl RangeBounds<usize>) -> PinnedSlice<'a, T> {
        match self.try_slice(range) {
            Ok(part) => part,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`PinnedSlice::slice`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn try_slice(self, range: impl RangeBounds<usize>) -> Result<PinnedSlice<'a, T>, TransferError> {
        let range = resolve(range, self.len).map_err(|wrong| RequestError::out_of_bounds(wrong, self.len))?;
        let (ptr, size) = (HostPtr(self.part.ptr.0 + range.start * size_of::<T>()), size_of::<T>());
        Ok(PinnedSlice::new(HostPart { ptr, bytes: range.len() * size, ..self.part }, range.len()))
    }

    /// Its bytes.
    pub fn as_bytes(self) -> PinnedSlice<'a, u8> {
        PinnedSlice::new(self.part, self.part.bytes)
    }

    /// The same bytes as values of another type.
    ///
    /// # Errors
    /// [`TransferError::BadCast`] when they do not divide into such values, or are not aligned for
    /// them.
    pub fn cast<U: Pod>(self) -> Result<PinnedSlice<'a, U>, TransferError> {
        let (HostPart { ptr, bytes, .. }, size) = (self.part, size_of::<U>());
        if size > 0 && bytes.is_multiple_of(size) && ptr.0.is_multiple_of(align_of::<U>()) {
            return Ok(PinnedSlice::new(self.part, bytes / size));
        }
        Err(TransferError::BadCast { bytes: bytes as u64, to: std::any::type_name::<U>() })
    }

    /// The values, after waiting on the host for copies into the buffer. Launches of graphs that
    /// write it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn read(self) -> Result<PinnedRead<'a, T>, TransferError> {
        let borrow = self.part.touch(AccessKind::Read)?;
        if size_of::<T>() == 0 {
            return Ok(PinnedRead::from(&*zeroed(self.len)?.leak()));
        }
        Ok(PinnedRead::new(self.part.ptr.as_ptr().cast(), self.len, Some(borrow)))
    }

    /// The memory that a copy reads.
    pub(crate) fn host(&self) -> HostPart<'a> {
        self.part
    }
}

impl<'a, T: Pod> PinnedSliceMut<'a, T> {
    /// Memory that is borrowed mutably for 'a only here. It must hold `len` values, and be aligned
    /// for them.
    pub(super) fn new(part: HostPart<'a>, len: usize) -> Self {
        PinnedSliceMut(PinnedSlice::new(part, len), PhantomData)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.part.bytes
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> PinnedSliceMut<'_, T> {
        PinnedSliceMut(self.0, PhantomData)
    }

    /// The same view, to copy from.
    pub fn as_shared(&self) -> PinnedSlice<'_, T> {
        self.0
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn into_slice(self, range: impl RangeBounds<usize>) -> Result<PinnedSliceMut<'a, T>, TransferError> {
        Ok(PinnedSliceMut(self.0.try_slice(range)?, PhantomData))
    }

    /// The part before element `middle` and the one from there on.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when there are fewer elements.
    pub fn split_at(self, middle: usize) -> Result<(PinnedSliceMut<'a, T>, PinnedSliceMut<'a, T>), TransferError> {
        let (head, tail) = (self.0.try_slice(..middle)?, self.0.try_slice(middle..)?);
        Ok((PinnedSliceMut(head, PhantomData), PinnedSliceMut(tail, PhantomData)))
    }

    /// Its bytes.
    pub fn into_bytes(self) -> PinnedSliceMut<'a, u8> {
        PinnedSliceMut(self.0.as_bytes(), PhantomData)
    }

    /// The same bytes as values of another type.
    ///
    /// # Errors
    /// As [`PinnedSlice::cast`].
    pub fn cast<U: Pod>(self) -> Result<PinnedSliceMut<'a, U>, TransferError> {
        Ok(PinnedSliceMut(self.0.cast()?, PhantomData))
    }

    /// The values, to be changed, after waiting on the host for all copies that use the buffer.
    /// Launches of graphs that use it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write(&mut self) -> Result<PinnedWrite<'_, T>, TransferError> {
        self.reborrow().into_write()
    }

    /// As [`PinnedSliceMut::write`], for as long as the buffer is borrowed.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn into_write(self) -> Result<PinnedWrite<'a, T>, TransferError> {
        let PinnedSlice { part, len, .. } = self.0;
        let borrow = part.touch(AccessKind::Write)?;
        if size_of::<T>() == 0 {
            return Ok(PinnedWrite::new(zeroed(len)?.leak().as_mut_ptr(), len, None));
        }
        Ok(PinnedWrite::new(part.ptr.as_ptr().cast(), len, Some(borrow)))
    }

    /// The memory that a copy writes.
    pub(crate) fn host(&self) -> HostPart<'a> {
        self.0.part
    }
}

impl<T> Clone for PinnedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PinnedSlice<'_, T> {}

impl<T> fmt::Debug for PinnedSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedSlice").field("part", &self.part).field("len", &self.len).finish()
    }
}
