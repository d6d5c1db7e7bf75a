//! Strided elements as rows: merging of dimensions, and iteration over rows.
//!
//! Elements may lie at several *ends*: a copy reads them at one place and writes them at another.
//! They are numbered in row-major order, and a range of these numbers may begin and end within a
//! row.

use std::ops::Range;

/// A dimension of elements at `N` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension<const N: usize> {
    /// The number of elements.
    pub extent: u64,
    /// The distance from one element to the next at each end.
    pub strides: [u64; N],
}

/// The places of strided elements: rows of adjacent elements, of which `height` lie at equal
/// distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows<const N: usize> {
    width: u64,
    height: u64,
    /// The distance from the start of one row to the start of the next at each end.
    pitches: [u64; N],
    /// The other dimensions, outermost first.
    outer: Vec<Dimension<N>>,
}

/// Some rows at equal distances, or a part of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlock<const N: usize> {
    /// The number of its first element, counted from the start of the range.
    pub first: u64,
    /// The place of its first element at each end.
    pub at: [u64; N],
    /// The number of elements of a row.
    pub width: u64,
    /// The number of rows.
    pub height: u64,
    /// The distance from the start of one row to the start of the next at each end.
    pub pitches: [u64; N],
}

/// Merges neighbours, outermost first, that are one dimension in memory at all ends, and drops
/// those of extent 1.
pub fn merge<const N: usize>(dimensions: impl IntoIterator<Item = Dimension<N>>) -> Vec<Dimension<N>> {
    let mut merged: Vec<Dimension<N>> = Vec::new();
    for next in dimensions.into_iter().filter(|dimension| dimension.extent != 1) {
        let continues = |outer: &Dimension<N>| {
            let reach = next.strides.map(|stride| stride.checked_mul(next.extent));
            reach.iter().zip(outer.strides).all(|(&reach, stride)| reach == Some(stride))
        };
        match merged.last_mut() {
            Some(outer) if continues(outer) => {
                *outer = Dimension { extent: outer.extent * next.extent, strides: next.strides };
            }
            _ => merged.push(next),
        }
    }
    merged
}

/// Moves the longest dimension whose steps are at least one row to the place before the row, seen
/// at some of the ends: one driver call copies all rows at one distance.
pub(crate) fn group_rows<const N: usize>(dimensions: &mut [Dimension<N>], ends: &[usize]) {
    let (mut width, mut inner) = (1, dimensions.len());
    let all = |dimension: &Dimension<N>, is: &dyn Fn(u64) -> bool| ends.iter().all(|&end| is(dimension.strides[end]));
    while let Some(next) = inner.checked_sub(1).filter(|&next| all(&dimensions[next], &|stride| stride == width)) {
        width *= dimensions[next].extent;
        inner = next;
    }
    let rows = (0..inner).filter(|&at| all(&dimensions[at], &|stride| stride >= width));
    if let Some(at) = rows.max_by_key(|&at| dimensions[at].extent) {
        dimensions[at..inner].rotate_left(1);
    }
}

/// The place of the element with a number, in row-major order.
pub fn place_of<const N: usize>(dimensions: &[Dimension<N>], mut number: u64) -> [u64; N] {
    let mut place = [0; N];
    for &Dimension { extent, strides } in dimensions.iter().rev() {
        let index = number % extent;
        number /= extent;
        place.iter_mut().zip(strides).for_each(|(place, stride)| *place += index * stride);
    }
    place
}

impl<const N: usize> Rows<N> {
    /// Adjacent elements.
    pub fn dense(len: u64) -> Rows<N> {
        Rows { width: len, height: 1, pitches: [len; N], outer: Vec::new() }
    }

    /// Elements by their dimensions, outermost first. No place that they reach may overflow.
    pub fn new(dimensions: impl IntoIterator<Item = Dimension<N>>) -> Rows<N> {
        let mut outer = merge(dimensions);
        let row = outer.pop_if(|innermost| innermost.strides == [1; N]);
        let width = row.map_or(1, |row| row.extent);
        let rows = outer.pop().unwrap_or(Dimension { extent: 1, strides: [width; N] });
        Rows { width, height: rows.extent, pitches: rows.strides, outer }
    }

    /// The bytes of elements of `size` bytes, by the dimensions of the elements.
    pub fn of_bytes(dimensions: impl IntoIterator<Item = Dimension<N>>, size: u64) -> Rows<N> {
        let in_bytes =
            |Dimension { extent, strides }| Dimension { extent, strides: strides.map(|stride: u64| stride * size) };
        let element = Dimension { extent: size, strides: [1; N] };
        Rows::new(dimensions.into_iter().map(in_bytes).chain([element]))
    }

