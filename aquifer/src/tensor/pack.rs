//! Packing of elements with gaps between them, in row-major order, on the host and on devices; on
//! devices also unpacking.

use aquifer_device::{RequestError, Stream};
use aquifer_kernels::{DType, Element, Strided};
use aquifer_transfer::internal::{Dimension, len_of, place_of};

use super::memory::{DeviceMemory, operand_of, part_of, target_of};
use crate::buffer::Buffer;
use crate::error::Error;

use crate::layout::Layout;
use crate::transfer::Transfer;

/// Dimensions that one launch of the gather or scatter kernel takes.
const LAUNCH_DIMENSIONS: usize = 4;

/// Copies the elements of `size` bytes that `layout` names in `from` to `to`, which has room for
/// exactly them.
pub(super) fn pack_on_host(from: &[u8], layout: &Layout, size: usize, to: &mut [u8]) {
    if layout.is_empty() {
        return;
    }
    let (rows, from) = (layout.rows_to_dense(), &from[layout.offset() * size..]);
    rows.copy_bytes(size, from, to);
}

/// Enqueues packing elements into new memory on their device, allocated for `stream`.
pub(super) fn pack_on_device(
    memory: &DeviceMemory,
    transfer: &Transfer,
    dtype: DType,
    layout: &Layout,
    stream: &Stream,
) -> Result<Buffer<u8>, Error> {
    let mut to = transfer.alloc_elements(layout.len(), dtype, stream)?;
    pack_to(memory, transfer, dtype, layout, &mut to, stream)?;
    Ok(to)
}

/// Enqueues packing elements into memory of their device that has exactly their length and does not
/// overlap them.
pub(super) fn pack_to(
    memory: &DeviceMemory,
    transfer: &Transfer,
    dtype: DType,
    layout: &Layout,
    to: &mut Buffer<u8>,
    stream: &Stream,
) -> Result<(), Error> {
    if layout.is_empty() {
        return Ok(());
    }
    if layout.is_contiguous() {
        let (copies, from) = (transfer.on(stream)?, memory.elements(dtype, layout.offset(), layout.len())?);
        return to.fill_by(&copies, &from);
    }
    let (kernels, size) = (transfer.allocator().kernels()?, dtype.bytes());
    let (strided, starts) = launches(layout)?;
    let reach = len_of(strided.reach(), size)?;
    for (number, start) in (0..).zip(starts) {
        let from = memory.elements(dtype, start, reach)?;
        let mut part = part_of(to, number * strided.len() * size..(number + 1) * strided.len() * size)?;
        kernels.gather(stream, operand_of(&from, dtype), &strided, target_of(&mut part, dtype))?;
    }
    Ok(())
}

/// Enqueues unpacking dense elements to the places that a layout names in memory of their device,
/// which must not overlap them.
pub(super) fn spread_on_device(
    from: &Buffer<u8>,
    memory: &DeviceMemory,
    transfer: &Transfer,
    dtype: DType,
    layout: &Layout,
    stream: &Stream,
) -> Result<(), Error> {
    let bytes = launches(layout)?.0.len() * dtype.bytes();
    scatter_all(memory, transfer, dtype, layout, stream, |number| part_of(from, number * bytes..(number + 1) * bytes))
}

/// Enqueues setting the elements that a layout names to `value`. Takes memory for the elements of
/// one launch.
pub(super) fn fill_on_device<T: Element>(
    memory: &DeviceMemory,
    transfer: &Transfer,
    layout: &Layout,
    value: T,
    stream: &Stream,
) -> Result<(), Error> {
    let count = launches(layout)?.0.len();
    let mut values: Buffer<T> = transfer.allocator().alloc(len_of(count, size_of::<T>() as u64)?, stream)?;
    transfer.allocator().kernels()?.fill(stream, &mut values, value)?;
    let values = values.reinterpret::<u8>();
    let values = values.ok_or(RequestError::Unsupported { what: "device memory of whole bytes" })?;
    scatter_all(memory, transfer, T::DTYPE, layout, stream, |_| Ok(values.share()))
}

/// Launches the scatter kernel for all of a layout; `part` returns the source of each launch by its
/// number.
fn scatter_all(
    memory: &DeviceMemory,
    transfer: &Transfer,
    dtype: DType,
    layout: &Layout,
    stream: &Stream,
    part: impl Fn(u64) -> Result<Buffer<u8>, Error>,
) -> Result<(), Error> {
    if layout.is_empty() {
        return Ok(());
    }
    let kernels = transfer.allocator().kernels()?;
    let (strided, starts) = launches(layout)?;
    let reach = len_of(strided.reach(), dtype.bytes())?;
    for (number, start) in (0..).zip(starts) {
        let (from, mut to) = (part(number)?, memory.elements(dtype, start, reach)?);
        kernels.scatter(stream, operand_of(&from, dtype), target_of(&mut to, dtype), &strided)?;
    }
    Ok(())
}

/// The innermost dimensions of a layout, which one launch takes, and the place where each launch
/// begins: one for each index of the other dimensions.
fn launches(layout: &Layout) -> Result<(Strided, Vec<usize>), Error> {
    let merged = layout.merged();
    let dimensions: Vec<_> = merged
        .dimensions()
        .map(|(extent, stride)| Dimension { extent: extent as u64, strides: [stride as u64] })
        .collect();
    let (outer, launched) = dimensions.split_at(dimensions.len().saturating_sub(LAUNCH_DIMENSIONS));
    let (extents, strides): (Vec<u64>, Vec<u64>) =
        launched.iter().map(|dimension| (dimension.extent, dimension.strides[0])).unzip();
    // Numbers of a part overflow no more than those of the whole.
    let what = "a layout that the gather and scatter kernels take";
    let strided = Strided::new(&extents, &strides).ok_or(RequestError::Unsupported { what })?;
    let count = outer.iter().map(|dimension| dimension.extent).product();
    let start = |number| len_of(merged.offset() as u64 + place_of(outer, number)[0], 1);
    Ok((strided, (0..count).map(start).collect::<Result<_, _>>()?))
}
