//! Where the bytes of a staged transfer lie at one of its ends: side by side, or in rows with gaps.
//!
//! A transfer's bytes are numbered in the order in which they go through the ring, where they have no gaps. Chunks end at any byte, within a
//! row or within an element.

use std::ops::Range;

/// The places of all bytes, by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spread {
    bytes: u64,
    /// Bytes of a row, which lie side by side.
    width: u64,
    /// Rows at equal distances, and the bytes from the start of one to the start of the next.
    height: u64,
    pitch: u64,
    /// Extent and stride in bytes of the dimensions that remain, the outermost first.
    outer: Vec<(u64, u64)>,
}

/// Some rows of a range of bytes, or a part of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Where their bytes begin among those of the range.
    pub(crate) packed: u64,
    /// Where the first of them begins, from the start of this end.
    pub(crate) at: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) pitch: u64,
}

impl Spread {
    /// `bytes` bytes side by side.
    pub(crate) fn dense(bytes: u64) -> Spread {
        Spread { bytes, width: bytes, height: 1, pitch: bytes, outer: Vec::new() }
    }

    /// Elements of `size` bytes, by the extents and strides of their dimensions in elements, the outermost first. What they reach must be
    /// bytes that can be numbered.
    pub(crate) fn new(dimensions: impl IntoIterator<Item = (u64, u64)>, size: u64) -> Spread {
        let mut outer: Vec<(u64, u64)> = Vec::new();
        let in_bytes = dimensions.into_iter().map(|(extent, stride)| (extent, stride * size));
        for (extent, stride) in in_bytes.chain([(size, 1)]) {
            match outer.last_mut() {
                // The outer one goes on where the inner one ends.
                Some(last) if last.1 == extent * stride => *last = (last.0 * extent, stride),
                _ => outer.push((extent, stride)),
            }
        }
        let bytes = outer.iter().map(|&(extent, _)| extent).product();
        let (width, _) = outer.pop().unwrap_or((0, 1));
        let (height, pitch) = outer.pop().unwrap_or((1, width));
        Spread { bytes, width, height, pitch, outer }
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Calls `visit` with where the bytes of a range lie, in the order of their numbers.
    pub(crate) fn rows<E>(&self, range: Range<u64>, mut visit: impl FnMut(Rows) -> Result<(), E>) -> Result<(), E> {
        let mut next = range.start;
        while next < range.end {
            let (row, column) = (next / self.width, next % self.width);
            let (number, left) = (row % self.height, range.end - next);
            let whole = if column == 0 { (left / self.width).min(self.height - number) } else { 0 };
            let (width, height) = if whole > 0 { (self.width, whole) } else { (left.min(self.width - column), 1) };
            let at = self.start_of(row / self.height) + number * self.pitch + column;
            visit(Rows { packed: next - range.start, at, width, height, pitch: self.pitch })?;
            next += width * height;
        }
        Ok(())
    }

    /// Where rows at equal distances begin, by their number.
    fn start_of(&self, mut number: u64) -> u64 {
        let mut start = 0;
        for &(extent, stride) in self.outer.iter().rev() {
            start += number % extent * stride;
            number /= extent;
        }
        start
    }
}

impl Rows {
    /// Each of them.
    pub(crate) fn each(self) -> impl Iterator<Item = Rows> {
        (0..self.height).map(move |row| Rows {
            packed: self.packed + row * self.width,
            at: self.at + row * self.pitch,
            height: 1,
            ..self
        })
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    /// Places of the bytes of a range, one by one.
    fn places(spread: &Spread, range: Range<u64>) -> Vec<u64> {
        let mut places = Vec::new();
        let Ok(()) = spread.rows::<Infallible>(range, |rows| {
            for row in rows.each() {
                assert_eq!(row.packed, places.len() as u64);
                places.extend(row.at..row.at + row.width);
            }
            Ok(())
        });
        places
    }

    #[test]
    fn what_lies_side_by_side_is_one_row() {
        assert_eq!(Spread::new([(5, 12), (3, 4), (4, 1)], 2), Spread::dense(120));
        assert_eq!(Spread::new([], 8), Spread::dense(8));
        assert_eq!(places(&Spread::dense(100), 7..9), [7, 8]);
        assert_eq!(Spread::new([(5, 12), (3, 4)], 0).bytes(), 0);
        assert_eq!(places(&Spread::new([(3, 10), (2, 1)], 2), 3..9), [3, 20, 21, 22, 23, 40]);
    }

    proptest! {
        /// However the bytes are cut into pieces, each is where its dimensions say.
        #[test]
        fn bytes_lie_where_their_dimensions_say(
            dimensions in proptest::collection::vec((1u64..5, 0u64..30), 0..4),
            size in 1u64..5,
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut expected = vec![0];
            for &(extent, stride) in &dimensions {
                expected = expected.iter().flat_map(|at| (0..extent).map(move |n| at + n * stride * size)).collect();
            }
            let expected: Vec<u64> = expected.iter().flat_map(|at| *at..at + size).collect();
            let spread = Spread::new(dimensions, size);
            prop_assert_eq!(spread.bytes(), expected.len() as u64);
            let mut cuts: Vec<u64> = cuts.iter().map(|cut| cut.index(expected.len()) as u64).collect();
            cuts.extend([0, spread.bytes()]);
            cuts.sort_unstable();
            let cut: Vec<u64> = cuts.windows(2).flat_map(|pair| places(&spread, pair[0]..pair[1])).collect();
            prop_assert_eq!(cut, expected);
        }
    }
}
