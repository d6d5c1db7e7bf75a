//! Regions: elements with gaps between them, in any number of dimensions.
//!
//! A region becomes rows at equal distances, which drivers copy in one call, and other dimensions.
//! Each index of these takes a call.

use aquifer_device::RequestError;
use aquifer_kernels::Strided;

use crate::error::TransferError;
use crate::rows::{Dimension, Rows, group_rows, merge};

/// The elements of a copy: for each dimension its extent, and its stride in elements at either end.
///
/// The element with index `(i, j, …)` lies `i · strides[0] + j · strides[1] + …` elements from the
/// start of its end. A stride of 0 in `from` repeats elements.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Region;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let host = memory.pinned_from_slice(&[1u32, 2, 3, 4, 5, 6])?;
/// // The rows of a 2 × 3 matrix become the columns of a 3 × 2 one.
/// let mut transposed = memory.alloc::<u32>(6, &stream)?;
/// let region = Region { extents: &[2, 3], from_strides: &[3, 1], to_strides: &[1, 2] };
/// transposed.upload(region.of(&host), &stream)?;
/// assert_eq!(transposed.to_vec(&stream)?, [1, 4, 2, 5, 3, 6]);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region<'a> {
    /// The number of elements in each dimension.
    pub extents: &'a [usize],
    /// The distance from an element to the next in each dimension, at the source.
    pub from_strides: &'a [usize],
    /// The distance from an element to the next in each dimension, at the target. No two elements
    /// may lie at one place.
    pub to_strides: &'a [usize],
}

/// A region of an end of a copy, made by [`Region::of`].
#[derive(Clone, Copy, Debug)]
pub struct InRegion<'r, E> {
    /// The region.
    pub region: Region<'r>,
    /// The end.
    pub end: E,
}

impl<'r> Region<'r> {
    /// The region of a source or of a target.
    pub fn of<E>(&self, end: E) -> InRegion<'r, E> {
        InRegion { region: *self, end }
    }
}

/// The elements that a copy moves.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a> {
    /// The size of an element in bytes.
    pub size: usize,
    /// The number of elements at the source.
    pub from: usize,
    /// The number of elements at the target.
    pub to: usize,
    /// Which of them to copy; all without a region.
    pub region: Option<&'a Region<'a>>,
}

/// A checked copy. All numbers but the size are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The rows at the source and at the target.
    pub(super) rows: Rows<2>,
    /// The number of elements from the first to the last one at either end, gaps included.
    reach: [u64; 2],
    /// The size of an element in bytes, not 0.
    pub(super) size: usize,
}

/// The most rows whose places are compared with each other, where both ends of a region lie in one
/// piece of memory.
const ROWS_COMPARED: u64 = 1 << 20;

impl Plan {
    /// The plan of a copy between ends of `from_bytes` and `to_bytes` bytes; `None` if there is
    /// nothing to copy.
    ///
    /// # Errors
    /// Without a region, ends of different lengths. A region that reaches beyond either end, or
    /// writes a place twice. Elements beyond the bytes of either end.
    pub(super) fn of(elements: &Elements<'_>, from_bytes: u64, to_bytes: u64) -> Result<Option<Plan>, TransferError> {
        let Elements { size, from, to, region } = *elements;
        let lens = [from as u64, to as u64];
        for (len, bytes) in lens.into_iter().zip([from_bytes, to_bytes]) {
            let end = len.saturating_mul(size as u64);
            if end > bytes {
                return Err(TransferError::Request(RequestError::OutOfBounds { start: 0, end, len: bytes }));
            }
        }
        let plan = match region {
            None if from != to => return Err(TransferError::LengthMismatch { from: lens[0], to: lens[1] }),
            None => (to > 0).then(|| Plan::dense(lens[1], size)),
            Some(region) => region.plan(size)?,
        };
        for (&end, len) in plan.iter().flat_map(|plan| &plan.reach).zip(lens) {
            if end > len {
                return Err(TransferError::Request(RequestError::OutOfBounds { start: 0, end, len }));
            }
        }
        Ok(plan.filter(|_| size > 0))
    }

    /// All of `len` elements.
    pub(super) fn dense(len: u64, size: usize) -> Plan {
        Plan { rows: Rows::dense(len), reach: [len; 2], size }
    }

    /// The size of all elements in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.rows.len().saturating_mul(self.size as u64)
    }

    /// Whether the elements written at `to` and those read at `from` have bytes in common. Exact
    /// for up to [`ROWS_COMPARED`] rows; for more it may be wrongly true where the ends reach over
    /// each other.
    pub(super) fn overlaps_itself(&self, from: u64, to: u64) -> bool {
        let size = self.size as u64;
        let [from_reach, to_reach] = self.reach.map(|reach| reach * size);
        if to >= from + from_reach || from >= to + to_reach || self.rows.len() == 0 {
            return false;
        }
        let (mut read, mut written, mut width) = (Vec::new(), Vec::new(), 0);
        if self.rows.len() / self.rows.width() > ROWS_COMPARED {
            return true;
        }
        let Ok(()) = self.rows.blocks(0..self.rows.len(), |block| -> Result<(), std::convert::Infallible> {
            for row in block.rows() {
                read.push(from + row.at[0] * size);
                written.push(to + row.at[1] * size);
                width = row.width * size;
            }
            Ok(())
        });
        read.sort_unstable();
        written.sort_unstable();
        let mut read = read.into_iter().peekable();
        written.into_iter().any(|start| {
            // All rows are equally long, so those that start late enough end late enough.
            while read.next_if(|&read| read + width <= start).is_some() {}
            read.peek().is_some_and(|&read| read < start + width)
        })
    }
}

