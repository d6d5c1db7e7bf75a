//! Reservations of addresses, and the mappings in them.
//!
//! Invariants: reservations do not overlap, and neither do mappings; every mapping lies in one
//! reservation.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::memory::StoreId;
use crate::refused::{Answer, Refused};

/// Granularity of physical memory and mappings, and alignment of plain allocations, in bytes.
pub(crate) const GRANULARITY: u64 = 2 << 20;

/// Physical memory mapped at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Number of the memory.
    pub(crate) physical: u64,
    pub(crate) store: StoreId,
    /// Ordinals of the devices that may touch it, ascending.
    pub(crate) devices: Vec<u32>,
}

impl Mapping {
    /// The first address behind it.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

/// The entry of a map by address that holds `at`, if `length` of it reaches that far.
pub(crate) fn holding<T>(map: &BTreeMap<u64, T>, at: u64, length: impl Fn(&T) -> u64) -> Option<(u64, &T)> {
    let (&start, entry) = map.range(..=at).next_back()?;
    (at - start < length(entry)).then_some((start, entry))
}

/// All reservations and mappings of a device, by address.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    /// Length of each reservation.
    reservations: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, Mapping>,
}

impl Mappings {
    /// Adds a reservation, a multiple of [`GRANULARITY`] in start and length, that overlaps no
    /// other.
    pub(crate) fn reserve(&mut self, start: u64, bytes: u64) {
        self.reservations.insert(start, bytes);
    }

    /// Removes a whole reservation, in which nothing is mapped.
    pub(crate) fn unreserve(&mut self, start: u64, bytes: u64) -> Answer<()> {
        match self.reservations.get(&start) {
            Some(&held) if held == bytes => {}
            Some(held) => {
                return Err(Refused::value(format!("the reservation at {start:#x} has {held} bytes, not {bytes}")));
            }
            None => return Err(Refused::value(format!("no reservation starts at {start:#x}"))),
        }
        if let Some((mapped, _)) = self.mapped.range(start..start + bytes).next() {
            return Err(Refused::value(format!(
                "memory is still mapped at {mapped:#x} in the reservation at {start:#x}"
            )));
        }
        self.reservations.remove(&start);
        Ok(())
    }

    /// The reservation that holds an address.
    pub(crate) fn reservation_holding(&self, at: u64) -> Option<Range<u64>> {
        holding(&self.reservations, at, |&bytes| bytes).map(|(start, &bytes)| start..start + bytes)
    }

    /// The mapping that holds an address.
    pub(crate) fn at(&self, at: u64) -> Option<&Mapping> {
        holding(&self.mapped, at, |mapping| mapping.bytes).map(|(_, mapping)| mapping)
    }