    /// The number of elements.
    #[allow(clippy::len_without_is_empty, reason = "a number of elements, as that of their places")]
    pub fn len(&self) -> u64 {
        self.outer.iter().map(|dimension| dimension.extent).product::<u64>() * self.height * self.width
    }

    /// The number of elements of a row.
    pub fn width(&self) -> u64 {
        self.width
    }

    /// Whether all elements are adjacent at every end.
    pub fn is_dense(&self) -> bool {
        self.width == self.len()
    }

    /// The merged dimensions, outermost first.
    pub fn dimensions(&self) -> impl Iterator<Item = Dimension<N>> {
        let rows = Dimension { extent: self.height, strides: self.pitches };
        let row = Dimension { extent: self.width, strides: [1; N] };
        self.outer.iter().copied().chain([rows, row]).filter(|dimension| dimension.extent != 1)
    }

    /// Calls `visit` with the blocks of a range of elements, in the order of their numbers.
    ///
    /// # Errors
    /// That of `visit`, which ends the iteration.
    pub fn blocks<E>(&self, range: Range<u64>, mut visit: impl FnMut(RowBlock<N>) -> Result<(), E>) -> Result<(), E> {
        let mut next = range.start;
        while next < range.end {
            let (row, column) = (next / self.width, next % self.width);
            let (number, rest) = (row % self.height, range.end - next);
            let whole = if column == 0 { (rest / self.width).min(self.height - number) } else { 0 };
            let (width, height) = if whole > 0 { (self.width, whole) } else { (rest.min(self.width - column), 1) };
            let mut at = place_of(&self.outer, row / self.height);
            at.iter_mut().zip(self.pitches).for_each(|(at, pitch)| *at += number * pitch + column);
            visit(RowBlock { first: next - range.start, at, width, height, pitches: self.pitches })?;
            next += width * height;
        }
        Ok(())
    }
}

impl<const N: usize> RowBlock<N> {
    /// Each of its rows.
    pub fn rows(self) -> impl Iterator<Item = RowBlock<N>> {
        (0..self.height).map(move |row| {
            let mut at = self.at;
            at.iter_mut().zip(self.pitches).for_each(|(at, pitch)| *at += row * pitch);
            RowBlock { first: self.first + row * self.width, at, height: 1, ..self }
        })
    }

    /// Whether no two of its rows overlap at any end, so that one driver call may copy them.
    pub fn is_apart(&self) -> bool {
        self.height == 1 || self.pitches.iter().all(|&pitch| pitch >= self.width)
    }
}

impl Rows<2> {
    /// Copies all elements from the first end to the second.
    ///
    /// # Panics
    /// If an element lies outside of a slice.
    pub fn copy<T: Copy>(&self, from: &[T], to: &mut [T]) {
        let place = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let Ok(()) = self.blocks(0..self.len(), |block| -> Result<(), std::convert::Infallible> {
            let ([from_at, to_at], [from_pitch, to_pitch]) = (block.at.map(place), block.pitches.map(place));
            let (width, height) = (place(block.width), place(block.height));
            if width == 1 && to_pitch == 1 {
                let to = &mut to[to_at..to_at + height];
                to.iter_mut().enumerate().for_each(|(row, to)| *to = from[from_at + row * from_pitch]);
            } else if width == 1 {
                (0..height).for_each(|row| to[to_at + row * to_pitch] = from[from_at + row * from_pitch]);
            } else {
                for row in 0..height {
                    let (from_at, to_at) = (from_at + row * from_pitch, to_at + row * to_pitch);
                    to[to_at..to_at + width].copy_from_slice(&from[from_at..from_at + width]);
                }
            }
            Ok(())
        });
    }
}

