//! Views of a layout: the same elements under other indices, or some of them. None moves any.

use std::ops::Range;

use super::{Layout, LayoutError, MAX_DIMENSIONS, too_many};

impl Layout {
    /// The indices `range` of a dimension.
    ///
    /// # Errors
    /// A dimension that is not there, and a range beyond its end or reversed.
    ///
    /// ```
    /// use aquifer::tensor::Layout;
    /// let rows = Layout::row_major(&[10, 4])?.narrow(0, 2..5)?;
    /// assert_eq!((rows.shape(), rows.offset()), (&[3, 4][..], 8));
    /// assert!(rows.narrow(0, 2..4).is_err());
    /// # Ok::<(), aquifer::tensor::LayoutError>(())
    /// ```
    pub fn narrow(&self, dimension: usize, range: Range<usize>) -> Result<Layout, LayoutError> {
        self.check_range(dimension, &range)?;
        let len = range.end - range.start;
        let narrowed = self
            .dimensions()
            .enumerate()
            .map(|(at, (extent, stride))| (if at == dimension { len } else { extent }, stride));
        // An empty layout has no place, and computing one could overflow.
        let skipped = if len == 0 { 0 } else { range.start * self.strides()[dimension] };
        Ok(self.with_dimensions(self.offset() + skipped, narrowed))
    }

    /// One index of a dimension, which is removed.
    ///
    /// # Errors
    /// A dimension or index that is not there.
    pub fn select(&self, dimension: usize, index: usize) -> Result<Layout, LayoutError> {
        let range = index..index.saturating_add(1);
        self.check_range(dimension, &range)?;
        self.narrow(dimension, range)?.squeeze(dimension)
    }

    fn check_range(&self, dimension: usize, range: &Range<usize>) -> Result<(), LayoutError> {
        let &extent = self.shape().get(dimension).ok_or_else(|| self.no_dimension(dimension))?;
        if range.start <= range.end && range.end <= extent {
            return Ok(());
        }
        Err(LayoutError(format!("indices {range:?} are not a part of dimension {dimension} of {:?}", self.shape())))
    }

    /// The dimensions in another order: dimension `i` of the result is dimension `order[i]` of this
    /// layout.
    ///
    /// # Errors
    /// An order that does not name each dimension once.
    pub fn permute(&self, order: &[usize]) -> Result<Layout, LayoutError> {
        let mut named = [false; MAX_DIMENSIONS];
        let mut new = |&dimension: &usize| dimension < self.rank() && !std::mem::replace(&mut named[dimension], true);
        if order.len() != self.rank() || !order.iter().all(&mut new) {
            return Err(LayoutError(format!("{order:?} does not name each dimension of {:?} once", self.shape())));
        }
        let dimensions = order.iter().map(|&dimension| (self.shape()[dimension], self.strides()[dimension]));
        Ok(self.with_dimensions(self.offset(), dimensions))
    }

