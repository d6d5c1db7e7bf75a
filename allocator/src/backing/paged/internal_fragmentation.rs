//! Internal fragmentation: granules that lie wholly in free blocks and cannot move, because their
//! frames are partly in use.
//!
//! It is counted for every limit on the size of frames: a frame of the size of a power of two, were
//! it made of smaller ones of one size, would lose only what is free of those that are partly in
//! use.

use std::ops::{AddAssign, Range};

/// The number of limits that are distinguished: 1, 2, 4, and so on, up to 32 granules. Larger ones
/// count as no limit.
const LIMITS: usize = 6;

/// Granules that cannot move, and how many could not if no frame were larger than a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InternalFragmentation {
    /// By the binary logarithm of the limit.
    by_limit: [u64; LIMITS],
    all: u64,
}

impl InternalFragmentation {
    /// Counts the granules `free` of a frame of `size` granules, of which others are in use.
    pub(crate) fn add(&mut self, size: usize, free: Range<usize>) {
        let count = free.len() as u64;
        self.all += count;
        for (log2, fragmentation) in self.by_limit.iter_mut().enumerate() {
            let limit = 1 << log2;
            let whole = if limit < size { (free.end / limit).saturating_sub(free.start.div_ceil(limit)) } else { 0 };
            *fragmentation += count - (whole as u64) * (limit as u64);
        }
    }

    /// Granules that cannot move.
    pub(crate) fn granules(&self) -> u64 {
        self.all
    }

    /// Granules that could not move if no frame had more than `limit` granules, a power of two.
    pub(crate) fn below(&self, limit: u32) -> u64 {
        self.by_limit.get(limit.max(1).ilog2() as usize).copied().unwrap_or(self.all)
    }
}

impl AddAssign for InternalFragmentation {
    fn add_assign(&mut self, other: InternalFragmentation) {
        self.all += other.all;
        self.by_limit.iter_mut().zip(other.by_limit).for_each(|(sum, more)| *sum += more);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn smaller_frames_strand_less() {
        let mut fragmentation = InternalFragmentation::default();
        fragmentation.add(8, 3..8);
        assert_eq!([1, 2, 4, 8, 64].map(|limit| fragmentation.below(limit)), [0, 1, 1, 5, 5]);
        fragmentation += fragmentation;
        assert_eq!((fragmentation.granules(), fragmentation.below(2)), (10, 2));
    }

    proptest! {
        #[test]
        fn counts_as_frame_by_frame(log2 in 1..8_u32, from in 0..128_usize, to in 0..128_usize, limit in 0..6_u32) {
            let size = 1_usize << log2;
            let free = from.min(to).min(size)..from.max(to).min(size);
            prop_assume!(free.len() < size);
            let mut fragmentation = InternalFragmentation::default();
            fragmentation.add(size, free.clone());
            let smaller = (1 << limit).min(size);
            let wholly_free = |frame: usize| free.start <= frame * smaller && (frame + 1) * smaller <= free.end;
            let movable = (0..size / smaller).filter(|&frame| wholly_free(frame)).count() * smaller;
            prop_assert_eq!(fragmentation.below(1 << limit), (free.len() - movable) as u64);
            prop_assert_eq!(fragmentation.granules(), free.len() as u64);
        }
    }
}
