//! Views of page-locked memory, for copies.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use std::panic::UnwindSafe;
use std::slice;
use std::sync::Arc;

use aquifer_device::{AccessKind, HostPtr, RequestError};
use bytemuck::Pod;

use super::memory::{HostPart, PinnedMemory};
use crate::error::Error;

/// The place of a view in its memory. Invariant: `offset..offset + len * size_of::<T>()` lies
/// inside, and the first byte is aligned for `T`.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// In bytes.
    offset: usize,
    /// In elements.
    len: usize,
}

impl Span {
    fn part<T>(self, range: Range<usize>) -> Span {
        Span { offset: self.offset + range.start * size_of::<T>(), len: range.len() }
    }

    fn ptr(self, memory: &PinnedMemory) -> HostPtr {
        HostPtr(memory.ptr().0 + self.offset)
    }

    /// The same bytes as elements of another type, if their length and alignment fit.
    fn cast<T, U>(self, memory: &PinnedMemory) -> Result<Span, Error> {
        let (bytes, size) = (self.len * size_of::<T>(), size_of::<U>());
        let fits = size > 0 && bytes.is_multiple_of(size) && self.ptr(memory).0.is_multiple_of(align_of::<U>());
        if fits {
            return Ok(Span { offset: self.offset, len: bytes / size });
        }
        Err(Error::BadCast { bytes: bytes as u64, to: std::any::type_name::<U>() })
    }
}

/// A part of a [`crate::PinnedBuffer`] that copies read from. While it is alive nothing can be
/// copied into the buffer.
///
/// ```
/// # use aquifer::prelude::*;
/// # use aquifer::transfer::{PinnedConfig, PinnedPool, PinnedSlice};
/// # let device = aquifer::open("sim:24GiB")?;
/// # let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let buffer = pool.alloc_from(&[1_u16, 2, 3, 4])?;
/// let tail: PinnedSlice<'_, u16> = buffer.slice(2..);
/// assert_eq!((tail.len(), tail.read()?), (2, &[3, 4][..]));
/// assert_eq!(PinnedSlice::from(&buffer).cast::<u32>()?.len(), 2);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct PinnedSlice<'a, T> {
    memory: &'a Arc<PinnedMemory>,
    span: Span,
    element: PhantomData<&'a [T]>,
}

/// A part of a [`crate::PinnedBuffer`] that copies write into. While it is alive no other code can
/// name that part.
///
/// ```
/// # use aquifer::prelude::*;
/// # use aquifer::transfer::{PinnedConfig, PinnedPool};
/// # let device = aquifer::open("sim:24GiB")?;
/// # let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut buffer = pool.alloc_zeroed::<u8>(10)?;
/// let (mut head, mut tail) = buffer.as_slice_mut().split_at(4)?;
/// head.write()?.fill(1);
/// tail.reborrow().write()?.fill(2);
/// assert_eq!(buffer.read()?, [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct PinnedSliceMut<'a, T> {
    memory: &'a Arc<PinnedMemory>,
    span: Span,
    element: PhantomData<&'a mut [T]>,
}

// Elements are plain numbers, of which every value is valid.
impl<T> UnwindSafe for PinnedSliceMut<'_, T> {}

impl<'a, T: Pod> PinnedSlice<'a, T> {
    /// All of the memory, which must hold `len` values.
    pub(super) fn new(memory: &'a Arc<PinnedMemory>, len: usize) -> Self {
        PinnedSlice { memory, span: Span { offset: 0, len }, element: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.span.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.span.len * size_of::<T>()
    }

    /// Whether the memory is page-locked.
    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
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
    pub fn try_slice(self, range: impl RangeBounds<usize>) -> Result<PinnedSlice<'a, T>, Error> {
        Ok(PinnedSlice { span: self.span.part::<T>(resolve(range, self.span.len)?), ..self })
    }

    /// Its bytes.
    pub fn as_bytes(self) -> PinnedSlice<'a, u8> {
        let span = Span { offset: self.span.offset, len: self.bytes() };
        PinnedSlice { memory: self.memory, span, element: PhantomData }
    }

    /// The same bytes as values of another type.
    ///
    /// # Errors
    /// [`Error::BadCast`] when they do not divide into such values, or are not aligned for
    /// them.
    pub fn cast<U: Pod>(self) -> Result<PinnedSlice<'a, U>, Error> {
        Ok(PinnedSlice { memory: self.memory, span: self.span.cast::<T, U>(self.memory)?, element: PhantomData })
    }

    /// The values, after waiting on the host for copies into the buffer.
    ///
    /// # Errors
    /// Errors of the driver.
    #[allow(unsafe_code, reason = "the memory is page-locked, so no collection of the standard library holds it")]
    pub fn read(self) -> Result<&'a [T], Error> {
        let ptr = self.span.ptr(self.memory);
        self.memory.touch(ptr, self.bytes(), AccessKind::Read)?;
        // SAFETY: the view's bytes are aligned for `T`, lie inside initialised memory that `memory`
        // keeps for 'a, and any bytes are a `T`. Copies into it were waited for, and new ones, like
        // writes of the host, need a mutable borrow of the buffer.
        Ok(unsafe { slice::from_raw_parts(ptr.as_ptr().cast::<T>(), self.span.len) })
    }

    /// The part of host memory that a copy reads.
    pub(crate) fn part(&self) -> HostPart<'a> {
        HostPart { memory: self.memory, ptr: self.span.ptr(self.memory), bytes: self.bytes() }
    }
}

