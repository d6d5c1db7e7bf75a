//! How often each place is pinned.

use std::collections::BTreeMap;
use std::ops::Range;

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
