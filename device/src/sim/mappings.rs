//! Reservations of addresses, and the mappings in them.
//!
//! A reservation has a place for each granule. So what is mapped at an address is found at once however much is mapped, and
//! mapping and unmapping allocate nothing once there were as many mappings before.
//!
//! Invariants: every mapping lies in one reservation; its number stands in each place that it covers and nowhere else, so no two
//! overlap.

use std::collections::BTreeMap;

use super::address::GRANULARITY;
use super::handle::Handles;
use super::memory::StoreId;

/// Physical memory mapped at an address.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Number of the physical memory.
    pub(super) physical: u64,
    pub(super) store: StoreId,
    /// Which devices may touch it, as a place in [`Mappings::access`].
    access: usize,
}

impl Mapping {
    /// The first address behind it.
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// What is in a place without a mapping.
const NONE: u32 = 0;

#[derive(Debug)]
struct Reservation {
    bytes: u64,
    /// The number of the mapping behind each granule; [`NONE`] if there is none.
    places: Vec<u32>,
    mapped: u64,
}

impl Reservation {
    /// The places of a range that lies in it, `offset` bytes from its start.
    fn places(&mut self, offset: u64, bytes: u64) -> &mut [u32] {
        let place = |offset: u64| usize::try_from(offset / GRANULARITY).unwrap_or(usize::MAX);
        self.places.get_mut(place(offset)..place(offset + bytes)).unwrap_or_default()
    }

    fn place(&self, offset: u64) -> u32 {
        self.places.get(usize::try_from(offset / GRANULARITY).unwrap_or(usize::MAX)).copied().unwrap_or(NONE)
    }
}

/// All reservations of a device.
#[derive(Debug)]
pub(super) struct Mappings {
    reservations: BTreeMap<u64, Reservation>,
    by_number: Handles<Mapping>,
    /// The sets of devices that may touch something: ordinals, ascending. The first is empty.
    access: Vec<Vec<u32>>,
}

impl Mappings {
    pub(super) fn new() -> Mappings {
        let by_number = Handles::new(u64::from(NONE) + 1);
        Mappings { reservations: BTreeMap::new(), by_number, access: vec![Vec::new()] }
    }

    /// Adds a reservation, a multiple of [`GRANULARITY`] in start and length, that overlaps no other.
    pub(super) fn reserve(&mut self, start: u64, bytes: u64) {
        let places = vec![NONE; usize::try_from(bytes / GRANULARITY).unwrap_or(0)];
        self.reservations.insert(start, Reservation { bytes, places, mapped: 0 });
    }

    /// Removes the reservation that starts there. Nothing is mapped in it.
    pub(super) fn unreserve(&mut self, start: u64) {
        let removed = self.reservations.remove(&start);
        debug_assert!(removed.is_none_or(|reservation| reservation.mapped == 0));
    }

    /// Bytes of the reservation that starts there.
    pub(super) fn reserved_at(&self, start: u64) -> Option<u64> {
        self.reservations.get(&start).map(|reservation| reservation.bytes)
    }

    /// How many bytes there are from `at` to the end of the reservation that it lies in.
    pub(super) fn reserved_from(&self, at: u64) -> Option<u64> {
        let (&start, reservation) = self.reservations.range(..=at).next_back()?;
        reservation.bytes.checked_sub(at - start).filter(|&left| left > 0)
    }

    /// Whether anything is mapped in the reservation that starts there; the lowest such address.
    pub(super) fn first_in(&self, start: u64) -> Option<u64> {
        let reservation = self.reservations.get(&start).filter(|reservation| reservation.mapped > 0)?;
        let number = reservation.places.iter().copied().find(|&number| number != NONE)?;
        self.by_number.get(number.into()).map(|mapping| mapping.start)
    }

    /// The mapping that holds `at`.
    pub(super) fn at(&self, at: u64) -> Option<&Mapping> {
        let (&start, reservation) = self.reservations.range(..=at).next_back()?;
        self.by_number.get(reservation.place(at - start).into())
    }

    /// The mapping that starts at `start`.
    pub(super) fn starting_at(&self, start: u64) -> Option<&Mapping> {
        self.at(start).filter(|mapping| mapping.start == start)
    }

    /// The last of the mappings that overlap a range, which lies in one reservation.
    pub(super) fn last_within(&mut self, start: u64, bytes: u64) -> Option<&Mapping> {
        let (&base, reservation) = self.reservations.range_mut(..=start).next_back()?;
        let number = reservation.places(start - base, bytes).iter().rev().copied().find(|&number| number != NONE)?;
        self.by_number.get(number.into())
    }

    /// Adds a mapping where nothing is mapped. No device may touch it yet.
    pub(super) fn map(&mut self, start: u64, bytes: u64, physical: u64, store: StoreId) {
        let Some((&base, reservation)) = self.reservations.range_mut(..=start).next_back() else { return };
        let number = self.by_number.insert(Mapping { start, bytes, physical, store, access: 0 });
        // As many mappings as that would be 2^53 bytes of a device, which has 2^48 at most.
        let number = u32::try_from(number).unwrap_or_else(|_| unreachable!("more than 2^32 mappings"));
        reservation.places(start - base, bytes).fill(number);
        reservation.mapped += 1;
    }

