//! Regions: elements with gaps between them, in any number of dimensions.
//!
//! A region is brought into the form that drivers copy in one call, rows at a pitch, and a call is made for each index of the dimensions
//! that remain.

use std::ops::Range;

use aquifer_device::{Copy2d, CopyEnd, DeviceError, RequestError, Stream};
use aquifer_kernels::Strided;

use crate::error::TransferError;

/// Which elements are copied: for each dimension its extent, and its stride in elements at either end.
///
/// The element with index `(i, j, …)` lies `i · strides[0] + j · strides[1] + …` elements from the start of its end. A stride of 0 in
/// `from` repeats elements.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, Buffer};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_transfer::{Region, Transfer};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
/// let stream = device.stream()?;
/// let host = transfer.pinned().alloc_from(&[1u32, 2, 3, 4, 5, 6])?;
/// // The rows of a 2 × 3 matrix become the columns of a 3 × 2 one.
/// let mut transposed: Buffer<u32> = transfer.allocator().alloc(6, &stream)?;
/// let region = Region { extents: &[2, 3], from_strides: &[3, 1], to_strides: &[1, 2] };
/// let _ = transfer.upload(region.of(&host), &mut transposed)?;
/// assert_eq!(transfer.to_vec(&transposed)?.wait()?, [1, 4, 2, 5, 3, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region<'a> {
    /// How many elements in each dimension.
    pub extents: &'a [usize],
    /// From an element to the next in each dimension, where they are read.
    pub from_strides: &'a [usize],
    /// From an element to the next in each dimension, where they are written. No two elements may lie at one place.
    pub to_strides: &'a [usize],
}

/// One dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dimension {
    pub(super) extent: u64,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// A region as driver calls copy it. All numbers are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    width: u64,
    height: u64,
    from_pitch: u64,
    to_pitch: u64,
    /// A call is made for each index of these.
    outer: Vec<Dimension>,
    /// Elements that are reached at either end, from the first on.
    from_reach: u64,
    to_reach: u64,
    pub(super) elements: u64,
}

/// Rows of which the places are compared, one with another, where both ends of a region lie in one piece of memory.
const ROWS_COMPARED: u64 = 1 << 20;

impl Plan {
    /// The plan of a copy of a region, or of all of two ends of `from_len` and `to_len` elements; `None` where there is
    /// nothing to copy.
    ///
    /// # Errors
    /// Without a region, ends of different lengths. A region that reaches beyond either end, or writes a place twice.
    pub(super) fn of(
        region: Option<&Region<'_>>,
        from_len: usize,
        to_len: usize,
    ) -> Result<Option<Plan>, TransferError> {
        let (from_len, to_len) = (from_len as u64, to_len as u64);
        match region {
            None if from_len != to_len => Err(TransferError::LengthMismatch { from: from_len, to: to_len }),
            None => Ok((to_len > 0).then(|| Plan::dense(to_len))),
            Some(region) => {
                let plan = region.plan()?;
                plan.iter().try_for_each(|plan| plan.check_reach(from_len, to_len))?;
                Ok(plan)
            }
        }
    }

    /// All of so many elements.
    pub(super) fn dense(len: u64) -> Plan {
        Plan {
            width: len,
            height: 1,
            from_pitch: len,
            to_pitch: len,
            outer: Vec::new(),
            from_reach: len,
            to_reach: len,
            elements: len,
        }
    }

    /// Whether the elements lie without gaps at either end.
    pub(super) fn is_dense(&self) -> bool {
        self.width == self.elements
    }

    /// Size of all elements in bytes.
    pub(super) fn bytes<T>(&self) -> u64 {
        self.elements.saturating_mul(size_of::<T>() as u64)
    }
}

