//! How large new frames are.
//!
//! A driver call costs about as much for a frame of 32 granules as for one. But a frame moves only when no part of it is in use. What is
//! free in one that is partly in use serves only where it lies; it is *stranded*. So three bounds hold for frames that are made:
//! * at most [`BLOCK_SHARE`] of the block that they are made for. Whatever a program frees, and leaves live beside it, about three quarters
//!   of each freed block can move;
//! * at most [`SHARE`] of their pool, so that small programs have small frames;
//! * a limit that follows what is stranded: each time memory is bought, it is halved if much is held beyond the peak of use and
//!   stranded memory is a large part of that, and doubled if little is. However low, it allows for [`LEAST_SHARE`] of the block.

/// Granules of the largest frames, unless the configuration says how large they are: 64 MiB where a granule has 2.
const LARGEST: u32 = 32;
/// A frame has at most its pool's memory divided by this, unless the configuration says how large frames are.
const SHARE: u64 = 64;
/// A frame has at most its block divided by this, unless the configuration says how large frames are.
const BLOCK_SHARE: u64 = 8;
/// A frame may have its block divided by this, however low the limit.
const LEAST_SHARE: u64 = 256;
/// Frames become smaller if more memory would be held beyond the peak of use than that peak divided by this,
const MUCH: u64 = 128;
/// and at least this part of it, as a divisor, is stranded;
const STRANDED_PART: u64 = 8;
/// they become larger again if it is at most the peak divided by this.
const LITTLE: u64 = 256;

/// The limit on the size of frames.
#[derive(Debug)]
pub(crate) struct FrameSize {
    /// In granules.
    limit: u32,
    largest: u32,
    /// True if the configuration says how large frames are.
    is_given: bool,
}

impl FrameSize {
    /// Frames of up to `given` granules, if the configuration says so.
    pub(crate) fn new(given: Option<u32>) -> FrameSize {
        let largest = given.unwrap_or(LARGEST);
        FrameSize { limit: largest, largest, is_given: given.is_some() }
    }

    /// Adapts the limit: memory is bought, after which `reserved` granules would be held, where at most `peak` were in use so far, and
    /// `stranded` are.
    pub(crate) fn note(&mut self, stranded: u64, reserved: u64, peak: u64) {
        let excess = reserved.saturating_sub(peak);
        if excess > peak / MUCH && stranded > excess / STRANDED_PART {
            self.limit = (self.limit / 2).max(1);
        } else if excess <= peak / LITTLE {
            self.limit = (self.limit * 2).min(self.largest);
        }
    }

    /// Granules of the largest frame that may be made for a block of `block` granules, in a pool that has, or is about to have, `pool`
    /// granules.
    pub(crate) fn largest(&self, pool: u64, block: u64) -> u32 {
        let limit = self.limit.max(power_of_two(block / LEAST_SHARE));
        let share = power_of_two((pool / SHARE).min(block / BLOCK_SHARE));
        limit.min(if self.is_given { self.largest } else { share }).min(self.largest)
    }
}

/// The largest power of two that is not above a number, or 1.
fn power_of_two(granules: u64) -> u32 {
    granules.checked_ilog2().map_or(1, |log2| 1_u32.checked_shl(log2).unwrap_or(1 << 31))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_become_smaller_while_much_is_stranded() {
        let mut size = FrameSize::new(None);
        let (large, block) = (1 << 20, 2 * LEAST_SHARE);
        assert_eq!(size.largest(large, block), 32);
        let much = large + large / MUCH + 1;
        size.note(large / MUCH, much, large);
        assert_eq!(size.largest(large, block), 16);
        size.note(0, much, large);
        assert_eq!(size.largest(large, block), 16, "what is held for other reasons does not count");
        (0..10).for_each(|_| size.note(large, much, large));
        assert_eq!([block / 2 - 1, block].map(|block| size.largest(large, block)), [1, 2]);
        (0..10).for_each(|_| size.note(0, large, large));
        assert_eq!(size.largest(large, block), 32);
    }

    #[test]
    fn small_blocks_and_small_pools_have_small_frames_unless_asked_for() {
        let granules = [0, 1, 127, 128, 300, 1 << 40];
        assert_eq!(granules.map(|pool| FrameSize::new(None).largest(pool, 1 << 40)), [1, 1, 1, 2, 4, 32]);
        assert_eq!([1, 15, 16, 100, 256].map(|block| FrameSize::new(None).largest(1 << 40, block)), [1, 1, 2, 8, 32]);
        assert_eq!(granules.map(|pool| FrameSize::new(Some(8)).largest(pool, 1)), [8; 6]);
        assert_eq!(FrameSize::new(Some(1)).largest(1 << 40, 1 << 40), 1);
    }
}
