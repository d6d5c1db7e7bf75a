//! The device's address space: plain allocations, and reservations with the mappings in them.
//!
//! Plain allocations start at multiples of 2 MiB in a zone of their own, at the lowest address that
//! is free or, if asked for, that was never used. Reservations are in another zone, at the lowest
//! that is free. Where misuse is looked for, the addresses given back last are not free yet, so
//! that work which still uses them is found. A range is live while the *program* may use it: one
//! freed on a stream is marked at the call, and goes when the stream gets there.
//!
//! Invariants: nothing overlaps; every mapping lies in one reservation; every allocation and
//! mapping has a store.

use std::collections::{BTreeMap, VecDeque};
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

/// How many ranges of a zone that were given back last are not free yet.
pub(crate) const QUARANTINED: usize = 64;

/// The addresses of a zone that are not in use.
#[derive(Debug)]
struct Zone {
    free: IntervalMap<()>,
    /// Ranges that were given back last, in that order, and how many there may be.
    quarantine: VecDeque<Range<u64>>,
    quarantined_max: usize,
}

impl Zone {
    fn new(base: u64, quarantined_max: usize) -> Zone {
        let mut free = IntervalMap::default();
        free.insert(base..base + ZONE_BYTES, ());
        Zone { free, quarantine: VecDeque::new(), quarantined_max }
    }

    /// Takes `bytes` at the lowest free multiple of `alignment` from an address on. If there is
    /// none, all addresses that were given back are free.
    fn take(&mut self, from: u64, bytes: u64, alignment: u64) -> Option<u64> {
        let fits = |(range, ()): (Range<u64>, &())| {
            let at = range.start.max(from).checked_next_multiple_of(alignment)?;
            (at.checked_add(bytes)? <= range.end).then_some(at)
        };
        let Some(at) = self.free.overlapping(from..u64::MAX).find_map(fits) else {
            let given = std::mem::take(&mut self.quarantine);
            given.iter().for_each(|range| self.free.insert(range.clone(), ()));
            return if given.is_empty() { None } else { self.take(from, bytes, alignment) };
        };
        self.free.remove(at..at + bytes);
        Some(at)
    }

    /// Gives a range back. Returns the one that is free now instead, if there is one.
    fn give(&mut self, range: Range<u64>) -> Option<Range<u64>> {
        self.quarantine.push_back(range);
        let freed = if self.quarantine.len() > self.quarantined_max { self.quarantine.pop_front() } else { None }?;
        self.free.insert(freed.clone(), ());
        Some(freed)
    }
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
        let quarantined = if config.checks { QUARANTINED } else { 0 };
        let reservable = config.addresses.unwrap_or(capacity.saturating_mul(ADDRESSES_FOR_MEMORY));
        AddressSpace {
            ordinal,
            plain: Zone::new(PLAIN_BASE + device, quarantined),
            unused: (!config.reuse).then_some(0),
            reserved: Zone::new(RESERVED_BASE + device, quarantined),
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
        let unused = self.unused.and_then(|unused| self.plain.take(unused, rounded, GRANULARITY));
        let ptr = unused.or_else(|| self.plain.take(0, rounded, GRANULARITY))?;
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
        self.gone.insert(ptr..ptr + allocation.bytes, by);
        let free = self.plain.give(ptr..ptr + allocation.bytes.next_multiple_of(GRANULARITY));
        // Addresses that never return would be remembered forever.
        free.filter(|_| self.unused.is_some()).inspect(|free| self.gone.remove(free.clone()));
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
        let ptr = self.reserved.take(0, bytes, alignment.max(GRANULARITY)).ok_or_else(|| out(self.reservable))?;
        self.reservable -= bytes;
        self.mappings.reserve(ptr, bytes);
        self.gone.remove(ptr..ptr + bytes);
        Ok(ptr)
    }

    /// Gives a whole reservation back.
    pub(crate) fn unreserve(&mut self, ptr: u64, bytes: u64, by: OpRef) -> Answer<()> {
        self.mappings.unreserve(ptr, bytes)?;
        self.reserved.give(ptr..ptr + bytes);
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
