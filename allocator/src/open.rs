//! Giving the unused memory of all open allocators back.

use aquifer_device::{Device, Operation, fork};

use crate::allocator::all_open;
use crate::error::AllocError;

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
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
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
    let ours = all_open().into_iter().filter(|allocator| allocator.device().id() == device.id());
    let freed: Vec<_> = ours.map(|allocator| allocator.empty_cache()).collect();
    freed.into_iter().sum()
}