impl Rows<2> {
    /// As [`Rows::copy`], for elements of `size` bytes.
    ///
    /// # Panics
    /// If an element lies outside of a slice.
    pub fn copy_bytes(&self, size: usize, from: &[u8], to: &mut [u8]) {
        match size {
            1 => self.copy(from, to),
            2 => self.copy(from.as_chunks::<2>().0, to.as_chunks_mut::<2>().0),
            4 => self.copy(from.as_chunks::<4>().0, to.as_chunks_mut::<4>().0),
            8 => self.copy(from.as_chunks::<8>().0, to.as_chunks_mut::<8>().0),
            16 => self.copy(from.as_chunks::<16>().0, to.as_chunks_mut::<16>().0),
            _ => Rows::<2>::of_bytes(self.dimensions(), size as u64).copy(from, to),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn dimensions<const N: usize>(extents: &[u64], strides: [&[u64]; N]) -> Vec<Dimension<N>> {
        let strides = |at: usize| strides.map(|strides| strides[at]);
        extents.iter().enumerate().map(|(at, &extent)| Dimension { extent, strides: strides(at) }).collect()
    }

    /// The places of a range of elements, one by one.
    fn places<const N: usize>(rows: &Rows<N>, range: Range<u64>) -> Vec<[u64; N]> {
        let mut places = Vec::new();
        let Ok(()) = rows.blocks::<Infallible>(range, |block| {
            for row in block.rows() {
                assert_eq!(row.first, places.len() as u64);
                places.extend((0..row.width).map(|column| row.at.map(|at| at + column)));
            }
            Ok(())
        });
        places
    }

    #[test]
    fn adjacent_elements_are_one_row() {
        let all = dimensions(&[5, 3, 4], [&[12, 4, 1]]);
        assert_eq!(Rows::of_bytes(all.iter().copied(), 2), Rows::dense(120));
        assert_eq!(merge(all), [Dimension { extent: 60, strides: [1] }]);
        assert_eq!(Rows::<1>::of_bytes([], 8), Rows::dense(8));
        assert_eq!(places(&Rows::<1>::dense(100), 7..9), [[7], [8]]);
        assert_eq!(Rows::of_bytes(dimensions(&[5, 3], [&[12, 4]]), 0).len(), 0);
        let rows = Rows::of_bytes(dimensions(&[3, 2], [&[10, 1]]), 2);
        assert_eq!(places(&rows, 3..9).concat(), [3, 20, 21, 22, 23, 40]);
    }

    #[test]
    fn the_longest_dimension_becomes_the_rows() {
        let mut all = dimensions(&[100, 7, 4], [&[28, 4, 1], &[5, 1000, 1]]);
        group_rows(&mut all, &[1]);
        assert_eq!(all, dimensions(&[7, 100, 4], [&[4, 28, 1], &[1000, 5, 1]]));
        // Repeated rows are no rows at one distance.
        let mut all = dimensions(&[7, 100, 4], [&[28, 0, 1], &[400, 4, 1]]);
        group_rows(&mut all, &[0, 1]);
        assert_eq!(all, dimensions(&[100, 7, 4], [&[0, 28, 1], &[4, 400, 1]]));
    }

    proptest! {
        /// Against a list of places, and in pieces that are cut anywhere.
        #[test]
        fn places_of_elements_follow_from_the_dimensions(
            all in proptest::collection::vec((1u64..5, 0u64..30, 0u64..30), 0..4),
            size in 1u64..5,
            cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut expected = vec![[0, 0]];
            for &(extent, one, two) in &all {
                expected = expected.iter().flat_map(|[a, b]| (0..extent).map(move |n| [a + n * one, b + n * two])).collect();
            }
            let all: Vec<_> = all.iter().map(|&(extent, one, two)| Dimension { extent, strides: [one, two] }).collect();
            let rows = Rows::new(all.iter().copied());
            prop_assert_eq!(&places(&rows, 0..rows.len()), &expected);
            prop_assert_eq!(&places(&Rows::new(rows.dimensions()), 0..rows.len()), &expected);
            let one_by_one: Vec<_> = (0..rows.len()).map(|number| place_of(&all, number)).collect();
            prop_assert_eq!(&one_by_one, &expected);

            let from: Vec<u64> = (0..=expected.iter().map(|place| place[0]).max().unwrap_or(0)).collect();
            let mut to = vec![u64::MAX; usize::try_from(expected.iter().map(|place| place[1]).max().unwrap_or(0)).unwrap() + 1];
            let mut model = to.clone();
            rows.copy(&from, &mut to);
            expected.iter().for_each(|&[from, to]| model[usize::try_from(to).unwrap()] = from);
            prop_assert_eq!(to, model);

            let bytes = Rows::of_bytes(all, size);
            let expected: Vec<_> = expected.iter().flat_map(|place| (0..size).map(|n| place.map(|at| at * size + n))).collect();
            let mut cuts: Vec<u64> = cuts.iter().map(|cut| cut.index(expected.len()) as u64).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let cut: Vec<_> = cuts.windows(2).flat_map(|pair| places(&bytes, pair[0]..pair[1])).collect();
            prop_assert_eq!(cut, expected);
        }
    }
}
