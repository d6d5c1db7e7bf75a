//! Mapped memory: what is mapped where, what is pinned, and how much the device has left.

use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) mod deferred_release;
pub(crate) mod frames;
pub(crate) mod granules;
pub(crate) mod layout;
pub(crate) mod places;

/// For so many plans one answer of the device is good where it has plenty: other programs may take
/// some meanwhile.
const GOOD_FOR: u32 = 16;

/// The most bytes that may be held, and for how many more plans that is good.
#[derive(Debug, Default)]
pub(crate) struct Capacity {
    bytes: u64,
    good_for: u32,
}

impl Capacity {
    /// Notes that no more than so many bytes can be held now.
    pub(crate) fn set(&mut self, bytes: u64) {
        *self = Capacity { bytes, good_for: GOOD_FOR };
    }

    /// True if the device is to be asked before the next plan: always while it has less than
    /// `plenty`, but some.
    pub(crate) fn is_old(&self, held: u64, plenty: u64) -> bool {
        self.good_for == 0 || (held + 1..held.saturating_add(plenty)).contains(&self.bytes)
    }

    /// Bytes that the device can give beyond those that are held; no limit if that is not known.
    pub(crate) fn left(&mut self, held: u64) -> u64 {
        let Some(fewer) = self.good_for.checked_sub(1) else { return u64::MAX };
        self.good_for = fewer;
        self.bytes.saturating_sub(held)
    }
}

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

    pub(crate) fn add(&mut self, addr: u64) {
        *self.0.entry(addr).or_default() += 1;
    }

    pub(crate) fn remove(&mut self, addr: u64) {
        if let Some(count) = self.0.get_mut(&addr) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&addr);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_good_for_a_while() {
        let mut capacity = Capacity::default();
        assert_eq!(capacity.left(0), u64::MAX, "not known");
        capacity.set(100);
        assert_eq!([50, 51, 100].map(|held| capacity.is_old(held, 50)), [false, true, false]);
        assert_eq!([40, 100, 120].map(|held| capacity.left(held)), [60, 0, 0]);
        (3..GOOD_FOR).for_each(|_| assert_eq!(capacity.left(0), 100));
        assert_eq!((capacity.left(0), capacity.is_old(0, 0)), (u64::MAX, true), "the device has to be asked again");
    }
}
