//! Pageable buffers as the staging ring reads and writes them: the driver itself would make their copies wait.
//!
//! The part is claimed while the ring has it, so the host, and other copies, wait until it is done.

use std::sync::Arc;

use aquifer_device::{AccessKind, RequestError};

use super::claimed::Claimed;
use super::memory::HostPart;
use crate::error::TransferError;
use crate::staging::{HostSource, HostTarget};

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
        // Copies by a driver are done when it returns, so pageable memory has none to come after.
        let (claim, _) = self.memory.claim(kind);
        Ok(self.under(Arc::new(claim)))
    }
}

impl HostSource for Source {
    fn bytes(&self) -> u64 {
        self.0.bytes() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let (from, end) = (self.0.lend(), offset.saturating_add(into.len() as u64));
        let part =
            usize::try_from(offset).ok().zip(usize::try_from(end).ok()).and_then(|(start, end)| from.get(start..end));
        into.copy_from_slice(part.ok_or(RequestError::OutOfBounds { start: offset, end, len: from.len() as u64 })?);
        Ok(())
    }
}

impl HostTarget for Target {
    fn bytes(&self) -> u64 {
        self.0.bytes() as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        self.0.put(usize::try_from(offset).unwrap_or(usize::MAX), from)
    }
}