impl Region<'_> {
    /// `None` where there is nothing to copy.
    pub(super) fn plan(&self) -> Result<Option<Plan>, TransferError> {
        let wrong = |reason| TransferError::Region { reason };
        if self.extents.len() != self.from_strides.len() || self.extents.len() != self.to_strides.len() {
            return Err(wrong("it must have a stride for each extent, at both ends"));
        }
        if self.extents.contains(&0) {
            return Ok(None);
        }
        let strides = self.from_strides.iter().zip(self.to_strides);
        let all = self.extents.iter().zip(strides).map(|(&extent, (&from, &to))| Dimension {
            extent: extent as u64,
            from: from as u64,
            to: to as u64,
        });
        let mut dimensions: Vec<_> = all.filter(|dimension| dimension.extent > 1).collect();
        let overflow = || wrong("its numbers are too large");
        let elements =
            dimensions.iter().try_fold(1u64, |all, next| all.checked_mul(next.extent)).ok_or_else(overflow)?;
        let reach = |stride: fn(&Dimension) -> u64| {
            dimensions
                .iter()
                .try_fold(1u64, |reach, next| reach.checked_add((next.extent - 1).checked_mul(stride(next))?))
        };
        let from_reach = reach(|dimension| dimension.from).ok_or_else(overflow)?;
        let to_reach = reach(|dimension| dimension.to).ok_or_else(overflow)?;
        // Which index belongs to which dimension does not matter, so the one with the smallest steps becomes the innermost.
        dimensions.sort_by_key(|dimension| (std::cmp::Reverse(dimension.to), std::cmp::Reverse(dimension.from)));
        if !Strided::are_distinct(dimensions.iter().rev().map(|dimension| (dimension.extent, dimension.to))) {
            return Err(wrong("two of its elements lie, or may lie, at one place where they are written"));
        }
        let mut dimensions = merged(dimensions);
        let width = match dimensions.last() {
            Some(&Dimension { extent, from: 1, to: 1 }) => {
                dimensions.pop();
                extent
            }
            _ => 1,
        };
        // Rows may neither overlap nor repeat.
        let is_pitch = |dimension: &Dimension| dimension.from >= width && dimension.to >= width;
        let rows = dimensions.iter().enumerate().filter(|(_, dimension)| is_pitch(dimension));
        let rows = rows.max_by_key(|(_, dimension)| dimension.extent).map(|(index, _)| index);
        let rows = rows.map_or(Dimension { extent: 1, from: width, to: width }, |index| dimensions.remove(index));
        Ok(Some(Plan {
            width,
            height: rows.extent,
            from_pitch: rows.from,
            to_pitch: rows.to,
            outer: dimensions,
            from_reach,
            to_reach,
            elements,
        }))
    }
}

/// Neighbours become one dimension where the outer one goes on where the inner one ends, at both ends.
fn merged(dimensions: Vec<Dimension>) -> Vec<Dimension> {
    let mut merged: Vec<Dimension> = Vec::with_capacity(dimensions.len());
    for next in dimensions {
        match merged.last_mut() {
            Some(outer)
                if next.from.checked_mul(next.extent) == Some(outer.from)
                    && next.to.checked_mul(next.extent) == Some(outer.to) =>
            {
                *outer = Dimension { extent: outer.extent * next.extent, ..next };
            }
            _ => merged.push(next),
        }
    }
    merged
}

impl Plan {
    /// The dimensions that are left, in any order.
    pub(super) fn dimensions(&self) -> Vec<Dimension> {
        let rows = Dimension { extent: self.height, from: self.from_pitch, to: self.to_pitch };
        let row = Dimension { extent: self.width, from: 1, to: 1 };
        let all = self.outer.iter().copied().chain([rows, row]);
        all.filter(|dimension| dimension.extent > 1).collect()
    }

    /// Calls `copy` with where each piece starts, in elements, at either end.
    fn pieces<E>(&self, mut copy: impl FnMut(u64, u64) -> Result<(), E>) -> Result<(), E> {
        let mut index = vec![0; self.outer.len()];
        loop {
            let place = |stride: fn(&Dimension) -> u64| -> u64 {
                self.outer.iter().zip(&index).map(|(dimension, index)| stride(dimension) * index).sum()
            };
            copy(place(|dimension| dimension.from), place(|dimension| dimension.to))?;
            let Some(turned) = (0..index.len()).rev().find(|&at| index[at] + 1 < self.outer[at].extent) else {
                return Ok(());
            };
            index[turned] += 1;
            index[turned + 1..].fill(0);
        }
    }

    /// Calls `visit` with where each row of some elements starts at either end, and its length, in elements. Elements are numbered in the
    /// order of the plan's rows, of which the first and the last may be cut.
    pub(super) fn rows(&self, elements: Range<u64>, mut visit: impl FnMut(u64, u64, u64)) {
        let Range { start: mut next, end } = elements;
        while next < end {
            let (row, mut column) = (next / self.width, next % self.width);
            let (mut from_at, mut to_at) = self.start_of(row / self.height);
            let first = row % self.height;
            from_at += first * self.from_pitch;
            to_at += first * self.to_pitch;
            for _ in first..self.height {
                let width = (self.width - column).min(end - next);
                visit(from_at + column, to_at + column, width);
                next += width;
                if next == end {
                    return;
                }
                (from_at, to_at, column) = (from_at + self.from_pitch, to_at + self.to_pitch, 0);
            }
        }
    }

    /// Where a piece starts, by its number.
    fn start_of(&self, mut piece: u64) -> (u64, u64) {
        self.outer.iter().rev().fold((0, 0), |(from, to), dimension| {
            let index = piece % dimension.extent;
            piece /= dimension.extent;
            (from + index * dimension.from, to + index * dimension.to)
        })
    }

