//! The table of mapped memory: which granule is mapped at which address. A granule is a piece of physical memory; physical memory and
//! addresses are separate resources, and this table connects them.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::{Device, DevicePtr, PhysicalOptions, RawPhysical, Reservation};

use crate::backing::paged::apart::{Owned, Retired};
use crate::backing::paged::pin::Pins;
use crate::backing::paged::places::Places;
use crate::backing::paged::recurrence::Recurrence;
use crate::backing::paged::sleep::Absent;
use crate::heap::BlockId;
use crate::size_class::PoolKind;

/// The state of mapped memory, under the core's lock.
#[derive(Debug)]
pub(crate) struct Paged {
    /// Bytes of a granule: a power of two and a multiple of the device's granularity.
    pub(crate) granule: u64,
    /// Properties that granules are created with.
    pub(crate) options: PhysicalOptions,
    /// Ordinals of the devices that have access to every mapping: this one first, then its peers.
    pub(crate) access: Vec<u32>,
    /// Reservations, by their first address.
    reservations: BTreeMap<u64, Mapped>,
    /// Owners of reservations outside of heaps, by the first address.
    pub(crate) owned: BTreeMap<u64, Owned>,
    /// Memory that such owners gave up.
    pub(crate) retired: Vec<Retired>,
    /// Ranges that have no memory while the allocator sleeps; `None` while it is awake.
    pub(crate) absent: Option<Vec<Absent>>,
    /// Granules that are mapped nowhere.
    pub(crate) spares: Vec<RawPhysical>,
    /// Mappings that cannot be used and that the driver has not unmapped so far.
    pub(crate) stuck: Vec<Stuck>,
    /// Number of spare granules that operations are working with.
    pub(crate) in_hands: u64,
    /// Bytes mapped for small and for large pools.
    pub(crate) mapped_bytes: [u64; 2],
    /// The same as counted in the statistics so far, where spare granules count as large.
    pub(crate) accounted: [u64; 2],
    /// The most bytes that were in use at one time, as far as plans have seen it.
    pub(crate) in_use_peak: u64,
    /// The number of allocations made when that peak was seen.
    pub(crate) peak_at: u64,
    /// Points of the program at which memory had to move.
    pub(crate) recurrence: Recurrence,
    /// How often the host waited so that memory could move.
    pub(crate) stalls: u64,
    /// How often a stream was made to wait for another one instead of memory being taken from the device.
    pub(crate) orders: u64,
}

/// Purpose of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A region of a heap.
    Heap,
    /// A [`crate::Growable`].
    Growable,
    /// A [`crate::Exportable`]. Its physical memory is of no use to others.
    Exportable,
}

/// Addresses that stay held because granules are mapped there without access and the driver did not unmap them.
#[derive(Debug)]
pub(crate) struct Stuck {
    /// The stream in whose arena they are held.
    pub(crate) arena: u32,
    pub(crate) block: BlockId,
    /// Addresses at which granules are mapped.
    pub(crate) granules: Vec<u64>,
}

/// A reservation, and the granule mapped at each of its places. A place is a stretch as long as a granule.
#[derive(Debug)]
struct Mapped {
    bytes: u64,
    purpose: Purpose,
    /// The kind of pool that its memory counts in.
    kind: PoolKind,
    /// Bytes of each of its granules.
    granule: u64,
    places: Places,
}

impl Mapped {
    /// The indices of the places that a range touches. The range is relative to the reservation.
    fn touched(&self, range: Range<u64>) -> Range<usize> {
        let number = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        number(range.start / self.granule)..number(range.end.div_ceil(self.granule))
    }
}

impl Paged {
    pub(crate) fn new(granule: u64, options: PhysicalOptions, ordinal: u32) -> Paged {
        debug_assert!(granule.is_power_of_two());
        let (reservations, spares) = (BTreeMap::new(), Vec::new());
        Paged {
            granule,
            options,
            access: vec![ordinal],
            reservations,
            owned: BTreeMap::new(),
            retired: Vec::new(),
            absent: None,
            spares,
            stuck: Vec::new(),
            in_hands: 0,
            mapped_bytes: [0; 2],
            accounted: [0; 2],
            in_use_peak: 0,
            peak_at: 0,
            recurrence: Recurrence::default(),
            stalls: 0,
            orders: 0,
        }
    }

