//! The device's address space: plain allocations, and reservations with the mappings in them.
//!
//! Plain allocations start at multiples of 2 MiB in a zone of their own, at the lowest address that
//! is free or, if asked for, that was never used. Reservations are in another zone, at the lowest
//! that is free. A range is live while the *program* may use it: one freed
//! on a stream is marked at the call, and goes when the stream gets there.
//!
//! Invariants: nothing overlaps; every mapping lies in one reservation; every allocation and
//! mapping has a store.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::Code;

use crate::config::SimConfig;
use crate::interval::IntervalMap;
use crate::mappings::{GRANULARITY, Mappings, holding};
use crate::memory::{Piece, StoreId};
use crate::refused::{Answer, Refused};
use crate::violation::{OpRef, ViolationKind};

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

/// The free addresses of a zone.
type Zone = IntervalMap<()>;

fn zone(base: u64) -> Zone {
    let mut free = Zone::default();
    free.insert(base..base + ZONE_BYTES, ());
    free
}

/// Takes `bytes` at the lowest free multiple of `alignment` from an address on.
fn take(free: &mut Zone, from: u64, bytes: u64, alignment: u64) -> Option<u64> {
    let fits = |(range, ()): (Range<u64>, &())| {
        let at = range.start.max(from).checked_next_multiple_of(alignment)?;
        (at.checked_add(bytes)? <= range.end).then_some(at)
    };
    let at = free.overlapping(from..u64::MAX).find_map(fits)?;
    free.remove(at..at + bytes);
    Some(at)
}

/// A plain allocation, or one of the driver's pool.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) bytes: u64,
    pub(crate) store: StoreId,
    pub(crate) pool: bool,
    /// The pool free that ended it for the program; the stream has not got there yet.
    pub(crate) freed: Option<OpRef>,
    /// A graph keeps it, and its launches begin and end its life.
    pub(crate) of_graph: bool,
}

/// Why a range may not be touched.
#[derive(Debug)]
pub(crate) struct Illegal {
    pub(crate) kind: ViolationKind,
    pub(crate) at: u64,
    /// The operation that took the memory away.
    pub(crate) gone: Option<OpRef>,
}

/// The device's address space.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    ordinal: u32,
    plain: Zone,
    /// Where plain allocations begin that are to get new addresses.
    unused: Option<u64>,
    reserved: Zone,
    reservable: u64,
    allocations: BTreeMap<u64, Allocation>,
    pub(crate) mappings: Mappings,
    /// The operation that last freed or unmapped memory at an address. It counts where nothing is
    /// now.
    pub(crate) gone: IntervalMap<OpRef>,
}

impl AddressSpace {
    /// The empty address space of a device.
    pub(crate) fn new(config: &SimConfig) -> Self {
        let (ordinal, capacity) = (config.ordinal, config.capacity_bytes.next_multiple_of(GRANULARITY));
        let device = u64::from(ordinal & 0xfff) << DEVICE_SHIFT;
        let reservable = config.addresses.unwrap_or(capacity.saturating_mul(ADDRESSES_FOR_MEMORY));
        AddressSpace {
            ordinal,
            plain: zone(PLAIN_BASE + device),
            unused: (!config.reuse).then_some(0),
            reserved: zone(RESERVED_BASE + device),
            reservable: reservable.min(ZONE_BYTES),
            allocations: BTreeMap::new(),
            mappings: Mappings::default(),
            gone: IntervalMap::default(),
        }
    }

    /// Adds a plain allocation at the lowest free address, or at a new one. `None` when the zone is
    /// full.
    pub(crate) fn allocate(&mut self, bytes: u64, store: StoreId, pool: bool) -> Option<u64> {
        let rounded = bytes.checked_next_multiple_of(GRANULARITY)?;
        let unused = self.unused.and_then(|unused| take(&mut self.plain, unused, rounded, GRANULARITY));
        let ptr = unused.or_else(|| take(&mut self.plain, 0, rounded, GRANULARITY))?;
        self.unused = self.unused.map(|unused| unused.max(ptr + rounded));
        self.gone.remove(ptr..ptr + bytes);
        self.allocations.insert(ptr, Allocation { bytes, store, pool, freed: None, of_graph: false });
        Some(ptr)
    }

    /// Bytes of the memory that graphs allocate.
    pub(crate) fn bytes_of_graphs(&self) -> u64 {
        self.allocations.values().filter(|held| held.of_graph).map(|held| held.bytes).sum()
    }

    /// The allocation that starts at `ptr`, freed or not.
    pub(crate) fn allocation_mut(&mut self, ptr: u64) -> Option<&mut Allocation> {
        self.allocations.get_mut(&ptr)
    }

