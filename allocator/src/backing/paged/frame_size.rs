//! How large new frames are.
//!
//! A driver call costs about as much for a frame of 8 granules as for one. But a frame moves only
//! when no part of it is in use. What is free in one that is partly in use serves only where it
//! lies; it is *internal fragmentation* (`internal_fragmentation.rs`). So three bounds hold for
//! frames that are made:
//! * the size of the block that they are made for, divided by [`BLOCK_SHARE`]; or [`ALWAYS`]
//!   granules, or the largest that divides the block without remainder, if that is more, but no
//!   more than half of the block. Each border between a free and a live block may cut a frame, so
//!   where blocks are small, frames have to be, unless borders fall between frames because blocks
//!   consist of whole ones. Internal fragmentation shows too late to decide this: the program has
//!   most of its memory then;
//! * their pool's memory, divided by [`SHARE`], so that small programs have small frames;
//! * a limit that follows internal fragmentation. Each time memory is bought, it becomes the
//!   largest for which frames such as there are would lose no more than a [`BUDGET`] allows, but at
//!   most doubles. It counts only where memory moves, or will once the device is done with it:
//!   while all that a program frees serves where it lies, small frames would not help. Nor does it
//!   count where memory moves again and again ([`Prospect::Recurs`]), if the device has enough
//!   left: each repetition pays for each frame.

use super::internal_fragmentation::InternalFragmentation;

/// Granules of the largest frames, unless the configuration says how large they are: 16 MiB where a
/// granule has 2.
const LARGEST: u32 = 8;
/// The same where memory moves again and again: 64 MiB.
const LARGEST_RECURRING: u32 = 32;
/// A frame has at most its pool's memory divided by this, unless the configuration says how large
/// frames are.
const SHARE: u64 = 64;
/// A frame has at most its block divided by this, or [`ALWAYS`] granules, unless the block consists
/// of whole frames or the configuration says how large frames are.
const BLOCK_SHARE: u64 = 16;
/// Granules of frames that are made regardless of that share, for blocks that are twice as large.
const ALWAYS: u64 = 2;
/// What is held beyond the peak of use should stay below that peak divided by this. What is held
/// for other reasons leaves less for internal fragmentation.
const BUDGET: u64 = 144;

/// What is known about memory that is about to be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prospect {
    /// Nothing moves, or will once the device is done with it.
    Grows,
    /// Memory moves.
    Moves,
    /// It moves where it moved before, the program returns to such points often (`recurrence.rs`),
    /// and the device has memory to spare for internal fragmentation.
    Recurs,
}

/// The length of a block, as far as it matters for the size of its frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockLength {
    /// Rounded up.
    granules: u64,
    /// Granules of the largest frame of which the block has a whole number; 1 if it has no whole
    /// number of granules.
    divisor: u64,
}

impl BlockLength {
    pub(crate) fn new(bytes: u64, granule: u64) -> BlockLength {
        let granules = bytes.div_ceil(granule);
        let divisor = if bytes.is_multiple_of(granule) { granules & granules.wrapping_neg() } else { 1 };
        BlockLength { granules, divisor }
    }
}

/// The limit on the size of frames.
#[derive(Debug)]
pub(crate) struct FrameSize {
    /// In granules; a power of two.
    limit: u32,
    largest: u32,
    /// True if the configuration says how large frames are.
    is_given: bool,
}

impl FrameSize {
    /// Frames of up to `given` granules, a power of two, if the configuration says so.
    pub(crate) fn new(given: Option<u32>) -> FrameSize {
        let largest = given.unwrap_or(LARGEST);
        FrameSize { limit: largest, largest, is_given: given.is_some() }
    }

    /// Adapts the limit: memory is bought, after which `reserved` granules would be held, where at
    /// most `peak` were in use so far, and some are internal fragmentation.
    pub(crate) fn note(&mut self, fragmentation: &InternalFragmentation, reserved: u64, peak: u64) {
        let other = reserved.saturating_sub(peak).saturating_sub(fragmentation.granules());
        let budget = (peak / BUDGET).saturating_sub(other);
        let larger = self.limit.saturating_mul(2).min(self.largest);
        if fragmentation.below(larger) <= budget {
            self.limit = larger;
        }
        while self.limit > 1 && fragmentation.below(self.limit) > budget {
            self.limit /= 2;
        }
    }

    /// Granules of the largest frame that may be made for a block, in a pool that has, or is about
    /// to have, `pool` granules.
    pub(crate) fn largest(&self, pool: u64, block: BlockLength, prospect: Prospect) -> u32 {
        let limit = match prospect {
            Prospect::Moves => self.limit,
            Prospect::Recurs if !self.is_given => LARGEST_RECURRING,
            Prospect::Grows | Prospect::Recurs => self.largest,
        };
        let of_block = (block.granules / BLOCK_SHARE).max(ALWAYS.max(block.divisor).min(block.granules / 2));
        let share = power_of_two(of_block.min(pool / SHARE));
        if self.is_given { limit } else { limit.min(share) }
    }
}

