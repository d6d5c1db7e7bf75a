//! Helpers of host implementations, which process device memory piece by piece.

use aquifer_device::{Code, DeviceError, DevicePtr, KernelMemory, Operation, Result};

use crate::dtype::Bytes;

/// Bytes or elements of a piece. A multiple of 8.
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

/// A length in host memory; one that does not fit there fails at allocation.
pub(crate) fn small(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The address of element `index`. Ranges were checked before.
pub(crate) fn element<T>(from: DevicePtr, index: u64) -> DevicePtr {
    from.offset(index * size_of::<T>() as u64)
}

/// `len` values; an error if the host lacks memory.
pub(crate) fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>> {
    let mut values = with_room(len)?;
    values.resize(len, value);
    Ok(values)
}

/// The values of an iterator of known length; an error if the host lacks memory.
pub(crate) fn collected<T>(from: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut values = with_room(from.len())?;
    values.extend(from);
    Ok(values)
}

fn with_room<T>(len: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let refused = |_| {
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        DeviceError::refused(Operation::Launch, Code::OUT_OF_MEMORY)
            .with_detail(format!("the host, which computes for a virtual device, has no {bytes} bytes for that"))
    };
    values.try_reserve_exact(len).map_err(refused)?;
    Ok(values)
}

/// Reads `len` elements from an index on.
pub(crate) fn read<T: Bytes>(memory: &dyn KernelMemory, from: DevicePtr, index: u64, len: usize) -> Result<Vec<T>> {
    let mut bytes = filled(len.saturating_mul(size_of::<T>()), 0)?;
    memory.read(element::<T>(from, index), &mut bytes)?;
    collected(bytes.chunks_exact(size_of::<T>()).map(T::read))
}

/// Writes elements from an index on.
pub(crate) fn write<T: Bytes>(memory: &mut dyn KernelMemory, to: DevicePtr, index: u64, elements: &[T]) -> Result<()> {
    let mut bytes = filled(size_of_val(elements), 0)?;
    for (into, element) in bytes.chunks_exact_mut(size_of::<T>()).zip(elements) {
        element.write(into);
    }
    memory.write(element::<T>(to, index), &bytes)
}
