//! Milestones: events recorded ahead of need, so that the host knows what is done.
//!
//! Before memory can move, the host must know that its last use is done, which takes an event. An
//! event recorded only when memory has to move would complete only after everything queued before
//! it. So a stream records one whenever much was given back since the last one, within a budget
//! (`policy.rs`). Others are recorded when a request needs to know.

use aquifer_device::Stream;

use crate::policy::{EVENT_SPACING, EVENTS_AT_START};

/// A stream's milestones, under its arena's lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Milestones {
    /// Bytes freed so far, and searches (allocations) made so far.
    pub(crate) freed: u64,
    pub(crate) searches: u64,
    /// The next milestone is due when `freed` less retaken bytes reaches this,
    pub(crate) due_at: u64,
    /// and not before `searches` reaches this.
    pub(crate) not_before: u64,
    /// Events recorded.
    recorded: u64,
}

impl Default for Milestones {
    /// Milestones that are never due.
    fn default() -> Milestones {
        Milestones { freed: 0, searches: 0, due_at: u64::MAX, not_before: 0, recorded: 0 }
    }
}

impl Milestones {
    pub(crate) fn start(&mut self) {
        self.due_at = 0;
    }

    pub(crate) fn note_recorded(&mut self) {
        self.recorded += 1;
        self.not_before = self.recorded.saturating_sub(EVENTS_AT_START) * EVENT_SPACING;
    }
}

/// Records a milestone on the stream.
#[cold]
pub(crate) fn record_milestone(stream: &Stream) {
    let timeline = stream.timeline();
    // A stream that captures, or one that is gone, records none. The host then learns in other ways
    // what is done there.
    if let Err(error) = timeline.cover(timeline.now()) {
        tracing::debug!(%error, stream = stream.id(), "no milestone could be recorded");
    }
}
