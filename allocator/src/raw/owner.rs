//! Finding the allocator of a raw pointer among all of the process.

use aquifer_device::{DevicePtr, fork};

use crate::allocator::{Allocator, all_open};
use crate::state::AllocatorState;

/// The owner of a live raw allocation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RawOwner {
    /// A handle of the allocator, of which [`Allocator::device`] is the device.
    pub allocator: Allocator,
    /// The pointer that the allocation is freed with.
    pub ptr: DevicePtr,
    /// Bytes requested.
    pub bytes: u64,
}

/// Finds the live raw allocation that contains an address, among those of all allocators of the
/// process: for `free(ptr)` without a device, `cuMemGetAddressRange` and the like. `None` for other
/// memory, and in a forked child.
///
/// The first address of an allocation is found at once. For another one, all raw pointers of the
/// process are looked at, without a lock. Virtual devices may use the same addresses; the
/// allocator that was made first is found.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, owner_of};
/// use aquifer_device::Device;
/// use aquifer_sim::{SimConfig, SimDriver};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let memory = Allocator::new(&device, Config::default())?;
/// let ptr = memory.alloc_raw(1000, device.default_stream())?;
/// let owner = owner_of(ptr.offset(999)).ok_or("not a raw allocation")?;
/// assert_eq!((owner.ptr, owner.bytes), (ptr, 1000));
/// owner.allocator.free_raw(owner.ptr)?;
/// assert!(owner_of(ptr).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn owner_of(ptr: DevicePtr) -> Option<RawOwner> {
    if ptr.0 == 0 || fork::is_child() {
        return None;
    }
    all_open(None).into_iter().find_map(|allocator| {
        let (ptr, bytes) = find(allocator.state(), ptr)?;
        Some(RawOwner { allocator, ptr, bytes })
    })
}

/// The raw allocation of an allocator state that contains an address: its pointer, and its
/// requested bytes.
fn find(state: &'static AllocatorState, addr: DevicePtr) -> Option<(DevicePtr, u64)> {
    let bytes_of =
        |ptr: u64| state.look_at_raw(DevicePtr(ptr), |block| state.shared().heap().block(block).requested).ok();
    if let Some(bytes) = bytes_of(addr.0) {
        return Some((addr, bytes));
    }
    // Allocations do not overlap, so only the last one that begins before may contain the address.
    let ptr = state.raw.last_until(addr.0)?;
    let bytes = bytes_of(ptr)?;
    (addr.0 - ptr < bytes).then_some((DevicePtr(ptr), bytes))
}
