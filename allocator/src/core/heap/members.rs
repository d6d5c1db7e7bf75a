//! Sets of blocks or streams: one bit for each number.
//!
//! A block that is given back is joined with those neighbours that are in the index. Most are not,
//! and their bits are close together in the cache, where their records are not. So it is with the
//! search for holes beside free blocks.

/// A set of numbers, as long as the greatest that was ever in it.
#[derive(Debug, Default)]
pub(super) struct Members(Vec<u64>);

impl Members {
    #[inline]
    fn place(id: impl Into<u32>) -> (usize, u64) {
        let number: u32 = id.into();
        (number as usize / 64, 1 << (number % 64))
    }

    #[inline]
    pub(super) fn contains(&self, id: impl Into<u32>) -> bool {
        let (word, bit) = Members::place(id);
        self.0.get(word).is_some_and(|word| word & bit != 0)
    }

    #[inline]
    pub(super) fn insert(&mut self, id: impl Into<u32>) {
        let (word, bit) = Members::place(id);
        if word >= self.0.len() {
            self.grow(word);
        }
        self.0[word] |= bit;
    }

    #[cold]
    fn grow(&mut self, word: usize) {
        self.0.resize(word + 1, 0);
    }

    /// Takes out a number, which must be in the set.
    #[inline]
    pub(super) fn remove(&mut self, id: impl Into<u32>) {
        let (word, bit) = Members::place(id);
        self.0[word] &= !bit;
    }

    /// The numbers in the set, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        (0_u32..).zip(&self.0).flat_map(|(word, &bits)| {
            let rest = std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)));
            rest.take_while(|&bits| bits != 0).map(move |bits| word * u64::BITS + bits.trailing_zeros())
        })
    }

    /// Number of members.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}
