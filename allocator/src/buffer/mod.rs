//! Typed device memory.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

use aquifer_device::{AccessKind, DevicePtr, RequestError, Stream};

use crate::alloc::alloc_aligned;
use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::buffer::storage::Memory;
use crate::error::AllocError;
use crate::pools::PrivatePool;

mod access;
pub(crate) mod foreign;
mod guard;
pub(crate) mod held;
pub(crate) mod ranges;
pub(crate) mod record;
mod reservation;
pub(crate) mod storage;
mod view;

pub use access::{Access, Bound, StreamAccess, WithError, read, write};
pub use guard::AccessGuard;
pub use reservation::Reservation;
pub use storage::Storage;
pub use view::{View, ViewMut};

/// A typed buffer of device memory: `len` values of `T`.
///
/// Calls that use a buffer take the stream on which they run, and order themselves after the work
/// that used the buffer before, on any stream. Work of another kind is ordered by
/// [`StreamAccess::with`]. The buffer can be dropped at any time: its memory is not reused before
/// the device is done with it.
///
/// [`Buffer::slice`] and [`Buffer::slice_mut`] borrow a part. [`Buffer::share`] gives another
/// handle of the same memory, which is given back when the last handle is dropped. Work through
/// different handles is ordered like that through one; but which of two threads enqueues first is
/// up to them.
///
/// ```
/// use aquifer_allocator::{Allocator, Config};
/// use aquifer_device::Device;
/// let device = Device::new(aquifer_sim::SimDriver::new(Default::default()));
/// let (allocator, stream) = (Allocator::new(&device, Config::default())?, device.stream()?);
/// let buffer = allocator.alloc_zeros::<f32>(1000, &stream)?;
/// let tail = buffer.slice(900..);
/// assert_eq!((tail.len(), tail.ptr().0), (100, buffer.ptr().0 + 3600));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Buffer<T> {
    storage: Arc<Storage>,
    /// In elements, as `len`.
    start: u64,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// See [`Allocator::alloc`].
#[track_caller]
pub(crate) fn alloc<T: Copy>(allocator: &Allocator, len: usize, stream: &Stream) -> Result<Buffer<T>, AllocError> {
    let (count, size) = (len as u64, size_of::<T>() as u64);
    let bytes = count.checked_mul(size).ok_or(RequestError::LengthOverflow { len: count, size })?;
    let alignment = (align_of::<T>() as u64).max(crate::ALIGNMENT);
    let memory = Memory::Block(alloc_aligned(allocator, bytes, alignment, stream)?, allocator.kept_open());
    let storage = Arc::new(Storage::new(memory, stream));
    Ok(Buffer { storage, start: 0, len, element: PhantomData })
}

/// See [`Allocator::alloc_zeros`].
#[track_caller]
pub(crate) fn alloc_zeros<T: Copy>(
    allocator: &Allocator,
    len: usize,
    stream: &Stream,
) -> Result<Buffer<T>, AllocError> {
    let mut buffer = alloc(allocator, len, stream)?;
    buffer.zero(stream)?;
    Ok(buffer)
}

/// See [`Allocator::buffer_of`].
pub(crate) fn buffer_of<T: Copy>(
    allocator: &Allocator,
    allocation: Allocation,
    stream: &Stream,
) -> Result<Buffer<T>, AllocError> {
    if stream.device_id() != allocator.device().id() {
        return Err(AllocError::wrong_device("stream", stream.device_id(), allocator.device().id()));
    }
    allocation.record_stream(stream)?;
    let storage = Storage::new(Memory::Block(allocation, allocator.kept_open()), stream);
    storage.check_allocator("allocation", allocator)?;
    Ok(Buffer::of_all(&Arc::new(storage)))
}

impl PrivatePool {
    /// Allocates memory for `len` values of `T` from this pool; see [`Allocator::alloc`].
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn alloc<T: Copy>(&self, len: usize, stream: &Stream) -> Result<Buffer<T>, AllocError> {
        let _route = self.route_thread();
        alloc(&self.allocator, len, stream)
    }
}

impl<T: Copy> Buffer<T> {
    /// As many whole values as the memory has now.
    pub(crate) fn of_all(storage: &Arc<Storage>) -> Buffer<T> {
        let len = storage.bytes().checked_div(size_of::<T>() as u64).unwrap_or(0);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        Buffer { storage: storage.clone(), start: 0, len, element: PhantomData }
    }