    /// Two dimensions exchanged.
    ///
    /// # Errors
    /// A dimension that is not there.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Layout, LayoutError> {
        let mut order: [usize; MAX_DIMENSIONS] = std::array::from_fn(|dimension| dimension);
        for dimension in [a, b] {
            if dimension >= self.rank() {
                return Err(self.no_dimension(dimension));
            }
        }
        order.swap(a, b);
        self.permute(&order[..self.rank()])
    }

    /// A dimension of extent 1 removed.
    ///
    /// # Errors
    /// A dimension that is not there, or of another extent.
    pub fn squeeze(&self, dimension: usize) -> Result<Layout, LayoutError> {
        match self.shape().get(dimension) {
            None => Err(self.no_dimension(dimension)),
            Some(1) => {
                let rest = self.dimensions().enumerate().filter(|&(at, _)| at != dimension).map(|(_, kept)| kept);
                Ok(self.with_dimensions(self.offset(), rest))
            }
            Some(_) => Err(LayoutError(format!(
                "cannot squeeze dimension {dimension} of {:?}: its size is not 1; select an index of it",
                self.shape()
            ))),
        }
    }

    /// A dimension of extent 1 inserted before `dimension`, or after the last one.
    ///
    /// # Errors
    /// A place beyond the last dimension's, and no room for another dimension.
    pub fn unsqueeze(&self, dimension: usize) -> Result<Layout, LayoutError> {
        if dimension > self.rank() {
            return Err(self.no_dimension(dimension));
        }
        // The stride that keeps dense layouts dense; with one index any serves.
        let stride =
            self.dimensions().nth(dimension).map_or(1, |(extent, stride)| stride.saturating_mul(extent.max(1)));
        let mut dimensions: Vec<(usize, usize)> = self.dimensions().collect();
        dimensions.insert(dimension, (1, stride));
        if dimensions.len() > MAX_DIMENSIONS {
            return Err(too_many(&dimensions.into_iter().map(|(extent, _)| extent).collect::<Vec<_>>()));
        }
        Ok(self.with_dimensions(self.offset(), dimensions))
    }

    /// Another shape with the same elements in the same row-major order.
    ///
    /// # Errors
    /// A shape of another number of elements, or of too many dimensions; and where the
    /// elements would have to lie at other places.
    ///
    /// ```
    /// use aquifer::tensor::Layout;
    /// let layout = Layout::row_major(&[4, 6])?;
    /// assert_eq!(layout.reshape(&[2, 2, 6])?.strides(), [12, 6, 1]);
    /// let some = layout.narrow(1, 0..3)?; // rows with gaps between them
    /// assert_eq!(some.reshape(&[2, 2, 3])?.strides(), [12, 6, 1]);
    /// assert!(some.reshape(&[12]).is_err());
    /// # Ok::<(), aquifer::tensor::LayoutError>(())
    /// ```
    pub fn reshape(&self, shape: &[usize]) -> Result<Layout, LayoutError> {
        let dense = Layout::row_major(shape)?;
        if dense.len() != self.len() {
            return Err(other_length(self.shape(), shape));
        }
        if self.is_empty() {
            return Ok(dense);
        }
        let strides = self.strides_for(shape).ok_or_else(|| {
            let (from, strides) = (self.shape(), self.strides());
            LayoutError(format!(
                "{from:?} with strides {strides:?} cannot become {shape:?} without a copy; make it contiguous first"
            ))
        })?;
        Layout::strided(shape, &strides[..shape.len()], self.offset())
    }

    /// Strides that give a shape of as many elements the same order; `None` if there are none.
    ///
    /// Each run of dimensions that are one in memory must be cut into extents of the new shape
    /// without remainder.
    fn strides_for(&self, shape: &[usize]) -> Option<[usize; MAX_DIMENSIONS]> {
        let merged = self.merged();
        let mut runs = merged.dimensions().rev();
        let mut strides = [0; MAX_DIMENSIONS];
        // The rest of the present run, and the stride of its next dimension.
        let (mut left, mut stride) = runs.next().unwrap_or((1, 1));
        for (at, &extent) in shape.iter().enumerate().rev() {
            if extent > 1 && left == 1 {
                (left, stride) = runs.next()?;
            }
            if left % extent != 0 {
                return None;
            }
            strides[at] = stride;
            left /= extent;
            stride = stride.saturating_mul(extent);
        }
        Some(strides)
    }

    /// A larger shape that repeats elements, with strides of 0: from the last dimension on, each
    /// extent must be the same, or 1 or missing in this layout.
    ///
    /// # Errors
    /// Another shape than that, or one of too many dimensions or elements.
    ///
    /// ```
    /// use aquifer::tensor::Layout;
    /// let column = Layout::row_major(&[3, 1])?;
    /// let wide = column.broadcast(&[2, 3, 4])?;
    /// assert_eq!((wide.strides(), wide.len(), wide.span()), (&[0, 1, 0][..], 24, 3));
    /// assert!(column.broadcast(&[4, 4]).is_err());
    /// # Ok::<(), aquifer::tensor::LayoutError>(())
    /// ```
    pub fn broadcast(&self, shape: &[usize]) -> Result<Layout, LayoutError> {
        let refuse = || {
            LayoutError(format!(
                "{:?} cannot be expanded to {shape:?}: counted from the last dimension, extents must be equal, 1, or missing",
                self.shape()
            ))
        };
        let added = shape.len().checked_sub(self.rank()).ok_or_else(refuse)?;
        if shape.len() > MAX_DIMENSIONS {
            return Err(too_many(shape));
        }
        let mut strides = [0; MAX_DIMENSIONS];
        for ((extent, stride), at) in self.dimensions().zip(added..) {
            strides[at] = match (extent, shape[at]) {
                (extent, asked) if extent == asked => stride,
                (1, _) => 0,
                _ => return Err(refuse()),
            };
        }
        Layout::strided(shape, &strides[..shape.len()], self.offset())
    }

    fn no_dimension(&self, dimension: usize) -> LayoutError {
        let present = match self.rank() {
            0 => "a single element".to_owned(),
            1 => "dimension 0".to_owned(),
            rank => format!("dimensions 0 to {}", rank - 1),
        };
        LayoutError(format!("{:?} has no dimension {dimension}, only {present}", self.shape()))
    }
}

/// The error of a shape of another number of elements.
pub(crate) fn other_length(from: &[usize], to: &[usize]) -> LayoutError {
    LayoutError(format!("{from:?} cannot become {to:?}, which has another number of elements"))
}
