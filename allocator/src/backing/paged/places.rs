//! The places of a reservation, by number: the granule behind each, and whether granules moved away from it.
//!
//! Places mostly change many at a time, side by side, so all operations work on ranges. A reservation has room for more memory
//! than there is, and its low end fills first; places above the highest one that ever had a granule cost nothing.

use std::ops::Range;

use aquifer_device::RawPhysical;

/// Places of a word of bits.
const WORD: usize = u64::BITS as usize;

/// The places of one reservation.
#[derive(Debug)]
pub(super) struct Places {
    count: usize,
    /// The granule behind each place, up to the highest that ever had one.
    granules: Vec<Option<RawPhysical>>,
    /// A bit for each place: whether granules moved away from it.
    left: Vec<u64>,
}

impl Places {
    /// So many places without memory.
    pub(super) fn new(count: usize) -> Places {
        Places { count, granules: Vec::new(), left: vec![0; count.div_ceil(WORD)] }
    }

    /// Notes which granules are behind the places from `from` on, which have none.
    pub(super) fn put(&mut self, from: usize, granules: &[RawPhysical]) {
        let to = from + granules.len();
        debug_assert!(to <= self.count && self.of(from..to).all(|behind| behind.is_none()));
        if self.granules.len() < to {
            self.granules.resize(to, None);
        }
        for (place, &granule) in self.granules[from..to].iter_mut().zip(granules) {
            *place = Some(granule);
        }
    }

    /// Removes the granules of a range from the record; the answer is in order.
    pub(super) fn forget(&mut self, range: Range<usize>) -> Vec<RawPhysical> {
        let mut taken = Vec::with_capacity(range.len());
        let known = self.known(range);
        taken.extend(self.granules[known].iter_mut().filter_map(Option::take));
        taken
    }

    /// The part of a range in which there may be granules.
    fn known(&self, range: Range<usize>) -> Range<usize> {
        range.start.min(self.granules.len())..range.end.min(self.granules.len())
    }

    /// The granule mapped at each place of a range, if any.
    pub(super) fn of(&self, range: Range<usize>) -> impl Iterator<Item = Option<RawPhysical>> + '_ {
        let known = self.known(range.clone());
        let beyond = range.len() - known.len();
        self.granules[known].iter().copied().chain(std::iter::repeat_n(None, beyond))
    }

    /// The granule mapped at each place, if any.
    pub(super) fn all(&self) -> impl Iterator<Item = Option<RawPhysical>> + '_ {
        self.of(0..self.count)
    }

    /// Notes that the granules of a range moved elsewhere.
    pub(super) fn leave(&mut self, range: Range<usize>) {
        for (word, bits) in words(range) {
            if let Some(left) = self.left.get_mut(word) {
                *left |= bits;
            }
        }
    }

    /// True if granules ever moved away from any place in a range.
    pub(super) fn was_left(&self, range: Range<usize>) -> bool {
        words(range).any(|(word, bits)| self.left.get(word).is_some_and(|left| left & bits != 0))
    }
}

/// The words that a range of bits touches, and which of their bits are in it.
fn words(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    (range.start / WORD..range.end.div_ceil(WORD)).map(move |word| {
        let (first, last) = (range.start.max(word * WORD), range.end.min((word + 1) * WORD) - 1);
        (word, u64::MAX << (first % WORD) & u64::MAX >> (WORD - 1 - last % WORD))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_put_is_taken_in_order() {
        let mut places = Places::new(10);
        let granules = |numbers: &[u64]| numbers.iter().map(|&number| RawPhysical(number)).collect::<Vec<_>>();
        places.put(6, &granules(&[1, 2]));
        places.put(2, &granules(&[3, 4, 5, 6]));
        assert_eq!(places.forget(4..7), granules(&[5, 6, 1]));
        assert_eq!(places.all().flatten().collect::<Vec<_>>(), granules(&[3, 4, 2]));
        assert_eq!(
            places.of(3..10).map(|behind| behind.is_some()).collect::<Vec<_>>(),
            [true, false, false, false, true, false, false]
        );
        assert_eq!(places.forget(9..10), []);
    }

    proptest! {
        #[test]
        fn behaves_like_a_map_and_a_set(steps in prop::collection::vec((0..4u8, 0..200usize, 0..130usize), 0..60)) {
            const COUNT: usize = 200;
            let (mut places, mut map, mut set) = (Places::new(COUNT), BTreeMap::new(), BTreeSet::new());
            let mut next = 0;
            for (what, from, length) in steps {
                let range = from..(from + length).min(COUNT);
                match what {
                    0 => {
                        let range = from..range.clone().find(|at| map.contains_key(at)).unwrap_or(range.end);
                        let granules: Vec<_> = range.clone().map(|_| { next += 1; RawPhysical(next) }).collect();
                        places.put(range.start, &granules);
                        map.extend(range.zip(granules));
                    }
                    1 => {
                        let taken: Vec<_> = range.clone().filter_map(|at| map.remove(&at)).collect();
                        prop_assert_eq!(places.forget(range), taken);
                    }
                    2 => {
                        places.leave(range.clone());
                        set.extend(range);
                    }
                    _ => {
                        prop_assert_eq!(places.was_left(range.clone()), set.range(range.clone()).next().is_some());
                        let behind: Vec<_> = range.clone().map(|at| map.get(&at).copied()).collect();
                        prop_assert_eq!(places.of(range).collect::<Vec<_>>(), behind);
                    }
                }
            }
        }
    }
}
