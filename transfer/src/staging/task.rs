//! The jobs, tasks and results that the ring and its threads exchange.

use std::ops::Range;

use crate::error::TransferError;

/// The direction of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    /// To the device.
    Up,
    /// To the host.
    Down,
}

/// A job to submit. Tasks get `work`.
#[derive(Debug)]
pub(super) struct Submission<J> {
    pub(super) work: J,
    pub(super) way: Way,
    /// Length, not 0.
    pub(super) bytes: u64,
    /// The offset of its first byte within a page of its host end: its first piece is that much
    /// shorter, so that the others begin at page boundaries.
    pub(super) phase: u64,
    /// The stream that its copies are enqueued on.
    pub(super) stream: u32,
    /// Lower is more urgent.
    pub(super) priority: i32,
}

/// Number of a job; never reused.
pub(super) type JobId = u64;

/// A part of a job, and the chunk that it goes through.
#[derive(Debug)]
pub(super) struct Piece<J, C> {
    pub(super) id: JobId,
    pub(super) work: J,
    pub(super) range: Range<u64>,
    pub(super) chunk: C,
}

/// A chunk that a copy uses.
#[derive(Debug)]
pub(super) struct Flight<C> {
    pub(super) id: JobId,
    pub(super) way: Way,
    pub(super) stream: u32,
    pub(super) range: Range<u64>,
    pub(super) chunk: C,
}

/// A task.
#[derive(Debug)]
pub(super) enum Task<J, C> {
    /// Allocate a chunk.
    Grow {
        /// Its bytes.
        bytes: usize,
        /// Bytes of the other chunks, including those that other tasks allocate.
        others: usize,
    },
    /// Fill the chunk from the source and enqueue its copy to the device.
    Fill(Piece<J, C>),
    /// Enqueue the copy from the device into the chunk.
    Fetch(Piece<J, C>),
    /// Store the chunk's contents in the target.
    Store(Piece<J, C>),
    /// Wait until the copy that uses the chunk is done.
    Wait(Flight<C>),
}

/// The result of a task.
#[derive(Debug)]
pub(super) enum TaskResult<J, C> {
    /// Of [`Task::Grow`].
    Grown(Result<C, TransferError>),
    /// Of [`Task::Fill`] and [`Task::Fetch`]: the copy is enqueued.
    Sent(Piece<J, C>),
    /// Of [`Task::Store`].
    Stored(Piece<J, C>),
    /// Of a task with a piece. A copy may still use the chunk.
    Failed(Piece<J, C>, TransferError),
    /// Of [`Task::Wait`].
    Waited(Flight<C>, Result<(), TransferError>),
}

/// The actions that follow a change, for a thread without the lock.
#[derive(Debug)]
pub(super) struct Followup<J, C> {
    /// Jobs that ended, which no task has any more. A successful upload is enqueued; a download is
    /// stored.
    pub(super) ended: Vec<(J, Result<(), TransferError>)>,
    /// Chunks that the ring released.
    pub(super) surplus: Vec<C>,
}

impl<J, C> Default for Followup<J, C> {
    fn default() -> Self {
        Followup { ended: Vec::new(), surplus: Vec::new() }
    }
}

impl<J, C> Followup<J, C> {
    pub(super) fn is_empty(&self) -> bool {
        self.ended.is_empty() && self.surplus.is_empty()
    }
}
