//! The host ends of staged transfers.
//!
//! The ring reads a source and writes a target only until it settles the job
//! ([`crate::job::Job::enqueued`], [`crate::job::Job::finish`]).

use std::ops::Range;
use std::sync::Arc;

use crate::error::TransferError;
use crate::rows::{RowBlock, Rows};

/// The source of a staged upload. Panics are caught; they fail only this job.
pub trait HostSource: Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// Reads the bytes from `offset` on, all of `into`. Called by several threads at a time, for
    /// parts that do not overlap.
    ///
    /// # Errors
    /// Those of the source, which fail its transfer.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError>;

    /// The offset of its first byte within a page, so that pieces can end at page boundaries.
    fn phase(&self) -> u64 {
        0
    }

    /// Whether reading it waits for storage: that time is counted separately.
    fn is_storage(&self) -> bool {
        false
    }
}

/// The target of a staged download. Panics are caught; they fail only this job.
pub(crate) trait HostTarget: Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// Writes bytes from `offset` on. Called by several threads at a time, for parts that do not
    /// overlap.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError>;
}

/// The bytes of a host end that lie in some rows. No two of a target's may be one.
pub(crate) struct InRows<E: ?Sized> {
    pub(crate) end: Arc<E>,
    pub(crate) rows: Rows<1>,
}

impl HostSource for InRows<dyn HostSource> {
    fn bytes(&self) -> u64 {
        self.rows.len()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.rows.blocks(offset..offset + into.len() as u64, |block| {
            block.rows().try_for_each(|row| self.end.read(row.at[0], &mut into[range_of(row)]))
        })
    }
}

impl HostTarget for InRows<dyn HostTarget> {
    fn bytes(&self) -> u64 {
        self.rows.len()
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        self.rows.blocks(offset..offset + from.len() as u64, |block| {
            block.rows().try_for_each(|row| self.end.write(row.at[0], &from[range_of(row)]))
        })
    }
}

/// The place of a row among the bytes of its range, which are in memory.
fn range_of(row: RowBlock<1>) -> Range<usize> {
    let place = |byte| usize::try_from(byte).unwrap_or(usize::MAX);
    place(row.first)..place(row.first + row.width)
}
