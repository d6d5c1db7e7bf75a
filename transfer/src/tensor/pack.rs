//! Packing: elements with gaps between them become dense, in row-major order, on the side where they are.

use aquifer_allocator::DeviceBuffer;
use aquifer_device::Stream;
use aquifer_kernels::{DType, Operand, Strided, Target};

use super::layout::Layout;
use super::memory::DeviceMemory;
use crate::error::TransferError;
use crate::runtime::Transfer;

/// Dimensions that one launch of the gather kernel takes.
const LAUNCH_DIMENSIONS: usize = 4;

/// Copies the elements of `size` bytes that `layout` names in `from` to `to`, which has room for exactly them.
pub(super) fn pack_on_host(from: &[u8], layout: &Layout, size: usize, to: &mut [u8]) {
    match size {
        1 => pack_sized::<1>(from, layout, to),
        2 => pack_sized::<2>(from, layout, to),
        4 => pack_sized::<4>(from, layout, to),
        _ => pack_sized::<8>(from, layout, to),
    }
}

fn pack_sized<const SIZE: usize>(from: &[u8], layout: &Layout, to: &mut [u8]) {
    if layout.is_empty() {
        return;
    }
    let merged = layout.merged();
    let (outer, along, stride) = inner(&merged);
    let (from, _) = from.as_chunks::<SIZE>();
    let (to, _) = to.as_chunks_mut::<SIZE>();
    let mut rows = to.chunks_exact_mut(small(along));
    places(&outer, merged.offset(), &mut |start| {
        let Some(row) = rows.next() else { return };
        let start = small(start);
        if stride == 1 {
            row.copy_from_slice(&from[start..start + row.len()]);
        } else {
            // Places lie within `from`, which the tensor's layout was checked against.
            let step = small(stride);
            row.iter_mut().enumerate().for_each(|(at, to)| *to = from[start + at * step]);
        }
    });
}

/// The outer dimensions of a merged layout, and extent and stride of the innermost one.
fn inner(merged: &Layout) -> (Vec<(u64, u64)>, u64, u64) {
    let mut dimensions: Vec<(u64, u64)> = merged.dimensions().collect();
    let (along, stride) = dimensions.pop().unwrap_or((1, 1));
    (dimensions, along, stride)
}

/// Calls `visit` with the place of each index of some dimensions, in row-major order.
fn places(dimensions: &[(u64, u64)], place: u64, visit: &mut impl FnMut(u64)) {
    match dimensions {
        [] => visit(place),
        [(extent, stride), rest @ ..] => (0..*extent).for_each(|at| places(rest, place + at * stride, visit)),
    }
}

fn small(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// Enqueues collecting elements in new memory on their device, allocated for `stream`.
pub(super) fn pack_on_device(
    memory: &DeviceMemory,
    transfer: &Transfer,
    dtype: DType,
    layout: &Layout,
    stream: &Stream,
) -> Result<DeviceBuffer<u8>, TransferError> {
    let size = dtype.bytes();
    let to: DeviceBuffer<u8> = transfer.allocator().alloc_buffer(layout.len().saturating_mul(size), stream)?;
    if layout.is_empty() {
        return Ok(to);
    }
    let kernels = transfer.kernels()?;
    let merged = layout.merged();
    let dimensions: Vec<(u64, u64)> = merged.dimensions().collect();
    let (outer, launched) = dimensions.split_at(dimensions.len().saturating_sub(LAUNCH_DIMENSIONS));
    let (extents, strides): (Vec<u64>, Vec<u64>) = launched.iter().copied().unzip();
    // Numbers of a part overflow no more than those of the whole.
    let Some(strided) = Strided::new(&extents, &strides) else {
        return Err(TransferError::Unsupported { what: "a layout that the gather kernel takes" });
    };
    let mut starts = Vec::new();
    places(outer, merged.offset(), &mut |start| starts.push(start));
    for (number, start) in (0..).zip(starts) {
        let from = memory.elements(dtype, start, strided.reach())?;
        let mut part = to.slice(number * strided.len() * size..(number + 1) * strided.len() * size)?;
        kernels.gather(stream, Operand::of_bytes(&from, dtype), &strided, Target::of_bytes(&mut part, dtype))?;
    }
    Ok(to)
}
