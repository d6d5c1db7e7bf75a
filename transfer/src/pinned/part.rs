//! Parts of blocks of pinned memory, for copies.

use std::fmt;
use std::ops::Range;
use std::panic::UnwindSafe;
use std::sync::Arc;

use aquifer_device::{AccessKind, HostPtr, RequestError};

use super::borrow::{PinnedRead, PinnedWrite};
use super::memory::{HostPart, PinnedMemory};
use crate::error::TransferError;

/// A part of a [`super::PinnedBlock`] that copies read. While it is alive nothing can be copied
/// into the block.
#[derive(Clone, Copy, Debug)]
pub struct PinnedPart<'a>(HostPart<'a>);

/// A part of a [`super::PinnedBlock`] that copies write. While it is alive no other code can name
/// that part.
#[derive(Debug)]
pub struct PinnedPartMut<'a>(HostPart<'a>);

// All values of bytes are valid.
impl UnwindSafe for PinnedPartMut<'_> {}

impl<'a> PinnedPart<'a> {
    pub(super) fn all(memory: &'a Arc<PinnedMemory>) -> PinnedPart<'a> {
        PinnedPart(HostPart::all(memory))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Its address.
    pub fn ptr(&self) -> HostPtr {
        self.0.ptr
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn part(self, bytes: Range<usize>) -> Result<PinnedPart<'a>, TransferError> {
        Ok(PinnedPart(self.0.part(bytes)?))
    }

    /// The bytes, after waiting on the host for copies into the block.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn read(self) -> Result<PinnedRead<'a>, TransferError> {
        Ok(PinnedRead::new(self.0.ptr.as_ptr(), self.0.bytes, Some(self.0.touch(AccessKind::Read)?)))
    }

    pub(crate) fn host(&self) -> HostPart<'a> {
        self.0
    }
}

impl<'a> PinnedPartMut<'a> {
    /// All of the memory, which must be borrowed mutably for 'a only here.
    pub(super) fn all(memory: &'a Arc<PinnedMemory>) -> PinnedPartMut<'a> {
        PinnedPartMut(HostPart::all(memory))
    }

    /// The same part with a shorter lifetime.
    pub fn reborrow(&mut self) -> PinnedPartMut<'_> {
        PinnedPartMut(self.0)
    }

    /// The same part, to copy from.
    pub fn as_shared(&self) -> PinnedPart<'_> {
        PinnedPart(self.0)
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when the range reaches beyond the end or is reversed.
    pub fn into_part(self, bytes: Range<usize>) -> Result<PinnedPartMut<'a>, TransferError> {
        Ok(PinnedPartMut(self.0.part(bytes)?))
    }

    /// The part before byte `middle` and the one from there on.
    ///
    /// # Errors
    /// [`RequestError::OutOfBounds`] when there are fewer bytes.
    pub fn split_at(self, middle: usize) -> Result<(PinnedPartMut<'a>, PinnedPartMut<'a>), TransferError> {
        let (head, tail) = (self.0.part(0..middle)?, self.0.part(middle..self.0.bytes)?);
        Ok((PinnedPartMut(head), PinnedPartMut(tail)))
    }

    /// The bytes, to be changed, after waiting on the host for all copies that use the block.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn into_write(self) -> Result<PinnedWrite<'a>, TransferError> {
        Ok(PinnedWrite::new(self.0.ptr.as_ptr(), self.0.bytes, Some(self.0.touch(AccessKind::Write)?)))
    }

    pub(crate) fn host(&self) -> HostPart<'a> {
        self.0
    }
}

impl<'a> HostPart<'a> {
    pub(crate) fn all(memory: &'a Arc<PinnedMemory>) -> HostPart<'a> {
        HostPart { memory, ptr: memory.ptr(), bytes: memory.bytes() }
    }

    fn part(self, part: Range<usize>) -> Result<HostPart<'a>, TransferError> {
        if part.start > part.end || part.end > self.bytes {
            return Err(RequestError::out_of_bounds(part, self.bytes).into());
        }
        Ok(HostPart { ptr: HostPtr(self.ptr.0 + part.start), bytes: part.len(), ..self })
    }
}

impl fmt::Debug for HostPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPart").field("ptr", &self.ptr).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
