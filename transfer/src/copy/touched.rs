//! Which addresses some copies touch.

use std::collections::BTreeMap;

use aquifer_device::DevicePtr;

/// A set of addresses, as disjoint ranges by their start, which do not adjoin.
#[derive(Debug, Default)]
pub(super) struct Touched(BTreeMap<u64, u64>);

impl Touched {
    /// Adds a range.
    pub(super) fn add(&mut self, ptr: DevicePtr, bytes: u64) {
        let (mut start, mut end) = (ptr.0, ptr.0.saturating_add(bytes));
        while let Some((&from, &to)) = self.0.range(..=end).next_back()
            && to >= start
        {
            self.0.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.0.insert(start, end);
    }

    /// Whether any address of a range is in the set.
    pub(super) fn overlaps(&self, ptr: DevicePtr, bytes: u64) -> bool {
        let end = ptr.0.saturating_add(bytes);
        self.0.range(..end).next_back().is_some_and(|(_, &to)| to > ptr.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_of_ranges_is_a_set_of_addresses(ranges in prop::collection::vec((0..200u64, 1..20u64), 0..40)) {
            let (mut touched, mut model) = (Touched::default(), [false; 256]);
            for (start, bytes) in ranges {
                let own = usize::try_from(start).unwrap()..usize::try_from(start + bytes).unwrap();
                prop_assert_eq!(touched.overlaps(DevicePtr(start), bytes), model[own.clone()].contains(&true));
                touched.add(DevicePtr(start), bytes);
                model[own].fill(true);
            }
            for at in 0..256u64 {
                prop_assert_eq!(touched.overlaps(DevicePtr(at), 1), model[usize::try_from(at).unwrap()]);
            }
        }
    }
}