    /// The allocation that starts at `ptr` and was not freed, or an error that says why there is
    /// none.
    pub(crate) fn allocation(&mut self, ptr: u64) -> Answer<&mut Allocation> {
        let freed = self.allocations.get(&ptr).map_or_else(|| self.gone_at(ptr).copied(), |held| held.freed);
        let around = holding(&self.allocations, ptr, |held| held.bytes).map(|(start, _)| start);
        match self.allocations.get_mut(&ptr) {
            Some(allocation) if allocation.freed.is_none() => Ok(allocation),
            _ => Err(Refused::value(match (freed, around) {
                (Some(op), _) => format!("{ptr:#x} was already freed by {op}"),
                (None, Some(start)) => format!("{ptr:#x} lies inside the allocation at {start:#x}; pass its start"),
                (None, None) => format!("{ptr:#x} is not an allocation of this device"),
            })),
        }
    }

    /// The range of the allocation that holds `at` and was not freed.
    pub(crate) fn allocation_at(&self, at: u64) -> Option<Range<u64>> {
        let (start, held) = holding(&self.allocations, at, |held| held.bytes)?;
        held.freed.is_none().then(|| start..start + held.bytes)
    }

    /// Removes the allocation at `ptr`.
    pub(crate) fn remove_allocation(&mut self, ptr: u64, by: OpRef) -> Option<Allocation> {
        let allocation = self.allocations.remove(&ptr)?;
        self.plain.insert(ptr..ptr + allocation.bytes.next_multiple_of(GRANULARITY), ());
        // Addresses that never return would be remembered forever.
        if self.unused.is_none() {
            self.gone.insert(ptr..ptr + allocation.bytes, by);
        }
        Some(allocation)
    }

    /// Reserves addresses, the first of them a multiple of `alignment`, where that is more than the
    /// granularity.
    pub(crate) fn reserve(&mut self, bytes: u64, alignment: u64) -> Answer<u64> {
        let out = |reservable| {
            let detail = format!("{bytes} bytes of addresses asked for, {reservable} left to reserve");
            Refused::new(Code::OUT_OF_MEMORY, detail)
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
        let ptr = take(&mut self.reserved, 0, bytes, alignment.max(GRANULARITY)).ok_or_else(|| out(self.reservable))?;
        self.reservable -= bytes;
        self.mappings.reserve(ptr, bytes);
        self.gone.remove(ptr..ptr + bytes);
        Ok(ptr)
    }

    /// Gives a whole reservation back.
    pub(crate) fn unreserve(&mut self, ptr: u64, bytes: u64, by: OpRef) -> Answer<()> {
        self.mappings.unreserve(ptr, bytes)?;
        self.reserved.insert(ptr..ptr + bytes, ());
        self.reservable += bytes;
        self.gone.insert(ptr..ptr + bytes, by);
        Ok(())
    }

    /// The operation that took the memory at an address away, if nothing is mapped there now.
    fn gone_at(&self, at: u64) -> Option<&OpRef> {
        if self.mappings.at(at).is_some() { None } else { self.gone.at(at, u64::MAX).0 }
    }

    /// Checks that the program may touch a range now.
    pub(crate) fn check(&self, range: Range<u64>) -> Result<(), Illegal> {
        match holding(&self.allocations, range.start, |held| held.bytes) {
            Some((_, &Allocation { freed: gone @ Some(_), .. })) => {
                Err(Illegal { kind: ViolationKind::UseAfterFree, at: range.start, gone })
            }
            _ => self.walk(range, |_| {}),
        }
    }

    /// The pieces of stores behind a range, as the device finds them when the work runs.
    pub(crate) fn pieces(&self, range: Range<u64>) -> Result<Vec<Piece>, Illegal> {
        let mut pieces = Vec::new();
        self.walk(range, |piece| pieces.push(piece))?;
        Ok(pieces)
    }

    fn walk(&self, range: Range<u64>, mut visit: impl FnMut(Piece)) -> Result<(), Illegal> {
        let mut at = range.start;
        if let Some((start, held)) = holding(&self.allocations, at, |held| held.bytes) {
            let end = start + held.bytes;
            if range.end > end {
                return Err(Illegal { kind: ViolationKind::NotAllocated, at: end, gone: None });
            }
            visit(Piece { store: held.store, offset: at - start, bytes: range.end - at });
            return Ok(());
        }
        while at < range.end {
            let Some(mapping) = self.mappings.at(at) else {
                let gone = self.gone_at(at).copied();
                let kind = if gone.is_some() { ViolationKind::UseAfterFree } else { ViolationKind::NotAllocated };
                return Err(Illegal { kind, at, gone });
            };
            if !mapping.devices.contains(&self.ordinal) {
                return Err(Illegal { kind: ViolationKind::NoAccess, at, gone: None });
            }
            let end = range.end.min(mapping.end());
            visit(Piece { store: mapping.store, offset: at - mapping.start, bytes: end - at });
            at = end;
        }
        Ok(())
    }
}
