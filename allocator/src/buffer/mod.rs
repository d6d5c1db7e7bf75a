//! Typed device memory.

mod claim;
pub(crate) mod held;
pub(crate) mod storage;
mod turn;

pub use claim::Claim;
pub use storage::Storage;
pub use turn::Turn;

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use aquifer_device::{DevicePtr, Stream};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::buffer::storage::Memory;
use crate::error::AllocError;
use crate::pools::PrivatePool;

/// A typed buffer of device memory: `len` values of `T`, or a part of such a buffer.
///
/// Cloning and [`DeviceBuffer::slice`] share the memory (its [`Storage`]), which is given back when the last handle is dropped.
/// Any stream may use the memory if it takes its turn: see [`crate::Turn`].
///
/// ```
/// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let buffer: DeviceBuffer<f32> = allocator.alloc_buffer(1000, device.default_stream())?;
/// let tail = buffer.slice(900..)?;
/// assert_eq!((tail.len(), tail.ptr().0), (100, buffer.ptr().0 + 3600));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DeviceBuffer<T> {
    storage: Arc<Storage>,
    start: u64,
    len: u64,
    element: PhantomData<fn() -> T>,
}

impl Allocator {
    /// Allocates memory for `len` values of `T`, uninitialised.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`], and a length whose bytes overflow.
    #[track_caller]
    pub fn alloc_buffer<T: Copy>(&self, len: u64, stream: &Stream) -> Result<DeviceBuffer<T>, AllocError> {
        let size = size_of::<T>() as u64;
        let bytes = len.checked_mul(size).ok_or(AllocError::LengthOverflow { len, size })?;
        let alignment = (align_of::<T>() as u64).max(crate::ALIGNMENT);
        let memory = Memory::Block(self.alloc_aligned(bytes, alignment, stream)?);
        let storage = Arc::new(Storage::new(memory, stream));
        Ok(DeviceBuffer { storage, start: 0, len, element: PhantomData })
    }
}

impl PrivatePool {
    /// Allocates memory for `len` values of `T` from this pool, uninitialised.
    ///
    /// # Errors
    /// As [`Allocator::alloc_buffer`].
    #[track_caller]
    pub fn alloc_buffer<T: Copy>(&self, len: u64, stream: &Stream) -> Result<DeviceBuffer<T>, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc_buffer(len, stream)
    }
}

impl DeviceBuffer<u8> {
    /// Makes a buffer of an allocation. The memory counts as written by the work enqueued on `stream` until now, so earlier work of other
    /// streams with it must be ordered before that. For elements of another type see [`DeviceBuffer::cast`].
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// let allocation = allocator.alloc_bytes(4000, &stream)?;
    /// stream.fill(allocation.ptr(), 0, 4000)?;
    /// let zeros = DeviceBuffer::from_allocation(allocation, &stream)?.cast::<f32>().expect("4000 bytes are 1000 floats");
    /// assert_eq!(zeros.len(), 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the stream belongs to another device. The allocation is then dropped.
    pub fn from_allocation(allocation: Allocation, stream: &Stream) -> Result<DeviceBuffer<u8>, AllocError> {
        allocation.record_stream(stream)?;
        let len = allocation.bytes();
        let storage = Arc::new(Storage::new(Memory::Block(allocation), stream));
        Ok(DeviceBuffer { storage, start: 0, len, element: PhantomData })
    }
}

impl<T: Copy> DeviceBuffer<T> {
    /// As many whole values as the memory has now.
    pub(crate) fn of_all(storage: &Arc<Storage>) -> DeviceBuffer<T> {
        let len = storage.bytes().checked_div(size_of::<T>() as u64).unwrap_or(0);
        DeviceBuffer { storage: storage.clone(), start: 0, len, element: PhantomData }
    }

    /// Address of the first element.
    pub fn ptr(&self) -> DevicePtr {
        self.storage.ptr().offset(self.start * size_of::<T>() as u64)
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.len * size_of::<T>() as u64
    }

    /// A part of it, sharing the memory.
    ///
    /// # Errors
    /// [`AllocError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<DeviceBuffer<T>, AllocError> {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&before) => before.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.len,
        };
        if start > end || end > self.len {
            return Err(AllocError::OutOfBounds { start, end, len: self.len });
        }
        Ok(DeviceBuffer { start: self.start + start, len: end - start, ..self.clone() })
    }

    /// The same memory as elements of another type; `None` where it is not a whole number of them, or does not begin at a multiple of
    /// their alignment. Its bytes stay as they are.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let bytes: DeviceBuffer<u8> = allocator.alloc_buffer(12, device.default_stream())?;
    /// let words = bytes.slice(4..)?.cast::<u32>().unwrap();
    /// assert_eq!((words.len(), words.ptr().0), (2, bytes.ptr().0 + 4));
    /// assert!(bytes.cast::<u64>().is_none() && bytes.slice(1..5)?.cast::<u32>().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cast<U: Copy>(&self) -> Option<DeviceBuffer<U>> {
        let (size, start) = (size_of::<U>() as u64, self.start * size_of::<T>() as u64);
        let whole = size > 0 && start.is_multiple_of(size) && self.bytes().is_multiple_of(size);
        let aligned = self.ptr().0.is_multiple_of(align_of::<U>() as u64);
        (whole && aligned).then(|| DeviceBuffer {
            storage: self.storage.clone(),
            start: start / size,
            len: self.bytes() / size,
            element: PhantomData,
        })
    }

    /// Makes the memory ready for work of `stream` with the bare address; see [`Storage::ready_on`]. This holds for the whole allocation.
    /// A new buffer is ready on the stream that it was allocated for, except that turns do not see work with the bare address there.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer, Turn};
    /// use aquifer_device::{AccessKind, Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let (one, two) = (device.stream()?, device.stream()?);
    /// let buffer: DeviceBuffer<u8> = allocator.alloc_buffer(1 << 20, &one)?;
    /// {
    ///     let _turn = Turn::take(&one, &[(buffer.storage(), AccessKind::Write)])?;
    ///     one.fill(buffer.ptr(), 7, buffer.bytes())?;
    /// }
    /// buffer.ready_on(&two)?; // after the fill
    /// two.fill(buffer.ptr(), 8, buffer.bytes())?;
    /// drop(buffer); // not reused before `two` is done with it
    /// assert!(device.driver().take_violation().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`crate::Turn::take`].
    pub fn ready_on(&self, stream: &Stream) -> Result<(), AllocError> {
        self.storage.ready_on(stream)
    }

    /// Notes that `stream` uses the memory, too; see [`crate::Allocation::record_stream`]. This holds for the whole allocation, and is not
    /// needed for streams that take their turns.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        self.storage.memory().record_stream(stream)
    }
}

impl<T> DeviceBuffer<T> {
    /// The memory that the buffer is a part of, which knows the work that uses it.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }
}

impl<T> Clone for DeviceBuffer<T> {
    fn clone(&self) -> Self {
        DeviceBuffer { storage: self.storage.clone(), start: self.start, len: self.len, element: PhantomData }
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("type", &std::any::type_name::<T>())
            .field("len", &self.len)
            .field("memory", self.storage.memory())
            .finish_non_exhaustive()
    }
}
