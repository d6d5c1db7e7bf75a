//! The handle of a pool of page-locked memory.

use std::fmt;
use std::sync::{Arc, Weak};

use aquifer_device::{Device, RequestError};

use super::class::SLAB;
use super::keeper::Keeper;
use super::ladder::Inner;
use super::source::SlabSource;
use super::stats::HostMemoryStats;
use crate::error::TransferError;

/// The configuration of a pool of page-locked memory.
///
/// ```
/// use std::num::NonZeroUsize;
/// use aquifer_transfer::{PinnedConfig, SlabSource};
/// let threads = NonZeroUsize::new(8).unwrap();
/// let config = PinnedConfig::default().limit_bytes(16 << 30).slabs(SlabSource::Registered { threads });
/// assert_eq!(config.limit_bytes, Some(16 << 30));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedConfig {
    /// The most bytes that the pool may hold from the system; `None` means no limit but the system's. A runtime's own copies of ordinary
    /// memory take from its pool, too: they fail while the caller's buffers hold all of it. The staging ring takes at most half of it.
    pub limit_bytes: Option<u64>,
    /// Where slabs come from.
    pub slabs: SlabSource,
}

impl PinnedConfig {
    /// Sets [`PinnedConfig::limit_bytes`].
    #[must_use]
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.limit_bytes = Some(bytes);
        self
    }

    /// Sets [`PinnedConfig::slabs`].
    #[must_use]
    pub fn slabs(mut self, slabs: SlabSource) -> Self {
        self.slabs = slabs;
        self
    }
}

/// A caching pool of page-locked host memory for copies of one device. Cloning gives another handle of the same pool.
///
/// *Sizes* are rounded up to eight classes per doubling, and up to 4 KiB to multiples of 512 bytes. So a buffer occupies less than an
/// eighth, or less than 512 bytes, more than was asked for, and at least 512 bytes. Small buffers are carved from slabs of 2 MiB, which
/// grow with the pool. Buffers of 16 MiB and more get slabs of their own, which are split for smaller requests while they are not needed
/// whole.
///
/// *Reuse.* Dropping a buffer makes no driver call and waits for nothing. Its memory is handed out again when every copy that used it
/// is done.
///
/// *Release.* Memory goes back to the system by [`PinnedPool::trim_to`] and [`PinnedPool::empty_cache`], when the limit or the system is
/// short of it, and when the pool and its last buffer are gone. The last of these to be dropped gives back what the driver says it is
/// done with, and waits for nothing. Memory that is still in use by copies, or that cannot go because of a capture in progress or
/// [`SlabSource::Registered`], is left to the device. It goes back when a pool of the device next gets more memory
/// ([`Device::settle_host`]), at the next [`Device::settle`], or when the device is closed.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_transfer::{PinnedConfig, PinnedPool};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut buffer = pool.alloc_from(&[1.0_f32, 2.0, 3.0])?;
/// buffer.write()?[0] = 4.0;
/// assert_eq!(buffer.read()?, [4.0, 2.0, 3.0]);
/// drop(buffer);
/// assert_eq!((pool.stats().active_bytes.current, pool.empty_cache()?), (0, 2 << 20));
/// # Ok::<(), aquifer_transfer::TransferError>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<Inner>);

impl PinnedPool {
    /// A pool for copies to and from `device`. Takes no memory from the system yet, and makes no driver call.
    ///
    /// # Errors
    /// None today; a configuration that cannot work is refused here.
    pub fn new(device: &Device, config: PinnedConfig) -> Result<PinnedPool, TransferError> {
        Ok(PinnedPool(Arc::new(Inner::new(device, config))))
    }

    /// The device whose copies the memory is for.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Asks `keeper` to give memory back when the pool lacks some.
    pub(crate) fn add_keeper(&self, keeper: Weak<dyn Keeper>) {
        self.0.keepers.add(keeper);
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Takes `bytes` bytes, rounded up to 2 MiB, from the system now: page-locking takes long, some 0.5 ms a MiB, and its calls make the driver
    /// wait. Buffers of 32 KiB and more, of any sizes that together have room there, are then handed out without it; smaller ones come from
    /// slabs of their own. The memory is the pool's as any other, and [`PinnedPool::trim_to`] gives it back. With
    /// [`SlabSource::Registered`] several threads touch it.
    ///
    /// ```
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{PinnedConfig, PinnedPool};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
    /// pool.prewarm(256 << 20)?;
    /// let buffers = [pool.alloc::<f32>(1 << 14)?, pool.alloc::<f32>(1 << 24)?];
    /// assert_eq!(pool.stats().num_host_alloc, 1);
    /// # drop(buffers);
    /// # Ok::<(), aquifer_transfer::TransferError>(())
    /// ```
    ///
    /// # Errors
    /// [`TransferError::OutOfPinned`] when the limit or the system does not let it come; nothing is given back or waited for, for that. Errors
    /// of the driver.
    pub fn prewarm(&self, bytes: u64) -> Result<(), TransferError> {
        let too_long = TransferError::Request(RequestError::LengthOverflow { len: bytes, size: 1 });
        let length = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(SLAB));
        match length.filter(|&length| isize::try_from(length).is_ok()) {
            Some(0) => Ok(()),
            Some(length) => self.0.prewarm(length),
            None => Err(too_long),
        }
    }

    /// Gives unused slabs back to the system, the largest first, until the pool holds at most `bytes`. Returns how many bytes went back.
    /// The chunks of a runtime's staging ring count as unused while there are no staged copies. Asks the driver what it is done with, and
    /// does not wait for the rest.
    ///
    /// # Errors
    /// Errors of the driver. What did not go stays in the pool.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, TransferError> {
        if self.0.reserved() as u64 > bytes {
            self.0.keepers.give_back();
        }
        self.0.poll()?;
        let held = self.0.reserved();
        let excess = held.saturating_sub(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(self.0.release(excess)? as u64)
    }

    /// Gives every unused slab back and returns how many bytes that was. As [`PinnedPool::trim_to`] with 0.
    ///
    /// # Errors
    /// As [`PinnedPool::trim_to`].
    pub fn empty_cache(&self) -> Result<u64, TransferError> {
        self.trim_to(0)
    }

    /// Limits how much the pool may hold from the system. Memory that it already holds stays: see [`PinnedPool::trim_to`].
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.0.state.lock().limit = bytes;
    }

    /// The limit, if there is one.
    pub(crate) fn limit(&self) -> Option<u64> {
        self.0.state.lock().limit
    }

    /// That a user of the pool leaves `bytes` bytes to others.
    pub(crate) fn refusal(&self, bytes: usize) -> TransferError {
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
        self.0.fmt(f)
    }
}
