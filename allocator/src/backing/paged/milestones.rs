//! Milestones: events recorded ahead of need, so that the host knows what is done.
//!
//! Before memory can move, the host must know that its last use is done, which takes an event. An event recorded only when memory has to move
//! would complete only after everything queued by then. So a stream records one whenever much was given back since the last one. Others are
//! recorded when a request needs to know. Both kinds together are at most one event per 100 operations, plus a few at the start. An
//! operation is an allocation or a free; allocations are what is counted.

use crate::shell::arena::Guard;
use crate::shell::whole::Whole;
use aquifer_device::Stream;

/// A milestone is due when so large a share of what is reserved was given back since the last.
const SHARE: u64 = 64;
/// Allocations for each event of one kind. With their frees, and both kinds of events, that is one for 100 operations.
const SPACING: u64 = 100;
/// Events of a kind that may be recorded before that many operations were made.
const ADVANCE: u64 = 32;

/// Why an event is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Much was given back.
    Milestone,
    /// A request needs to know.
    Question,
}

/// A stream's milestones, under its arena's lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Milestones {
    /// Bytes given back, and searches made, so far.
    pub(crate) freed: u64,
    pub(crate) searches: u64,
    /// The next milestone is due when so many were,
    due_at: u64,
    /// and not before so many searches.
    not_before: u64,
    /// Events recorded, by reason.
    recorded: [u64; 2],
}

impl Default for Milestones {
    /// None are ever due.
    fn default() -> Milestones {
        Milestones { freed: 0, searches: 0, due_at: u64::MAX, not_before: 0, recorded: [0; 2] }
    }
}

impl Milestones {
    pub(crate) fn start(&mut self) {
        self.due_at = 0;
    }

    /// Whether one more event of a kind is within what milestones may cost.
    fn may_record(&self, reason: Reason) -> bool {
        self.searches >= self.searches_for(reason)
    }

    fn note_recorded(&mut self, reason: Reason) {
        self.recorded[reason as usize] += 1;
        // Small heaps give a milestone's bytes back with every operation, and must not come to see to it with each.
        self.not_before = self.searches_for(Reason::Milestone);
    }

    /// How many searches there must have been for one more event of a kind.
    fn searches_for(&self, reason: Reason) -> u64 {
        self.recorded[reason as usize].saturating_sub(ADVANCE) * SPACING
    }
}

impl Guard {
    /// Whether to record a milestone now. It is then taken for recorded.
    #[inline]
    pub(crate) fn is_milestone_due(&mut self) -> bool {
        let milestones = &self.milestones;
        self.given_back_for_good() >= milestones.due_at
            && milestones.searches >= milestones.not_before
            && self.begin_milestone()
    }

    /// Bytes given back so far, but for those that the next request took again as they were.
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
        // Nothing was given back since the start: nothing to learn.
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
    // A stream that captures, or one that is gone, records none; what is free there is then learned of in other ways.
    if let Err(error) = timeline.cover(timeline.now()) {
        tracing::debug!(%error, stream = stream.id(), "no milestone could be recorded");
    }
}

impl Whole {
    /// Whether one more event on the stream is within what milestones may cost.
    pub(crate) fn may_record(&mut self, slot: u32, reason: Reason) -> bool {
        self.try_arena(slot).is_some_and(|arena| arena.milestones.may_record(reason))
    }

    pub(crate) fn note_recorded(&mut self, slot: u32, reason: Reason) {
        if let Some(arena) = self.try_arena(slot) {
            arena.milestones.note_recorded(reason);
        }
    }
}