    pub(crate) fn add_reservation(&mut self, addr: u64, bytes: u64, kind: PoolKind, purpose: Purpose) {
        // Exportable memory is one granule, however large, so that there is one handle to export.
        let granule = if purpose == Purpose::Exportable { bytes } else { self.granule };
        let places = Places::new(usize::try_from(bytes / granule).unwrap_or(0));
        self.reservations.insert(addr, Mapped { bytes, purpose, kind, granule, places });
    }

    /// Forgets a reservation, and returns its length in bytes.
    pub(crate) fn remove_reservation(&mut self, addr: u64) -> u64 {
        let removed = self.reservations.remove(&addr);
        debug_assert!(removed.as_ref().is_some_and(|mapped| mapped.places.all().all(|behind| behind.is_none())));
        removed.map_or(0, |mapped| mapped.bytes)
    }

    /// Purpose of the reservation that starts at `addr`.
    pub(crate) fn purpose_of(&self, addr: u64) -> Option<Purpose> {
        self.reservations.get(&addr).map(|mapped| mapped.purpose)
    }

    /// Bytes held from the device that are not behind usable addresses.
    pub(crate) fn spare_bytes(&self) -> u64 {
        let stuck: usize = self.stuck.iter().map(|stuck| stuck.granules.len()).sum();
        (self.spares.len() as u64 + self.in_hands + stuck as u64) * self.granule
    }

    /// Number of reservations.
    pub(crate) fn reservations(&self) -> u64 {
        self.reservations.len() as u64
    }

    /// Bytes of reserved addresses.
    pub(crate) fn address_bytes(&self) -> u64 {
        self.reservations.values().map(|mapped| mapped.bytes).sum()
    }

    /// Bytes of reserved addresses outside of heaps.
    pub(crate) fn apart_address_bytes(&self) -> u64 {
        let apart = self.reservations.values().filter(|mapped| mapped.purpose != Purpose::Heap);
        apart.map(|mapped| mapped.bytes).sum()
    }

    /// The reservation that a range lies in, and the places that it touches there.
    fn touched(&self, range: &Range<u64>) -> Option<(&Mapped, Range<usize>)> {
        let (&base, mapped) = self.reservations.range(..=range.start).next_back()?;
        Some((mapped, mapped.touched(range.start - base..range.end - base)))
    }

    /// As [`Paged::touched`], to change the reservation.
    fn touched_mut(&mut self, range: &Range<u64>) -> Option<(&mut Mapped, Range<usize>)> {
        let (&base, mapped) = self.reservations.range_mut(..=range.start).next_back()?;
        let touched = mapped.touched(range.start - base..range.end - base);
        Some((mapped, touched))
    }

    /// Notes that the granules of a range moved elsewhere.
    pub(crate) fn leave(&mut self, range: &Range<u64>) {
        if let Some((mapped, touched)) = self.touched_mut(range) {
            mapped.places.leave(touched);
        }
    }

    /// True if granules moved away from any place that a range touches.
    pub(crate) fn was_left(&self, range: &Range<u64>) -> bool {
        range.start < range.end && self.touched(range).is_some_and(|(mapped, touched)| mapped.places.was_left(touched))
    }

    /// Notes that granules are mapped side by side from `addr` on.
    pub(crate) fn put_all(&mut self, addr: u64, granules: &[RawPhysical]) {
        if let Some((mapped, touched)) = self.touched_mut(&(addr..addr)) {
            mapped.places.put(touched.start, granules);
        }
    }

    /// Removes the granules of a mapped range from the table, and returns them by address.
    pub(crate) fn forget_mapped(&mut self, addr: u64, bytes: u64) -> Vec<RawPhysical> {
        let Some((mapped, touched)) = self.touched_mut(&(addr..addr + bytes)) else { return Vec::new() };
        let taken = mapped.places.forget(touched);
        debug_assert_eq!(taken.len() as u64 * mapped.granule, bytes);
        taken
    }

