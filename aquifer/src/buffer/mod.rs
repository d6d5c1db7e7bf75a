//! Typed device memory, with all that can be done with it.

use std::borrow::Borrow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

use aquifer_allocator::{AccessGuard, Storage};
use aquifer_device::{AccessKind, DevicePtr, Operation, RequestError, Stream, fork};
use aquifer_transfer::internal::resolve;
use aquifer_transfer::{DevicePart, Transfer};
use bytemuck::Pod;

use crate::allocator::Allocator;
use crate::error::Error;
use crate::transfer::{DeviceSource, OnStreams, Pending, RunsCopies, Source, Target, bytes_of_mut, elements};

mod access;
mod alloc;
mod kernels;
mod view;

pub use access::{Access, WithError, read, with, write};
pub use view::{View, ViewMut};

/// A typed buffer of device memory: `len` values of `T`.
///
/// Calls that use a buffer take the stream on which they run, as their last argument, and order
/// themselves after the work that used the buffer before, on any stream. Work of another kind is
/// ordered by [`with`]. The buffer can be dropped at any time: its memory is not reused before the
/// device is done with it.
///
/// [`Buffer::slice`] and [`Buffer::slice_mut`] borrow a part. [`Buffer::share`] gives another
/// handle of the same memory, which is given back when the last handle is dropped. Work through
/// different handles is ordered like that through one; but which of two threads enqueues first is
/// up to them.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let buffer = memory.alloc_zeros::<f32>(1000, &stream)?;
/// let tail = buffer.slice(900..);
/// assert_eq!((tail.len(), tail.ptr().0), (100, buffer.ptr().0 + 3600));
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// *Copies* between device memory return `()` once they are enqueued. Those with an end on the host
/// return a [`Pending`], which can be waited for, awaited or dropped: the copy goes on. Methods
/// that return values on the host wait for them.
///
/// ```
/// # use aquifer::prelude::*;
/// # let device = aquifer::open("sim:24GiB")?;
/// # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let x = memory.from_slice(&[1.0_f32, 2.0, 3.0], &stream)?;
/// let mut y = memory.alloc::<f32>(2, &stream)?;
/// y.copy_from(&x.slice(1..), &stream)?;
/// assert_eq!(y.to_vec(&stream)?, [2.0, 3.0]);
/// assert_eq!(y.slice(..1).item(&stream)?, 2.0);
/// y.upload(vec![4.0, 5.0], &stream)?.wait()?;
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// *Kernels* are enqueued, and their results are new buffers of the same allocator. The first one
/// on an allocator loads all ([`Kernels::load`](aquifer_kernels::Kernels::load)), which fails while
/// a stream captures.
///
/// ```
/// # use aquifer::prelude::*;
/// # let device = aquifer::open("sim:24GiB")?;
/// # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let mut x = memory.alloc::<f32>(1000, &stream)?;
/// x.fill(2.0, &stream)?;
/// let mut y = memory.alloc_zeros::<f32>(1000, &stream)?;
/// y.axpy(0.5, &x, &stream)?;
/// assert_eq!(y.sum(&stream)?.item(&stream)?, 1000.0);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[must_use]
pub struct Buffer<T, H = Arc<Storage>> {
    storage: H,
    /// In elements, as `len`.
    start: u64,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// The most bytes that are read by a blocking copy of a stream.
const FEW_BYTES: u64 = 8 << 10;

/// How a [`Buffer`] refers to its memory: by a handle of its own, or as a [`View`] by one that it
/// borrows.
pub trait Handle: Borrow<Arc<Storage>> {}

impl<H: Borrow<Arc<Storage>>> Handle for H {}

impl<T> Buffer<T> {
    #[inline]
    pub(crate) fn new(storage: Arc<Storage>, len: usize) -> Buffer<T> {
        Buffer { storage, start: 0, len, element: PhantomData }
    }

    /// A buffer of memory that has no type yet, such as [`Growable::storage`] and
    /// [`Exportable::storage`]: as many whole values as there is memory for now. It shares the
    /// memory and keeps it alive.
    ///
    /// ```
    /// # use aquifer::prelude::*;
    /// # let device = aquifer::open("sim:24GiB")?;
    /// # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let mut cache = memory.growable(1 << 30, &stream)?; // addresses, and no memory yet
    /// cache.grow_to(100 << 20, &stream)?;
    /// let half = Buffer::<f32>::of(cache.storage());
    /// cache.grow_to(200 << 20, &stream)?; // at the same address, nothing is copied
    /// assert_eq!((half.len(), Buffer::<f32>::of(cache.storage()).len()), (25 << 20, 50 << 20));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// [`Growable::storage`]: aquifer_allocator::Growable::storage
    /// [`Exportable::storage`]: aquifer_allocator::Exportable::storage
    pub fn of(storage: &Arc<Storage>) -> Buffer<T> {
        let len = storage.bytes().checked_div(size_of::<T>() as u64).unwrap_or(0);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Buffer::new(storage.clone(), len)
    }
}

/// Memory.
impl<T, H: Handle> Buffer<T, H> {
    /// Another handle of the same memory. The memory is given back when the last one is dropped.
    pub fn share(&self) -> Buffer<T> {
        Buffer { storage: self.storage().clone(), start: self.start, len: self.len, element: PhantomData }
    }