    /// A buffer of as many values, from the same allocator, for work of `stream` and of others. The
    /// content is undefined until it is written.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn like(&self, stream: &Stream) -> Result<Buffer<T>, AllocError> {
        alloc(self.allocator(), self.len, stream)
    }

    /// Enqueues setting every byte to zero.
    ///
    /// # Errors
    /// A stream of another device, and errors of the driver.
    #[track_caller]
    pub fn zero(&mut self, stream: &Stream) -> Result<(), AllocError> {
        let _access = AccessGuard::acquire(stream, &[(&self.storage, AccessKind::Write)])?;
        if self.bytes() == 0 {
            return Ok(());
        }
        Ok(stream.fill(self.ptr(), 0, self.bytes())?)
    }

    /// A part of it, borrowed.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> View<'_, T> {
        match self.try_slice(range) {
            Ok(part) => part,
            Err(error) => panic!("{error}"),
        }
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

    /// As [`Buffer::slice`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>, AllocError> {
        let range = self.elements(range)?;
        Ok(View::new(Buffer { start: self.start + range.start as u64, len: range.len(), ..self.share() }))
    }

    /// As [`Buffer::slice_mut`], with an error instead of a panic.
    ///
    /// # Errors
    /// As [`Buffer::try_slice`].
    pub fn try_slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>, AllocError> {
        let range = self.elements(range)?;
        Ok(ViewMut::new(Buffer { start: self.start + range.start as u64, len: range.len(), ..self.share() }))
    }

    /// The same bytes as elements of another type; `None` where they are not a whole number of
    /// them, or do not begin at a multiple of their size and alignment. To convert values, see
    /// `cast` of `aquifer-kernels`.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let bytes = Allocator::new(&device, Config::default())?.alloc::<u8>(12, &device.stream()?)?;
    /// let tail = bytes.slice(4..);
    /// let words = tail.reinterpret::<u32>().unwrap();
    /// assert_eq!((words.len(), words.ptr().0), (2, bytes.ptr().0 + 4));
    /// assert!(bytes.reinterpret::<u64>().is_none() && bytes.slice(1..5).reinterpret::<u32>().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reinterpret<U: Copy>(&self) -> Option<View<'_, U>> {
        self.as_elements().map(View::new)
    }

    /// As [`Buffer::reinterpret`], for writing.
    pub fn reinterpret_mut<U: Copy>(&mut self) -> Option<ViewMut<'_, U>> {
        self.as_elements().map(ViewMut::new)
    }

    fn elements(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>, AllocError> {
        ranges::resolve(range, self.len).map_err(|wrong| RequestError::out_of_bounds(wrong, self.len).into())
    }

    fn as_elements<U: Copy>(&self) -> Option<Buffer<U>> {
        let (size, start) = (size_of::<U>() as u64, self.start * size_of::<T>() as u64);
        let whole = size > 0 && start.is_multiple_of(size) && self.bytes().is_multiple_of(size);
        let aligned = self.ptr().0.is_multiple_of(align_of::<U>() as u64);
        let len = usize::try_from(self.bytes().checked_div(size)?).ok()?;
        (whole && aligned).then(|| Buffer {
            storage: self.storage.clone(),
            start: start / size,
            len,
            element: PhantomData,
        })
    }
}

impl<T> Buffer<T> {
    /// Another handle of the same memory. The memory is given back when the last one is dropped.
    pub fn share(&self) -> Buffer<T> {
        Buffer { storage: self.storage.clone(), start: self.start, len: self.len, element: PhantomData }
    }

    /// Address of the first element.
    pub fn ptr(&self) -> DevicePtr {
        self.storage.ptr().offset(self.start * size_of::<T>() as u64)
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
    pub fn allocator(&self) -> &Allocator {
        self.storage.allocator()
    }

    /// The memory that the buffer is a part of, which knows the work that uses it.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Makes the memory ready for work of `stream` with the bare address; see
    /// [`Storage::ready_on`]. This holds for the whole allocation. A new buffer is ready on the
    /// stream that it was allocated for, except that access guards do not see work with the bare
    /// address there.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let (one, two) = (device.stream()?, device.stream()?);
    /// let buffer = allocator.alloc_zeros::<u8>(1 << 20, &one)?;
    /// buffer.ready_on(&two)?; // after the zeros
    /// two.fill(buffer.ptr(), 8, buffer.bytes())?;
    /// drop(buffer); // not reused before `two` is done with it
    /// device.assert_no_violations();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`crate::AccessGuard::acquire`].
    pub fn ready_on(&self, stream: &Stream) -> Result<(), AllocError> {
        self.storage.ready_on(stream)
    }

    /// Notes that `stream` uses the memory, too; see [`crate::Allocation::record_stream`]. This
    /// holds for the whole allocation, and is not needed for streams that use access guards.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        self.storage.memory().record_stream(stream)
    }
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("type", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("memory", self.storage.memory())
            .finish_non_exhaustive()
    }
}
