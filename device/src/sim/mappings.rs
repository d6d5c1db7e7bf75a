//! Reservations of addresses, and the mappings in them.
//!
//! A reservation has a place for each granule. So what is mapped at an address is found at once
//! however much is mapped. A piece of physical memory is mapped once at most, so a mapping goes by
//! the number of its memory: mapping and unmapping look for no vacant number, and allocate nothing
//! once there was as much memory before.
//!
//! Invariants: every mapping lies in one reservation; its number stands in each place that it
//! covers and nowhere else, so no two overlap.

use std::ops::Range;

use super::address::GRANULARITY;
use super::memory::StoreId;

/// Physical memory mapped at an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) store: StoreId,
    /// Which devices may touch it, as a place in [`Mappings::access`].
    access: u32,
}

impl Mapping {
    /// The first address behind it.
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// What is in a place without a mapping; else it is the number of the memory, and one.
const NONE: u32 = 0;

#[derive(Debug)]
struct Reservation {
    start: u64,
    bytes: u64,
    /// As far as anything was ever mapped.
    places: Vec<u32>,
    mapped: u64,
}

impl Reservation {
    /// The places of a range that lies in it.
    #[inline]
    fn places(&mut self, start: u64, bytes: u64) -> &mut [u32] {
        let place = |at: u64| usize::try_from((at - self.start) / GRANULARITY).unwrap_or(usize::MAX);
        let places = place(start)..place(start + bytes);
        if self.places.len() < places.end {
            self.places.resize(places.end, NONE);
        }
        self.places.get_mut(places).unwrap_or_default()
    }

    /// Number of the memory that is mapped at `at`.
    #[inline]
    fn number_at(&self, at: u64) -> Option<usize> {
        let place = usize::try_from((at - self.start) / GRANULARITY).unwrap_or(usize::MAX);
        let number = *self.places.get(place)?;
        (number != NONE).then(|| number as usize - 1)
    }
}

/// All reservations of a device.
#[derive(Debug)]
pub(super) struct Mappings {
    /// By address.
    reservations: Vec<Reservation>,
    /// The mapping of each piece of physical memory, by its number.
    mapped: Vec<Option<Mapping>>,
    /// The sets of devices that may touch something: ordinals, ascending. The first is empty.
    access: Vec<Vec<u32>>,
}

impl Mappings {
    pub(super) fn new() -> Mappings {
        Mappings { reservations: Vec::new(), mapped: Vec::new(), access: vec![Vec::new()] }
    }

    /// Adds a reservation, a multiple of [`GRANULARITY`] in start and length, that overlaps no
    /// other.
    pub(super) fn reserve(&mut self, start: u64, bytes: u64) {
        let places = Vec::with_capacity(usize::try_from(bytes / GRANULARITY).unwrap_or(0));
        let at = self.reservations.partition_point(|reservation| reservation.start < start);
        self.reservations.insert(at, Reservation { start, bytes, places, mapped: 0 });
    }

    /// Removes the reservation that starts there. Nothing is mapped in it.
    pub(super) fn unreserve(&mut self, start: u64) {
        if let Ok(at) = self.reservations.binary_search_by_key(&start, |reservation| reservation.start) {
            let removed = self.reservations.remove(at);
            debug_assert_eq!(removed.mapped, 0);
        }
    }

    /// The last reservation that starts at `at` or before.
    #[inline]
    fn reservation(&self, at: u64) -> Option<&Reservation> {
        self.reservations[..self.reservations_to(at)].last()
    }

    /// How many reservations start at `at` or before.
    #[inline]
    fn reservations_to(&self, at: u64) -> usize {
        self.reservations.partition_point(|reservation| reservation.start <= at)
    }

    /// Bytes of the reservation that starts there.
    pub(super) fn reserved_at(&self, start: u64) -> Option<u64> {
        self.reservation(start).filter(|reservation| reservation.start == start).map(|reservation| reservation.bytes)
    }

    /// The reservation that holds an address: its start and length.
    pub(super) fn reservation_holding(&self, at: u64) -> Option<(u64, u64)> {
        let reservation = self.reservation(at).filter(|reservation| at - reservation.start < reservation.bytes)?;
        Some((reservation.start, reservation.bytes))
    }

    /// Whether anything is mapped in the reservation that starts there; the lowest such address.
    pub(super) fn first_in(&self, start: u64) -> Option<u64> {
        let reservation = self.reservation(start).filter(|found| found.start == start && found.mapped > 0)?;
        let number = reservation.places.iter().copied().find(|&number| number != NONE)?;
        self.of(u64::from(number) - 1).map(|mapping| mapping.start)
    }

    /// Where physical memory is mapped, by its number.
    #[inline]
    pub(super) fn of(&self, physical: u64) -> Option<&Mapping> {
        self.mapped.get(usize::try_from(physical).unwrap_or(usize::MAX))?.as_ref()
    }

