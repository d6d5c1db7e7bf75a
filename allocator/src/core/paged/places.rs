//! The places of a reservation, by number: the frame behind each, and whether memory moved away
//! from it. A place is a stretch of addresses as long as a granule, so a frame is behind one place
//! or several.
//!
//! Places mostly change many at a time, side by side, so all operations work on ranges. A
//! reservation has room for more memory than there is, and its low end fills first; places above
//! the highest one that ever had memory cost two bits each.

use std::ops::Range;

use super::frames::{Frame, granules_of};

/// Places of a word of bits.
const WORD: usize = u64::BITS as usize;

/// The places of one reservation.
#[derive(Debug)]
pub(super) struct Places {
    count: usize,
    /// What is behind each place, up to the highest that ever had memory.
    parts: Vec<Option<Part>>,
    /// A bit for each place: whether it lies within a frame that begins below it. So that places
    /// are distinguished from frames without looking at parts, of which there are hundreds of times
    /// as many bytes.
    within: Vec<u64>,
    /// Number of places with memory.
    filled: usize,
}

/// The part of a frame that is behind one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    frame: Frame,
    /// Its number in the frame, from the low end.
    number: u32,
}

impl Places {
    /// So many places without memory.
    pub(super) fn new(count: usize) -> Places {
        Places { count, parts: Vec::new(), within: vec![0; count.div_ceil(WORD)], filled: 0 }
    }

    /// Notes the frames that lie side by side from the place `from` on. There was no memory behind
    /// these places.
    pub(super) fn put(&mut self, from: usize, frames: &[Frame]) {
        let parts =
            frames.iter().flat_map(|&frame| (0..frame.granules.get()).map(move |number| Part { frame, number }));
        for (place, part) in (from..).zip(parts) {
            debug_assert!(place < self.count && self.parts.get(place).is_none_or(Option::is_none));
            if place >= self.parts.len() {
                self.parts.resize(place + 1, None);
            }
            self.parts[place] = Some(part);
            self.filled += 1;
            if part.number > 0 {
                self.within[place / WORD] |= 1 << (place % WORD);
            }
        }
    }

    /// Removes the frames of a range, which holds whole frames, from the record. The answer is in
    /// order.
    pub(super) fn forget(&mut self, range: Range<usize>) -> Vec<Frame> {
        let known = self.known(range);
        let taken: Vec<Frame> = self.frames(known.clone()).map(|(_, frame)| frame).collect();
        debug_assert_eq!(granules_of(&taken), self.parts[known.clone()].iter().flatten().count() as u64);
        self.filled -= taken.iter().map(|frame| frame.granules.get() as usize).sum::<usize>();
        self.parts[known.clone()].fill(None);
        for (word, bits) in words(known) {
            self.within[word] &= !bits;
        }
        taken
    }

    /// The whole frames of a range, all of which has memory: from the first place of the lowest to
    /// behind the last of the highest. Empty if there are none.
    pub(super) fn whole_frames(&self, range: Range<usize>) -> Range<usize> {
        let low = self.border_from(range.start).min(range.end);
        low..self.border_to(range.end).max(low)
    }

    /// The lowest place from `place` on that is not within a frame.
    fn border_from(&self, place: usize) -> usize {
        let mut word = place / WORD;
        let mut borders = self.borders(word) & u64::MAX << (place % WORD);
        while borders == 0 {
            word += 1;
            borders = self.borders(word);
        }
        word * WORD + borders.trailing_zeros() as usize
    }

    /// The highest place up to `place` that is not within a frame.
    pub(super) fn border_to(&self, place: usize) -> usize {
        let mut word = place / WORD;
        let mut borders = self.borders(word) & u64::MAX >> (WORD - 1 - place % WORD);
        while borders == 0 && word > 0 {
            word -= 1;
            borders = self.borders(word);
        }
        word * WORD + borders.checked_ilog2().unwrap_or(0) as usize
    }

    /// The places of a word that are not within a frame.
    fn borders(&self, word: usize) -> u64 {
        !self.within.get(word).copied().unwrap_or(0)
    }

    /// The part of a range in which there may be memory.
    fn known(&self, range: Range<usize>) -> Range<usize> {
        range.start.min(self.parts.len())..range.end.min(self.parts.len())
    }

    /// Number of places with memory.
    pub(super) fn filled(&self) -> usize {
        self.filled
    }

    /// Whether there is memory behind each place of a range.
    pub(super) fn have_memory(&self, range: Range<usize>) -> impl Iterator<Item = bool> + '_ {
        let known = self.known(range.clone());
        let beyond = range.len() - known.len();
        self.parts[known].iter().map(Option::is_some).chain(std::iter::repeat_n(false, beyond))
    }

    /// The frames of a range, which holds whole frames, each with its first place.
    pub(super) fn frames(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Frame)> + '_ {
        let known = self.known(range);
        let parts = known.clone().zip(&self.parts[known.clone()]);
        parts.filter_map(|(place, part)| part.filter(|part| part.number == 0).map(|part| (place, part.frame)))
    }

    /// Every frame, with its first place.
    pub(super) fn all(&self) -> impl Iterator<Item = (usize, Frame)> + '_ {
        self.frames(0..self.count)
    }

    /// The places of the frame that the memory behind a place belongs to.
    pub(super) fn frame_around(&self, place: usize) -> Option<Range<usize>> {
        let Part { frame, number } = (*self.parts.get(place)?)?;
        let first = place - number as usize;
        Some(first..first + frame.granules.get() as usize)
    }
}

