//! Parts of buffers that are claimed for threads of the runtime, as these read and write them.

use std::slice;
use std::sync::Arc;

use aquifer_device::{AccessKind, HostPtr, RequestError, Tick};

use super::memory::HostPart;
use super::uses::HostClaim;
use crate::error::TransferError;

/// A part of a buffer, claimed for reading or for writing.
#[derive(Debug)]
pub(crate) struct Claimed {
    claim: Arc<HostClaim>,
    /// From the start of the memory.
    offset: usize,
    bytes: usize,
}

impl HostPart<'_> {
    /// The part under a claim of its memory.
    pub(super) fn under(self, claim: Arc<HostClaim>) -> Claimed {
        Claimed { claim, offset: self.ptr.0 - self.memory.ptr().0, bytes: self.bytes }
    }

    /// The part claimed for writing, which must be borrowed mutably, once the copies given beside it are done.
    pub(crate) fn claim_to_write(self) -> (Claimed, Vec<Tick>) {
        let (claim, before) = self.memory.claim(AccessKind::Write);
        (self.under(Arc::new(claim)), before)
    }

    /// Two parts without bytes in common claimed for a copy from this one to the other, once the copies given beside them are done.
    pub(crate) fn claim_to_copy(self, to: HostPart<'_>) -> (Claimed, Claimed, Vec<Tick>) {
        if Arc::ptr_eq(self.memory, to.memory) {
            // Who claimed it twice would wait for itself.
            let (claim, before) = to.memory.claim(AccessKind::Write);
            let claim = Arc::new(claim);
            return (self.under(claim.clone()), to.under(claim), before);
        }
        let ends = [(self.memory, AccessKind::Read), (to.memory, AccessKind::Write)];
        // In one order for all, so that who has one end never waits in a circle for the other.
        let reversed = Arc::as_ptr(self.memory) > Arc::as_ptr(to.memory);
        let [first, second] = if reversed { [ends[1], ends[0]] } else { ends };
        let (first, mut before) = first.0.claim(first.1);
        let (second, more) = second.0.claim(second.1);
        before.extend(more);
        let (read, written) = if reversed { (second, first) } else { (first, second) };
        (self.under(Arc::new(read)), to.under(Arc::new(written)), before)
    }
}

impl Claimed {
    /// How many bytes it has.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Tells the driver that the host is about to touch it. What it was claimed after is done by now.
    pub(crate) fn announce(&self, kind: AccessKind) -> Result<(), TransferError> {
        let memory = self.claim.memory();
        memory.announce(HostPtr(memory.ptr().0 + self.offset), self.bytes, kind)
    }

    /// The bytes of a part that was claimed to be read. What it was claimed after must be done.
    #[allow(unsafe_code, reason = "the memory is claimed, which no type of the standard library says")]
    pub(crate) fn lend(&self) -> &[u8] {
        let start = self.claim.memory().ptr().as_ptr().wrapping_add(self.offset);
        // SAFETY: the bytes lie in initialised memory that the claim keeps, and that nobody writes while it is claimed for reading; under
        // a claim for writing, they are none of those that are written.
        unsafe { slice::from_raw_parts(start, self.bytes) }
    }

    /// Writes bytes from `offset` on, of a part that was claimed to be written. What it was claimed after must be done.
    #[inline]
    #[allow(unsafe_code, reason = "the memory is claimed, which no type of the standard library says")]
    pub(crate) fn put(&self, offset: usize, from: &[u8]) -> Result<(), TransferError> {
        if offset.checked_add(from.len()).is_none_or(|end| end > self.bytes) {
            let end = offset.saturating_add(from.len()) as u64;
            return Err(TransferError::Request(RequestError::OutOfBounds {
                start: offset as u64,
                end,
                len: self.bytes as u64,
            }));
        }
        let to = self.claim.memory().ptr().as_ptr().wrapping_add(self.offset + offset);
        // SAFETY: the bytes lie in memory that the claim keeps, and that nobody else touches while it is claimed for writing; threads of
        // the runtime write different bytes of it (N3).
        unsafe { slice::from_raw_parts_mut(to, from.len()) }.copy_from_slice(from);
        Ok(())
    }
}