    /// The contiguous ranges that have memory, by address. Ranges of two reservations that lie side by side are listed separately, because
    /// a mapping operation concerns one reservation.
    pub(crate) fn mapped_ranges(&self) -> Vec<Range<u64>> {
        let all = |(&base, mapped): (&u64, &Mapped)| base..base + mapped.bytes;
        self.reservations.iter().flat_map(|entry| self.mapped_within(&all(entry))).collect()
    }

    /// The contiguous parts of a range, within a reservation, that have memory.
    pub(crate) fn mapped_within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.runs(range, |_, physical| physical.is_some())
    }

    /// The contiguous parts of a range, within a reservation, that have no memory.
    pub(crate) fn unmapped_within(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.runs(range, |_, physical| physical.is_none())
    }

    /// The contiguous ranges whose memory may go while the allocator sleeps, each with the kind of pool that it counts in.
    pub(crate) fn not_pinned(&self, pins: &Pins) -> Vec<(Range<u64>, PoolKind)> {
        let may_sleep = self.reservations.iter().filter(|(_, mapped)| mapped.purpose != Purpose::Exportable);
        let ranges = may_sleep.flat_map(|(&base, mapped)| {
            let stays = |at| pins.contains(at) || self.is_unusable(at);
            let runs = self.runs(&(base..base + mapped.bytes), |at, physical| physical.is_some() && !stays(at));
            runs.into_iter().map(|range| (range, mapped.kind))
        });
        ranges.collect()
    }

    /// True if the granule mapped at an address never became usable, and the driver has not unmapped it so far.
    fn is_unusable(&self, at: u64) -> bool {
        let of_growth = |retired: &Retired| !retired.was_told && retired.range.contains(&at);
        self.stuck.iter().any(|stuck| stuck.granules.contains(&at)) || self.retired.iter().any(of_growth)
    }

    fn runs(&self, range: &Range<u64>, pick: impl Fn(u64, Option<RawPhysical>) -> bool) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        if range.is_empty() {
            return runs;
        }
        let Some((reserved, touched)) = self.touched(range) else { return runs };
        let step = usize::try_from(reserved.granule).unwrap_or(usize::MAX);
        let places = (range.start..).step_by(step).zip(reserved.places.of(touched));
        for (at, _) in places.filter(|&(at, physical)| pick(at, physical)) {
            match runs.last_mut() {
                Some(last) if last.end == at => last.end += reserved.granule,
                _ => runs.push(at..at + reserved.granule),
            }
        }
        runs
    }

    /// The contiguous ranges of memory outside of heaps. Each comes with its owner's record, whose `size` is the part that the owner has,
    /// from the first address on. That part counts as memory even while it is absent.
    pub(crate) fn apart(&self) -> impl Iterator<Item = (Range<u64>, Owned)> + '_ {
        self.owned.iter().flat_map(|(&base, owned)| {
            let end = base + self.reservations.get(&base).map_or(0, |mapped| mapped.bytes);
            let mut ranges = vec![(base..base + owned.size, *owned)];
            for beyond in self.mapped_within(&(base + owned.size..end)) {
                match ranges.last_mut() {
                    Some((last, _)) if last.end == beyond.start => last.end = beyond.end,
                    _ => ranges.push((beyond, Owned { size: 0, ..*owned })),
                }
            }
            ranges.into_iter().filter(|(range, _)| !range.is_empty())
        })
    }

    /// Hands all memory and addresses to the device object, which gives them back at its next driver call.
    pub(crate) fn bury(mut self, device: &Device) {
        for absent in self.absent.take().into_iter().flatten() {
            let (mapped, loose) = absent.granules.split_at(absent.mapped);
            self.put_all(absent.range.start, mapped);
            loose.iter().for_each(|&physical| device.release_later(physical));
        }
        for (addr, reserved) in self.reservations {
            let step = usize::try_from(reserved.granule).unwrap_or(usize::MAX);
            let places = (addr..).step_by(step).zip(reserved.places.all());
            let mapped =
                places.filter_map(|(at, physical)| Some((DevicePtr(at), reserved.granule, physical?))).collect();
            device.unreserve_later(Reservation { ptr: DevicePtr(addr), bytes: reserved.bytes, mapped });
        }
        self.spares.into_iter().for_each(|physical| device.release_later(physical));
    }
}
