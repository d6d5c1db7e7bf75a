//! The device's address space: plain allocations, and reservations with the mappings in them.
//!
//! Plain allocations start at multiples of 2 MiB in a zone of their own, at the lowest address that
//! is free; so do reservations in theirs. What is live here is what the *program* may use: a range
//! freed on a stream is marked at the call, and goes when the stream gets there.
//!
//! Invariants: nothing overlaps; every mapping lies in one reservation; every allocation and
//! mapping has a store.

use std::collections::BTreeMap;
use std::ops::Range;

use super::interval::IntervalMap;
use super::mappings::{Mapping, Mappings, NoRoom};
use super::memory::{Piece, StoreId};
use super::refused::{Answer, Refused};
use super::violation::{OpRef, ViolationKind};
use crate::error::{Code, ErrorKind};

/// Granularity of physical memory and mappings, and alignment of plain allocations, in bytes.
pub(super) const GRANULARITY: u64 = 2 << 20;

/// First address of plain allocations of device 0.
const PLAIN_BASE: u64 = 0x7000_0000_0000;
/// First address of reservations of device 0.
const RESERVED_BASE: u64 = 0x4_0000_0000_0000;
/// Length of either zone: above the largest capacity, and the zones of one device fit below the
/// next one's.
const ZONE_BYTES: u64 = 1 << 49;
/// Addresses can be reserved for so many times the memory of the device, at most a zone. Real
/// devices have hundreds of TiB of them: a bound that programs can reach shows whether they give
/// addresses back.
const ADDRESSES_FOR_MEMORY: u64 = 64;
/// Distance between the zones of two devices.
const DEVICE_SHIFT: u32 = 51;

/// A zone of addresses from which the lowest that is free is taken.
#[derive(Debug)]
struct Zone {
    /// Start → end of the free ranges.
    free: BTreeMap<u64, u64>,
}

impl Zone {
    fn new(base: u64) -> Self {
        Zone { free: BTreeMap::from([(base, base + ZONE_BYTES)]) }
    }

    /// Takes `bytes` from a multiple of `alignment` on.
    fn take(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let fits = |(&start, &end): (&u64, &u64)| {
            let at = start.checked_next_multiple_of(alignment)?;
            (at.checked_add(bytes)? <= end).then_some((start, at, end))
        };
        let (start, at, end) = self.free.iter().find_map(fits)?;
        self.free.remove(&start);
        if start < at {
            self.free.insert(start, at);
        }
        if at + bytes < end {
            self.free.insert(at + bytes, end);
        }
        Some(at)
    }

    fn give(&mut self, start: u64, bytes: u64) {
        let (mut start, mut end) = (start, start + bytes);
        if let Some((&before, &before_end)) = self.free.range(..start).next_back()
            && before_end == start
        {
            start = before;
        }
        if let Some(after_end) = self.free.remove(&end) {
            end = after_end;
        }
        self.free.insert(start, end);
    }
}

/// A plain allocation, or one of the driver's pool.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) bytes: u64,
    pub(super) store: StoreId,
    pub(super) pool: bool,
    /// The pool free that ended it for the program; the stream has not got there yet.
    pub(super) freed: Option<OpRef>,
}

/// Why a range may not be touched.
#[derive(Debug)]
pub(super) struct Illegal {
    pub(super) kind: ViolationKind,
    pub(super) at: u64,
    /// The operation that took the memory away.
    pub(super) gone: Option<OpRef>,
}

/// The device's address space.
#[derive(Debug)]
pub(super) struct AddressSpace {
    ordinal: u32,
    plain: Zone,
    reserved: Zone,
    reservable: u64,
    allocations: BTreeMap<u64, Allocation>,
    mappings: Mappings,
    /// Who last freed or unmapped what was at an address. It counts where nothing is now.
    gone: IntervalMap<OpRef>,
}

/// The entry of a map by address that holds `at`, when `length` of it reaches that far.
fn holding<T>(map: &BTreeMap<u64, T>, at: u64, length: impl Fn(&T) -> u64) -> Option<(u64, &T)> {
    let (&start, entry) = map.range(..=at).next_back()?;
    (at - start < length(entry)).then_some((start, entry))
}

impl AddressSpace {
    /// The empty address space of a device with `capacity` bytes.
    pub(super) fn new(ordinal: u32, capacity: u64) -> Self {
        let device = u64::from(ordinal & 0xfff) << DEVICE_SHIFT;
        AddressSpace {
            ordinal,
            plain: Zone::new(PLAIN_BASE + device),
            reserved: Zone::new(RESERVED_BASE + device),
            reservable: capacity.next_multiple_of(GRANULARITY).saturating_mul(ADDRESSES_FOR_MEMORY).min(ZONE_BYTES),
            allocations: BTreeMap::new(),
            mappings: Mappings::new(),
            gone: IntervalMap::default(),
        }
    }

