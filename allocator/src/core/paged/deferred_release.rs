//! Dedicated memory that its owners gave up: which of it is done, and which reservations are of no
//! use any more.
//!
//! Invariants: pieces of one reservation do not overlap; a reservation whose owner is gone is in
//! `gone` while it has pieces, and in `vacant` afterwards, until its addresses are taken.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::core::tick_index::TickIndex;
use crate::types::{After, StreamId, Use};

/// Memory that its owner gave up.
#[derive(Debug)]
pub(crate) struct DeferredRelease {
    /// First address of the reservation that it is in.
    pub(crate) base: u64,
    /// Not empty.
    pub(crate) range: Range<u64>,
    /// Streams that used it, and where their timelines must have got to.
    pub(crate) uses: Vec<Use>,
    /// False if it never became usable, so that observers were not notified of it.
    pub(crate) was_told: bool,
}

impl DeferredRelease {
    /// Memory of a growth that failed, which the driver neither gave access to nor unmapped again.
    pub(crate) fn unusable(base: u64, range: Range<u64>) -> DeferredRelease {
        DeferredRelease { base, range, uses: Vec::new(), was_told: false }
    }

    fn key(&self) -> Key {
        (self.base, self.range.start)
    }
}

/// The reservation of a piece, and its first address.
type Key = (u64, u64);

/// All memory that its owners gave up.
#[derive(Debug, Default)]
pub(crate) struct DeferredReleases {
    granule: u64,
    pieces: BTreeMap<Key, DeferredRelease>,
    uses: TickIndex<Key>,
    /// Reservations whose owners are gone, and which have pieces.
    gone: BTreeSet<u64>,
    /// Reservations whose owners are gone, and which have none.
    vacant: Vec<u64>,
}

impl DeferredReleases {
    pub(crate) fn new(granule: u64) -> DeferredReleases {
        DeferredReleases { granule, ..DeferredReleases::default() }
    }