impl Region<'_> {
    /// `None` if there is nothing to copy.
    pub(super) fn plan(&self, size: usize) -> Result<Option<Plan>, TransferError> {
        let wrong = |reason| TransferError::Region { reason };
        if self.extents.len() != self.from_strides.len() || self.extents.len() != self.to_strides.len() {
            return Err(wrong("it must have a stride for each extent, at both ends"));
        }
        if self.extents.contains(&0) {
            return Ok(None);
        }
        let strides = self.from_strides.iter().zip(self.to_strides);
        let mut dimensions: Vec<_> = self
            .extents
            .iter()
            .zip(strides)
            .filter(|&(&extent, _)| extent > 1)
            .map(|(&extent, (&from, &to))| Dimension { extent: extent as u64, strides: [from as u64, to as u64] })
            .collect();
        let overflow = || wrong("its numbers are too large");
        dimensions.iter().try_fold(1u64, |all, next| all.checked_mul(next.extent)).ok_or_else(overflow)?;
        let reach = |end: usize| {
            let step =
                |reach: u64, next: &Dimension<2>| reach.checked_add((next.extent - 1).checked_mul(next.strides[end])?);
            dimensions.iter().try_fold(1, step).ok_or_else(overflow)
        };
        let reach = [reach(0)?, reach(1)?];
        // The order of the dimensions does not matter, so the one with the smallest steps becomes
        // the innermost.
        dimensions.sort_by_key(|&Dimension { strides: [from, to], .. }| std::cmp::Reverse((to, from)));
        let to = dimensions.iter().rev().map(|dimension| (dimension.extent, dimension.strides[1]));
        if !Strided::are_distinct(to) {
            return Err(wrong("two of its elements lie, or may lie, at one place where they are written"));
        }
        let mut dimensions = merge(dimensions);
        group_rows(&mut dimensions, &[0, 1]);
        Ok(Some(Plan { rows: Rows::new(dimensions), reach, size }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(extents: &[usize], from_strides: &[usize], to_strides: &[usize]) -> Option<Plan> {
        Region { extents, from_strides, to_strides }.plan(4).unwrap()
    }

    #[test]
    fn a_block_of_a_volume_is_rows_and_one_outer_dimension() {
        assert_eq!(plan(&[2, 3, 4], &[12, 4, 1], &[12, 4, 1]).unwrap(), Plan::dense(24, 4));
        let plan = plan(&[2, 3, 4], &[100, 10, 1], &[12, 4, 1]).unwrap();
        assert_eq!((plan.rows.len(), plan.rows.width(), plan.reach), (24, 4, [124, 24]));
    }

    #[test]
    fn overlaps_are_found_row_by_row() {
        // Even columns of rows go to the odd ones, which lie in between.
        let columns = plan(&[4, 3], &[6, 2], &[6, 2]).unwrap();
        assert!(!columns.overlaps_itself(0, 4));
        assert!(columns.overlaps_itself(0, 8) && columns.overlaps_itself(8, 0));
        let repeated = plan(&[3, 2], &[0, 1], &[4, 1]).unwrap();
        assert!(!repeated.overlaps_itself(8, 0), "between the rows that are written");
        assert!(repeated.overlaps_itself(4, 0) && repeated.overlaps_itself(4096, 4096));
        let many = plan(&[1 << 21, 1], &[2, 1], &[2, 1]).unwrap();
        assert!(many.overlaps_itself(0, 4), "too many to compare");
        assert!(!many.overlaps_itself(0, 4 << 22));
    }

    #[test]
    fn regions_that_write_twice_or_lack_strides_are_refused() {
        for (extents, from, to) in [
            (&[2, 2][..], &[2, 1][..], &[0, 1][..]),
            (&[2, 3], &[3, 1], &[2, 1]),
            (&[2], &[1, 1], &[1]),
            (&[usize::MAX, 3], &[1, 1], &[3, 1]),
        ] {
            let region = Region { extents, from_strides: from, to_strides: to };
            assert!(region.plan(4).is_err(), "{region:?}");
        }
        assert_eq!(plan(&[3, 0], &[1, 1], &[1, 1]), None);
    }

    /// Every element goes where its index says, whatever the order of the dimensions.
    #[test]
    fn plans_copy_each_element_once() {
        let from: Vec<usize> = (0..1000).collect();
        for (extents, from_strides, to_strides) in [
            (&[4, 5, 6][..], &[200, 30, 2][..], &[1, 8, 50][..]),
            (&[7, 9], &[0, 1], &[9, 1]),
            (&[7, 9], &[3, 0], &[1, 7]),
            (&[3, 4, 5], &[1, 3, 12], &[20, 5, 1]),
            (&[], &[], &[]),
        ] {
            let mut to = vec![usize::MAX; 1000];
            plan(extents, from_strides, to_strides).unwrap().rows.copy(&from, &mut to);
            let mut expected = vec![usize::MAX; 1000];
            for number in 0..extents.iter().product() {
                let (mut rest, mut read, mut written) = (number, 0, 0);
                for dimension in (0..extents.len()).rev() {
                    let index = rest % extents[dimension];
                    rest /= extents[dimension];
                    read += index * from_strides[dimension];
                    written += index * to_strides[dimension];
                }
                expected[written] = read;
            }
            assert_eq!(to, expected, "{extents:?} {from_strides:?} {to_strides:?}");
        }
    }
}
