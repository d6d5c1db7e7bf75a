//! Host implementations work on pieces of device memory: what they have in common.

use aquifer_device::{DevicePtr, KernelMemory, Result};

use crate::dtype::Bytes;

/// Bytes, or elements, that are worked on at a time. A multiple of 8.
pub(crate) const CHUNK: usize = 1 << 16;

/// Calls `work` with the start and the length of each piece of `total`, in order.
pub(crate) fn chunks(total: u64, mut work: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
    let mut at = 0;
    while at < total {
        let len = small(total - at).min(CHUNK);
        work(at, len)?;
        at += len as u64;
    }
    Ok(())
}

/// A length in the host's memory; one that does not fit there fails at allocation.
pub(crate) fn small(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The address of element `index`. Ranges were checked before.
pub(crate) fn element<T>(from: DevicePtr, index: u64) -> DevicePtr {
    from.offset(index * size_of::<T>() as u64)
}

/// Reads `len` elements from the one with the given index on.
pub(crate) fn read<T: Bytes>(memory: &dyn KernelMemory, from: DevicePtr, index: u64, len: usize) -> Result<Vec<T>> {
    let mut bytes = vec![0; len * size_of::<T>()];
    memory.read(element::<T>(from, index), &mut bytes)?;
    Ok(bytes.chunks_exact(size_of::<T>()).map(T::read).collect())
}

/// Writes elements from the one with the given index on.
pub(crate) fn write<T: Bytes>(memory: &mut dyn KernelMemory, to: DevicePtr, index: u64, elements: &[T]) -> Result<()> {
    let mut bytes = vec![0; size_of_val(elements)];
    for (into, element) in bytes.chunks_exact_mut(size_of::<T>()).zip(elements) {
        element.write(into);
    }
    memory.write(element::<T>(to, index), &bytes)
}
