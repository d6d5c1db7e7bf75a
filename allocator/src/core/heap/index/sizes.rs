//! Bins of sizes, and the bitmap of occupied bins.

use crate::size_class::MIN_BLOCK;

/// Binary logarithm of the number of bins per doubling.
pub(super) const SUB_BITS: u32 = 6;
const SUB: u64 = 1 << SUB_BITS;
/// Number of bins. Blocks from 16 TiB on share the last one.
pub(super) const BINS: usize = 2048;

/// The bin of a size, not 0: one for each multiple of [`MIN_BLOCK`] up to [`SUB`] of them, then
/// [`SUB`] bins a doubling. All sizes of a bin are smaller than all of the next one.
///
/// Round sizes are the greatest of their bin, not the least, because segments have round sizes, and
/// the rest should be in the same bin when a little is cut off.
#[inline]
pub(in crate::core::heap) fn bin_of(size: u64) -> usize {
    let last = size.wrapping_sub(1) / MIN_BLOCK;
    let exponent = (last | SUB).ilog2() - SUB_BITS;
    let bin = u64::from(exponent) * SUB + (last >> exponent);
    usize::try_from(bin).unwrap_or(usize::MAX).min(BINS - 1)
}

/// The occupied bins: one bit for each bin, and one bit for each word of those bits.
#[derive(Debug, Default)]
pub(super) struct Occupied {
    bins: [u64; BINS / 64],
    words: u64,
}

impl Occupied {
    /// Notes whether a bin is occupied.
    #[inline]
    pub(super) fn set_to(&mut self, bin: usize, occupied: bool) {
        let with = |word: u64, bit: usize, is_set: bool| word & !(1 << bit) | u64::from(is_set) << bit;
        let word = &mut self.bins[bin / 64];
        *word = with(*word, bin % 64, occupied);
        self.words = with(self.words, bin / 64, *word != 0);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// The first occupied bin from `from` on.
    #[inline]
    pub(super) fn first_from(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let here = self.bins.get(word)? & (u64::MAX << (from % 64));
        // Without a branch on its position, which follows no pattern.
        let later = (self.words & (u64::MAX << 1 << word)).trailing_zeros() as usize;
        let beyond = self.bins.get(later).copied().unwrap_or(0);
        let (word, bits) = std::hint::select_unpredictable(here != 0, (word, here), (later, beyond));
        (bits != 0).then(|| word * 64 + bits.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_contiguous_and_ordered() {
        let mut last = bin_of(MIN_BLOCK);
        for units in 2..100_000 {
            let bin = bin_of(units * MIN_BLOCK);
            assert!(bin == last || bin == last + 1, "units {units}");
            last = bin;
        }
        assert_eq!((bin_of(MIN_BLOCK), bin_of(u64::MAX)), (0, BINS - 1));
        let mib = 1 << 20;
        assert!([2, 20, 32, 64].iter().all(|n| bin_of(n * mib) == bin_of(n * mib - 1)), "round sizes end their bins");
        assert!(bin_of((16 << 40) - 1) < BINS);
    }

    #[test]
    fn a_bin_is_at_most_a_64th_of_its_sizes_wide() {
        let mut least = 1_u64;
        for units in 1..1_u64 << 20 {
            if bin_of(units * MIN_BLOCK) != bin_of(least * MIN_BLOCK) {
                least = units;
            }
            assert!((units - least) << SUB_BITS <= least, "{least} and {units} share a bin");
        }
    }
}
