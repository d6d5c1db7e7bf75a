//! Strided layouts, without memory, locks or drivers: the places of a tensor's elements ([`Layout`]
//! and its views), and the rows that copies go by ([`Rows`]).
//!
//! Invariant: no number that follows from a [`Layout`] overflows a `usize`: neither the number of
//! its elements, even with empty dimensions counted as 1, nor the place of the last one. So views
//! of a layout check nothing but their arguments.

#[cfg(test)]
mod tests;
mod views;

use std::fmt;

use aquifer_kernels::Strided;
use aquifer_transfer::internal::{Dimension, Rows, merge};

pub(crate) use views::other_length;

/// The most dimensions of a layout.
pub const MAX_DIMENSIONS: usize = 8;

/// An impossible layout, or view of one: the caller asked for dimensions that it does not have. The
/// text says what is wrong; it has extents outermost first.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LayoutError(pub(crate) String);

aquifer_device::debug_as_display!(LayoutError);

/// The places of a tensor's elements in its storage: up to [`MAX_DIMENSIONS`] dimensions, outermost
/// first, each with an extent and a stride in elements, and the place of the first element. A
/// stride of 0 repeats elements.
///
/// ```
/// use aquifer::tensor::Layout;
/// let matrix = Layout::row_major(&[2, 3])?;
/// assert_eq!((matrix.strides(), matrix.len()), (&[3, 1][..], 6));
/// let transposed = matrix.transpose(0, 1)?;
/// assert_eq!((transposed.shape(), transposed.strides()), (&[3, 2][..], &[1, 3][..]));
/// assert!(!transposed.is_contiguous());
/// assert_eq!(transposed.place(&[2, 1]), Some(5));
/// # Ok::<(), aquifer::tensor::LayoutError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Layout {
    rank: usize,
    /// Beyond the rank 0, so that equality is that of the dimensions.
    extents: [usize; MAX_DIMENSIONS],
    strides: [usize; MAX_DIMENSIONS],
    offset: usize,
}

impl Layout {
    /// Dense elements from the start of the storage on, the last dimension's next to each other: as
    /// C, PyTorch and NumPy have it.
    ///
    /// # Errors
    /// More than [`MAX_DIMENSIONS`] dimensions, and more elements than a `usize` counts.
    pub fn row_major(shape: &[usize]) -> Result<Layout, LayoutError> {
        let (mut strides, mut stride) = ([0; MAX_DIMENSIONS], 1usize);
        for dimension in (0..shape.len().min(MAX_DIMENSIONS)).rev() {
            strides[dimension] = stride;
            stride = stride.checked_mul(shape[dimension].max(1)).ok_or_else(|| too_large(shape))?;
        }
        Layout::strided(shape, strides.get(..shape.len()).unwrap_or(&strides), 0)
    }

    /// Elements at any places.
    ///
    /// # Errors
    /// More than [`MAX_DIMENSIONS`] dimensions, another number of strides than of extents, and
    /// numbers that overflow a `usize`.
    pub fn strided(shape: &[usize], strides: &[usize], offset: usize) -> Result<Layout, LayoutError> {
        if shape.len() > MAX_DIMENSIONS {
            return Err(too_many(shape));
        }
        if shape.len() != strides.len() {
            let (count, rank) = (strides.len(), shape.len());
            let problem = format!("{count} strides, {strides:?}, were given for the {rank} dimensions of {shape:?}");
            return Err(LayoutError(problem));
        }
        let mut layout =
            Layout { rank: shape.len(), extents: [0; MAX_DIMENSIONS], strides: [0; MAX_DIMENSIONS], offset };
        layout.extents[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        layout.checked().ok_or_else(|| too_large(shape))
    }

    /// The layout, if no number of it overflows.
    fn checked(self) -> Option<Layout> {
        self.shape().iter().try_fold(1usize, |len, &extent| len.checked_mul(extent.max(1)))?;
        let mut reach = self.offset.checked_add(1)?;
        for (&extent, stride) in self.shape().iter().zip(self.strides()) {
            reach = reach.checked_add(extent.saturating_sub(1).checked_mul(*stride)?)?;
        }
        Some(self)
    }

    /// Extents, outermost first. Empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.extents[..self.rank]
    }

    /// Strides in elements, outermost first.
    pub fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    /// The place of the first element in the storage, in elements.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The number of dimensions: 0 for a scalar.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of elements: 1 for a scalar.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// The number of elements from the first to the last one, both and gaps included; 0 if there
    /// are none.
    pub fn span(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        1 + self.dimensions().map(|(extent, stride)| (extent - 1) * stride).sum::<usize>()
    }

