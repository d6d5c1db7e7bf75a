//! The layout of a remap: which sizes of frames fill which range, which of them have to be made,
//! and which frames are broken for that. Pure arithmetic, decided before the driver is called
//! (`carry_out.rs`).
//!
//! Frames that there are come first, large ones before small ones. What they do not fill is filled
//! with new frames, whose memory comes from the device, as far as that was planned, and otherwise
//! from frames that fit nowhere, or are too small: those are *broken*, that is, released, and others
//! made of the memory.
//!
//! Frames that are still mapped elsewhere (`../remap/trim.rs`) are never broken. They come before
//! all others, whatever their size; only those are chosen that have room ([`FrameRoom`]).

use std::ops::Range;

use super::frames::{LooseFrames, sizes};

/// Aligned stretches of addresses that get memory as a whole, as far as there is none: a granule
/// each, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slots {
    /// Bytes of a granule, and of a slot: powers of two.
    pub(crate) granule: u64,
    pub(crate) bytes: u64,
}

impl Slots {
    /// The addresses of the slots that a range touches.
    pub(crate) fn around(self, range: Range<u64>) -> Range<u64> {
        range.start / self.bytes * self.bytes..range.end.next_multiple_of(self.bytes)
    }

    /// The granules of whole slots that have no more than so many bytes.
    pub(crate) fn whole(self, bytes: u64) -> u64 {
        bytes / self.bytes * (self.bytes / self.granule)
    }
}

/// The alignment of reservations, where the driver gives such addresses. No address counts as more
/// aligned, so that a program gets the same frames wherever its reservations are.
pub(crate) const ALIGNMENT: u64 = 256 << 20;

/// Lengths, in granules, of the two parts of a range to fill: below and above the first of the most
/// aligned addresses in it. Frames whose sizes ascend in the one and descend in the other lie at
/// multiples of their size.
pub(crate) fn parts(range: &Range<u64>, granule: u64) -> [u64; 2] {
    let Range { start, end } = *range;
    let common = (start.wrapping_sub(1) ^ end).checked_ilog2().unwrap_or(0);
    let most = if start < end { (end >> common << common).max(start) } else { start };
    let border = start.checked_next_multiple_of(ALIGNMENT).filter(|&first| first <= end).unwrap_or(most);
    [(border - start) / granule, (end - border) / granule]
}

/// Which frames take part in a remap, by their granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameSizes {
    /// Of the largest that are made.
    made: u32,
    /// Of the largest that are mapped as they are.
    kept: u32,
    /// Of a slot. Smaller ones fill none: one is made of their memory, as each costs driver time
    /// whenever it moves.
    slot: u32,
}

impl FrameSizes {
    /// Every frame is one granule: for memory that is given back granule by granule.
    pub(crate) const GRANULE: FrameSizes = FrameSizes { made: 1, kept: 1, slot: 1 };

    /// For a heap's region where little is left: frames stay as they are, and granules are made.
    pub(crate) const SMALL: FrameSizes = FrameSizes { kept: u32::MAX, ..FrameSizes::GRANULE };

    /// For a heap's region: frames stay as they are, and of at most so many bytes are made.
    pub(crate) fn in_slots(slots: Slots, frame: u64) -> FrameSizes {
        let granules = |bytes: u64| u32::try_from(bytes / slots.granule).unwrap_or(1);
        FrameSizes { made: granules(frame), kept: u32::MAX, slot: granules(slots.bytes) }
    }
}

impl Default for FrameSizes {
    fn default() -> FrameSizes {
        FrameSizes::GRANULE
    }
}

/// Sizes, in granules, of the frames that take part in a remap.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// For each range to fill, its frames from the low end up.
    pub(crate) ranges: Vec<Vec<u32>>,
    /// Frames to create of memory that the device has left. They are created first, because this is
    /// what fails for lack of memory.
    pub(crate) first: Vec<u32>,
    /// Frames to break once they are mapped nowhere.
    pub(crate) broken: Vec<u32>,
    /// Frames to create from the broken frames' memory, to fill the ranges.
    pub(crate) then: Vec<u32>,
    /// Frames to create from the rest of that memory; they become spare.
    pub(crate) surplus: Vec<u32>,
}

impl Layout {
    /// Fills ranges with frames that there are, first with the `unbroken` ones, and with `create`
    /// granules from the device. Together they suffice. All but the unbroken ones have the `sizes`.
    pub(crate) fn of(
        unbroken: &LooseFrames,
        there: &LooseFrames,
        fill: &[Range<u64>],
        granule: u64,
        create: u64,
        sizes: FrameSizes,
    ) -> Layout {
        let lengths: Vec<u64> = fill.iter().flat_map(|range| parts(range, granule)).collect();
        let mut layout = Layout::new(unbroken, there, &lengths, create, sizes);
        let mut parts = std::mem::take(&mut layout.ranges).into_iter();
        while let (Some(mut low), Some(high)) = (parts.next(), parts.next()) {
            low.reverse();
            low.extend(high);
            layout.ranges.push(low);
        }
        layout
    }

