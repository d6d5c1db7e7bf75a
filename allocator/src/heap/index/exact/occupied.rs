//! The bitmap of occupied sizes: one bit for each size, one for each word of those bits, and one
//! for each word of these.

/// Sizes that the bitmap covers at most, in units: three levels of 64.
pub(super) const SIZES: usize = 64 * 64 * 64;

/// The sizes, in units, of which there is a block.
#[derive(Debug)]
pub(super) struct Occupied {
    /// One bit for each size, for as many sizes as [`Occupied::grow`] was asked for.
    sizes: Vec<u64>,
    /// One bit for each word of `sizes`. The last word is always empty: where a search goes that
    /// finds no other.
    words: [u64; 65],
    /// One bit for each word of `words`.
    groups: u64,
}

impl Default for Occupied {
    fn default() -> Self {
        Occupied { sizes: Vec::new(), words: [0; 65], groups: 0 }
    }
}

impl Occupied {
    /// Makes room for the sizes below `end`, at most [`SIZES`].
    pub(super) fn grow(&mut self, end: usize) {
        debug_assert!(end <= SIZES);
        self.sizes.resize(end.div_ceil(64), 0);
    }

    /// Notes that a size, for which there is room, is occupied. Returns whether it was.
    #[inline]
    pub(super) fn insert(&mut self, size: usize) -> bool {
        let (word, group, bit) = (size / 64, size / 64 / 64, 1 << (size % 64));
        let sizes = self.sizes[word];
        self.sizes[word] = sizes | bit;
        self.words[group] |= 1 << (word % 64);
        self.groups |= 1 << group;
        sizes & bit != 0
    }

    /// Notes that a size, which was occupied, is not any more. Without branches, because it follows
    /// no pattern whether a word becomes empty.
    #[inline]
    pub(super) fn remove(&mut self, size: usize) {
        let (word, group) = (size / 64, size / 64 / 64);
        self.sizes[word] &= !(1 << (size % 64));
        self.words[group] &= !(u64::from(self.sizes[word] == 0) << (word % 64));
        self.groups &= !(u64::from(self.words[group] == 0) << group);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups == 0
    }

    /// The first occupied size from `from` on. Without branches on where it is.
    #[inline]
    pub(super) fn first_from(&self, from: usize) -> Option<usize> {
        let (word, group) = (from / 64, from / 64 / 64);
        let here = self.sizes.get(word)? & (u64::MAX << (from % 64));
        let near = self.words[group] & (u64::MAX << 1 << (word % 64));
        // 64, where nothing is, if there is no later one.
        let later = (self.groups & (u64::MAX << 1 << group)).trailing_zeros() as usize;
        let far = self.words[later];
        let (group, words) = std::hint::select_unpredictable(near != 0, (group, near), (later, far));
        let next = group * 64 + words.trailing_zeros() as usize;
        let beyond = self.sizes.get(next).copied().unwrap_or(0);
        let (word, sizes) = std::hint::select_unpredictable(here != 0, (word, here), (next, beyond));
        (sizes != 0).then(|| word * 64 + sizes.trailing_zeros() as usize)
    }

    /// Every occupied size from `from` on, in order.
    pub(super) fn iter_from(&self, from: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(self.first_from(from), |size| self.first_from(size + 1))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        #[test]
        fn equals_a_set(
            end in prop_oneof![1..200_usize, 1..=SIZES],
            steps in prop::collection::vec((any::<usize>(), 0..130_usize, any::<bool>()), 1..200),
        ) {
            let (mut occupied, mut model) = (Occupied::default(), BTreeSet::new());
            prop_assert_eq!(occupied.first_from(0), None);
            occupied.grow(end);
            for (far, near, is_set) in steps {
                let size = if far % 2 == 0 { far % end } else { near % end };
                if is_set {
                    prop_assert_eq!(occupied.insert(size), !model.insert(size));
                } else if model.remove(&size) {
                    occupied.remove(size);
                }
                for from in [0, near, size, size + 1, far % SIZES] {
                    prop_assert_eq!(occupied.first_from(from), model.range(from..).next().copied());
                }
                prop_assert!(occupied.iter_from(near).eq(model.range(near..).copied()));
            }
        }
    }
}
