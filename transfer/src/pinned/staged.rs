//! Pageable buffers as the staging ring reads and writes them: the driver itself would make their copies wait.
//!
//! The part is claimed while the ring has it, so the host, and other copies, wait until it is done.

use std::slice;
use std::sync::Arc;

use aquifer_device::AccessKind;

use super::memory::HostPart;
use super::uses::HostClaim;
use crate::error::TransferError;
use crate::staging::{HostSource, HostTarget};

/// A part of a buffer, claimed for reading or for writing.
#[derive(Debug)]
struct Claimed {
    claim: HostClaim,
    /// From the start of the memory.
    offset: usize,
    bytes: usize,
}

struct Source(Claimed);

struct Target(Claimed);

impl HostPart<'_> {
    /// The part as the ring reads it. Waits for claims that conflict, and for copies into the memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn into_source(self) -> Result<Arc<dyn HostSource>, TransferError> {
        Ok(Arc::new(Source(self.claimed(AccessKind::Read)?)))
    }

    /// The part as the ring writes it, which must be borrowed mutably. Waits for claims that conflict, and for all copies of the memory.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn into_target(self) -> Result<Arc<dyn HostTarget>, TransferError> {
        Ok(Arc::new(Target(self.claimed(AccessKind::Write)?)))
    }

    fn claimed(self, kind: AccessKind) -> Result<Claimed, TransferError> {
        self.memory.touch(self.ptr, self.bytes, kind)?;
        let offset = self.ptr.0 - self.memory.ptr().0;
        Ok(Claimed { claim: self.memory.claim(kind), offset, bytes: self.bytes })
    }
}

impl Claimed {
    /// The address of `bytes` bytes from `offset` on, if they lie in the part.
    fn at(&self, offset: u64, bytes: usize) -> Result<*mut u8, TransferError> {
        let inside =
            usize::try_from(offset).ok().filter(|start| start.checked_add(bytes).is_some_and(|end| end <= self.bytes));
        let end = offset.saturating_add(bytes as u64);
        let start = inside.ok_or(TransferError::OutOfBounds { start: offset, end, len: self.bytes as u64 })?;
        Ok(self.claim.memory().ptr().as_ptr().wrapping_add(self.offset + start))
    }
}

impl HostSource for Source {
    fn bytes(&self) -> u64 {
        self.0.bytes as u64
    }

    #[allow(unsafe_code, reason = "the memory is claimed, which no type of the standard library says")]
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let from = self.0.at(offset, into.len())?;
        // SAFETY: the bytes lie in initialised memory that the claim keeps, and that nobody writes while it is claimed for reading.
        into.copy_from_slice(unsafe { slice::from_raw_parts(from, into.len()) });
        Ok(())
    }
}

impl HostTarget for Target {
    fn bytes(&self) -> u64 {
        self.0.bytes as u64
    }

    #[allow(unsafe_code, reason = "the memory is claimed, which no type of the standard library says")]
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let to = self.0.at(offset, from.len())?;
        // SAFETY: the bytes lie in memory that the claim keeps, and that nobody else touches while it is claimed for writing;
        // threads of the ring write different bytes of it (N3).
        unsafe { slice::from_raw_parts_mut(to, from.len()) }.copy_from_slice(from);
        Ok(())
    }
}