    /// The same for ranges that are given by their lengths in granules, frames in descending order.
    fn new(
        unbroken: &LooseFrames,
        there: &LooseFrames,
        lengths: &[u64],
        create: u64,
        FrameSizes { made, kept, slot }: FrameSizes,
    ) -> Layout {
        let mut layout = Layout { ranges: vec![Vec::new(); lengths.len()], ..Layout::default() };
        let mut left = lengths.to_vec();
        let mut fill = |frames: &LooseFrames, kept: u32, slot: u32| {
            let mut unused: Vec<(u32, usize)> = frames.counts().collect();
            for (size, count) in unused.iter_mut().rev().filter(|(size, _)| *size <= kept) {
                let granules = u64::from(*size);
                let room = |left: u64| if *size < slot { left % u64::from(slot) } else { left };
                for (left, frames) in left.iter_mut().zip(&mut layout.ranges) {
                    while *count > 0 && room(*left) >= granules {
                        frames.push(*size);
                        *left -= granules;
                        *count -= 1;
                    }
                }
            }
            unused
        };
        fill(unbroken, u32::MAX, 1);
        let unused = fill(there, kept, slot);
        let mut new: Vec<u32> = Vec::new();
        for (left, frames) in left.iter().zip(&mut layout.ranges) {
            frames.extend(sizes(*left, made));
            new.extend(sizes(*left, made));
            frames.sort_unstable_by(|one, other| other.cmp(one));
        }
        new.sort_unstable_by(|one, other| other.cmp(one));
        let mut from_device = create;
        for size in new {
            match from_device.checked_sub(size.into()) {
                Some(rest) => {
                    from_device = rest;
                    layout.first.push(size);
                }
                None => layout.then.push(size),
            }
        }
        let lacking = total(&layout.then).saturating_sub(from_device);
        let smallest_first = unused.iter().flat_map(|&(size, count)| std::iter::repeat_n(size, count));
        let mut broken = 0;
        for size in smallest_first {
            if broken >= lacking {
                break;
            }
            layout.broken.push(size);
            broken += u64::from(size);
        }
        let surplus = broken.saturating_sub(lacking);
        layout.surplus = sizes(surplus, made).collect();
        layout
    }
}

/// The room that ranges have for frames that are not broken.
///
/// Sizes are powers of two, so frames can be placed, the largest first, if for each size those of
/// at least that size have no more granules than the ranges have in whole multiples of it.
#[derive(Debug)]
pub(crate) struct FrameRoom {
    /// For each power of two, by its logarithm: granules in whole multiples of it.
    left: [u64; u32::BITS as usize],
}

impl FrameRoom {
    /// The room of empty ranges of these lengths, in granules.
    pub(crate) fn new(lengths: &[u64]) -> FrameRoom {
        let multiples = |log2: usize| lengths.iter().map(|length| length >> log2 << log2).sum();
        FrameRoom { left: std::array::from_fn(multiples) }
    }

    /// Takes the room for a frame, if there is any.
    pub(crate) fn take(&mut self, granules: u64) -> bool {
        let log2 = granules.trailing_zeros() as usize;
        let Some(affected) = self.left.get_mut(..=log2).filter(|_| granules.is_power_of_two()) else { return false };
        let fits = affected.iter().all(|&left| left >= granules);
        if fits {
            affected.iter_mut().for_each(|left| *left -= granules);
        }
        fits
    }
}

/// How many granules frames of these sizes have together.
fn total(sizes: &[u32]) -> u64 {
    sizes.iter().map(|&size| u64::from(size)).sum()
}

#[cfg(test)]
mod tests {
    use aquifer_device::RawPhysical;
    use proptest::prelude::*;

    use super::super::frames::Frame;
    use super::*;

    const UP_TO_32: FrameSizes = FrameSizes { made: 32, kept: u32::MAX, slot: 1 };

    fn there(sizes: &[u32]) -> LooseFrames {
        let mut there = LooseFrames::default();
        there.extend(sizes.iter().map(|&size| Frame::new(RawPhysical(1), size)));
        there
    }

    fn laid_out(there: &LooseFrames, lengths: &[u64], create: u64, sizes: FrameSizes) -> Layout {
        Layout::new(&LooseFrames::default(), there, lengths, create, sizes)
    }

    #[test]
    fn frames_that_are_not_broken_come_first_at_any_size() {
        let layout = Layout::new(&there(&[8]), &there(&[4]), &[3, 11], 2, FrameSizes::SMALL);
        assert_eq!(layout.ranges, [vec![1, 1, 1], vec![8, 1, 1, 1]]);
        assert_eq!((layout.broken, layout.first.len(), layout.then.len()), (vec![4], 2, 4));
    }

    #[test]
    fn large_frames_come_first_and_new_ones_fill_up() {
        let layout = laid_out(&there(&[8, 2]), &[11, 4], 5, UP_TO_32);
        assert_eq!(layout.ranges, [vec![8, 2, 1], vec![4]]);
        assert_eq!((layout.first, layout.broken, layout.then), (vec![4, 1], vec![], vec![]));
    }

