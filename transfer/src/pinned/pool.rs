//! The handle of a pool of pinned memory.

use std::fmt;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::{Code, Device, HostPtr};
use bytemuck::Pod;

use super::block::PinnedBlock;
use super::config::PinnedConfig;
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
/// because of a capture in progress or [`PinnedConfig::register_threads`]. It goes back when a pool
/// of the device next gets more memory ([`Device::settle_host`]), at the next [`Device::settle`],
/// or when the device is closed.
///
/// ```
/// use aquifer_transfer::{PinnedConfig, PinnedPool};
/// let device = aquifer::open("sim:24GiB")?;
/// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut block = pool.alloc_from(&[1, 2, 3], 1)?;
/// block.write()?[0] = 4;
/// assert_eq!(block.read()?, [4, 2, 3]);
/// drop(block);
/// assert_eq!((pool.stats().active_bytes.current, pool.empty_cache()?), (0, 2 << 20));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<SharedPool>);

impl PinnedPool {
    /// A pool for copies to and from `device`. Takes no memory from the system yet, and makes no
    /// driver call.
    ///
    /// # Errors
    /// None today; a configuration that cannot work is refused here.
    pub fn new(device: &Device, config: PinnedConfig) -> Result<PinnedPool, TransferError> {
        Ok(PinnedPool(Arc::new(SharedPool::new(device, config))))
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

    /// `bytes` bytes of pinned memory, aligned to `alignment`, and to 512 bytes, or to 4096
    /// from 32 KiB on. The contents are those of earlier use. Makes no driver call while the pool
    /// has unused memory of that size.
    ///
    /// # Errors
    /// [`TransferError::OutOfPinned`], also when the driver refuses more;
    /// [`aquifer_device::RequestError::LengthOverflow`]; errors of the driver.
    pub fn alloc(&self, bytes: usize, alignment: usize) -> Result<PinnedBlock, TransferError> {
        host_memory::bytes_of(bytes, 1)?;
        Ok(PinnedBlock(PinnedMemory::alloc(&self.0, bytes, alignment)?))
    }

    /// As [`PinnedPool::alloc`], every byte being zero.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_zeroed(&self, bytes: usize, alignment: usize) -> Result<PinnedBlock, TransferError> {
        let mut block = self.alloc(bytes, alignment)?;
        block.write()?.fill(0);
        Ok(block)
    }

    /// As [`PinnedPool::alloc`], holding a copy of `bytes`.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_from(&self, bytes: &[u8], alignment: usize) -> Result<PinnedBlock, TransferError> {
        let mut block = self.alloc(bytes.len(), alignment)?;
        block.write()?.copy_from_slice(bytes);
        Ok(block)
    }

    /// Pins the caller's memory where it is, without a copy. [`PinnedBlock::into_vec`] gives
    /// it back. It counts towards no limit and no statistic of the pool. A block that is dropped
    /// leaves its memory to the device, which drops it at its next
    /// [`aquifer_device::Device::settle`], or when a pool of the device gets more memory and more
    /// than 64 MiB of such memory are done.
    ///
    /// # Errors
    /// [`TransferError::AlreadyPinned`] when a page of it is pinned already; errors of the
    /// driver. They return the memory.
    pub fn register<T: Pod + Send>(&self, mut memory: Vec<T>) -> Result<PinnedBlock, (Vec<T>, TransferError)> {
        let bytes = size_of_val(memory.as_slice());
        if bytes == 0 {
            return Ok(PinnedBlock(PinnedMemory::empty(&self.0, align_of::<T>())));
        }
        match self.page_lock(memory.as_mut_ptr().cast(), bytes) {
            Ok(ptr) => {
                let origin = Origin::Registered(Mutex::new(Some(Box::new(memory))));
                Ok(PinnedBlock(PinnedMemory::new(&self.0, ptr, bytes, origin)))
            }
            Err(error) => Err((memory, error)),
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