    /// The place after its last element, which a storage must have: offset and span.
    pub fn end(&self) -> usize {
        if self.is_empty() { 0 } else { self.offset + self.span() }
    }

    /// The place of an element in the storage; `None` where there is none with these indices.
    pub fn place(&self, indices: &[usize]) -> Option<usize> {
        let within =
            indices.len() == self.rank && indices.iter().zip(self.shape()).all(|(index, extent)| index < extent);
        within.then(|| {
            self.offset + indices.iter().zip(self.strides()).map(|(index, stride)| index * stride).sum::<usize>()
        })
    }

    /// Whether its elements lie next to each other in row-major order, so that they can be copied
    /// as one piece. Layouts without elements, or with one, always do.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.is_empty()
            || (0..self.rank).rev().filter(|&dimension| self.extents[dimension] > 1).all(|dimension| {
                let dense = self.strides[dimension] == expected;
                expected *= self.extents[dimension];
                dense
            })
    }

    /// The dimensions' numbers in the order of their strides, the largest first, as dense elements
    /// have them.
    pub(crate) fn by_falling_stride(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.rank).collect();
        order.sort_by_key(|&dimension| std::cmp::Reverse(self.strides[dimension]));
        order
    }

    /// Whether no two elements lie at one place, by [`Strided::are_distinct`]. It is always exact
    /// for views of a dense layout.
    pub(crate) fn is_distinct(&self) -> bool {
        let rising = self.by_falling_stride().into_iter().rev();
        self.is_empty()
            || Strided::are_distinct(
                rising.map(|dimension| (self.extents[dimension] as u64, self.strides[dimension] as u64)),
            )
    }

    /// Extents with their strides.
    pub(crate) fn dimensions(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> + '_ {
        self.shape().iter().copied().zip(self.strides().iter().copied())
    }

    /// The same elements in fewer dimensions, merged where they are one in memory.
    pub(crate) fn merged(&self) -> Layout {
        if self.is_empty() {
            return self.with_dimensions(self.offset, [(0, 0)]);
        }
        let dimensions = self.dimensions().map(|(extent, stride)| dimension(extent, [stride]));
        let merged = merge(dimensions).into_iter();
        // The numbers are those of a layout, or products that divide its length.
        let usize_of = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        self.with_dimensions(self.offset, merged.map(|merged| (usize_of(merged.extent), usize_of(merged.strides[0]))))
    }

    /// The rows of the elements, without the offset, at this layout and at one of the same shape
    /// whose elements are adjacent.
    pub(crate) fn rows_to_dense(&self) -> Rows<2> {
        let mut dense = self.len().max(1);
        Rows::new(self.dimensions().map(|(extent, stride)| {
            dense /= extent.max(1);
            dimension(extent, [stride, dense])
        }))
    }

    /// The same elements with a smaller offset.
    pub(crate) fn at(self, offset: usize) -> Layout {
        debug_assert!(offset <= self.offset, "what does not overflow stays so only where the offset shrinks");
        Layout { offset, ..self }
    }

    /// A layout with dimensions of this one's, which so needs no check. `dimensions` has at most as
    /// many as there may be.
    pub(super) fn with_dimensions(
        &self,
        offset: usize,
        dimensions: impl IntoIterator<Item = (usize, usize)>,
    ) -> Layout {
        let mut layout = Layout { rank: 0, extents: [0; MAX_DIMENSIONS], strides: [0; MAX_DIMENSIONS], offset };
        for (extent, stride) in dimensions {
            layout.extents[layout.rank] = extent;
            layout.strides[layout.rank] = stride;
            layout.rank += 1;
        }
        layout
    }
}

fn dimension<const N: usize>(extent: usize, strides: [usize; N]) -> Dimension<N> {
    Dimension { extent: extent as u64, strides: strides.map(|stride| stride as u64) }
}

fn too_large(shape: &[usize]) -> LayoutError {
    LayoutError(format!("{shape:?} has more elements, or places of elements, than 64 bits count"))
}

fn too_many(shape: &[usize]) -> LayoutError {
    let rank = shape.len();
    LayoutError(format!("{shape:?} has {rank} dimensions, {MAX_DIMENSIONS} is the most there may be; reshape it first"))
}

impl fmt::Debug for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layout")
            .field("shape", &self.shape())
            .field("strides", &self.strides())
            .field("offset", &self.offset)
            .finish()
    }
}
