//! Views of pinned memory, for copies.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use std::panic::UnwindSafe;

use aquifer_device::{HostPtr, RequestError};
use aquifer_transfer::internal::zeroed;
use aquifer_transfer::{PinnedPart, PinnedPartMut, PinnedRead, PinnedWrite};
use bytemuck::Pod;

use crate::error::Error;

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
/// assert_eq!((tail.len(), &*tail.read()?), (2, &[3, 4][..]));
/// assert_eq!(PinnedSlice::from(&buffer).cast::<u32>()?.len(), 2);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct PinnedSlice<'a, T> {
    /// It holds `len` values, and is aligned for them.
    part: PinnedPart<'a>,
    len: usize,
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
    /// It holds `len` values, and is aligned for them.
    part: PinnedPartMut<'a>,
    len: usize,
    element: PhantomData<&'a mut [T]>,
}

// Elements are plain numbers, of which every value is valid.
impl<T> UnwindSafe for PinnedSliceMut<'_, T> {}

macro_rules! sizes {
    ($($view:ident $(by $as_shared:ident)?,)*) => { $(
        impl<T> $view<'_, T> {
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
                self.part$(.$as_shared())?.bytes()
            }
        }
    )* };
}

sizes! { PinnedSlice, PinnedSliceMut by as_shared, }

impl<'a, T: Pod> PinnedSlice<'a, T> {
    /// The part must hold `len` values, and be aligned for them.
    pub(super) fn new(part: PinnedPart<'a>, len: usize) -> Self {
        PinnedSlice { part, len, element: PhantomData }
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
        let range = resolve(range, self.len)?;
        Ok(PinnedSlice::new(self.part.part(in_bytes::<T>(&range))?, range.len()))
    }

    /// Its bytes.
    pub fn as_bytes(self) -> PinnedSlice<'a, u8> {
        PinnedSlice::new(self.part, self.bytes())
    }

    /// The same bytes as values of another type.
    ///
    /// # Errors
    /// [`Error::BadCast`] when they do not divide into such values, or are not aligned for
    /// them.
    pub fn cast<U: Pod>(self) -> Result<PinnedSlice<'a, U>, Error> {
        Ok(PinnedSlice::new(self.part, len_as::<U>(self.part.ptr(), self.part.bytes())?))
    }

    /// The values, after waiting on the host for copies into the buffer. Launches of graphs that
    /// write it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn read(self) -> Result<PinnedRead<'a, T>, Error> {
        let empty: &[T] = if size_of::<T>() == 0 { zeroed(self.len)?.leak() } else { &[] };
        Ok(self.part.read()?.map(|bytes| if size_of::<T>() == 0 { empty } else { bytemuck::cast_slice(bytes) }))
    }

    /// The bytes that a copy reads.
    pub(crate) fn part(&self) -> PinnedPart<'a> {
        self.part
    }
}

impl<'a, T: Pod> PinnedSliceMut<'a, T> {
    /// The part must hold `len` values, and be aligned for them.
    pub(super) fn new(part: PinnedPartMut<'a>, len: usize) -> Self {
        PinnedSliceMut { part, len, element: PhantomData }
    }

    /// The same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> PinnedSliceMut<'_, T> {
        PinnedSliceMut::new(self.part.reborrow(), self.len)
    }

    /// The same view, to copy from.
    pub fn as_shared(&self) -> PinnedSlice<'_, T> {
        PinnedSlice::new(self.part.as_shared(), self.len)
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn into_slice(self, range: impl RangeBounds<usize>) -> Result<PinnedSliceMut<'a, T>, Error> {
        let range = resolve(range, self.len)?;
        Ok(PinnedSliceMut::new(self.part.into_part(in_bytes::<T>(&range))?, range.len()))
    }

    /// The part before element `middle` and the one from there on.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when there are fewer elements.
    pub fn split_at(self, middle: usize) -> Result<(PinnedSliceMut<'a, T>, PinnedSliceMut<'a, T>), Error> {
        let (head, tail) = (resolve(..middle, self.len)?, resolve(middle.., self.len)?);
        let (head_part, tail_part) = self.part.split_at(in_bytes::<T>(&head).end)?;
        Ok((PinnedSliceMut::new(head_part, head.len()), PinnedSliceMut::new(tail_part, tail.len())))
    }

    /// Its bytes.
    pub fn into_bytes(self) -> PinnedSliceMut<'a, u8> {
        let bytes = self.bytes();
        PinnedSliceMut::new(self.part, bytes)
    }

    /// The same bytes as values of another type.
    ///
    /// # Errors
    /// [`Error::BadCast`] when they do not divide into such values, or are not aligned for
    /// them.
    pub fn cast<U: Pod>(self) -> Result<PinnedSliceMut<'a, U>, Error> {
        let own = self.part.as_shared();
        let len = len_as::<U>(own.ptr(), own.bytes())?;
        Ok(PinnedSliceMut::new(self.part, len))
    }

    /// The values, to be changed, after waiting on the host for all copies that use the buffer.
    /// Launches of graphs that use it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write(&mut self) -> Result<PinnedWrite<'_, T>, Error> {
        self.reborrow().into_write()
    }

    /// As [`PinnedSliceMut::write`], for as long as the buffer is borrowed.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn into_write(self) -> Result<PinnedWrite<'a, T>, Error> {
        let empty = if size_of::<T>() == 0 { zeroed(self.len)?.leak() } else { &mut [] };
        let values = self.part.into_write()?;
        Ok(values.map(|bytes| if size_of::<T>() == 0 { empty } else { bytemuck::cast_slice_mut(bytes) }))
    }

    /// The bytes that a copy writes.
    pub(crate) fn part(self) -> PinnedPartMut<'a> {
        self.part
    }
}

/// The bytes of some elements.
fn in_bytes<T>(range: &Range<usize>) -> Range<usize> {
    range.start * size_of::<T>()..range.end * size_of::<T>()
}

/// The number of values of another type in the same bytes, if their length and alignment fit.
fn len_as<U>(ptr: HostPtr, bytes: usize) -> Result<usize, Error> {
    let size = size_of::<U>();
    if size > 0 && bytes.is_multiple_of(size) && ptr.0.is_multiple_of(align_of::<U>()) {
        return Ok(bytes / size);
    }
    Err(Error::BadCast { bytes: bytes as u64, to: std::any::type_name::<U>() })
}

/// The range as indices of `len` elements.
fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>, Error> {
    crate::ranges::resolve(range, len).map_err(|wrong| RequestError::out_of_bounds(wrong, len).into())
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

impl<T> fmt::Debug for PinnedSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedSliceMut").field("part", &self.part).field("len", &self.len).finish()
    }
}
