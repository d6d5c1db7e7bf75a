//! The host ends of staged transfers.
//!
//! The ring reads a source and writes a target only until it settles the job: when [`crate::job::Job::enqueued`] or
//! [`crate::job::Job::finish`] is called, no thread of it touches them any more, nor will one.

use crate::error::TransferError;

/// Where a staged upload's bytes come from. Panics are caught; they fail only this job.
pub(crate) trait HostSource: Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// Reads the bytes from `offset` on, all of `into`. Called by several threads at a time, for parts that do not overlap.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError>;

    /// How many bytes behind a page boundary it begins, so that pieces can be cut at such boundaries.
    fn phase(&self) -> u64 {
        0
    }

    /// Whether reading it waits for storage, so that the time it takes is told apart from that of copies in memory.
    fn is_storage(&self) -> bool {
        false
    }

    /// A piece was enqueued, of `bytes` bytes; `starved` says whether the copies enqueued before it were all done by then, so that
    /// the device waited for the source.
    fn sent(&self, _bytes: u64, _starved: bool) {}
}

/// Where a staged download's bytes go. Panics are caught; they fail only this job.
pub(crate) trait HostTarget: Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// Writes bytes from `offset` on. Called by several threads at a time, for parts that do not overlap.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError>;
}
