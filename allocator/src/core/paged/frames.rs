//! Frames: physical memory as the driver knows it. A frame has one handle, and is as large as one
//! granule or several; it is created, mapped, unmapped and released as a whole. Each driver call
//! for a frame costs about the same at any size, so large frames save calls; but a frame
//! moves only when no part of it is in use, so small ones save memory (`policy.rs` says which
//! are made).
//!
//! Frames are made as large as a power of two, so that a few of them add up to any number of
//! granules.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use aquifer_device::RawPhysical;

use crate::types::{BlockId, Use};

/// Physical memory with one handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) physical: RawPhysical,
    /// How many granules it is as large as.
    pub(crate) granules: NonZeroU32,
}

impl Frame {
    pub(crate) fn new(physical: RawPhysical, granules: u32) -> Frame {
        Frame { physical, granules: NonZeroU32::new(granules).unwrap_or(NonZeroU32::MIN) }
    }

    pub(crate) fn granules(self) -> u64 {
        self.granules.get().into()
    }
}

/// Addresses at which frames are mapped that moved elsewhere, or that another capture of the pool
/// has elsewhere, too (`trim.rs`).
#[derive(Debug)]
pub(crate) struct OldMapping {
    pub(crate) block: BlockId,
    pub(crate) range: Range<u64>,
    pub(crate) last_use: Use,
    /// Where they moved.
    pub(crate) window: Range<u64>,
    /// Frames there that did not move, because the remap failed. They become spare.
    pub(crate) unmoved: Vec<Frame>,
}

/// How many granules some frames have together.
pub(crate) fn granules_of(frames: &[Frame]) -> u64 {
    frames.iter().map(|frame| frame.granules()).sum()
}

/// The sizes of frames, none larger than `largest`, that add up to a number of granules. Largest
/// first.
pub(crate) fn sizes(granules: u64, largest: u32) -> impl Iterator<Item = u32> {
    let largest = u64::from(largest.max(1));
    let mut left = granules;
    std::iter::from_fn(move || {
        let power = 1_u64 << left.checked_ilog2()?;
        let size = power.min(largest);
        left -= size;
        u32::try_from(size).ok()
    })
}

/// Frames that are mapped nowhere, by size.
#[derive(Debug, Default)]
pub(crate) struct LooseFrames {
    by_size: BTreeMap<u32, Vec<RawPhysical>>,
    granules: u64,
}

impl LooseFrames {
    /// How many granules they have together.
    pub(crate) fn granules(&self) -> u64 {
        self.granules
    }

    pub(crate) fn add(&mut self, frame: Frame) {
        self.by_size.entry(frame.granules.get()).or_default().push(frame.physical);
        self.granules += frame.granules();
    }

    /// The sizes that there are, smallest first, each with the number of frames.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u32, usize)> + '_ {
        self.by_size.iter().map(|(&size, frames)| (size, frames.len())).filter(|&(_, count)| count > 0)
    }

    /// Takes out a frame of this size.
    pub(crate) fn take_sized(&mut self, size: u32) -> Option<Frame> {
        let physical = self.by_size.get_mut(&size)?.pop()?;
        self.granules -= u64::from(size);
        Some(Frame::new(physical, size))
    }

    /// Takes out frames of at least `granules` granules together, or all: as many as it takes,
    /// exactly as large if that is possible.
    pub(crate) fn take(&mut self, granules: u64) -> LooseFrames {
        let mut taken = LooseFrames::default();
        let largest_first: Vec<u32> = self.by_size.keys().rev().copied().collect();
        for size in largest_first {
            while taken.granules + u64::from(size) <= granules
                && let Some(frame) = self.take_sized(size)
            {
                taken.add(frame);
            }
        }
        // All that are left are larger than what is missing.
        if taken.granules < granules {
            taken.extend(self.pop());
        }
        taken
    }

    /// Takes out any frame, the smallest first.
    pub(crate) fn pop(&mut self) -> Option<Frame> {
        let (size, _) = self.counts().next()?;
        self.take_sized(size)
    }

    /// Every frame.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Frame> + '_ {
        self.by_size.iter().flat_map(|(&size, frames)| frames.iter().map(move |&physical| Frame::new(physical, size)))
    }
}

impl Extend<Frame> for LooseFrames {
    fn extend<T: IntoIterator<Item = Frame>>(&mut self, frames: T) {
        frames.into_iter().for_each(|frame| self.add(frame));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn loose(sizes: &[u32]) -> LooseFrames {
        let mut loose = LooseFrames::default();
        loose.extend(sizes.iter().zip(1..).map(|(&size, number)| Frame::new(RawPhysical(number), size)));
        loose
    }

    fn sizes_of(frames: &LooseFrames) -> Vec<u32> {
        frames.iter().map(|frame| frame.granules.get()).collect()
    }

    #[test]
    fn sizes_add_up() {
        assert_eq!(sizes(37, 32).collect::<Vec<_>>(), [32, 4, 1]);
        assert_eq!(sizes(7, 2).collect::<Vec<_>>(), [2, 2, 2, 1]);
        assert_eq!(sizes(0, 8).count(), 0);
        assert_eq!(sizes(3, 0).collect::<Vec<_>>(), [1, 1, 1]);
    }

    #[test]
    fn frames_are_taken_exactly_if_they_can_be() {
        let mut from = loose(&[8, 4, 1, 1]);
        assert_eq!(sizes_of(&from.take(6)), [1, 1, 4]);
        assert_eq!(sizes_of(&from.take(3)), [8], "one that is too large rather than too few");
        assert_eq!((from.granules(), from.take(5).granules()), (0, 0));
    }

    proptest! {
        #[test]
        fn no_frame_is_lost(powers in prop::collection::vec(0..6_u32, 0..20), granules in 0..200_u64) {
            let all: Vec<u32> = powers.iter().map(|power| 1 << power).collect();
            let mut from = loose(&all);
            let total = from.granules();
            let taken = from.take(granules);
            prop_assert_eq!(taken.granules() + from.granules(), total);
            prop_assert!(taken.granules() >= granules.min(total));
            // No more than that: without the largest they would not do.
            let largest = sizes_of(&taken).into_iter().max().map_or(0, u64::from);
            prop_assert!(taken.granules() - largest < granules.max(1));
            let mut numbers: Vec<u64> = taken.iter().chain(from.iter()).map(|frame| frame.physical.0).collect();
            numbers.sort_unstable();
            prop_assert_eq!(numbers, (1..=all.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!(granules_of(&taken.iter().collect::<Vec<_>>()), taken.granules());
            prop_assert_eq!(std::iter::from_fn(|| from.pop()).count() + taken.iter().count(), all.len());
        }
    }
}