    /// All of it, borrowed.
    #[inline]
    pub(crate) fn view(&self) -> View<'_, T> {
        Buffer { storage: self.storage(), start: self.start, len: self.len, element: PhantomData }
    }

    /// Address of the first element.
    #[inline]
    pub fn ptr(&self) -> DevicePtr {
        self.storage().ptr().offset(self.start * size_of::<T>() as u64)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }

    /// The allocator of its memory.
    ///
    /// # Panics
    /// As [`Storage::allocator`].
    pub fn allocator(&self) -> Allocator {
        self.storage().allocator().into()
    }

    /// As [`Buffer::allocator`], with an error in a forked child.
    pub(crate) fn memory(&self) -> Result<Allocator, Error> {
        fork::check(Operation::Alloc)?;
        Ok(self.allocator())
    }

    /// The memory that the buffer is a part of, which knows the work that uses it.
    #[inline]
    pub fn storage(&self) -> &Arc<Storage> {
        self.storage.borrow()
    }

    /// Makes the memory ready for work of `stream` with the bare address; see
    /// [`Storage::ready_on`]. This holds for the whole allocation. A new buffer is ready on the
    /// stream that it was allocated for, except that access guards do not see work with the bare
    /// address there.
    ///
    /// ```
    /// # use aquifer::prelude::*;
    /// # let device = aquifer::open("sim:24GiB")?;
    /// # let memory = Allocator::of(&device)?;
    /// let (one, two) = (device.stream()?, device.stream()?);
    /// let buffer = memory.alloc_zeros::<u8>(1 << 20, &one)?;
    /// buffer.ready_on(&two)?; // after the zeros
    /// two.fill(buffer.ptr(), 8, buffer.bytes())?;
    /// drop(buffer); // not reused before `two` is done with it
    /// device.assert_no_violations();
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`AccessGuard::acquire`].
    pub fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.storage().ready_on(stream)?)
    }

    /// Notes that `stream` uses the memory, too; see
    /// [`Allocation::record_stream`](aquifer_allocator::Allocation::record_stream). This holds for
    /// the whole allocation, and is not needed for streams that use access guards.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.storage().record_stream(stream)?)
    }

    /// The runtime of its device for a copy by `copies`, which may be another device's.
    pub(crate) fn copies_for(&self, copies: &Transfer) -> Result<Transfer, Error> {
        if self.storage().device_id() == copies.device().id() {
            return Ok(copies.clone());
        }
        let memory = self.memory()?;
        Ok(memory.services()?.runtime()?.transfer(memory.untyped())?)
    }

    /// Copies to and from its memory, on a stream.
    pub(crate) fn copies_on(&self, stream: &Stream) -> Result<Transfer, Error> {
        let memory = self.memory()?;
        Ok(memory.services()?.runtime()?.transfer(memory.untyped())?.on(stream)?)
    }

    /// Its memory, as an end of a copy.
    pub(crate) fn device_part(&self) -> DevicePart<'_> {
        DevicePart { storage: self.storage(), ptr: self.ptr(), bytes: self.bytes() }
    }
}

