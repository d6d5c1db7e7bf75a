//! Ranges of elements.

use std::ops::{Bound, Range, RangeBounds};

/// The elements of a range within `len`.
///
/// # Errors
/// The range as it was asked for, when it reaches beyond the end or is reversed.
pub fn resolve(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>, Range<usize>> {
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
    if start <= end && end <= len { Ok(start..end) } else { Err(start..end) }
}
