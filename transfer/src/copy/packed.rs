//! Regions on their way through page-locked memory, where their elements have no gaps.
//!
//! The elements go in the order in which the device has them: whatever the host does with single elements costs less than a driver call or
//! a copy engine's transaction for each.

use crate::copy::Region;
use crate::copy::region::{Dimension, Plan};
use crate::error::TransferError;
use crate::staging::Spread;

/// Which end of a copy is the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnDevice {
    From,
    To,
}

/// A region's dimensions in the order in which its elements are packed, the outermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packed {
    extents: Vec<usize>,
    from: Vec<usize>,
    /// Strides where they are packed.
    dense: Vec<usize>,
    to: Vec<usize>,
}

impl Packed {
    pub(super) fn new(plan: &Plan, device: OnDevice) -> Packed {
        let mut dimensions = plan.dimensions();
        sort_for(&mut dimensions, |dimension| match device {
            OnDevice::From => dimension.from,
            OnDevice::To => dimension.to,
        });
        // They are those of a region, which are `usize`.
        let length = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let each = |number: fn(&Dimension) -> u64| dimensions.iter().map(|next| length(number(next))).collect();
        let mut packed = Packed {
            extents: each(|dimension| dimension.extent),
            from: each(|dimension| dimension.from),
            dense: Vec::new(),
            to: each(|dimension| dimension.to),
        };
        packed.dense = packed
            .extents
            .iter()
            .rev()
            .scan(1, |next, extent| {
                let stride = *next;
                *next *= extent;
                Some(stride)
            })
            .collect();
        packed.dense.reverse();
        packed
    }

    /// From where they are to where they are packed.
    pub(super) fn gathering(&self) -> Region<'_> {
        Region { extents: &self.extents, from_strides: &self.from, to_strides: &self.dense }
    }

    /// From where they are packed to where they go.
    pub(super) fn scattering(&self) -> Region<'_> {
        Region { extents: &self.extents, from_strides: &self.dense, to_strides: &self.to }
    }

    /// Packs all elements with the calling thread; the region must reach beyond neither end.
    pub(super) fn gather_on_host<T: Copy>(&self, from: &[T], packed: &mut [T]) -> Result<(), TransferError> {
        self.gathering().plan()?.iter().for_each(|plan| plan.copy_on_host(from, packed));
        Ok(())
    }

    /// Brings all elements to where they go, likewise.
    pub(super) fn scatter_on_host<T: Copy>(&self, packed: &[T], to: &mut [T]) -> Result<(), TransferError> {
        self.scattering().plan()?.iter().for_each(|plan| plan.copy_on_host(packed, to));
        Ok(())
    }

    /// Where elements of `size` bytes lie at either end.
    pub(super) fn spreads(&self, size: u64) -> (Spread, Spread) {
        let spread = |strides: &[usize]| {
            let dimensions = self.extents.iter().zip(strides);
            Spread::new(dimensions.map(|(&extent, &stride)| (extent as u64, stride as u64)), size)
        };
        (spread(&self.from), spread(&self.to))
    }
}

/// Puts those first that take the longest steps, or none, so that what lies side by side makes long rows, and before these the one
/// with the most rows at one distance, which are one call.
fn sort_for(dimensions: &mut [Dimension], stride: impl Fn(&Dimension) -> u64) {
    dimensions.sort_by_key(|dimension| std::cmp::Reverse(stride(dimension).wrapping_sub(1)));
    let (mut width, mut inner) = (1, dimensions.len());
    while let Some(next) = inner.checked_sub(1).filter(|&next| stride(&dimensions[next]) == width) {
        width *= dimensions[next].extent;
        inner = next;
    }
    let rows = dimensions[..inner].iter().enumerate().filter(|(_, dimension)| stride(dimension) >= width);
    if let Some((at, _)) = rows.max_by_key(|(_, dimension)| dimension.extent) {
        dimensions[at..inner].rotate_left(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(extents: &[usize], from_strides: &[usize], to_strides: &[usize], device: OnDevice) -> Packed {
        Packed::new(&Region { extents, from_strides, to_strides }.plan().unwrap().unwrap(), device)
    }

    #[test]
    fn elements_are_packed_as_the_device_has_them() {
        // A transposition: all of one end is side by side, whichever is the device's.
        let (from, to) = packed(&[3, 5], &[5, 1], &[1, 3], OnDevice::To).spreads(4);
        assert_eq!((to, from.bytes()), (Spread::dense(60), 60));
        let (from, to) = packed(&[3, 5], &[5, 1], &[1, 3], OnDevice::From).spreads(4);
        assert_eq!((from, to.bytes()), (Spread::dense(60), 60));
        // Most rows at one distance, whichever dimension they are of.
        let many = packed(&[100, 7, 4], &[28, 4, 1], &[5, 1000, 1], OnDevice::To);
        assert_eq!(
            many.scattering(),
            Region { extents: &[7, 100, 4], from_strides: &[400, 4, 1], to_strides: &[1000, 5, 1] }
        );
        let many = packed(&[7, 100, 4], &[28, 0, 1], &[400, 4, 1], OnDevice::From);
        assert_eq!(
            many.gathering(),
            Region { extents: &[100, 7, 4], from_strides: &[0, 28, 1], to_strides: &[28, 4, 1] }
        );
    }
}