    #[test]
    fn a_frame_that_fits_nowhere_is_broken() {
        let layout = laid_out(&there(&[8]), &[3], 0, UP_TO_32);
        assert_eq!(layout.ranges, [vec![2, 1]]);
        assert_eq!((layout.broken, layout.then, layout.surplus), (vec![8], vec![2, 1], vec![4, 1]));
    }

    #[test]
    fn small_frames_fill_no_whole_slot() {
        let sizes = FrameSizes { slot: 16, ..UP_TO_32 };
        let layout = laid_out(&there(&[16, 8, 4, 2, 1, 1]), &[40], 8, sizes);
        assert_eq!(layout.ranges, [vec![16, 16, 8]]);
        assert_eq!((layout.broken, layout.then, layout.surplus), (vec![1, 1, 2, 4], vec![16], vec![]));
    }

    #[test]
    fn frames_lie_at_multiples_of_their_size() {
        for (start, end) in [(1, 7), (5, 37), (8, 16), (3, 4), (0, 21), (40, 48), (0, 0)] {
            let nothing = LooseFrames::default();
            let fill = start..end;
            let layout = Layout::of(&nothing, &nothing, std::slice::from_ref(&fill), 1, end - start, UP_TO_32);
            let mut at = start;
            for size in layout.ranges.into_iter().flatten() {
                assert_eq!(at % u64::from(size), 0, "{start}..{end}");
                at += u64::from(size);
            }
            assert_eq!(at, end);
        }
    }

    #[test]
    fn frames_stay_as_they_are_unless_every_granule_is_on_its_own() {
        assert_eq!(laid_out(&there(&[8]), &[8], 0, FrameSizes::SMALL).ranges, [vec![8]], "large ones stay");
        let layout = laid_out(&there(&[2, 1]), &[3], 0, FrameSizes::GRANULE);
        assert_eq!((layout.ranges, layout.broken), (vec![vec![1, 1, 1]], vec![2]), "every granule is on its own");
    }

    proptest! {
        #[test]
        fn a_range_has_the_same_parts_wherever_its_reservation_is(
            start in 0..1000_u64, length in 0..1000_u64, moved in 1..1000_u64
        ) {
            const GRANULE: u64 = 2 << 20;
            let range = |base: u64| base + start * GRANULE..base + (start + length) * GRANULE;
            prop_assert_eq!(parts(&range(0), GRANULE), parts(&range(moved * ALIGNMENT), GRANULE));
        }

        #[test]
        fn everything_is_filled_and_nothing_is_lost(
            powers in prop::collection::vec(0..6_u32, 0..12),
            unbroken in prop::collection::vec(0..6_u32, 0..12),
            lengths in prop::collection::vec(1..90_u64, 0..6),
            more in 0..20_u64,
            largest in 0..6_u32,
            slot in 0..6_u32,
            by_granule in any::<bool>(),
        ) {
            let sizes: Vec<u32> = powers.iter().map(|power| 1 << power).collect();
            let (there, largest, slot) = (there(&sizes), 1 << largest, 1 << slot);
            let mut room = FrameRoom::new(&lengths);
            let unbroken = unbroken.into_iter().map(|power| 1 << power).filter(|&size| room.take(u64::from(size)));
            let unbroken: Vec<u32> = unbroken.collect();
            let fill = lengths.iter().sum::<u64>() - total(&unbroken);
            // As plans are: either frames suffice, with some to spare, or the device gives what
            // they lack.
            let create = if more < 10 { fill.saturating_sub(there.granules()) } else { 0 };
            prop_assume!(there.granules() + create >= fill);
            let in_slots = FrameSizes { made: largest, kept: u32::MAX, slot: slot.min(largest) };
            let bounds = if by_granule { FrameSizes::GRANULE } else { in_slots };
            let mut layout = Layout::new(&self::there(&unbroken), &there, &lengths, create, bounds);
            for (frames, &length) in layout.ranges.iter().zip(&lengths) {
                prop_assert_eq!(total(frames), length);
            }
            for size in unbroken {
                let holds = |frames: &&mut Vec<u32>| frames.contains(&size);
                let frames = layout.ranges.iter_mut().find(holds).unwrap();
                frames.remove(frames.iter().position(|&other| other == size).unwrap());
            }
            prop_assert!(layout.ranges.iter().flatten().all(|&size| size <= bounds.kept));
            prop_assert!(total(&layout.first) <= create);
            let spent = total(&layout.first) + total(&layout.then) + total(&layout.surplus);
            prop_assert!(spent <= create + total(&layout.broken), "no more is created than there is");
            prop_assert!(spent + there.granules() - total(&layout.broken) >= fill);
            // What is mapped is there once frames are broken and created.
            let mut stock = sizes;
            for size in &layout.broken {
                let at = stock.iter().position(|other| other == size);
                prop_assert!(at.is_some());
                stock.swap_remove(at.unwrap());
            }
            stock.extend(layout.first.iter().chain(&layout.then).chain(&layout.surplus));
            for size in layout.ranges.iter().flatten() {
                let at = stock.iter().position(|other| other == size);
                prop_assert!(at.is_some(), "{:?}", layout);
                stock.swap_remove(at.unwrap());
            }
        }
    }
}
