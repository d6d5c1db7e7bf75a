//! Regions on their way through pinned memory, where their elements are adjacent.
//!
//! The elements are packed in the order in which the device has them: single elements cost the host
//! less than a driver call or a copy engine's transaction for each.

use super::region::Plan;
use crate::rows::{Dimension, Rows, group_rows};

/// The end of a copy that is the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnDevice {
    From,
    To,
}

const FROM: usize = 0;
const PACKED: usize = 1;
const TO: usize = 2;

/// A region's dimensions in the order in which its elements are packed, outermost first. Strides
/// are those of the source, the packed elements and the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed(Vec<Dimension<3>>);

impl Packed {
    /// Every element, including repeated ones.
    pub(super) fn new(plan: &Plan, device: OnDevice) -> Packed {
        Packed::with(plan, device, |_| true)
    }

    /// Each element once, where the region repeats elements.
    pub(super) fn once(plan: &Plan, order: OnDevice) -> Packed {
        Packed::with(plan, order, |dimension| dimension.strides[FROM] > 0)
    }

    /// Dimensions that `is_packed` excludes get a stride of 0 where the elements are packed.
    fn with(plan: &Plan, order: OnDevice, is_packed: impl Fn(&Dimension<3>) -> bool) -> Packed {
        let mut dimensions: Vec<_> = plan
            .rows
            .dimensions()
            .map(|Dimension { extent, strides: [from, to] }| Dimension { extent, strides: [from, 0, to] })
            .collect();
        let end = if order == OnDevice::From { FROM } else { TO };
        // Long steps first, so that adjacent elements make long rows; steps of 0 before all others.
        dimensions.sort_by_key(|dimension| std::cmp::Reverse(dimension.strides[end].wrapping_sub(1)));
        group_rows(&mut dimensions, &[end]);
        let mut dense = 1;
        for dimension in dimensions.iter_mut().rev() {
            if is_packed(dimension) {
                dimension.strides[PACKED] = dense;
                dense *= dimension.extent;
            }
        }
        Packed(dimensions)
    }

    /// From the source to where the elements are packed.
    pub(super) fn gathering(&self) -> Rows<2> {
        Rows::new(self.dimensions([FROM, PACKED]).filter(|dimension| dimension.strides[1] > 0))
    }

    /// From where the elements are packed to the target.
    pub(super) fn scattering(&self) -> Rows<2> {
        Rows::new(self.dimensions([PACKED, TO]))
    }

    /// The bytes of elements of `size` bytes at the source and at the target, in the packed order.
    pub(super) fn ends(&self, size: u64) -> (Rows<1>, Rows<1>) {
        (Rows::of_bytes(self.dimensions([FROM]), size), Rows::of_bytes(self.dimensions([TO]), size))
    }

    /// The dimensions at some of the ends.
    fn dimensions<const N: usize>(&self, ends: [usize; N]) -> impl Iterator<Item = Dimension<N>> {
        self.0
            .iter()
            .map(move |&Dimension { extent, strides }| Dimension { extent, strides: ends.map(|end| strides[end]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    fn packed(extents: &[usize], from_strides: &[usize], to_strides: &[usize], device: OnDevice) -> Packed {
        Packed::new(&Region { extents, from_strides, to_strides }.plan(4).unwrap().unwrap(), device)
    }

    fn rows(extents: [u64; 3], from: [u64; 3], to: [u64; 3]) -> Rows<2> {
        Rows::new((0..3).map(|at| Dimension { extent: extents[at], strides: [from[at], to[at]] }))
    }

    #[test]
    fn elements_are_packed_in_the_order_of_the_device() {
        // A transposition: all of the device's end is adjacent, whichever that is.
        let (from, to) = packed(&[3, 5], &[5, 1], &[1, 3], OnDevice::To).ends(4);
        assert_eq!((to, from.len()), (Rows::dense(60), 60));
        let (from, to) = packed(&[3, 5], &[5, 1], &[1, 3], OnDevice::From).ends(4);
        assert_eq!((from, to.len()), (Rows::dense(60), 60));
        // The longest dimension makes the rows.
        let many = packed(&[100, 7, 4], &[28, 4, 1], &[5, 1000, 1], OnDevice::To);
        assert_eq!(many.scattering(), rows([7, 100, 4], [400, 4, 1], [1000, 5, 1]));
        let many = packed(&[7, 100, 4], &[28, 0, 1], &[400, 4, 1], OnDevice::From);
        assert_eq!(many.gathering(), rows([100, 7, 4], [0, 28, 1], [28, 4, 1]));
    }

    #[test]
    fn repeated_elements_are_packed_once() {
        let region = Region { extents: &[5, 2, 3], from_strides: &[0, 7, 1], to_strides: &[6, 3, 1] };
        let packed = Packed::once(&region.plan(4).unwrap().unwrap(), OnDevice::To);
        assert_eq!(packed.gathering().len(), 6);
        assert_eq!(packed.scattering(), rows([5, 2, 3], [0, 3, 1], [6, 3, 1]));
    }
}
