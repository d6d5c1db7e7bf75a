//! The pool as people hold it.

use std::fmt;
use std::sync::{Arc, Weak};

use aquifer_device::Device;

use super::keeper::Keeper;
use super::ladder::Inner;
use super::source::SlabSource;
use super::stats::HostMemoryStats;
use crate::error::TransferError;

/// How a pool of page-locked memory behaves.
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
    /// Most bytes that the pool may hold from the system; `None` is no limit but the system's. A runtime's own copies of ordinary memory
    /// take from its pool, too: they fail when buffers of the caller's hold all of it.
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

/// Page-locked host memory of one device, kept for reuse. Cloning gives another handle of the same pool.
///
/// Sizes are rounded to eight classes for each doubling, so a buffer holds less than an eighth more than it was asked for, and at
/// least 512 bytes. Small ones are carved from slabs of 2 MiB, which grow with the pool; buffers of 16 MiB and more get slabs of their
/// own, which are split for smaller requests while nobody needs them whole.
///
/// Dropping a buffer makes no driver call and waits for nothing: its memory is handed out again when every copy that used it
/// is done. The memory itself goes back to the system by [`PinnedPool::trim_to`] and [`PinnedPool::empty_cache`], under the
/// pressure of the limit or the system, and when the pool and its last buffer are gone. The last of these to be dropped asks the
/// driver what it is done with, and gives that back; it waits for nothing. What is still copied, or what a capture in progress or
/// [`SlabSource::Registered`] keeps from going, stays with the device: until a pool of the device next gets more memory
/// ([`Device::settle_host`]), its next [`Device::settle`], or its own end.
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
    /// A pool for copies to and from `device`. Takes nothing from the system yet, and makes no driver call.
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

    /// Gives slabs of which nothing is in use back to the system, the largest first, until the pool holds at most `bytes`. Returns how
    /// many bytes went back. What a runtime keeps for staged copies is not in use while there are none. Asks the driver what it is done
    /// with, and does not wait for the rest.
    ///
    /// # Errors
    /// Those of the driver. What did not go stays in the pool.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, TransferError> {
        if self.0.reserved() as u64 > bytes {
            self.0.keepers.give_back();
        }
        self.0.poll()?;
        let held = self.0.reserved();
        let excess = held.saturating_sub(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(self.0.release(excess)? as u64)
    }

    /// Gives every slab back of which nothing is in use; returns their bytes. As [`PinnedPool::trim_to`] with 0.
    ///
    /// # Errors
    /// As [`PinnedPool::trim_to`].
    pub fn empty_cache(&self) -> Result<u64, TransferError> {
        self.trim_to(0)
    }

    /// Limits what the pool may hold from the system. What it holds already stays: see [`PinnedPool::trim_to`].
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.0.state.lock().limit = bytes;
    }

    /// What the pool counts. Makes no driver call.
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
