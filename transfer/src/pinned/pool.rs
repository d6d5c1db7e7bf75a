//! The handle of a pool of pinned memory.

use std::fmt;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::{Code, Device, HostPtr};
use bytemuck::Pod;

use super::buffer::{PinnedBuffer, Returned};
use super::ladder::SharedPool;
use super::memory::{Origin, PinnedMemory};
use super::stats::HostMemoryStats;
use crate::error::TransferError;
use crate::host_memory;

/// CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED.
const ALREADY_REGISTERED: Code = Code(712);

/// A caching pool of pinned host memory for copies of one device. Cloning gives another handle
/// of the same pool.
///
/// *Sizes* are rounded up to eight classes per doubling, and up to 4 KiB to multiples of 512 bytes.
/// So a buffer occupies less than an eighth, or less than 512 bytes, more than was asked for, and
/// at least 512 bytes. Small buffers are carved from slabs of 2 MiB, which grow with the pool.
/// Buffers of 16 MiB and more get slabs of their own, which are split for smaller requests while
/// they are not needed whole.
///
/// *Reuse.* Dropping a buffer makes no driver call and waits for nothing. Its memory is handed out
/// again when every copy that used it is done.
///
/// *Release.* Memory goes back to the system by [`PinnedPool::trim_to`] and
/// [`PinnedPool::empty_cache`], when the limit or the system is short of it, and when the pool and
/// its last buffer are gone. The last of these to be dropped releases memory that the driver is
/// done with, and does not wait. The device takes memory that copies still use, or that cannot go
/// because of a capture in progress. It goes back when a pool of the device next gets more memory
/// ([`Device::settle_host`]), at the next [`Device::settle`], or when the device is closed.
///
/// ```
/// use aquifer::transfer::PinnedPool;
/// let device = aquifer::open("sim:24GiB")?;
/// let pool = PinnedPool::new(&device);
/// let mut buffer = pool.alloc_from(&[1.0_f32, 2.0, 3.0])?;
/// buffer.write()?[0] = 4.0;
/// assert_eq!(buffer.read()?, [4.0, 2.0, 3.0]);
/// drop(buffer);
/// assert_eq!((pool.stats().active_bytes.current, pool.empty_cache()?), (0, 2 << 20));
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<SharedPool>);

impl PinnedPool {
    /// A pool for copies to and from `device`. Takes no memory from the system yet, and makes no
    /// driver call. Without a limit but the system's: see [`PinnedPool::set_limit`].
    pub fn new(device: &Device) -> PinnedPool {
        PinnedPool(Arc::new(SharedPool::new(device)))
    }

    /// The device of the copies.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Calls `reclaim` when the pool lacks memory; see [`Reclaim`](super::ladder::Reclaim). A pool
    /// has one such cache.
    pub(crate) fn set_cache(&self, reclaim: impl Fn() -> bool + Send + Sync + 'static) {
        let before = self.0.cache.lock().replace(Arc::new(reclaim));
        debug_assert!(before.is_none(), "two rings take their chunks from one pool");
    }

    /// Asserts the invariants of its state.
    #[cfg(test)]
    pub(super) fn check(&self) {
        self.0.state.lock().check();
    }

    #[cfg(all(test, aquifer_shuttle))]
    pub(super) fn reserved(&self) -> u64 {
        self.0.state.lock().reserved()
    }

