//! How large new frames are.
//!
//! A driver call costs about as much for a frame of 32 granules as for one. But a frame moves only when no part of it is in use. What is
//! free in one that is partly in use serves only where it lies; it is *stranded*. So frames are large as long as little memory is held beyond
//! the peak of use, and become smaller where stranded memory is a large part of what is: each time memory is bought, the limit on the size of
//! new frames is halved or doubled.
//!
//! Whatever the limit, a frame is at most [`SHARE`] of its pool, so that small programs have small frames, and may be [`FILL_SHARE`] of what
//! is mapped with it: the ends of a large block strand little of it.

/// Granules of the largest frames, unless the configuration says how large they are: 64 MiB where a granule has 2.
const LARGEST: u32 = 32;
/// A frame has at most its pool's memory divided by this, unless the configuration says how large frames are.
const SHARE: u64 = 64;
/// A frame may have what is mapped with it divided by this, however low the limit.
const FILL_SHARE: u64 = 256;
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

    /// Granules of the largest frame that may be made for a pool that has, or is about to have, `pool` granules, when `fill` granules are
    /// mapped together.
    pub(crate) fn largest(&self, pool: u64, fill: u64) -> u32 {
        let power =
            |granules: u64| granules.checked_ilog2().map_or(1, |power| 1_u32.checked_shl(power).unwrap_or(u32::MAX));
        let share = if self.is_given { self.largest } else { power(pool / SHARE) };
        self.limit.max(power(fill / FILL_SHARE)).min(share).min(self.largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_become_smaller_while_much_is_stranded() {
        let mut size = FrameSize::new(None);
        let large = 1 << 20;
        assert_eq!(size.largest(large, 10), 32);
        let much = large + large / MUCH + 1;
        size.note(large / MUCH, much, large);
        assert_eq!(size.largest(large, 10), 16);
        size.note(0, much, large);
        assert_eq!(size.largest(large, 10), 16, "what is held for other reasons does not count");
        (0..10).for_each(|_| size.note(large, much, large));
        assert_eq!(size.largest(large, 10), 1);
        assert_eq!(size.largest(large, 2 * FILL_SHARE), 2, "large blocks have larger ones");
        (0..10).for_each(|_| size.note(0, large, large));
        assert_eq!(size.largest(large, 10), 32);
    }

    #[test]
    fn small_pools_have_small_frames_unless_asked_for() {
        let granules = [0, 1, 127, 128, 300, 1 << 40];
        assert_eq!(granules.map(|pool| FrameSize::new(None).largest(pool, 1)), [1, 1, 1, 2, 4, 32]);
        assert_eq!(granules.map(|pool| FrameSize::new(Some(8)).largest(pool, 1)), [8; 6]);
        assert_eq!(FrameSize::new(Some(1)).largest(1 << 40, 1 << 40), 1);
    }
}
