//! Free blocks by size, and then by address: PyTorch's best fit.
//!
//! Blocks of similar sizes are in a bin, a sorted list that is short because there are many bins. A
//! bitmap tells which bins have blocks.

use super::UNIT;

/// Bins from each power of two to the next.
const STEPS: usize = 32;
/// Bins for all sizes in units, up to 2^64.
const BINS: usize = 64 * STEPS;

/// A free block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry {
    pub(super) size: u64,
    pub(super) place: u64,
    pub(super) id: u32,
}

impl Entry {
    /// Orders entries by size and then by place, as one number.
    #[inline]
    fn key(&self) -> u128 {
        u128::from(self.size) << 64 | u128::from(self.place)
    }
}

#[derive(Debug)]
pub(super) struct Index {
    bins: Vec<Vec<Entry>>,
    /// A bit for each bin with blocks.
    occupied: [u64; BINS / 64],
}

impl Default for Index {
    fn default() -> Index {
        Index { bins: vec![Vec::new(); BINS], occupied: [0; BINS / 64] }
    }
}

/// The bin of a size. Small sizes have one each.
fn bin_of(size: u64) -> usize {
    let units = size / UNIT;
    let doublings = units.checked_ilog2().unwrap_or(0).saturating_sub(STEPS.ilog2());
    doublings as usize * STEPS + usize::try_from(units >> doublings).unwrap_or(0)
}

impl Index {
    pub(super) fn insert(&mut self, entry: Entry) {
        let bin = bin_of(entry.size);
        let blocks = &mut self.bins[bin];
        let at = blocks.partition_point(|other| other.key() < entry.key());
        blocks.insert(at, entry);
        self.occupied[bin / 64] |= 1 << (bin % 64);
    }

    /// Removes a block that is there.
    pub(super) fn remove(&mut self, entry: Entry) {
        let bin = bin_of(entry.size);
        let blocks = &mut self.bins[bin];
        let at = blocks.partition_point(|other| other.key() < entry.key());
        debug_assert_eq!(blocks.get(at), Some(&entry));
        blocks.remove(at);
        if blocks.is_empty() {
            self.occupied[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// The smallest block that is large enough, at the lowest address.
    #[inline]
    pub(super) fn best_fit(&self, size: u64) -> Option<Entry> {
        let own = bin_of(size);
        let blocks = &self.bins[own];
        if let Some(found) = blocks.get(blocks.partition_point(|entry| entry.size < size)) {
            return Some(*found);
        }
        self.bins[self.occupied_from(own + 1)?].first().copied()
    }

    /// All blocks that are large enough, in order.
    pub(super) fn iter_from(&self, size: u64) -> impl Iterator<Item = Entry> {
        let own = bin_of(size);
        let bins = std::iter::successors(self.occupied_from(own), |bin| self.occupied_from(bin + 1));
        bins.flat_map(move |bin| {
            let blocks = &self.bins[bin];
            let from = if bin == own { blocks.partition_point(|entry| entry.size < size) } else { 0 };
            blocks[from..].iter().copied()
        })
    }

    fn occupied_from(&self, bin: usize) -> Option<usize> {
        let (mut word, mut mask) = (bin / 64, u64::MAX << (bin % 64));
        while let Some(bits) = self.occupied.get(word) {
            if bits & mask != 0 {
                return Some(word * 64 + (bits & mask).trailing_zeros() as usize);
            }
            (word, mask) = (word + 1, u64::MAX);
        }
        None
    }
}
