//! Milestones: events recorded ahead of need, so that the host knows what is done.
//!
//! Before memory can move, the host must know that its last use is done, which takes an event. An
//! event recorded only when memory has to move would complete only after everything queued before
//! it. So a stream records one whenever much was given back since the last one. Others are recorded
//! when a request needs to know. Both kinds together are at most one event per 100 operations, plus
//! a few at the start. An operation is an allocation or a free; allocations are what is counted.

use aquifer_device::Stream;

/// A milestone is due when the bytes freed since the last one reach reserved memory divided by
/// this.
pub(crate) const SHARE: u64 = 64;
/// Allocations for each event of one kind. Counting frees, and both kinds of events, that is one
/// event for 100 operations.
const SPACING: u64 = 100;
/// Events of each kind that may be recorded in advance, before that many allocations were made.
const ADVANCE: u64 = 32;

/// Why an event is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Much memory was freed.
    Milestone,
    /// A request needs to know whether work is done.
    Question,
}

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
    /// Events recorded, by reason.
    recorded: [u64; 2],
}

impl Default for Milestones {
    /// Milestones that are never due.
    fn default() -> Milestones {
        Milestones { freed: 0, searches: 0, due_at: u64::MAX, not_before: 0, recorded: [0; 2] }
    }
}

impl Milestones {
    pub(crate) fn start(&mut self) {
        self.due_at = 0;
    }

    /// True if one more event of a kind is within the budget.
    pub(crate) fn may_record(&self, reason: Reason) -> bool {
        self.searches >= self.searches_for(reason)
    }

    pub(crate) fn note_recorded(&mut self, reason: Reason) {
        self.recorded[reason as usize] += 1;
        // In a small heap every free may make a milestone due. This keeps the check from running
        // each time.
        self.not_before = self.searches_for(Reason::Milestone);
    }

    /// Number of searches from which on one more event of a kind is within the budget.
    fn searches_for(&self, reason: Reason) -> u64 {
        self.recorded[reason as usize].saturating_sub(ADVANCE) * SPACING
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
