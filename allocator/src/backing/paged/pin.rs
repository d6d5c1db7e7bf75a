//! Others that reach memory: pins for parties that know its address, such as a network card that
//! registered it, and access of other devices.
//!
//! Pins are counted by granule, or by segment, so they may overlap. Memory of a live allocation
//! moves only if its frame is split (`split.rs`); a pin prevents that, and keeps the memory in
//! place after the allocation is dropped, until the other party has released it.
//!
//! Each mapping has its own list of devices with access. So a new peer is given access to all
//! existing mappings, and to every later one by the list that operations on mappings use. The gate
//! excludes those operations in between, so that no mapping is missed.

use std::ops::Range;

use aquifer_device::{Device, DevicePtr, Operation, fork};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::backing::choose::try_mapping;
use crate::error::AllocError;

/// Keeps the memory of an allocation where it is until it is dropped, also after the allocation
/// was: it is not moved, unmapped or given back to the device, but may be handed out again.
/// Dropping it makes no driver call. It keeps the allocator open.
#[derive(Debug)]
#[must_use = "dropping this ends the pin"]
pub struct PinnedMapping {
    allocator: Allocator,
    range: Range<u64>,
    /// Bytes from one pinned place to the next.
    step: u64,
}

impl Allocator {
    /// Pins the memory behind an allocation, for parties that take note of it: see
    /// [`PinnedMapping`].
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let buffer = memory.alloc_bytes(3 << 20, device.default_stream())?;
    /// let pinned = memory.pin_mapping(&buffer)?;
    /// // Two granules: register these with the network card.
    /// assert_eq!(pinned.range().end - pinned.range().start, 4 << 20);
    /// drop(buffer);
    /// memory.empty_cache()?;
    /// assert_eq!(memory.memory_reserved(), 4 << 20); // they stay
    /// drop(pinned);
    /// memory.empty_cache()?;
    /// assert_eq!(memory.memory_reserved(), 0);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::WrongAllocator`] or
    /// [`RequestError::WrongDevice`](aquifer_device::RequestError::WrongDevice) for an allocation
    /// of another allocator; [`AllocError::Asleep`] while there is no memory.
    pub fn pin_mapping(&self, allocation: &Allocation) -> Result<PinnedMapping, AllocError> {
        fork::check(Operation::Map)?;
        // Not while the self falls asleep, which looks at what is pinned once.
        let _gate = self.gate()?.shared();
        let mut shared = self.state().shared();
        let Some(block) = allocation.block() else {
            return Ok(PinnedMapping { allocator: self.kept_open(), range: 0..0, step: u64::MAX });
        };
        if !std::ptr::eq(allocation.state(), self.state()) {
            drop(shared);
            let is = allocation.state().shared().device().map_or(u32::MAX, Device::id);
            return Err(AllocError::wrong_allocator("allocation", is, self.device().id()));
        }
        if shared.sleeps(&allocation.range()) {
            return Err(AllocError::Asleep);
        }
        let region = shared.heap().region_of(block);
        let (range, step) = if region.is_paged() {
            let (Range { start, end }, granule) = (allocation.range(), shared.paged().granule);
            (start / granule * granule..end.next_multiple_of(granule), granule)
        } else {
            (region.addr..region.addr + region.bytes, u64::MAX)
        };
        places(&range, step).for_each(|addr| shared.pins.add(addr));
        drop(shared);
        Ok(PinnedMapping { allocator: self.kept_open(), range, step })
    }
}

impl PinnedMapping {
    /// The addresses that are pinned: whole granules, or the whole segment. Empty for an allocation
    /// of zero bytes.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

impl Drop for PinnedMapping {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let mut shared = self.allocator.state().shared();
        places(&self.range, self.step).for_each(|addr| shared.pins.remove(addr));
    }
}

/// The places that a pin counts.
fn places(range: &Range<u64>, step: u64) -> impl Iterator<Item = u64> {
    range.clone().step_by(usize::try_from(step).unwrap_or(usize::MAX))
}

impl Allocator {
    /// Lets the device with this ordinal read and write all memory of the allocator that is mapped,
    /// now and later. Once is enough; again is nothing.
    ///
    /// ```
    /// use aquifer::device::sim::{SimConfig, SimDriver};
    /// use aquifer::prelude::*;
    /// let driver = SimDriver::new(SimConfig::default());
    /// let peer = SimDriver::new(SimConfig::default().ordinal(1));
    /// let device = Device::new(driver.clone());
    /// let memory = Allocator::of(&device)?;
    /// let before = memory.alloc_bytes(5 << 20, device.default_stream())?;
    /// memory.enable_peer_access(1)?;
    /// let after = memory.alloc_bytes(50 << 20, device.default_stream())?;
    /// for buffer in [before, after] {
    ///     assert_eq!(driver.mapping_at(buffer.ptr()).unwrap().devices, [0, 1]);
    /// }
    /// # drop(peer);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver, such as a device that does not exist, or devices that cannot reach
    /// each other: the peer is then not let into later mappings, though it may have access to some
    /// of the present ones. [`AllocError::NotMapped`] where memory comes in segments.
    pub fn enable_peer_access(&self, ordinal: u32) -> Result<(), AllocError> {
        fork::check(Operation::SetAccess)?;
        let _alone = self.gate()?.exclusive();
        let shared = self.state().shared();
        let paged = shared.paged();
        if paged.access.contains(&ordinal) {
            return Ok(());
        }
        if self.why_segments().is_some() {
            return Err(self.not_mapped("access of peers"));
        }
        let (granule, options) = (paged.granule, paged.options);
        let ranges = paged.mapped_ranges();
        drop(shared);
        if ranges.is_empty() {
            // Better now than at the first growth. A device that is just full is taken to be able.
            let tried = try_mapping(self.device(), granule, options, &[self.device().info().ordinal, ordinal]);
            tried.map(|_| ()).or_else(|error| if error.is_out_of_memory() { Ok(()) } else { Err(error) })?;
        }
        for range in ranges {
            self.device().driver().set_access(DevicePtr(range.start), range.end - range.start, &[ordinal])?;
        }
        self.state().shared().add_peer(ordinal);
        Ok(())
    }
}
