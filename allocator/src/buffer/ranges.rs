//! Ranges of elements.

use std::ops::{Bound, Range, RangeBounds};

use crate::error::AllocError;

/// The elements of a range within `len`.
pub(super) fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>, AllocError> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if start > end || end > len {
        return Err(AllocError::OutOfBounds { start: start as u64, end: end as u64, len: len as u64 });
    }
    Ok(start..end)
}