    /// Adds a plain allocation at the lowest free address. `None` when the zone is full.
    pub(super) fn allocate(&mut self, bytes: u64, store: StoreId, pool: bool) -> Option<u64> {
        let ptr = self.plain.take(bytes.checked_next_multiple_of(GRANULARITY)?, GRANULARITY)?;
        self.gone.remove(ptr..ptr + bytes);
        self.allocations.insert(ptr, Allocation { bytes, store, pool, freed: None });
        Some(ptr)
    }

    /// The allocation that starts at `ptr` and was not freed, or what is wrong with `ptr`.
    pub(super) fn allocation(&mut self, ptr: u64) -> Answer<&mut Allocation> {
        let detail = match self.allocations.get(&ptr) {
            Some(Allocation { freed: None, .. }) => String::new(),
            Some(Allocation { freed: Some(op), .. }) => format!("{ptr:#x} was already freed by {op}"),
            None => match (holding(&self.allocations, ptr, |held| held.bytes), self.gone_at(ptr)) {
                (Some((start, _)), _) => format!("{ptr:#x} lies inside the allocation at {start:#x}; pass its start"),
                (None, Some(op)) => format!("{ptr:#x} was already freed by {op}"),
                (None, None) => format!("{ptr:#x} is not an allocation of this device"),
            },
        };
        match self.allocations.get_mut(&ptr) {
            Some(allocation) if allocation.freed.is_none() => Ok(allocation),
            _ => Err(Refused::value(detail)),
        }
    }

    /// The range of the allocation that holds `at` and was not freed.
    pub(super) fn allocation_at(&self, at: u64) -> Option<Range<u64>> {
        let (start, held) = holding(&self.allocations, at, |held| held.bytes)?;
        held.freed.is_none().then(|| start..start + held.bytes)
    }

    /// The reservation that holds `at`.
    pub(super) fn reservation_at(&self, at: u64) -> Option<Range<u64>> {
        self.mappings.reservation_holding(at).map(|(start, bytes)| start..start + bytes)
    }

    /// Removes the allocation at `ptr`.
    pub(super) fn remove_allocation(&mut self, ptr: u64, by: OpRef) -> Option<Allocation> {
        let allocation = self.allocations.remove(&ptr)?;
        self.plain.give(ptr, allocation.bytes.next_multiple_of(GRANULARITY));
        self.gone.insert(ptr..ptr + allocation.bytes, by);
        Some(allocation)
    }

