//! Giving unused memory back: of all open allocators, and of one that closes.

use std::sync::Arc;

use aquifer_device::{Device, Operation, fork};

use crate::allocator::{Allocator, AtLast, all_open};
use crate::backing::trim::trim_idle_pools;
use crate::error::AllocError;
use crate::recovery::hooks::is_within_an_observer;
use crate::state::close_abandoned;

/// Gives the unused memory of all allocators of a device back to it, for another allocator of the
/// process whose memory ran out: such as cudarc's or the driver's pool. Returns how many bytes that
/// was.
///
/// May be called on any thread, and where no allocator is known. Waits for streams that still use
/// memory which was given back here, as [`crate::Allocator::empty_cache`] does, so no stream may
/// wait for the caller meanwhile. To leave some memory cached, use [`crate::Allocator::trim_to`].
///
/// ```
/// use aquifer_allocator::{Allocator, Config, empty_caches};
/// use aquifer_device::Device;
/// use aquifer_sim::{SimConfig, SimDriver};
/// let device = Device::new(SimDriver::new(SimConfig::new(64 << 20)));
/// let memory = Allocator::new(&device, Config::default())?;
/// drop(memory.alloc_bytes(40 << 20, device.default_stream())?);
/// assert!(device.alloc(40 << 20).is_err()); // for another library
/// assert_eq!(empty_caches(&device)?, 40 << 20);
/// device.alloc(40 << 20)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The first error, of the driver, or [`AllocError::Observing`] within an observer of mappings. The
/// other allocators give their memory back, too.
pub fn empty_caches(device: &Device) -> Result<u64, AllocError> {
    fork::check(Operation::Free)?;
    let ours = all_open(Some(device.id()));
    let freed: Vec<_> = ours.into_iter().map(|allocator| allocator.empty_cache()).collect();
    freed.into_iter().sum()
}

/// Has the other open allocators of the device give unused memory back, about `bytes` if they have
/// as much, rather than that a request is refused. Returns how many bytes that was.
///
/// The caller holds no lock, so two allocators may ask each other at the same time. An observer of
/// mappings runs under the gate of its allocator: requests that it makes of others ask nobody.
pub(crate) fn trim_others(allocator: &Allocator, bytes: u64) -> u64 {
    if is_within_an_observer() || allocator.device().is_capturing() {
        return 0;
    }
    let mut freed = 0;
    for other in all_open(Some(allocator.device().id())) {
        if freed >= bytes || std::ptr::eq(other.state(), allocator.state()) {
            continue;
        }
        let left = || other.memory_reserved().saturating_sub(bytes.saturating_sub(freed));
        match other.trim_to(left()).and_then(|freed| Ok(freed + trim_idle_pools(&other, left() + freed)?)) {
            Ok(more) => freed += more,
            Err(error) => tracing::debug!(%error, "another allocator could not give its unused memory back"),
        }
    }
    freed
}

impl Drop for AtLast {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        let weak = Arc::downgrade(&inner);
        // Buffers may keep it open; bare allocations do not.
        let closes = Arc::strong_count(&inner) == 1 && !fork::is_child();
        let closing = Allocator::keeping(inner);
        if closes
            && closing.memory_allocated() > 0
            && let Err(error) = closing.trim_to(0)
        {
            tracing::warn!(%error, "unused memory of an allocator stays until its last allocation is gone");
        }
        drop(closing);
        if weak.strong_count() == 0 {
            self.device.settle();
            close_abandoned();
        }
    }
}