    /// The mapping that holds `at`.
    #[inline]
    pub(super) fn at(&self, at: u64) -> Option<&Mapping> {
        self.mapped.get(self.number_at(at)?)?.as_ref()
    }

    /// Number of the physical memory that is mapped at `at`.
    #[inline]
    pub(super) fn number_at(&self, at: u64) -> Option<usize> {
        self.reservation(at)?.number_at(at)
    }

    /// The mappings side by side from `start` on, where the first one starts, and their numbers.
    pub(super) fn tiles(&self, start: u64) -> impl Iterator<Item = (u64, &Mapping)> + '_ {
        let mut at = start;
        let mut reservation = self.reservation(at);
        std::iter::from_fn(move || {
            // Reservations may lie side by side, too.
            if reservation.is_some_and(|reservation| at - reservation.start >= reservation.bytes) {
                reservation = self.reservation(at);
            }
            let number = reservation?.number_at(at)?;
            let mapping = self.mapped.get(number)?.as_ref().filter(|mapping| mapping.start == at)?;
            at = mapping.end();
            Some((number as u64, mapping))
        })
    }

    /// Adds a mapping of physical memory that is mapped nowhere, if there is room for it. No device
    /// may touch it yet.
    pub(super) fn map(&mut self, start: u64, bytes: u64, physical: u64, store: StoreId) -> Result<(), NoRoom> {
        let to = self.reservations_to(start);
        let Some(reservation) = self.reservations[..to].last_mut() else { return Err(NoRoom::Unreserved) };
        match reservation.bytes.checked_sub(start - reservation.start) {
            None | Some(0) => return Err(NoRoom::Unreserved),
            Some(left) if left < bytes => return Err(NoRoom::PastEnd),
            Some(_) => {}
        }
        let places = reservation.places(start, bytes);
        if let Some(number) = places.iter().rev().copied().find(|&number| number != NONE) {
            let other = self.mapped.get(number as usize - 1).and_then(Option::as_ref);
            return Err(NoRoom::Overlaps(other.map_or(start, |mapping| mapping.start)));
        }
        // As much memory as that would be 2^53 bytes of a device, which has 2^48 at most.
        let number = u32::try_from(physical + 1).unwrap_or_else(|_| unreachable!("more than 2^32 mappings"));
        set(places, number);
        reservation.mapped += 1;
        let number = number as usize;
        if self.mapped.len() < number {
            self.mapped.resize(number, None);
        }
        self.mapped[number - 1] = Some(Mapping { start, bytes, store, access: 0 });
        Ok(())
    }

    /// Removes the mapping that starts at `start`; returns the number of its memory.
    pub(super) fn unmap(&mut self, start: u64) -> Option<(u64, Mapping)> {
        let to = self.reservations_to(start);
        let reservation = self.reservations[..to].last_mut()?;
        let number = reservation.number_at(start)?;
        let mapping = self.mapped.get_mut(number)?.take_if(|mapping| mapping.start == start)?;
        set(reservation.places(start, mapping.bytes), NONE);
        reservation.mapped -= 1;
        Some((number as u64, mapping))
    }

    /// Ordinals of the devices that may touch a mapping, ascending.
    pub(super) fn access_to(&self, mapping: &Mapping) -> &[u32] {
        self.access.get(mapping.access as usize).map_or(&[], Vec::as_slice)
    }

    /// Lets devices touch the mappings that tile a range, besides those that may already.
    pub(super) fn give_access(&mut self, range: Range<u64>, devices: &[u32]) {
        let mut at = range.start;
        // Mappings side by side mostly had the same access before.
        let mut known = None;
        while at < range.end {
            let to = self.reservations_to(at);
            let Some(reservation) = self.reservations[..to].last() else { return };
            let end = range.end.min(reservation.start + reservation.bytes);
            if end <= at {
                return;
            }
            while at < end {
                let mapping = reservation.number_at(at).and_then(|number| self.mapped.get_mut(number)?.as_mut());
                let Some(mapping) = mapping else { return };
                let after = match known {
                    Some((before, after)) if before == mapping.access => after,
                    _ => with_access(&mut self.access, mapping.access, devices),
                };
                known = Some((mapping.access, after));
                mapping.access = after;
                at = mapping.end();
            }
        }
    }
}

/// Why memory cannot be mapped somewhere.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The range starts in no reservation.
    Unreserved,
    /// It does not end in the same one.
    PastEnd,
    /// It overlaps a mapping, the last of which starts there.
    Overlaps(u64),
}

/// Puts a number in places: mostly one, for which a fill that is made for many is slow.
#[inline]
fn set(places: &mut [u32], number: u32) {
    match places {
        [place] => *place = number,
        places => places.fill(number),
    }
}