/// The words that a range of bits touches, and which of their bits are in it.
fn words(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    (range.start / WORD..range.end.div_ceil(WORD)).map(move |word| {
        let (first, last) = (range.start.max(word * WORD), range.end.min((word + 1) * WORD) - 1);
        (word, u64::MAX << (first % WORD) & u64::MAX >> (WORD - 1 - last % WORD))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use aquifer_device::RawPhysical;
    use proptest::prelude::*;

    use super::*;

    fn frames(numbers_and_sizes: &[(u64, u32)]) -> Vec<Frame> {
        numbers_and_sizes.iter().map(|&(number, size)| Frame::new(RawPhysical(number), size)).collect()
    }

    #[test]
    fn what_is_put_is_taken_in_order() {
        let mut places = Places::new(10);
        places.put(6, &frames(&[(1, 1), (2, 1)]));
        places.put(2, &frames(&[(3, 2), (4, 1), (5, 1)]));
        assert_eq!(places.forget(4..7), frames(&[(4, 1), (5, 1), (1, 1)]));
        assert_eq!(places.all().collect::<Vec<_>>(), [(2, frames(&[(3, 2)])[0]), (7, frames(&[(2, 1)])[0])]);
        assert_eq!(places.have_memory(3..10).collect::<Vec<_>>(), [true, false, false, false, true, false, false]);
        assert_eq!([2, 3, 4, 9].map(|place| places.frame_around(place)), [Some(2..4), Some(2..4), None, None]);
        assert_eq!(places.forget(9..10), []);
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in prop::collection::vec((0..3u8, 0..200usize, 0..130usize), 0..60)) {
            const COUNT: usize = 200;
            // The frames by their first place.
            let (mut places, mut map) = (Places::new(COUNT), BTreeMap::<usize, Frame>::new());
            let around = |map: &BTreeMap<usize, Frame>, place: usize| {
                let (&first, frame) = map.range(..=place).next_back()?;
                Some(first..first + frame.granules.get() as usize).filter(|frame| frame.contains(&place))
            };
            let mut next = 0;
            for (what, from, length) in steps {
                let range = from..(from + length).min(COUNT);
                match what {
                    0 => {
                        let vacant = range.clone().take_while(|&place| around(&map, place).is_none()).count();
                        let sizes = super::super::frames::sizes(vacant as u64, 1 << (length % 6));
                        let put: Vec<_> = sizes.map(|size| { next += 1; Frame::new(RawPhysical(next), size) }).collect();
                        places.put(from, &put);
                        let mut at = from;
                        for frame in put {
                            map.insert(at, frame);
                            at += frame.granules.get() as usize;
                        }
                    }
                    1 => {
                        // From the first frame that begins in the range to the last one that ends
                        // there.
                        let whole = |&(first, frame): &(usize, Frame)| {
                            first + frame.granules.get() as usize <= range.end
                        };
                        let within = map.range(range.clone()).map(|(&first, &frame)| (first, frame));
                        let within: Vec<_> = within.take_while(whole).collect();
                        let Some(&(start, _)) = within.first() else { continue };
                        let end = within.last().map_or(start, |&(first, frame)| first + frame.granules.get() as usize);
                        let taken: Vec<_> = within.iter().map(|&(_, frame)| frame).collect();
                        map.retain(|first, _| !(start..end).contains(first));
                        prop_assert_eq!(places.forget(start..end), taken);
                    }
                    _ => {
                        let behind: Vec<_> = range.clone().map(|place| around(&map, place)).collect();
                        let memory: Vec<_> = behind.iter().map(Option::is_some).collect();
                        let filled = range.start..range.start + memory.iter().take_while(|&&there| there).count();
                        prop_assert_eq!(places.have_memory(range.clone()).collect::<Vec<_>>(), memory);
                        prop_assert_eq!(range.clone().map(|place| places.frame_around(place)).collect::<Vec<_>>(), behind);
                        let fits = |frame: &Range<usize>| filled.start <= frame.start && frame.end <= filled.end;
                        let frames = filled.clone().filter_map(|place| around(&map, place));
                        let mut whole: Vec<_> = frames.filter(fits).collect();
                        whole.dedup();
                        let found = places.whole_frames(filled);
                        prop_assert_eq!(found.len(), whole.iter().map(ExactSizeIterator::len).sum::<usize>());
                        prop_assert!(found.is_empty() || whole.first().is_some_and(|frame| frame.start == found.start));
                        prop_assert!(whole.iter().all(|frame| places.border_to(frame.end - 1) == frame.start));
                    }
                }
            }
            prop_assert_eq!(places.all().collect::<Vec<_>>(), map.into_iter().collect::<Vec<_>>());
        }
    }
}