/// The largest power of two that is not above a number, or 1.
fn power_of_two(granules: u64) -> u32 {
    granules.checked_ilog2().map_or(1, |log2| 1_u32.checked_shl(log2).unwrap_or(1 << 31))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: u64 = 1 << 20;
    const GRANULE: u64 = 2 << 20;

    /// A block of so many granules, less a bit.
    fn uneven(granules: u64) -> BlockLength {
        BlockLength::new(granules * GRANULE - 512, GRANULE)
    }

    /// Internal fragmentation of frames that are free but for one granule.
    fn internal_fragmentation(frames: u64, size: usize) -> InternalFragmentation {
        let mut fragmentation = InternalFragmentation::default();
        (0..frames).for_each(|_| fragmentation.add(size, 1..size));
        fragmentation
    }

    fn limit(size: &FrameSize) -> u32 {
        size.largest(MUCH, uneven(MUCH), Prospect::Moves)
    }

    #[test]
    fn frames_are_as_large_as_what_they_strand_allows() {
        let mut size = FrameSize::new(None);
        let (peak, budget) = (MUCH, MUCH / BUDGET);
        assert_eq!(limit(&size), 8);
        // Of a frame of 8 granules, 7 cannot move; of smaller ones it would be 3, 1 and 0.
        for (frames, expected) in [(budget / 7, 8), (budget / 3, 4), (budget, 2), (budget + 1, 1)] {
            let fragmentation = internal_fragmentation(frames, 8);
            size.note(&fragmentation, peak + fragmentation.granules(), peak);
            assert_eq!(limit(&size), expected);
            size.note(&fragmentation, peak + fragmentation.granules(), peak);
            assert_eq!(limit(&size), expected, "it does not swing");
        }
        for expected in [2, 4, 8, 8] {
            size.note(&InternalFragmentation::default(), peak, peak);
            assert_eq!(limit(&size), expected);
        }
    }

    #[test]
    fn what_is_held_for_other_reasons_leaves_less() {
        let mut size = FrameSize::new(None);
        let (peak, fragmentation) = (MUCH, internal_fragmentation(100, 8));
        size.note(&fragmentation, peak + fragmentation.granules() + peak / BUDGET - 300, peak);
        assert_eq!(limit(&size), 4);
        size.note(&fragmentation, 2 * peak, peak);
        let otherwise = [Prospect::Grows, Prospect::Recurs].map(|prospect| size.largest(MUCH, uneven(MUCH), prospect));
        assert_eq!((limit(&size), otherwise), (1, [8, 32]), "it counts only where memory moves, but not for ever");
        size.note(&InternalFragmentation::default(), 2 * peak, peak);
        assert_eq!(limit(&size), 2, "without internal fragmentation, small frames save nothing");
    }

    #[test]
    fn small_blocks_and_small_pools_have_small_frames_unless_asked_for() {
        let granules = [0, 1, 127, 128, 300, MUCH];
        let of_pool = |pool| FrameSize::new(None).largest(pool, uneven(MUCH), Prospect::Moves);
        assert_eq!(granules.map(of_pool), [1, 1, 1, 2, 4, 8]);
        let of_block = |block| FrameSize::new(None).largest(MUCH, uneven(block), Prospect::Grows);
        assert_eq!([1, 3, 4, 63, 64, 127, 128, MUCH].map(of_block), [1, 1, 2, 2, 4, 4, 8, 8]);
        let given = |pool| FrameSize::new(Some(32)).largest(pool, uneven(1), Prospect::Recurs);
        assert_eq!(granules.map(given), [32; 6]);
        assert_eq!(FrameSize::new(Some(1)).largest(MUCH, uneven(MUCH), Prospect::Recurs), 1);
    }

    #[test]
    fn blocks_of_whole_frames_have_large_ones() {
        let bytes = [1, 2, 4, 6, 8, 12, 16, 17, 24, 64].map(|granules| granules * GRANULE);
        let largest = |bytes| FrameSize::new(None).largest(MUCH, BlockLength::new(bytes, GRANULE), Prospect::Grows);
        assert_eq!(bytes.map(largest), [1, 1, 2, 2, 4, 4, 8, 2, 8, 8]);
        assert_eq!(bytes.map(|bytes| largest(bytes + 512)), [1, 1, 2, 2, 2, 2, 2, 2, 2, 4], "not those beyond one");
        assert_eq!(largest(0), 1);
    }
}