    /// The mappings that overlap a range, by address.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = &Mapping> {
        let from = self.at(range.start).map_or(range.start, |mapping| mapping.start);
        self.mapped.range(from..range.end.max(from)).map(|(_, mapping)| mapping)
    }

    /// Checks that whole mappings tile a range, and counts them.
    pub(crate) fn count_tiles(&self, start: u64, bytes: u64) -> Answer<u64> {
        let end = start.checked_add(bytes).filter(|_| bytes > 0);
        let end = end.ok_or_else(|| Refused::value(format!("{bytes} bytes at {start:#x} are no range")))?;
        let (mut at, mut count) = (start, 0);
        for mapping in self.mapped.range(start..end).map(|(_, mapping)| mapping) {
            if mapping.start != at {
                break;
            }
            count += 1;
            at = mapping.end();
        }
        if at < end {
            return Err(Refused::value(format!("no mapping starts at {at:#x}: whole mappings must tile the range")));
        }
        if at > end {
            return Err(Refused::value(format!("the range ends at {end:#x}, inside a mapping that ends at {at:#x}")));
        }
        Ok(count)
    }

    /// Maps physical memory, if there is room for it. No device may touch it there yet.
    pub(crate) fn map(&mut self, start: u64, bytes: u64, physical: u64, store: StoreId) -> Answer<()> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !start.is_multiple_of(GRANULARITY) {
            return Err(Refused::value(format!("{start:#x} and {bytes} bytes are not multiples of {GRANULARITY}")));
        }
        let Some(reservation) = self.reservation_holding(start) else {
            return Err(Refused::value(format!("{start:#x} lies in no reservation")));
        };
        if reservation.end - start < bytes {
            return Err(Refused::value(format!("{bytes} bytes at {start:#x} reach past their reservation")));
        }
        let before = self.mapped.range(..start + bytes).next_back();
        if let Some((other, _)) = before.filter(|(_, mapping)| mapping.end() > start) {
            return Err(Refused::value(format!("{start:#x} and {bytes} bytes overlap the mapping at {other:#x}")));
        }
        self.mapped.insert(start, Mapping { start, bytes, physical, store, devices: Vec::new() });
        Ok(())
    }

    /// Removes the mapping that starts at `start`.
    pub(crate) fn unmap(&mut self, start: u64) -> Option<Mapping> {
        self.mapped.remove(&start)
    }

    /// Lets devices touch the mappings that tile a range. Devices that had access keep it.
    pub(crate) fn give_access(&mut self, range: Range<u64>, devices: &[u32]) {
        for (_, mapping) in self.mapped.range_mut(range) {
            mapping.devices.extend(devices);
            mapping.devices.sort_unstable();
            mapping.devices.dedup();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = GRANULARITY;

    #[test]
    fn a_mapping_is_found_at_every_address_that_it_covers_and_at_no_other() {
        let mut mappings = Mappings::default();
        mappings.reserve(10 * G, 8 * G);
        mappings.reserve(18 * G, 2 * G);
        mappings.map(12 * G, 3 * G, 7, 70).unwrap();
        mappings.map(18 * G, G, 0, 80).unwrap();
        let stores = |at: &[u64]| at.iter().map(|&at| mappings.at(at).map(|found| found.store)).collect::<Vec<_>>();
        assert_eq!(stores(&[12 * G, 13 * G + 5, 15 * G - 1, 18 * G]), [Some(70), Some(70), Some(70), Some(80)]);
        assert_eq!(stores(&[0, 11 * G, 12 * G - 1, 15 * G, 20 * G, u64::MAX]), [None; 6]);
        let mut refusal = |at, granules| mappings.map(at * G, granules * G, 9, 90).unwrap_err().detail;
        assert!([9, 20, 21].into_iter().all(|at| refusal(at, 1).contains("in no reservation")));
        assert!([(17, 2), (18, 3)].into_iter().all(|(at, granules)| refusal(at, granules).contains("reach past")));
        let overlapped = format!("overlap the mapping at {:#x}", 12 * G);
        let overlapping = [(11, 2), (14, 1), (10, 8)];
        assert!(overlapping.into_iter().all(|(at, granules)| refusal(at, granules).ends_with(&overlapped)));
        assert!(mappings.unmap(13 * G).is_none() && mappings.unreserve(10 * G, 8 * G).is_err());
        assert_eq!(mappings.unmap(12 * G).unwrap().physical, 7);
        mappings.unreserve(10 * G, 8 * G).unwrap();
        assert!(mappings.reservation_holding(10 * G).is_none() && mappings.at(18 * G).is_some());
    }

    #[test]
    fn adjacent_mappings_tile_ranges_across_reservations() {
        let mut mappings = Mappings::default();
        mappings.reserve(6 * G, 2 * G);
        mappings.reserve(0, 6 * G);
        for (start, end, number) in [(2, 5, 4), (5, 6, 1), (6, 7, 0)] {
            mappings.map(start * G, (end - start) * G, number, number).unwrap();
        }
        let tiles = |from: u64, to: u64| mappings.count_tiles(from * G, (to - from) * G).ok();
        assert_eq!([tiles(2, 7), tiles(2, 6), tiles(5, 7)], [Some(3), Some(2), Some(2)]);
        assert_eq!([tiles(3, 5), tiles(2, 4), tiles(6, 8), tiles(7, 8), tiles(8, 9)], [None; 5]);
        mappings.give_access(2 * G..7 * G, &[3]);
        mappings.give_access(5 * G..6 * G, &[1, 3]);
        let devices = [2, 5, 6].map(|at| mappings.at(at * G).unwrap().devices.clone());
        assert_eq!(devices, [vec![3], vec![1, 3], vec![3]], "access adds up, and crosses borders of reservations");
        mappings.unmap(5 * G);
        mappings.map(5 * G, G, 9, 9).unwrap();
        assert!(mappings.at(5 * G).unwrap().devices.is_empty(), "access goes with the mapping");
    }
}