    /// Pinned memory for `len` values of `T`, aligned to 512 bytes, or to 4096 from 32 KiB on. Its
    /// contents are those of earlier use. Makes no driver call while the pool has unused memory of
    /// that size.
    ///
    /// # Errors
    /// [`TransferError::OutOfPinned`], also when the driver refuses more;
    /// [`aquifer_device::RequestError::LengthOverflow`]; errors of the driver.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError> {
        let bytes = host_memory::bytes_of(len, size_of::<T>() as u64)?;
        Ok(PinnedBuffer::new(PinnedMemory::alloc(&self.0, bytes, align_of::<T>())?, len))
    }

    /// As [`PinnedPool::alloc`], every byte being zero.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_zeroed<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError> {
        let mut buffer = self.alloc(len)?;
        buffer.write()?.fill(T::zeroed());
        Ok(buffer)
    }

    /// As [`PinnedPool::alloc`], holding a copy of `values`.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_from<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, TransferError> {
        let mut buffer = self.alloc(values.len())?;
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
    /// use aquifer::transfer::PinnedPool;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let pool = PinnedPool::new(&device);
    /// let weights = vec![1.5_f32; 1 << 20];
    /// let address = weights.as_ptr();
    /// let buffer = pool.register(weights)?;
    /// let weights = buffer.into_vec()?;
    /// assert_eq!((weights.as_ptr(), weights[9]), (address, 1.5));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`TransferError::AlreadyPinned`] when a page of it is
    /// pinned already; errors of the driver. They return the memory.
    pub fn register<T: Pod + Send>(&self, mut memory: Vec<T>) -> Result<PinnedBuffer<T>, Box<Returned<Vec<T>>>> {
        let (len, bytes) = (memory.len(), size_of_val(memory.as_slice()));
        if bytes == 0 {
            return Ok(PinnedBuffer::new(PinnedMemory::empty(&self.0, align_of::<T>()), len));
        }
        match self.page_lock(memory.as_mut_ptr().cast(), bytes) {
            Ok(ptr) => {
                let origin = Origin::Registered(Mutex::new(Some(Box::new(memory))));
                Ok(PinnedBuffer::new(PinnedMemory::new(&self.0, ptr, bytes, origin), len))
            }
            Err(error) => Err(Box::new(Returned { memory, error })),
        }
    }

    #[allow(unsafe_code, reason = "the driver is given memory by its address")]
    fn page_lock(&self, start: *mut u8, bytes: usize) -> Result<HostPtr, TransferError> {
        self.device().settle_host();
        // SAFETY: the caller keeps the memory, which it owns, until it is unregistered: by the
        // buffer, or by the device after that.
        let locked = unsafe { self.device().driver().host_register(start, bytes) };
        locked.map_err(|cause| match cause.code {
            ALREADY_REGISTERED => {
                TransferError::AlreadyPinned { address: start.expose_provenance() as u64, bytes: bytes as u64, cause }
            }
            _ => cause.into(),
        })
    }

    /// Gives unused slabs back to the system, the largest first, until the pool holds at most
    /// `bytes`. Returns how many bytes went back. The chunks of a runtime's staging ring count as
    /// unused while there are no staged copies. Queries the driver for finished memory, and does
    /// not wait for the rest.
    ///
    /// # Errors
    /// Errors of the driver. What did not go stays in the pool.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, TransferError> {
        if self.0.state.lock().reserved() > bytes {
            self.0.reclaim();
        }
        self.0.poll()?;
        let excess = self.0.state.lock().reserved().saturating_sub(bytes);
        self.0.release(excess)
    }

    /// Gives every unused slab back and returns how many bytes that was. As [`PinnedPool::trim_to`]
    /// with 0.
    ///
    /// # Errors
    /// As [`PinnedPool::trim_to`].
    pub fn empty_cache(&self) -> Result<u64, TransferError> {
        self.trim_to(0)
    }

    /// Limits how much the pool may hold from the system. Memory that it already holds stays: see
    /// [`PinnedPool::trim_to`].
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.0.state.lock().limit = bytes;
    }

    /// The limit, if there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.0.state.lock().limit
    }

    /// The error of a user that leaves `bytes` bytes to others.
    pub(crate) fn refusal(&self, bytes: u64) -> TransferError {
        self.0.refusal(bytes, None)
    }

    /// The pool's statistics. Makes no driver call.
    pub fn stats(&self) -> HostMemoryStats {
        let mut state = self.0.state.lock();
        state.reap();
        state.stats
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        self.0.state.lock().stats.reset_peaks();
    }

    /// Starts accumulated values and counts of events from zero.
    pub fn reset_accumulated_stats(&self) {
        self.0.state.lock().stats.reset_accumulated();
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, reserved) = (self.device().id(), self.0.state.lock().reserved());
        f.debug_struct("PinnedPool").field("device", &device).field("reserved", &reserved).finish_non_exhaustive()
    }
}