    /// Reserves addresses, the first of them a multiple of `alignment`, where that is more than the
    /// granularity.
    pub(super) fn reserve(&mut self, bytes: u64, alignment: u64) -> Answer<u64> {
        let out = |reservable| {
            let detail = format!("{bytes} bytes of addresses asked for, {reservable} left to reserve");
            Refused { kind: ErrorKind::OutOfAddresses, ..Refused::new(Code::OUT_OF_MEMORY, detail) }
        };
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Refused::value(format!("{bytes} is not a positive multiple of {GRANULARITY} bytes")));
        }
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(Refused::value(format!("an alignment of {alignment} is not a power of two")));
        }
        if bytes > self.reservable {
            return Err(out(self.reservable));
        }
        let ptr = self.reserved.take(bytes, alignment.max(GRANULARITY)).ok_or_else(|| out(self.reservable))?;
        self.reservable -= bytes;
        self.mappings.reserve(ptr, bytes);
        self.gone.remove(ptr..ptr + bytes);
        Ok(ptr)
    }

    /// Gives a whole reservation back.
    pub(super) fn unreserve(&mut self, ptr: u64, bytes: u64, by: OpRef) -> Answer<()> {
        match self.mappings.reserved_at(ptr) {
            Some(held) if held == bytes => {}
            Some(held) => {
                return Err(Refused::value(format!("the reservation at {ptr:#x} has {held} bytes, not {bytes}")));
            }
            None => return Err(Refused::value(format!("no reservation starts at {ptr:#x}"))),
        }
        if let Some(mapped) = self.mappings.first_in(ptr) {
            return Err(Refused::value(format!(
                "memory is still mapped at {mapped:#x} in the reservation at {ptr:#x}"
            )));
        }
        self.mappings.unreserve(ptr);
        self.reserved.give(ptr, bytes);
        self.reservable += bytes;
        self.gone.insert(ptr..ptr + bytes, by);
        Ok(())
    }

    /// Maps physical memory, which is mapped nowhere, at `ptr`, if it fits there. No device may
    /// touch it yet.
    pub(super) fn map(&mut self, ptr: u64, bytes: u64, physical: u64, store: StoreId) -> Answer<()> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !ptr.is_multiple_of(GRANULARITY) {
            return Err(Refused::value(format!("{ptr:#x} and {bytes} bytes are not multiples of {GRANULARITY}")));
        }
        self.mappings.map(ptr, bytes, physical, store).map_err(|no_room| {
            Refused::value(match no_room {
                NoRoom::Unreserved => format!("{ptr:#x} lies in no reservation"),
                NoRoom::PastEnd => format!("{bytes} bytes at {ptr:#x} reach past their reservation"),
                NoRoom::Overlaps(start) => format!("{ptr:#x} and {bytes} bytes overlap the mapping at {start:#x}"),
            })
        })
    }

    /// Where physical memory is mapped, by its number.
    pub(super) fn mapped_at(&self, physical: u64) -> Option<u64> {
        self.mappings.of(physical).map(|mapping| mapping.start)
    }

    /// Checks that whole mappings tile the range, and counts them.
    pub(super) fn count_tiles(&self, ptr: u64, bytes: u64) -> Answer<u64> {
        let end = ptr.checked_add(bytes).filter(|_| bytes > 0);
        let end = end.ok_or_else(|| Refused::value(format!("{bytes} bytes at {ptr:#x} are no range")))?;
        let (mut at, mut count, mut tiles) = (ptr, 0, self.mappings.tiles(ptr));
        while at < end {
            let Some((_, mapping)) = tiles.next() else {
                return Err(Refused::value(format!(
                    "no mapping starts at {at:#x}: whole mappings must tile the range"
                )));
            };
            count += 1;
            at = mapping.end();
        }
        if at != end {
            return Err(Refused::value(format!("the range ends at {end:#x}, inside a mapping that ends at {at:#x}")));
        }
        Ok(count)
    }

    /// Removes the mapping that starts at `ptr`, and returns the number of its memory, for
    /// [`AddressSpace::unmapped`].
    pub(super) fn unmap(&mut self, ptr: u64) -> Option<(u64, Mapping)> {
        self.mappings.unmap(ptr)
    }

    /// Notes that all mappings of a range were removed.
    pub(super) fn unmapped(&mut self, range: Range<u64>, by: OpRef) {
        self.gone.insert(range, by);
    }

    /// The mapping that holds `at`, and the number of its memory.
    pub(super) fn mapping(&self, at: u64) -> Option<(u64, &Mapping)> {
        let number = self.mappings.number_at(at)? as u64;
        Some((number, self.mappings.of(number)?))
    }

    /// Ordinals of the devices that may touch a mapping, ascending.
    pub(super) fn access_to(&self, mapping: &Mapping) -> &[u32] {
        self.mappings.access_to(mapping)
    }

    /// Lets devices touch the mappings that tile a range.
    pub(super) fn set_access(&mut self, range: Range<u64>, devices: &[u32]) {
        self.mappings.give_access(range, devices);
    }

    /// Who took away what was at an address, if nothing is mapped there now.
    fn gone_at(&self, at: u64) -> Option<&OpRef> {
        if self.mappings.at(at).is_some() { None } else { self.gone.at(at, u64::MAX).0 }
    }

    /// Checks that the program may touch a range now.
    pub(super) fn check(&self, range: Range<u64>) -> Result<(), Illegal> {
        match holding(&self.allocations, range.start, |held| held.bytes) {
            Some((start, Allocation { freed: None, bytes, .. })) if range.end - start <= *bytes => Ok(()),
            Some((_, Allocation { freed: Some(op), .. })) => {
                Err(Illegal { kind: ViolationKind::UseAfterFree, at: range.start, gone: Some(*op) })
            }
            Some((start, Allocation { bytes, .. })) => {
                Err(Illegal { kind: ViolationKind::NotAllocated, at: start + bytes, gone: None })
            }
            None => self.walk(range, |_, _| {}),
        }
    }

    /// The pieces of stores behind a range, as the device finds them when the work runs.
    pub(super) fn pieces(&self, range: Range<u64>) -> Result<Vec<Piece>, Illegal> {
        let bytes = range.end - range.start;
        match holding(&self.allocations, range.start, |held| held.bytes) {
            Some((start, held)) if range.end - start <= held.bytes => {
                Ok(vec![Piece { store: held.store, offset: range.start - start, bytes }])
            }
            Some((start, held)) => {
                Err(Illegal { kind: ViolationKind::NotAllocated, at: start + held.bytes, gone: None })
            }
            None => {
                let mut pieces = Vec::new();
                self.walk(range, |mapping, piece| pieces.push(Piece { store: mapping.store, ..piece }))?;
                Ok(pieces)
            }
        }
    }

    fn walk(&self, range: Range<u64>, mut visit: impl FnMut(&Mapping, Piece)) -> Result<(), Illegal> {
        let mut at = range.start;
        while at < range.end {
            let Some(mapping) = self.mappings.at(at) else {
                let gone = self.gone_at(at).copied();
                let kind = if gone.is_some() { ViolationKind::UseAfterFree } else { ViolationKind::NotAllocated };
                return Err(Illegal { kind, at, gone });
            };
            if !self.access_to(mapping).contains(&self.ordinal) {
                return Err(Illegal { kind: ViolationKind::NoAccess, at, gone: None });
            }
            let end = range.end.min(mapping.end());
            visit(mapping, Piece { store: mapping.store, offset: at - mapping.start, bytes: end - at });
            at = end;
        }
        Ok(())
    }
}