    /// True if no memory and no addresses are to go back.
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.vacant.is_empty()
    }

    pub(crate) fn add(&mut self, piece: DeferredRelease) {
        debug_assert!(!piece.range.is_empty() && !self.pieces.contains_key(&piece.key()));
        self.uses.insert(piece.key(), self.granules(&piece), &piece.uses);
        self.pieces.insert(piece.key(), piece);
    }

    /// Notes that a reservation's owner is gone, after it gave up all memory there.
    pub(crate) fn abandon(&mut self, base: u64) {
        if self.of(base).next().is_some() {
            self.gone.insert(base);
        } else {
            self.vacant.push(base);
        }
    }

    fn take(&mut self, key: Key) -> Option<DeferredRelease> {
        let piece = self.pieces.remove(&key)?;
        self.uses.remove(key, self.granules(&piece), &piece.uses);
        Some(piece)
    }

    /// Takes a piece that is known done; `reached` gives for a stream the tick that its timeline is
    /// known to have reached.
    pub(crate) fn take_done(&mut self, reached: impl Fn(StreamId) -> After) -> Option<DeferredRelease> {
        self.uses.advance(reached);
        let key = *self.uses.done().first()?;
        self.take(key)
    }

    /// True if a piece is known done, or addresses may go back.
    pub(crate) fn any_done(&mut self, reached: impl Fn(StreamId) -> After) -> bool {
        self.uses.advance(reached);
        !self.uses.done().is_empty() || !self.vacant.is_empty()
    }

    /// Puts a piece back that was taken as done: the driver did not unmap it.
    pub(crate) fn put_back(&mut self, piece: DeferredRelease) {
        // The owner may have gone meanwhile, and seen no pieces.
        if let Some(at) = self.vacant.iter().position(|&base| base == piece.base) {
            self.vacant.swap_remove(at);
            self.gone.insert(piece.base);
        }
        self.add(piece);
    }

    /// Notes that a piece of a reservation that was taken as done is gone.
    pub(crate) fn forget(&mut self, base: u64) {
        if self.of(base).next().is_none() && self.gone.remove(&base) {
            self.vacant.push(base);
        }
    }

    /// Takes a reservation of no use any more.
    pub(crate) fn take_vacant(&mut self) -> Option<u64> {
        self.vacant.pop()
    }

    /// The pieces of a reservation, by address.
    pub(crate) fn of(&self, base: u64) -> impl Iterator<Item = &DeferredRelease> + '_ {
        self.pieces.range((base, 0)..=(base, u64::MAX)).map(|(_, piece)| piece)
    }

    /// True if a piece of a reservation begins below an address.
    pub(crate) fn is_below(&self, base: u64, end: u64) -> bool {
        self.of(base).next().is_some_and(|piece| piece.range.start < end)
    }

    /// Takes what of a reservation's pieces lies below `end` and has been in use.
    pub(crate) fn take_below(&mut self, base: u64, end: u64) -> Vec<DeferredRelease> {
        let below = self.pieces.range((base, 0)..(base, end));
        // Memory without uses was left by a growth that failed. It may lack access, so it is
        // recycled first.
        let keys: Vec<Key> = below.filter(|(_, piece)| !piece.uses.is_empty()).map(|(&key, _)| key).collect();
        let mut taken: Vec<DeferredRelease> = keys.into_iter().filter_map(|key| self.take(key)).collect();
        if let Some(last) = taken.last_mut().filter(|last| last.range.end > end) {
            let beyond =
                DeferredRelease { base, range: end..last.range.end, uses: last.uses.clone(), was_told: last.was_told };
            last.range.end = end;
            self.add(beyond);
        }
        taken
    }

    /// True if the memory at an address of a reservation never became usable.
    pub(crate) fn is_unusable(&self, base: u64, at: u64) -> bool {
        let before = self.pieces.range((base, 0)..=(base, at)).next_back();
        before.is_some_and(|(_, piece)| piece.range.contains(&at) && !piece.was_told)
    }

    /// The ticks that pieces wait for, each with their granules.
    pub(crate) fn ticks(&self) -> impl Iterator<Item = (Use, u64)> + '_ {
        self.uses.ticks()
    }

    fn granules(&self, piece: &DeferredRelease) -> u64 {
        (piece.range.end - piece.range.start).div_ceil(self.granule)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::{ticks, used_until};

    const GRANULE: u64 = 1 << 21;

    fn piece(base: u64, granules: Range<u64>, uses: &[Use]) -> DeferredRelease {
        let range = base + granules.start * GRANULE..base + granules.end * GRANULE;
        DeferredRelease { base, range, uses: uses.to_vec(), was_told: true }
    }

    /// The granules of a releases, by number in its reservation.
    fn granules(releases: &DeferredRelease) -> Range<u64> {
        (releases.range.start - releases.base) / GRANULE..(releases.range.end - releases.base) / GRANULE
    }

    #[test]
    fn addresses_are_vacant_once_the_owner_and_all_pieces_are_gone() {
        let mut releases = DeferredReleases::new(GRANULE);
        releases.add(piece(0, 1..3, &[used_until(1, 5)]));
        releases.add(piece(0, 0..1, &[used_until(1, 6), used_until(2, 1)]));
        assert!(releases.take_done(|_| ticks(0)).is_none());
        releases.abandon(0);
        releases.abandon(GRANULE * 64);
        assert_eq!((releases.take_vacant(), releases.take_vacant()), (Some(GRANULE * 64), None));
        let reached = |stream| ticks(if stream == StreamId(1) { 6 } else { 0 });
        assert_eq!(releases.take_done(reached).map(|one| one.range), Some(GRANULE..3 * GRANULE));
        releases.forget(0);
        assert!(releases.take_done(reached).is_none() && !releases.any_done(reached) && !releases.is_empty());
        assert_eq!(releases.take_done(|_| ticks(6)).map(|one| one.range), Some(0..GRANULE));
        releases.forget(0);
        assert!(releases.any_done(|_| ticks(0)));
        assert_eq!(releases.take_vacant(), Some(0));
        assert!(releases.is_empty());
    }

    #[test]
    fn addresses_of_a_piece_that_stayed_mapped_are_not_vacant() {
        let mut releases = DeferredReleases::new(GRANULE);
        releases.add(piece(0, 0..1, &[used_until(1, 5)]));
        let taken = releases.take_done(|_| ticks(5)).unwrap();
        releases.abandon(0);
        releases.put_back(taken);
        assert_eq!(releases.take_vacant(), None);
        assert!(releases.take_done(|_| ticks(5)).is_some());
        releases.forget(0);
        assert_eq!(releases.take_vacant(), Some(0));
    }

    #[test]
    fn a_piece_that_is_taken_back_in_part_still_waits() {
        let mut releases = DeferredReleases::new(GRANULE);
        releases.add(piece(0, 1..5, &[used_until(1, 5)]));
        releases.add(DeferredRelease::unusable(0, 0..GRANULE));
        let taken = releases.take_below(0, 2 * GRANULE);
        assert_eq!((taken.len(), taken[0].range.clone()), (1, GRANULE..2 * GRANULE));
        assert_eq!(releases.ticks().collect::<Vec<_>>(), [(used_until(1, 5), 3)]);
        assert!(releases.is_unusable(0, GRANULE / 2) && !releases.is_unusable(0, 3 * GRANULE));
        assert!(releases.is_below(0, GRANULE) && !releases.is_below(64 * GRANULE, u64::MAX));
        assert_eq!(releases.of(0).count(), 2);
    }

    proptest! {
        /// Owners give up and take back granules of their reservations; streams get further; what
        /// is done is recycled.
        #[test]
        fn behaves_like_a_list_of_granules(
            steps in prop::collection::vec((0..5_u8, 0..3_u64, 0..12_u64, 1..4_u64), 0..80),
        ) {
            let (mut releases, mut now, mut done) = (DeferredReleases::new(GRANULE), 1, 0);
            // The tick that each granule waits for, by reservation and number.
            let mut model: BTreeMap<(u64, u64), u64> = BTreeMap::new();
            for (what, owner, from, count) in steps {
                let base = owner * 64 * GRANULE;
                match what {
                    0 | 1 => {
                        let is_vacant = |at: &u64| !model.contains_key(&(owner, *at));
                        let vacant = (from..from + count).take_while(is_vacant).count() as u64;
                        if vacant > 0 {
                            releases.add(piece(base, from..from + vacant, &[used_until(7, now)]));
                            model.extend((from..from + vacant).map(|at| ((owner, at), now)));
                        }
                        now += 1;
                    }
                    2 => {
                        let taken = releases.take_below(base, base + from * GRANULE);
                        let taken = taken.iter().flat_map(|one| granules(one).map(move |at| (at, one.uses[0].after)));
                        let expected = model.range((owner, 0)..(owner, from)).map(|(&(_, at), &until)| (at, ticks(until)));
                        let expected: Vec<_> = expected.collect();
                        prop_assert_eq!(taken.collect::<Vec<_>>(), expected);
                        model.retain(|&(of, at), _| of != owner || at >= from);
                    }
                    3 => done = now - 1,
                    _ => {
                        while let Some(one) = releases.take_done(|_| ticks(done)) {
                            let owner = one.base / 64 / GRANULE;
                            for at in granules(&one) {
                                prop_assert!(model.remove(&(owner, at)).is_some_and(|after| after <= done));
                            }
                        }
                        prop_assert!(model.values().all(|&after| after > done));
                    }
                }
                let waits = releases.ticks().filter(|(one, _)| one.after > ticks(done));
                let listed: u64 = waits.map(|(_, granules)| granules).sum();
                prop_assert_eq!(listed, model.values().filter(|&&after| after > done).count() as u64);
            }
        }
    }
}
