//! Milestones: events recorded ahead of need, so that the host knows what is done.
//!
//! Before memory can move, the host must know that its last use is done, which takes an event. An event recorded only when memory has to
//! move would complete only after everything queued by then. So a stream records one whenever much was given back since the last one.
//! Others are recorded when a request needs to know. Both kinds together are at most one event per 100 operations, plus a few at the start.
//! An operation is an allocation or a free; allocations are what is counted.

use crate::shell::arena::Guard;
use crate::shell::whole::Whole;
use aquifer_device::Stream;

/// A milestone is due when the bytes freed since the last one reach reserved memory divided by this.
const SHARE: u64 = 64;
/// Allocations for each event of one kind. Counting frees, and both kinds of events, that is one event for 100 operations.
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
    due_at: u64,
    /// and not before `searches` reaches this.
    not_before: u64,
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
    fn may_record(&self, reason: Reason) -> bool {
        self.searches >= self.searches_for(reason)
    }

    fn note_recorded(&mut self, reason: Reason) {
        self.recorded[reason as usize] += 1;
        // In a small heap every free may make a milestone due. This keeps the check from running each time.
        self.not_before = self.searches_for(Reason::Milestone);
    }

    /// Number of searches from which on one more event of a kind is within the budget.
    fn searches_for(&self, reason: Reason) -> u64 {
        self.recorded[reason as usize].saturating_sub(ADVANCE) * SPACING
    }
}

impl Guard {
    /// True if a milestone is due now. The caller must then record it; it is counted as recorded here.
    #[inline]
    pub(crate) fn is_milestone_due(&mut self) -> bool {
        let milestones = &self.milestones;
        self.given_back_for_good() >= milestones.due_at
            && milestones.searches >= milestones.not_before
            && self.begin_milestone()
    }

    /// Bytes freed so far, without those of blocks that the next request took again unchanged.
    #[inline]
    fn given_back_for_good(&self) -> u64 {
        self.milestones.freed - self.heap.retaken
    }

    #[cold]
    fn begin_milestone(&mut self) -> bool {
        let apart = self.arena.shell.counters.reserved_bytes.read().all.current / SHARE;
        let freed = self.given_back_for_good();
        let milestones = &mut self.milestones;
        let may_record = milestones.may_record(Reason::Milestone);
        // If nothing was freed since the start, there is nothing to learn.
        let useful = freed > 0;
        milestones.due_at = freed + apart.max(1);
        if useful && may_record {
            milestones.note_recorded(Reason::Milestone);
        }
        useful && may_record
    }
}

/// Records a milestone on the stream.
#[cold]
pub(crate) fn record_milestone(stream: &Stream) {
    let timeline = stream.timeline();
    // A stream that captures, or one that is gone, records none. The host then learns in other ways what is done there.
    if let Err(error) = timeline.cover(timeline.now()) {
        tracing::debug!(%error, stream = stream.id(), "no milestone could be recorded");
    }
}

impl Whole {
    /// True if one more event on the stream is within the budget.
    pub(crate) fn may_record(&mut self, slot: u32, reason: Reason) -> bool {
        self.try_arena(slot).is_some_and(|arena| arena.milestones.may_record(reason))
    }

    pub(crate) fn note_recorded(&mut self, slot: u32, reason: Reason) {
        if let Some(arena) = self.try_arena(slot) {
            arena.milestones.note_recorded(reason);
        }
    }
}
