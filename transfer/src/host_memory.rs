//! Host memory: lengths, ordinary memory, and ranges that threads of the staging ring access.
//!
//! If the system refuses ordinary memory, that is an error rather than the end of the process.
//!
//! Invariant **N3**: the ring reads a source and writes a target only before the job is settled,
//! and no two threads write the same bytes of a target.

use std::ops::Range;
use std::sync::Arc;

use aquifer_device::RequestError;
use bytemuck::{Pod, Zeroable};

use crate::error::TransferError;

/// The number of elements of `size` bytes as a length on the host.
///
/// # Errors
/// [`RequestError::LengthOverflow`] where their bytes are more than there are addresses for.
pub fn len_of(len: u64, size: u64) -> Result<usize, TransferError> {
    let elements = usize::try_from(len).map_err(|_| RequestError::LengthOverflow { len, size })?;
    bytes_of(elements, size).map(|_bytes| elements)
}

/// The bytes of `len` elements of `size` bytes on the host.
///
/// # Errors
/// As [`len_of`].
pub fn bytes_of(len: usize, size: u64) -> Result<usize, TransferError> {
    let bytes = usize::try_from(size).ok().and_then(|size| len.checked_mul(size));
    let addressable = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
    Ok(addressable.ok_or(RequestError::LengthOverflow { len: len as u64, size })?)
}

/// `len` elements with all bits 0.
///
/// # Errors
/// [`TransferError::OutOfHostMemory`].
pub fn zeroed<T: Zeroable>(len: usize) -> Result<Vec<T>, TransferError> {
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| out_of_host_memory(bytes))
}

/// A copy of the first `len` elements in bytes of any alignment. Elements may have no bytes.
///
/// # Errors
/// [`TransferError::OutOfHostMemory`].
///
/// # Panics
/// If the elements are more bytes.
pub fn copied<T: Pod>(bytes: &[u8], len: usize) -> Result<Vec<T>, TransferError> {
    let mut elements = zeroed::<T>(len)?;
    let to: &mut [u8] = bytemuck::cast_slice_mut(&mut elements);
    to.copy_from_slice(&bytes[..to.len()]);
    Ok(elements)
}

fn out_of_host_memory(bytes: u64) -> TransferError {
    TransferError::OutOfHostMemory { bytes, cause: Arc::new(std::io::ErrorKind::OutOfMemory.into()) }
}

/// A range of host memory with another owner, for threads of the staging ring. Its users keep N3.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRange {
    ptr: *mut u8,
    bytes: usize,
}

#[allow(unsafe_code, reason = "threads of the runtime copy for others")]
// SAFETY: a range is two numbers; its users keep N3.
unsafe impl Send for HostRange {}

#[allow(unsafe_code, reason = "threads of the runtime copy for others")]
// SAFETY: a range is two numbers; its users keep N3.
unsafe impl Sync for HostRange {}

impl HostRange {
    pub(crate) fn new(ptr: *mut u8, bytes: usize) -> HostRange {
        HostRange { ptr, bytes }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// A part of it, which must lie inside.
    pub(crate) fn cut(&self, part: Range<usize>) -> HostRange {
        debug_assert!(part.start <= part.end && part.end <= self.bytes);
        HostRange { ptr: self.ptr.wrapping_add(part.start), bytes: part.len() }
    }

    /// The bytes.
    ///
    /// # Safety
    /// The memory must be live and initialised, and no thread may write it, during `'a`.
    #[allow(unsafe_code, reason = "the owner keeps the memory")]
    pub(crate) unsafe fn as_slice<'a>(self) -> &'a [u8] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }

    /// Copies bytes out of the range.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let part = self.part(offset, into.len())?;
        #[allow(unsafe_code, reason = "threads of the runtime read memory that the caller lends")]
        // SAFETY: the part lies within the range, of live memory that no thread writes now (N3).
        into.copy_from_slice(unsafe { part.as_slice() });
        Ok(())
    }

    /// Copies bytes into the range.
    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let part = self.part(offset, from.len())?;
        #[allow(unsafe_code, reason = "several threads write disjoint parts of one memory")]
        // SAFETY: the part lies within the range, of live memory that no other thread touches there
        // now (N3).
        unsafe { std::slice::from_raw_parts_mut(part.ptr, part.bytes) }.copy_from_slice(from);
        Ok(())
    }

    fn part(&self, offset: u64, len: usize) -> Result<HostRange, TransferError> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match start.checked_add(len).filter(|&end| end <= self.bytes) {
            Some(end) => Ok(self.cut(start..end)),
            None => Err(RequestError::out_of_bounds(start..start.saturating_add(len), self.bytes).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_the_system_are_errors() {
        let error = zeroed::<u64>(1 << 58).unwrap_err();
        assert!(matches!(error, TransferError::OutOfHostMemory { bytes, .. } if bytes == 1 << 61), "{error}");
        assert!(matches!(zeroed::<u64>(usize::MAX), Err(TransferError::OutOfHostMemory { .. })));
        assert_eq!(copied::<u16>(&[1, 0, 2, 0, 3], 2).unwrap(), [1_u16.to_le(), 2_u16.to_le()]);
        assert!(copied::<u16>(&[], 0).unwrap().is_empty());
        assert_eq!(copied::<()>(&[], 5).unwrap().len(), 5);
    }
}
