//! Access of other devices to this one's memory.
//!
//! Each mapping has its own list of devices with access. So a new peer is given access to all
//! existing mappings, and to every later one by the list that operations on mappings use. The gate
//! excludes those operations in between, so that no mapping is missed.

use aquifer_device::DevicePtr;

use crate::allocator::Allocator;
use crate::backing::paged::probe::try_mapping;
use crate::error::AllocError;

/// See [`Allocator::enable_peer_access`].
pub(crate) fn enable_peer_access(allocator: &Allocator, ordinal: u32) -> Result<(), AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::SetAccess)?;
    let _alone = allocator.gate()?.exclusive();
    let shared = allocator.state().shared();
    let Some(paged) = &shared.paged else {
        return Err(allocator.not_mapped("access of peers"));
    };
    if paged.access.contains(&ordinal) {
        return Ok(());
    }
    let (granule, options) = (paged.granule, paged.options);
    let ranges = paged.mapped_ranges();
    drop(shared);
    if ranges.is_empty() {
        // Better now than at the first growth. A device that is just full is taken to be able.
        let tried = try_mapping(allocator.device(), granule, options, &[allocator.device().info().ordinal, ordinal]);
        tried.map(|_| ()).or_else(|error| if error.is_out_of_memory() { Ok(()) } else { Err(error) })?;
    }
    for range in ranges {
        allocator.device().driver().set_access(DevicePtr(range.start), range.end - range.start, &[ordinal])?;
    }
    if let Some(paged) = &mut allocator.state().shared().paged {
        paged.access.push(ordinal);
    }
    Ok(())
}