    /// Copies all rows with the calling thread, between slices that the region was checked to lie within.
    pub(super) fn copy_on_host<T: Copy>(&self, from: &[T], to: &mut [T]) {
        let place = |element: u64| usize::try_from(element).unwrap_or(usize::MAX);
        self.rows(0..self.elements, |from_at, to_at, width| {
            let (from_at, to_at, width) = (place(from_at), place(to_at), place(width));
            if width == 1 {
                to[to_at] = from[from_at];
            } else {
                to[to_at..to_at + width].copy_from_slice(&from[from_at..from_at + width]);
            }
        });
    }

    /// Enqueues all pieces.
    ///
    /// # Safety
    /// What the region reaches from `from` and `to` on must be memory as [`aquifer_device::Driver::copy_2d`] asks for.
    #[allow(unsafe_code, reason = "passed on from the driver")]
    pub(super) unsafe fn enqueue(
        &self,
        stream: &Stream,
        from: CopyEnd,
        to: CopyEnd,
        size: u64,
    ) -> Result<(), DeviceError> {
        if self.is_dense() {
            let bytes = self.elements * size;
            let host_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            return match (from, to) {
                // SAFETY: passed on to the caller.
                (CopyEnd::Host(from), CopyEnd::Device(to)) => unsafe { stream.upload(to, from, host_bytes) },
                // SAFETY: passed on to the caller.
                (CopyEnd::Device(from), CopyEnd::Host(to)) => unsafe { stream.download(to, from, host_bytes) },
                (CopyEnd::Device(from), CopyEnd::Device(to)) => stream.copy(to, from, bytes),
                (CopyEnd::Host(_), CopyEnd::Host(_)) => unreachable!("one end is the device's"),
            };
        }
        self.pieces(|from_at, to_at| {
            let copy = Copy2d {
                dst: further(to, to_at * size),
                dst_pitch: self.to_pitch * size,
                src: further(from, from_at * size),
                src_pitch: self.from_pitch * size,
                width: self.width * size,
                height: self.height,
            };
            // SAFETY: passed on to the caller; the piece lies within what the region reaches.
            unsafe { stream.copy_2d(&copy) }
        })
    }

    /// Whether what is written at `to` on meets what is read at `from` on, in bytes. Told exactly for up to [`ROWS_COMPARED`] rows; where both
    /// ends reach over each other with more, they are taken to meet.
    pub(super) fn meets_itself(&self, from: u64, to: u64, size: u64) -> bool {
        let apart = to >= from + self.from_reach * size || from >= to + self.to_reach * size;
        if apart || self.elements == 0 {
            return false;
        }
        if self.elements / self.width > ROWS_COMPARED {
            return true;
        }
        let (mut read, mut written) = (Vec::new(), Vec::new());
        self.rows(0..self.elements, |from_at, to_at, _| {
            read.push(from + from_at * size);
            written.push(to + to_at * size);
        });
        read.sort_unstable();
        written.sort_unstable();
        let width = self.width * size;
        let mut read = read.into_iter().peekable();
        written.into_iter().any(|start| {
            // All rows are equally long, so those that start late enough end late enough.
            while read.next_if(|&read| read + width <= start).is_some() {}
            read.peek().is_some_and(|&read| read < start + width)
        })
    }

    pub(super) fn check_reach(&self, from_len: u64, to_len: u64) -> Result<(), TransferError> {
        let fits = |reach: u64, len: u64| {
            if reach <= len {
                Ok(())
            } else {
                Err(TransferError::Request(RequestError::OutOfBounds { start: 0, end: reach, len }))
            }
        };
        fits(self.from_reach, from_len)?;
        fits(self.to_reach, to_len)
    }
}

