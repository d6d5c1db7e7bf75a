//! What the ring and those who work for it say to each other: jobs, tasks, and what became of them.

use std::ops::Range;

use super::config::Sizes;
use crate::error::TransferError;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Way {
    /// To the device.
    Up,
    /// To the host.
    Down,
}

/// A job as it is handed in. `J` is what tasks need to know about it.
#[derive(Debug)]
pub(super) struct Order<J> {
    pub(super) work: J,
    pub(super) way: Way,
    /// Length, not 0.
    pub(super) bytes: u64,
    /// How far behind a page boundary of its host end it begins, in bytes: its first piece is so much shorter, so that the others
    /// begin at page boundaries.
    pub(super) phase: u64,
    /// The stream that its copies are enqueued on.
    pub(super) lane: u32,
    /// Lower is more urgent.
    pub(super) priority: i32,
}

/// Number of a job; never reused.
pub(super) type JobId = u64;

/// A piece in somebody's hands: part of a job, and the chunk that it goes through.
#[derive(Debug)]
pub(super) struct Piece<J, C> {
    pub(super) id: JobId,
    pub(super) work: J,
    pub(super) range: Range<u64>,
    pub(super) chunk: C,
}

/// A chunk that a copy uses, until `tick`.
#[derive(Debug)]
pub(super) struct Flight<C, T> {
    pub(super) id: JobId,
    pub(super) way: Way,
    pub(super) lane: u32,
    pub(super) range: Range<u64>,
    pub(super) chunk: C,
    pub(super) tick: T,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Task<J, C, T> {
    /// Find out how large the ring should be.
    Tune,
    /// Get a chunk.
    Grow {
        /// Its bytes.
        bytes: usize,
        /// Bytes of the chunks that there are, or that others are getting.
        others: usize,
    },
    /// Fill the chunk from the source and enqueue its copy to the device.
    Fill(Piece<J, C>),
    /// Enqueue the copy from the device into the chunk.
    Fetch(Piece<J, C>),
    /// Store the chunk's bytes in the target.
    Store(Piece<J, C>),
    /// Wait until the copy that uses the chunk is done.
    Wait(Flight<C, T>),
}

/// What was done.
#[derive(Debug)]
pub(super) enum Done<J, C, T> {
    /// Of [`Task::Tune`].
    Tuned(Sizes),
    /// Of [`Task::Grow`].
    Grown(Result<C, TransferError>),
    /// Of [`Task::Fill`] and [`Task::Fetch`]: the copy is enqueued.
    Sent(Piece<J, C>, T),
    /// Of [`Task::Store`].
    Stored(Piece<J, C>),
    /// Of those that had a piece in hand. The chunk can be used again by whoever first makes sure that nothing uses it.
    Failed(Piece<J, C>, TransferError),
    /// Of [`Task::Wait`].
    Waited(Flight<C, T>, Result<(), TransferError>),
}

/// What has to be done about a change, without a lock.
#[derive(Debug)]
pub(super) struct After<J, C> {
    /// Jobs that ended: nobody has them in hand any more. An upload that ended well is enqueued; a download has landed.
    pub(super) ended: Vec<(J, Result<(), TransferError>)>,
    /// Chunks that the ring has no use for.
    pub(super) surplus: Vec<C>,
}

impl<J, C> Default for After<J, C> {
    fn default() -> Self {
        After { ended: Vec::new(), surplus: Vec::new() }
    }
}

impl<J, C> After<J, C> {
    pub(super) fn is_empty(&self) -> bool {
        self.ended.is_empty() && self.surplus.is_empty()
    }
}
