//! Pins: memory that other parties know by its address, such as a network card that registered it, stays where it is.
//!
//! Pins are counted by granule, or by segment, so they may overlap. Memory of a live allocation never moves anyway; a pin keeps
//! it in place after the allocation is dropped, until the other party has released it.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::fork;

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::error::AllocError;

/// How often each place is pinned, by address.
#[derive(Debug, Default)]
pub(crate) struct Pins(BTreeMap<u64, u32>);

impl Pins {
    pub(crate) fn contains(&self, addr: u64) -> bool {
        !self.0.is_empty() && self.0.contains_key(&addr)
    }

    /// The places in a range that are pinned, by address.
    pub(crate) fn within(&self, range: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        self.0.range(range).map(|(&addr, _)| addr)
    }

    /// True if any place in a range is pinned.
    pub(crate) fn are_in(&self, range: Range<u64>) -> bool {
        !self.0.is_empty() && self.within(range).next().is_some()
    }

    fn add(&mut self, addr: u64) {
        *self.0.entry(addr).or_default() += 1;
    }

    fn remove(&mut self, addr: u64) {
        if let Some(count) = self.0.get_mut(&addr) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&addr);
            }
        }
    }
}

/// The memory that a pin keeps in place.
#[derive(Clone, Copy, Debug)]
enum Pinned {
    Nothing,
    Segment,
    /// Granules of so many bytes.
    Granules(u64),
}

/// Keeps the memory of an allocation where it is until it is dropped, also after the allocation was: it is not moved, unmapped or
/// given back to the device, but may be handed out again. Dropping it makes no driver call. It keeps the allocator open.
#[derive(Debug)]
#[must_use = "dropping this ends the pin"]
pub struct PinnedMapping {
    allocator: Allocator,
    range: Range<u64>,
    pinned: Pinned,
}

impl Allocator {
    /// Pins the memory behind an allocation, for parties that take note of it: see [`PinnedMapping`].
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let buffer = allocator.alloc_bytes(3 << 20, device.default_stream())?;
    /// let pinned = allocator.pin_mapping(&buffer)?;
    /// assert_eq!(pinned.range().end - pinned.range().start, 4 << 20); // two granules: register these with the network card
    /// drop(buffer);
    /// allocator.empty_cache()?;
    /// assert_eq!(allocator.memory_reserved(), 4 << 20); // they stay
    /// drop(pinned);
    /// allocator.empty_cache()?;
    /// assert_eq!(allocator.memory_reserved(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::WrongAllocator`] or [`RequestError::WrongDevice`](aquifer_device::RequestError::WrongDevice) for
    /// an allocation of another allocator; [`AllocError::Asleep`] while there is no memory.
    pub fn pin_mapping(&self, allocation: &Allocation) -> Result<PinnedMapping, AllocError> {
        fork::check(aquifer_device::Operation::Map)?;
        // Not while the allocator falls asleep, which looks at what is pinned once.
        let _gate = self.gate()?.shared();
        let mut core = self.shell().core();
        let Some((arena, block)) = allocation.place() else {
            return Ok(PinnedMapping { allocator: self.kept_open(), range: 0..0, pinned: Pinned::Nothing });
        };
        if !std::ptr::eq(arena.shell, self.shell()) {
            drop(core);
            let is = arena.look(|desk| desk.device_id);
            return Err(AllocError::wrong_allocator("allocation", is, self.device().id()));
        }
        if core.is_asleep() {
            return Err(AllocError::Asleep);
        }
        let segment = arena.look(|desk| {
            let region = desk.heap.region(desk.heap.blocks[block].region);
            (!region.is_paged()).then_some(region.addr..region.addr + region.bytes)
        });
        let (range, pinned) = match (segment, &core.paged) {
            (None, Some(paged)) => {
                let Range { start, end } = allocation.range();
                let granule = paged.granule;
                (start / granule * granule..end.next_multiple_of(granule), Pinned::Granules(granule))
            }
            (segment, _) => (segment.unwrap_or_default(), Pinned::Segment),
        };
        places(&range, pinned).for_each(|addr| core.pins.add(addr));
        drop(core);
        Ok(PinnedMapping { allocator: self.kept_open(), range, pinned })
    }
}

impl PinnedMapping {
    /// The addresses that are pinned: whole granules, or the whole segment. Empty for an allocation of zero bytes.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }
}

impl Drop for PinnedMapping {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let mut core = self.allocator.shell().core();
        places(&self.range, self.pinned).for_each(|addr| core.pins.remove(addr));
    }
}

/// The places that a pin counts.
fn places(range: &Range<u64>, pinned: Pinned) -> impl Iterator<Item = u64> {
    let step = match pinned {
        Pinned::Granules(granule) => usize::try_from(granule).unwrap_or(usize::MAX),
        Pinned::Nothing | Pinned::Segment => usize::MAX,
    };
    range.clone().step_by(step)
}