/// The place `bytes` on, within memory that was checked.
pub(super) fn further(place: CopyEnd, bytes: u64) -> CopyEnd {
    match place {
        CopyEnd::Device(ptr) => CopyEnd::Device(ptr.offset(bytes)),
        CopyEnd::Host(mut ptr) => {
            ptr.0 += usize::try_from(bytes).unwrap_or(usize::MAX);
            CopyEnd::Host(ptr)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;
    use crate::host_vec;

    fn plan(extents: &[usize], from_strides: &[usize], to_strides: &[usize]) -> Option<Plan> {
        Region { extents, from_strides, to_strides }.plan().unwrap()
    }

    #[test]
    fn dense_dimensions_become_one_row() {
        let plan = plan(&[2, 3, 4], &[12, 4, 1], &[12, 4, 1]).unwrap();
        assert_eq!((plan.width, plan.height, plan.outer.len()), (24, 1, 0));
    }

    #[test]
    fn a_block_of_a_volume_is_rows_and_one_outer_dimension() {
        let plan = plan(&[2, 3, 4], &[100, 10, 1], &[12, 4, 1]).unwrap();
        assert_eq!((plan.width, plan.height, plan.from_pitch, plan.to_pitch), (4, 3, 10, 4));
        assert_eq!((plan.outer.len(), plan.from_reach, plan.to_reach), (1, 124, 24));
    }

    #[test]
    fn only_what_meets_itself_does() {
        // Even columns of rows go to the odd ones beside them, which lie in between.
        let columns = plan(&[4, 3], &[6, 2], &[6, 2]).unwrap();
        assert!(!columns.meets_itself(0, 4, 4) && columns.meets_itself(0, 8, 4) && columns.meets_itself(8, 0, 4));
        let repeated = plan(&[3, 2], &[0, 1], &[4, 1]).unwrap();
        assert!(!repeated.meets_itself(8, 0, 4), "between the rows that are written");
        assert!(repeated.meets_itself(4, 0, 4) && repeated.meets_itself(4096, 4096, 4));
        let many = plan(&[1 << 21, 1], &[2, 1], &[2, 1]).unwrap();
        assert!(many.meets_itself(0, 4, 4), "too many to tell");
        assert!(!many.meets_itself(0, 4 << 22, 4));
    }

    #[test]
    fn what_would_be_written_twice_or_has_no_strides_is_refused() {
        for (extents, from, to) in [
            (&[2, 2][..], &[2, 1][..], &[0, 1][..]),
            (&[2, 3], &[3, 1], &[2, 1]),
            (&[2], &[1, 1], &[1]),
            (&[usize::MAX, 3], &[1, 1], &[3, 1]),
        ] {
            assert!(
                Region { extents, from_strides: from, to_strides: to }.plan().is_err(),
                "{extents:?} {from:?} {to:?}"
            );
        }
        assert_eq!(plan(&[3, 0], &[1, 1], &[1, 1]), None);
    }

    proptest! {
        /// Every element goes where its index says, once.
        #[test]
        fn plans_copy_each_element_once(
            extents in proptest::collection::vec(1usize..5, 0..5),
            order in any::<u64>(),
            gaps in proptest::collection::vec(0usize..3, 5),
            repeat in any::<u8>(),
        ) {
            let mut dims: Vec<usize> = (0..extents.len()).collect();
            dims.sort_by_key(|&dim| order.rotate_left(u32::try_from(dim).unwrap() * 7) % 97);
            let mut to_strides = vec![0; extents.len()];
            let mut step = 1;
            for &dim in dims.iter().rev() {
                to_strides[dim] = step + gaps[dim];
                step = to_strides[dim] * extents[dim];
            }
            let mut from_strides = vec![0; extents.len()];
            step = 1;
            for dim in (0..extents.len()).rev() {
                from_strides[dim] = if repeat >> dim & 1 == 1 { 0 } else { step };
                step *= extents[dim];
            }
            let plan = plan(&extents, &from_strides, &to_strides).unwrap();
            let mut expected = std::collections::BTreeMap::new();
            for number in 0..extents.iter().product::<usize>() {
                let (mut rest, mut from, mut to) = (number, 0, 0);
                for dim in (0..extents.len()).rev() {
                    let index = rest % extents[dim];
                    rest /= extents[dim];
                    from += index * from_strides[dim];
                    to += index * to_strides[dim];
                }
                expected.insert(to as u64, from as u64);
            }
            let mut copied = std::collections::BTreeMap::new();
            plan.pieces::<Infallible>(|from, to| {
                for row in 0..plan.height {
                    for column in 0..plan.width {
                        let before = copied.insert(to + row * plan.to_pitch + column, from + row * plan.from_pitch + column);
                        assert_eq!(before, None);
                    }
                }
                Ok(())
            }).unwrap();
            prop_assert_eq!(&copied, &expected);
            // However the elements are cut into ranges.
            let mut cut = std::collections::BTreeMap::new();
            let mut start = 0;
            while start < plan.elements {
                let end = (start + 1 + order % 7).min(plan.elements);
                plan.rows(start..end, |from, to, width| {
                    (0..width).for_each(|column| assert_eq!(cut.insert(to + column, from + column), None));
                });
                start = end;
            }
            prop_assert_eq!(&cut, &expected);
            let from: Vec<u64> = (0..plan.from_reach).collect();
            let mut to = vec![u64::MAX; host_vec::len_of(plan.to_reach, 8).unwrap()];
            plan.copy_on_host(&from, &mut to);
            let written = (0u64..).zip(to).filter(|&(_, from)| from != u64::MAX);
            prop_assert_eq!(written.collect::<std::collections::BTreeMap<_, _>>(), expected);
        }
    }
}