/// Parts of it to read.
impl<T: Copy, H: Handle> Buffer<T, H> {
    /// A buffer of as many values, from the same allocator, for work of `stream` and of others. The
    /// content is undefined until it is written.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn like(&self, stream: &Stream) -> Result<Buffer<T>, Error> {
        self.memory()?.alloc(self.len, stream)
    }

    /// A part of it, borrowed.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, T> {
        match resolve(range, self.len) {
            Ok(range) => self.view().part(&range),
            Err(wrong) => out_of_bounds(wrong, self.len),
        }
    }

    /// As [`Buffer::slice`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>, Error> {
        Ok(self.view().part(&self.elements(range)?))
    }

    /// The same bytes as elements of another type; `None` where they are not a whole number of
    /// them, or do not begin at a multiple of their size and alignment. To convert values, see
    /// [`Buffer::cast`].
    ///
    /// ```
    /// # use aquifer::prelude::*;
    /// # let device = aquifer::open("sim:24GiB")?;
    /// let bytes = Allocator::of(&device)?.alloc::<u8>(12, &device.stream()?)?;
    /// let tail = bytes.slice(4..);
    /// let words = tail.reinterpret::<u32>().unwrap();
    /// assert_eq!((words.len(), words.ptr().0), (2, bytes.ptr().0 + 4));
    /// assert!(bytes.reinterpret::<u64>().is_none() && bytes.slice(1..5).reinterpret::<u32>().is_none());
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[must_use]
    pub fn reinterpret<U: Copy>(&self) -> Option<View<'_, U>> {
        self.view().into_elements()
    }

    fn elements(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>, Error> {
        let resolved = resolve(range, self.len);
        resolved.map_err(|wrong| RequestError::out_of_bounds(wrong, self.len).into())
    }

    /// Elements that lie within it.
    #[inline]
    fn part(self, range: &Range<usize>) -> Buffer<T, H> {
        Buffer { start: self.start + range.start as u64, len: range.len(), ..self }
    }

    fn into_elements<U: Copy>(self) -> Option<Buffer<U, H>> {
        let (size, start) = (size_of::<U>() as u64, self.start * size_of::<T>() as u64);
        let whole = size > 0 && start.is_multiple_of(size) && self.bytes().is_multiple_of(size);
        let aligned = self.ptr().0.is_multiple_of(align_of::<U>() as u64);
        let len = usize::try_from(self.bytes().checked_div(size)?).ok()?;
        (whole && aligned).then(|| Buffer { storage: self.storage, start: start / size, len, element: PhantomData })
    }
}

#[track_caller]
#[cold]
fn out_of_bounds(wrong: Range<usize>, len: usize) -> ! {
    panic!("{}", RequestError::out_of_bounds(wrong, len))
}

/// Parts of it to write.
impl<T: Copy> Buffer<T> {
    /// Enqueues setting every byte to zero.
    ///
    /// # Errors
    /// A stream of another device, and errors of the driver.
    #[track_caller]
    pub fn zero(&mut self, stream: &Stream) -> Result<(), Error> {
        let _access = AccessGuard::acquire(stream, &[(&self.storage, AccessKind::Write)])?;
        if self.bytes() == 0 {
            return Ok(());
        }
        Ok(stream.fill(self.ptr(), 0, self.bytes())?)
    }

    /// A part of it, borrowed for writing.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> ViewMut<'_, T> {
        match self.try_slice_mut(range) {
            Ok(part) => part,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`Buffer::slice_mut`], with an error instead of a panic.
    ///
    /// # Errors
    /// As [`Buffer::try_slice`].
    pub fn try_slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>, Error> {
        let range = self.elements(range)?;
        Ok(ViewMut::new(self.share().part(&range)))
    }

    /// As [`Buffer::reinterpret`], for writing.
    #[must_use]
    pub fn reinterpret_mut<U: Copy>(&mut self) -> Option<ViewMut<'_, U>> {
        self.share().into_elements().map(ViewMut::new)
    }
}

