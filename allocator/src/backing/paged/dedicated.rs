//! Dedicated memory: memory mapped for one owner at addresses of its own, outside of every heap
//! ([`crate::Growable`], [`crate::Exportable`]).
//!
//! It counts in `reserved` and `allocated` as a block of the large pool. Memory that its owner
//! gives up is *deferred*: it is listed with a tick of each stream that used it, which makes no
//! driver call. Later operations on mappings unmap deferred memory whose ticks are done, and
//! recycle or release it. Ticks that are not known done are asked about and waited for together
//! with those of free blocks (`donors.rs`).

use aquifer_device::{DeviceError, DevicePtr, RawPhysical, Reservation};

use crate::allocator::Allocator;
use crate::backing::paged::carry_out::{unless_capturing, unmap_range};
use crate::core::dedicated::Recycling;
use crate::core::paged::deferred_release::DeferredRelease;
use crate::error::AllocError;

/// Unmaps deferred memory that is known done. Its frames become spare; those of exportable memory
/// go back to the device. Returns how many bytes went back.
pub(crate) fn recycle_deferred_releases(allocator: &Allocator) -> Result<u64, AllocError> {
    if allocator.device().is_capturing() || !allocator.state().shared().is_recyclable() {
        return Ok(0);
    }
    // Exclusive, so that a reservation never goes before the last memory mapped in it.
    let _alone = allocator.gate()?.exclusive();
    let mut released = 0;
    loop {
        let leaving = allocator.state().shared().begin_recycling();
        let Some(leaving) = leaving else { break };
        let failed = unmap_leaving(allocator, &leaving);
        let mut guard = allocator.state().lock();
        let frames = guard.commit_recycling(leaving, failed.is_none());
        let bytes = frames.iter().map(|&(_, bytes)| bytes).sum::<u64>();
        guard.begin_leaving(bytes);
        drop(guard);
        release_freed(allocator, frames);
        allocator.state().shared().end_leaving(bytes);
        released += bytes;
        if let Some(error) = failed {
            // A capture that began meanwhile.
            return unless_capturing(Err(error)).map(|()| released).map_err(AllocError::from);
        }
    }
    loop {
        let vacant = allocator.state().shared().take_vacant_reservation();
        let Some((ptr, bytes)) = vacant else { return Ok(released) };
        if let Err(error) = allocator.device().driver().unreserve(ptr, bytes) {
            allocator.device().unreserve_later(Reservation { ptr, bytes, mapped: Vec::new() });
            return Err(error.into());
        }
    }
}

/// Unmaps deferred memory. Returns the error, if any; the memory is then mapped still, and stays
/// deferred.
fn unmap_leaving(allocator: &Allocator, leaving: &Recycling) -> Option<DeviceError> {
    let DeferredRelease { range, was_told, .. } = &leaving.deferred_release;
    if *was_told {
        unmap_range(allocator.device(), allocator.hooks(), range).err()
    } else {
        allocator.device().unmap(DevicePtr(range.start), range.end - range.start).err()
    }
}

/// Releases frames that are of no use to others. What the driver keeps is left to the device, which
/// warns if it fails once more.
fn release_freed(allocator: &Allocator, freed: Vec<(RawPhysical, u64)>) {
    for (physical, _) in freed {
        if let Err(error) = allocator.device().driver().release_physical(physical) {
            tracing::debug!(%error, "memory could not be given back; it will be tried again");
            allocator.device().release_later(physical);
        }
    }
}