impl<'a, T: Pod> PinnedSliceMut<'a, T> {
    /// All of the memory, which must hold `len` values and be borrowed mutably for 'a only here.
    pub(super) fn new(memory: &'a Arc<PinnedMemory>, len: usize) -> Self {
        PinnedSliceMut { memory, span: Span { offset: 0, len }, element: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.span.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.span.len * size_of::<T>()
    }

    /// Whether the memory is page-locked.
    pub fn is_pinned(&self) -> bool {
        self.memory.is_pinned()
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> PinnedSliceMut<'_, T> {
        PinnedSliceMut { memory: self.memory, span: self.span, element: PhantomData }
    }

    /// The same view, to copy from.
    pub fn as_shared(&self) -> PinnedSlice<'_, T> {
        PinnedSlice { memory: self.memory, span: self.span, element: PhantomData }
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn into_slice(self, range: impl RangeBounds<usize>) -> Result<PinnedSliceMut<'a, T>, Error> {
        Ok(PinnedSliceMut { span: self.span.part::<T>(resolve(range, self.span.len)?), ..self })
    }

    /// The part before element `middle` and the one from there on.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when there are fewer elements.
    pub fn split_at(self, middle: usize) -> Result<(PinnedSliceMut<'a, T>, PinnedSliceMut<'a, T>), Error> {
        let (memory, span) = (self.memory, self.span);
        let (head, tail) = (resolve(..middle, span.len)?, resolve(middle.., span.len)?);
        let part = |range| PinnedSliceMut { memory, span: span.part::<T>(range), element: PhantomData };
        Ok((part(head), part(tail)))
    }

    /// Its bytes.
    pub fn into_bytes(self) -> PinnedSliceMut<'a, u8> {
        let span = Span { offset: self.span.offset, len: self.bytes() };
        PinnedSliceMut { memory: self.memory, span, element: PhantomData }
    }

    /// The same bytes as values of another type.
    ///
    /// # Errors
    /// [`Error::BadCast`] when they do not divide into such values, or are not aligned for
    /// them.
    pub fn cast<U: Pod>(self) -> Result<PinnedSliceMut<'a, U>, Error> {
        Ok(PinnedSliceMut { memory: self.memory, span: self.span.cast::<T, U>(self.memory)?, element: PhantomData })
    }

    /// The values, to be changed, after waiting on the host for all copies that use the buffer.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write(&mut self) -> Result<&mut [T], Error> {
        self.reborrow().into_write()
    }

    /// As [`PinnedSliceMut::write`], for as long as the buffer is borrowed.
    ///
    /// # Errors
    /// Errors of the driver.
    #[allow(unsafe_code, reason = "the memory is page-locked, so no collection of the standard library holds it")]
    pub fn into_write(self) -> Result<&'a mut [T], Error> {
        let ptr = self.span.ptr(self.memory);
        self.memory.touch(ptr, self.bytes(), AccessKind::Write)?;
        // SAFETY: as in `PinnedSlice::read`; and this view is the only one of its bytes while 'a
        // lasts, so no new copy, and no other reference, can name them, and all earlier copies were
        // waited for.
        Ok(unsafe { slice::from_raw_parts_mut(ptr.as_ptr().cast::<T>(), self.span.len) })
    }

    /// The part of host memory that a copy writes.
    pub(crate) fn part(&self) -> HostPart<'a> {
        HostPart { memory: self.memory, ptr: self.span.ptr(self.memory), bytes: self.bytes() }
    }
}

/// The range as indices of `len` elements.
fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>, Error> {
    aquifer_allocator::internal::resolve(range, len).map_err(|wrong| RequestError::out_of_bounds(wrong, len).into())
}

impl<T> Clone for PinnedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PinnedSlice<'_, T> {}

impl<T> fmt::Debug for PinnedSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedSlice").field("span", &self.span).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for PinnedSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedSliceMut").field("span", &self.span).finish_non_exhaustive()
    }
}