/// The set of these devices and those of another set.
fn with_access(sets: &mut Vec<Vec<u32>>, before: u32, devices: &[u32]) -> u32 {
    let before = sets.get(before as usize).map_or(&[][..], Vec::as_slice);
    let mut set = [before, devices].concat();
    set.sort_unstable();
    set.dedup();
    let number = sets.iter().position(|known| *known == set).unwrap_or_else(|| {
        sets.push(set);
        sets.len() - 1
    });
    u32::try_from(number).unwrap_or_else(|_| unreachable!("more than 2^32 sets of devices"))
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
        mappings.map(12 * G, 3 * G, 7, 70).unwrap();
        mappings.map(18 * G, G, 0, 80).unwrap();
        let store_at = |mappings: &Mappings, at| mappings.at(at).map(|mapping| mapping.store);
        assert_eq!([12 * G, 13 * G + 5, 15 * G - 1].map(|at| store_at(&mappings, at)), [Some(70); 3]);
        assert_eq!([0, 11 * G, 12 * G - 1, 15 * G, 20 * G, u64::MAX].map(|at| store_at(&mappings, at)), [None; 6]);
        assert_eq!(store_at(&mappings, 18 * G), Some(80));
        let starts = [0, 1, 7, 8].map(|number| mappings.of(number).map(|mapping| mapping.start));
        assert_eq!(starts, [Some(18 * G), None, Some(12 * G), None]);
        assert!(mappings.tiles(13 * G).next().is_none() && mappings.unmap(13 * G).is_none());
        let mut map = |at, granules| mappings.map(at * G, granules * G, 9, 90);
        assert_eq!([9, 20, 21].map(|at| map(at, 1)), [const { Err(NoRoom::Unreserved) }; 3]);
        assert_eq!([map(17, 2), map(18, 3)], [const { Err(NoRoom::PastEnd) }; 2]);
        assert_eq!([map(11, 2), map(14, 1), map(10, 8)], [const { Err(NoRoom::Overlaps(12 * G)) }; 3]);
        assert_eq!((mappings.first_in(10 * G), mappings.reserved_at(18 * G)), (Some(12 * G), Some(2 * G)));
        let (number, mapping) = mappings.unmap(12 * G).unwrap();
        assert_eq!((number, mapping.bytes, mappings.of(7).is_some()), (7, 3 * G, false));
        assert_eq!((store_at(&mappings, 13 * G), mappings.first_in(10 * G)), (None, None));
        mappings.unreserve(10 * G);
        assert_eq!((mappings.reserved_at(10 * G), store_at(&mappings, 18 * G)), (None, Some(80)));
    }

    #[test]
    fn mappings_side_by_side_are_tiles_whatever_reservations_they_are_in() {
        let mut mappings = Mappings::new();
        mappings.reserve(6 * G, 2 * G);
        mappings.reserve(0, 6 * G);
        for (start, end, number) in [(2, 5, 4), (5, 6, 1), (6, 7, 0)] {
            mappings.map(start * G, (end - start) * G, number, number).unwrap();
        }
        let tiles =
            |at| mappings.tiles(at * G).map(|(number, mapping)| (number, mapping.end() / G)).collect::<Vec<_>>();
        assert_eq!(tiles(2), [(4, 5), (1, 6), (0, 7)]);
        assert_eq!(tiles(5), [(1, 6), (0, 7)]);
        assert_eq!([3, 7, 8].map(|at| tiles(at).len()), [0; 3]);
        mappings.give_access(2 * G..7 * G, &[3]);
        let devices = [2, 5, 6].map(|at| mappings.access_to(mappings.at(at * G).unwrap()).to_vec());
        assert_eq!(devices, [[3]; 3], "access crosses borders of reservations");
    }

    #[test]
    fn access_adds_up() {
        let mut mappings = Mappings::new();
        mappings.reserve(0, 4 * G);
        (0..3).for_each(|at| mappings.map(at * G, G, at, at).unwrap());
        let devices = |mappings: &Mappings, at: u64| mappings.access_to(mappings.at(at * G).unwrap()).to_vec();
        mappings.give_access(0..2 * G, &[2]);
        assert_eq!((devices(&mappings, 0), devices(&mappings, 1), devices(&mappings, 2)), (vec![2], vec![2], vec![]));
        mappings.give_access(G..3 * G, &[3, 1, 3]);
        mappings.give_access(2 * G..3 * G, &[1, 2]);
        assert_eq!(
            (devices(&mappings, 0), devices(&mappings, 1), devices(&mappings, 2)),
            (vec![2], vec![1, 2, 3], vec![1, 2, 3])
        );
        // No device, 2, 1 to 3, and for a while 1 and 3.
        assert_eq!(mappings.access.len(), 4);
        mappings.unmap(G);
        mappings.map(G, G, 9, 9).unwrap();
        assert_eq!(devices(&mappings, 1), [], "access goes with the mapping");
    }
}
