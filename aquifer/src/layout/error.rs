//! Errors of layouts.

use std::fmt;

/// The most dimensions of a layout.
pub const MAX_DIMENSIONS: usize = 8;

/// An impossible layout, or view of one: the caller asked for dimensions that it does not have.
/// Extents are outermost first.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// More dimensions than a layout may have.
    #[error("{shape:?} has {} dimensions, {} is the most there may be; reshape it first", shape.len(), MAX_DIMENSIONS)]
    TooManyDimensions {
        /// The extents.
        shape: Vec<usize>,
    },
    /// Not one stride for each dimension.
    #[error("{} strides, {strides:?}, were given for the {} dimensions of {shape:?}", strides.len(), shape.len())]
    StrideCount {
        /// The extents.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<usize>,
    },
    /// Elements, or their places, that 64 bits cannot count.
    #[error("{shape:?} has more elements, or places of elements, than 64 bits count")]
    TooLarge {
        /// The extents.
        shape: Vec<usize>,
    },
    /// A dimension that is not there.
    #[error("{shape:?} has no dimension {dimension}, only {}", Dimensions(shape.len()))]
    NoSuchDimension {
        /// The extents.
        shape: Vec<usize>,
        /// The dimension asked for, the outermost being 0.
        dimension: usize,
    },
    /// Indices beyond a dimension's end, or a range that ends before it starts.
    #[error("indices {start}..{end} are not a part of dimension {dimension} of {shape:?}")]
    OutOfRange {
        /// The extents.
        shape: Vec<usize>,
        /// The dimension, the outermost being 0.
        dimension: usize,
        /// First index asked for.
        start: usize,
        /// Index after the last.
        end: usize,
    },
    /// An order of dimensions that does not name each of them once.
    #[error("{order:?} does not name each dimension of {shape:?} once")]
    NotAnOrder {
        /// The extents.
        shape: Vec<usize>,
        /// The dimensions in the order asked for.
        order: Vec<usize>,
    },
    /// A dimension to remove whose size is not 1.
    #[error("cannot squeeze dimension {dimension} of {shape:?}: its size is not 1; select an index of it")]
    NotOne {
        /// The extents.
        shape: Vec<usize>,
        /// The dimension, the outermost being 0.
        dimension: usize,
    },
    /// A shape of another number of elements.
    #[error("{from:?} cannot become {to:?}, which has another number of elements")]
    OtherLength {
        /// The extents there are.
        from: Vec<usize>,
        /// The extents asked for.
        to: Vec<usize>,
    },
    /// A shape that needs elements at other places: make the tensor contiguous first, which copies
    /// it.
    #[error("{from:?} with strides {strides:?} cannot become {to:?} without a copy; make it contiguous first")]
    NeedsCopy {
        /// The extents there are.
        from: Vec<usize>,
        /// Their strides.
        strides: Vec<usize>,
        /// The extents asked for.
        to: Vec<usize>,
    },
    /// A shape that repeating elements does not lead to.
    #[error(
        "{from:?} cannot be expanded to {to:?}: counted from the last dimension, extents must be equal, 1, or missing"
    )]
    NotBroadcast {
        /// The extents there are.
        from: Vec<usize>,
        /// The extents asked for.
        to: Vec<usize>,
    },
    /// Storage that ends before the last element.
    #[error("a layout of {shape:?} needs {needed} elements, the storage has {has}")]
    StorageTooShort {
        /// The extents.
        shape: Vec<usize>,
        /// Elements needed, from the storage's start on.
        needed: usize,
        /// Elements there are.
        has: usize,
    },
}

aquifer_device::debug_as_display!(LayoutError);

/// The numbers of the dimensions, in messages.
struct Dimensions(usize);

impl fmt::Display for Dimensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("a single element"),
            1 => f.write_str("dimension 0"),
            rank => write!(f, "dimensions 0 to {}", rank - 1),
        }
    }
}