/// Copies from it.
impl<T: Pod + Send + Sync, H: Handle> Buffer<T, H> {
    /// Enqueues a copy to the host; see [`Target`].
    ///
    /// ```
    /// # #![deny(warnings)]
    /// # use aquifer::prelude::*;
    /// # let device = aquifer::open("sim:24GiB")?;
    /// # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let x = memory.from_slice(&[1.0_f32, 2.0], &stream)?;
    /// let mut pinned = memory.pinned::<f32>(2)?;
    /// x.download(&mut pinned, &stream)?; // returns at once
    /// assert_eq!(pinned.read()?, [1.0, 2.0]); // waits
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Buffer::upload`].
    #[track_caller]
    pub fn download<D: Target<T>>(&self, to: D, by: &impl RunsCopies) -> Result<Pending<D::Output>, Error> {
        let copies = by.copies_of(self.view())?;
        let _place = copies.called_here();
        to.download_from(&copies, self.view(), None)
    }

    /// Copies to borrowed host memory, and waits until it is there.
    ///
    /// # Errors
    /// As [`Buffer::upload`].
    #[track_caller]
    pub fn download_blocking(&self, to: &mut [T], by: &impl RunsCopies) -> Result<(), Error> {
        let copies = by.copies_of(self.view())?;
        let _place = copies.called_here();
        let elements = elements::<T>(self.len, to.len(), None);
        Ok(copies.download_blocking(self.device_part(), bytes_of_mut(to), &elements)?)
    }

    /// Copies to a new `Vec`, and waits until it is there.
    ///
    /// # Errors
    /// As [`Buffer::upload`], and when host memory runs out.
    #[track_caller]
    pub fn to_vec(&self, by: &impl RunsCopies) -> Result<Vec<T>, Error> {
        if let Some(values) = self.read_few(by)? {
            return Ok(values);
        }
        let copies = by.copies_of(self.view())?;
        let _place = copies.called_here();
        let (copied, values) = copies.download_new_vec(self.device_part(), self.len)?;
        copied.wait()?;
        Ok(values()?)
    }

    /// The element of a buffer of one; of a longer one, `x.slice(..1).item(&stream)` is the first.
    /// Waits until it is there.
    ///
    /// # Errors
    /// [`Error::NotOneElement`], and as [`Buffer::upload`].
    #[track_caller]
    pub fn item(&self, by: &impl RunsCopies) -> Result<T, Error> {
        if self.len != 1 {
            return Err(Error::NotOneElement { shape: vec![self.len] });
        }
        if let Some(values) = self.read_few(by)? {
            return Ok(values[0]);
        }
        let copies = by.copies_of(self.view())?;
        let _place = copies.called_here();
        let (copied, values) = copies.download_new_vec(self.device_part(), 1)?;
        copied.wait_counted()?;
        Ok(values()?[0])
    }

    /// A few values, by a blocking copy of a stream. `None` if there are many, or none, or a runtime
    /// is to copy them, or the stream captures or is another device's.
    #[track_caller]
    fn read_few(&self, by: &impl RunsCopies) -> Result<Option<Vec<T>>, Error> {
        let plain =
            by.stream().filter(|stream| stream.timeline().device_id_unless_capturing() == self.storage().device_id());
        let Some(stream) = plain.filter(|_| (1..=FEW_BYTES).contains(&self.bytes())) else { return Ok(None) };
        let mut values = bytemuck::zeroed_vec(self.len);
        let _access = AccessGuard::acquire(stream, &[(self.storage(), AccessKind::Read)])?;
        stream.download_blocking(bytes_of_mut(&mut values), self.ptr())?;
        Ok(Some(values))
    }

    /// A copy in memory of another allocator, such as another device's, enqueued on `stream` of
    /// that device.
    ///
    /// # Errors
    /// As [`Buffer::copy_from`], and when device memory runs out.
    #[track_caller]
    pub fn to(&self, memory: &Allocator, stream: &Stream) -> Result<Buffer<T>, Error> {
        let mut to = memory.alloc(self.len, stream)?;
        to.copy_from(&self.view(), stream)?;
        Ok(to)
    }
}

/// Copies to it.
impl<T: Pod + Send + Sync> Buffer<T> {
    /// Enqueues filling the buffer from the host, or from a file; see [`Source`]. From a slice, it
    /// returns once the slice may be reused.
    ///
    /// # Errors
    /// Ends of different lengths, a source that cannot be read, a stream of another device or that
    /// captures, and errors of the driver. When pinned memory for staging runs out.
    #[track_caller]
    pub fn upload(&mut self, from: impl Source<T>, by: &impl RunsCopies) -> Result<Pending<()>, Error> {
        let copies = by.copies_of(self.view())?;
        let _place = copies.called_here();
        from.upload_to(&copies, self, None)
    }

    /// Enqueues filling the buffer from device memory, also of another device. Between devices the
    /// fastest way is taken ([`Route`](crate::transfer::Route)).
    ///
    /// # Errors
    /// Ends of different lengths, or that overlap, and as [`Buffer::upload`].
    #[track_caller]
    pub fn copy_from(&mut self, from: impl DeviceSource<T>, stream: &Stream) -> Result<(), Error> {
        let copies = self.copies_on(stream)?;
        let _place = copies.called_here();
        self.fill_by(&copies, from)
    }

    /// As [`Buffer::copy_from`], by a runtime of its device.
    pub(crate) fn fill_by(&mut self, copies: &Transfer, from: impl DeviceSource<T>) -> Result<(), Error> {
        let (from, region) = from.parts();
        let elements = elements::<T>(from.len, self.len, region);
        Ok(copies.copy_in_order(&from.copies_for(copies)?, from.device_part(), self.device_part(), &elements)?)
    }
}

impl<T, H: Handle> OnStreams for Buffer<T, H> {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.storage().ready_on(stream)?)
    }
}

impl<T, H: Handle> fmt::Debug for Buffer<T, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("type", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("ptr", &self.ptr())
            .finish_non_exhaustive()
    }
}