    /// Removes the mapping that starts at `start`.
    pub(super) fn unmap(&mut self, start: u64) -> Option<Mapping> {
        let (&base, reservation) = self.reservations.range_mut(..=start).next_back()?;
        let number = reservation.place(start - base).into();
        if self.by_number.get(number)?.start != start {
            return None;
        }
        let mapping = self.by_number.remove(number)?;
        reservation.places(start - base, mapping.bytes).fill(NONE);
        reservation.mapped -= 1;
        Some(mapping)
    }

    /// Ordinals of the devices that may touch a mapping, ascending.
    pub(super) fn access_to(&self, mapping: &Mapping) -> &[u32] {
        self.access.get(mapping.access).map_or(&[], Vec::as_slice)
    }

    /// Lets devices touch the mapping that starts at `start`, besides those that may already.
    pub(super) fn give_access(&mut self, start: u64, devices: &[u32]) {
        let Some(mapping) = self.starting_at(start) else { return };
        let before = self.access_to(mapping);
        let is_union = |set: &&Vec<u32>| {
            before.iter().chain(devices).all(|device| set.contains(device))
                && set.iter().all(|device| before.contains(device) || devices.contains(device))
        };
        let access = match self.access.iter().position(|set| is_union(&set)) {
            Some(known) => known,
            None => {
                let mut set = [before, devices].concat();
                set.sort_unstable();
                set.dedup();
                self.access.push(set);
                self.access.len() - 1
            }
        };
        let number = self.number_at(start);
        if let Some(mapping) = self.by_number.get_mut(number) {
            mapping.access = access;
        }
    }

    fn number_at(&self, at: u64) -> u64 {
        let found = self.reservations.range(..=at).next_back();
        found.map_or(NONE, |(&start, reservation)| reservation.place(at - start)).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = GRANULARITY;

    #[test]
    fn a_mapping_is_found_at_every_address_that_it_covers_and_at_no_other() {
        let mut mappings = Mappings::new();
        mappings.reserve(10 * G, 8 * G);
        mappings.reserve(18 * G, 2 * G);
        mappings.map(12 * G, 3 * G, 7, 70);
        mappings.map(18 * G, G, 8, 80);
        let physical_at = |mappings: &Mappings, at| mappings.at(at).map(|mapping| mapping.physical);
        assert_eq!([12 * G, 13 * G + 5, 15 * G - 1].map(|at| physical_at(&mappings, at)), [Some(7); 3]);
        assert_eq!([0, 11 * G, 12 * G - 1, 15 * G, 20 * G, u64::MAX].map(|at| physical_at(&mappings, at)), [None; 6]);
        assert_eq!(physical_at(&mappings, 18 * G), Some(8));
        assert!(mappings.starting_at(13 * G).is_none() && mappings.unmap(13 * G).is_none());
        assert_eq!(
            [10, 17, 18, 20].map(|at| mappings.reserved_from(at * G)),
            [Some(8 * G), Some(G), Some(2 * G), None]
        );
        assert_eq!(mappings.last_within(10 * G, 8 * G).unwrap().end(), 15 * G);
        assert!(mappings.last_within(15 * G, 3 * G).is_none());
        assert_eq!((mappings.first_in(10 * G), mappings.reserved_at(18 * G)), (Some(12 * G), Some(2 * G)));
        assert_eq!(mappings.unmap(12 * G).unwrap().bytes, 3 * G);
        assert_eq!((physical_at(&mappings, 13 * G), mappings.first_in(10 * G)), (None, None));
        mappings.unreserve(10 * G);
        assert_eq!((mappings.reserved_from(10 * G), physical_at(&mappings, 18 * G)), (None, Some(8)));
    }

    #[test]
    fn access_adds_up() {
        let mut mappings = Mappings::new();
        mappings.reserve(0, 4 * G);
        (0..3).for_each(|at| mappings.map(at * G, G, at, at));
        let devices = |mappings: &Mappings, at: u64| mappings.access_to(mappings.at(at * G).unwrap()).to_vec();
        mappings.give_access(0, &[2]);
        mappings.give_access(G, &[2]);
        assert_eq!((devices(&mappings, 0), devices(&mappings, 1), devices(&mappings, 2)), (vec![2], vec![2], vec![]));
        mappings.give_access(G, &[3, 1, 3]);
        mappings.give_access(2 * G, &[1, 2, 3]);
        assert_eq!(
            (devices(&mappings, 0), devices(&mappings, 1), devices(&mappings, 2)),
            (vec![2], vec![1, 2, 3], vec![1, 2, 3])
        );
        assert_eq!(mappings.access.len(), 3);
        mappings.unmap(G);
        mappings.map(G, G, 9, 9);
        assert_eq!(devices(&mappings, 1), [], "access goes with the mapping");
    }
}
