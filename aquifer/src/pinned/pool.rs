//! The pool of pinned memory, with types.

use std::fmt;
use std::ops::Deref;

use aquifer_device::Device;
use aquifer_transfer::PinnedConfig;
use aquifer_transfer::internal::bytes_of;
use bytemuck::Pod;

use super::buffer::{PinnedBuffer, Returned};
use crate::allocator::Allocator;
use crate::error::Error;

/// A caching pool of pinned host memory for copies of one device. Cloning gives another handle
/// of the same pool.
///
/// It derefs to the pool below, which says how memory is kept and released, and has limits and
/// statistics.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::{PinnedConfig, PinnedPool};
/// let device = aquifer::open("sim:24GiB")?;
/// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut buffer = pool.alloc_from(&[1.0_f32, 2.0, 3.0])?;
/// buffer.write()?[0] = 4.0;
/// assert_eq!(buffer.read()?, [4.0, 2.0, 3.0]);
/// drop(buffer);
/// assert_eq!((pool.stats().active_bytes.current, pool.empty_cache()?), (0, 2 << 20));
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(aquifer_transfer::PinnedPool);

impl Deref for PinnedPool {
    type Target = aquifer_transfer::PinnedPool;

    fn deref(&self) -> &aquifer_transfer::PinnedPool {
        &self.0
    }
}

impl PinnedPool {
    /// A pool for copies to and from `device`. Takes no memory from the system yet, and makes no
    /// driver call.
    ///
    /// # Errors
    /// None today; a configuration that cannot work is refused here.
    pub fn new(device: &Device, config: PinnedConfig) -> Result<PinnedPool, Error> {
        Ok(PinnedPool(aquifer_transfer::PinnedPool::new(device, config)?))
    }

    pub(crate) fn of(pool: &aquifer_transfer::PinnedPool) -> PinnedPool {
        PinnedPool(pool.clone())
    }

    /// Pinned memory for `len` values of `T`. Its contents are those of earlier use. Makes no
    /// driver call while the pool has unused memory of that size.
    ///
    /// # Errors
    /// [`OutOfPinned`](aquifer_transfer::TransferError::OutOfPinned), also when the driver refuses
    /// more; [`aquifer_device::RequestError::LengthOverflow`]; errors of the driver.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, Error> {
        let bytes = bytes_of(len, size_of::<T>() as u64)?;
        Ok(PinnedBuffer::new(self.0.alloc(bytes, align_of::<T>())?, len))
    }

    /// As [`PinnedPool::alloc`], every byte being zero.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_zeroed<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, Error> {
        let bytes = bytes_of(len, size_of::<T>() as u64)?;
        Ok(PinnedBuffer::new(self.0.alloc_zeroed(bytes, align_of::<T>())?, len))
    }

    /// As [`PinnedPool::alloc`], holding a copy of `values`.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_from<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, Error> {
        let mut buffer = self.alloc::<T>(values.len())?;
        buffer.write()?.copy_from_slice(values);
        Ok(buffer)
    }

    /// Pins the caller's memory where it is, without a copy. [`PinnedBuffer::into_vec`] gives
    /// it back. A `Box<[T]>` becomes a `Vec` at no cost. It counts towards no limit and no
    /// statistic of the pool.
    ///
    /// Locking takes time for each page, and unlocking makes the driver wait for the device: this
    /// is for memory that is copied often, or is too large to exist twice. The system locks whole
    /// pages, so two small pieces in one page cannot both be registered. A buffer that is dropped
    /// leaves its memory to the device, which drops it at its next
    /// [`aquifer_device::Device::settle`], or when a pool of the device gets more memory and more
    /// than 64 MiB of such memory are done.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::{PinnedConfig, PinnedPool};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
    /// let weights = vec![1.5_f32; 1 << 20];
    /// let address = weights.as_ptr();
    /// let buffer = pool.register(weights)?;
    /// let weights = buffer.into_vec()?;
    /// assert_eq!((weights.as_ptr(), weights[9]), (address, 1.5));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`AlreadyPinned`](aquifer_transfer::TransferError::AlreadyPinned) when a page of it is
    /// pinned already; errors of the driver. They return the memory.
    pub fn register<T: Pod + Send>(&self, memory: Vec<T>) -> Result<PinnedBuffer<T>, Box<Returned<Vec<T>>>> {
        let len = memory.len();
        match self.0.register(memory) {
            Ok(block) => Ok(PinnedBuffer::new(block, len)),
            Err((memory, error)) => Err(Box::new(Returned { memory, error: error.into() })),
        }
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Allocator {
    /// Pinned memory for `len` values of `T`, which copies of this device read and write
    /// without staging. Its contents are undefined.
    ///
    /// # Errors
    /// When pinned memory runs out, and errors of the driver.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, Error> {
        PinnedPool::of(self.services().runtime()?.pinned()).alloc(len)
    }

    /// Pinned memory with a copy of `values`.
    ///
    /// # Errors
    /// As [`Allocator::pinned`].
    pub fn pinned_from_slice<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, Error> {
        PinnedPool::of(self.services().runtime()?.pinned()).alloc_from(values)
    }
}
