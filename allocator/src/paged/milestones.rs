//! Milestones: events recorded in time, so that the host knows what is done.
//!
//! What the host must know before it can move memory needs an event, and one recorded only then would complete only after
//! everything queued by then. So a stream records one when much was given back since the last. Others are recorded when a request
//! needs to know. Both together are at most one event for 100 operations, beside a few at the start: an operation is an
//! allocation or a free, and allocations are what is counted.

use crate::allocator::Allocator;
use crate::whole::Whole;
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
    /// Bytes given back so far.
    pub(crate) freed: u64,
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
        Milestones { freed: 0, due_at: u64::MAX, not_before: 0, recorded: [0; 2] }
    }
}

impl Milestones {
    pub(crate) fn start(&mut self) {
        self.due_at = 0;
    }

    /// Whether to see to a milestone, after so many searches. Most operations stop at the first comparison.
    #[inline]
    pub(crate) fn is_due(&self, searches: impl FnOnce() -> u64) -> bool {
        self.freed >= self.due_at && searches() >= self.not_before
    }

    /// How many searches there must have been for one more event of a kind.
    fn searches_for(&self, reason: Reason) -> u64 {
        self.recorded[reason as usize].saturating_sub(ADVANCE) * SPACING
    }
}

impl Allocator {
    /// Records a milestone on the stream, unless there were too many.
    #[cold]
    pub(crate) fn record_milestone(&self, stream: &Stream) {
        let mut whole = self.shell().whole();
        let slot = stream.id();
        let apart = whole.reserved / SHARE;
        let may_record = whole.may_record(slot, Reason::Milestone);
        let milestones = &mut whole.arena(slot).milestones;
        // Nothing was given back since the start: nothing to learn.
        let useful = milestones.freed > 0;
        milestones.due_at = milestones.freed + apart.max(1);
        if !useful || !may_record {
            return;
        }
        whole.note_recorded(slot, Reason::Milestone);
        drop(whole);
        let timeline = stream.timeline();
        // A stream that captures, or one that is gone, records none; what is free there is then learned of in other ways.
        if let Err(error) = timeline.cover(timeline.now()) {
            tracing::debug!(%error, stream = slot, "no milestone could be recorded");
        }
    }
}

impl Whole {
    /// Whether one more event on the stream is within what milestones may cost.
    pub(crate) fn may_record(&mut self, slot: u32, reason: Reason) -> bool {
        let Some(desk) = self.try_arena(slot) else { return false };
        desk.heap.searches() >= desk.milestones.searches_for(reason)
    }

    pub(crate) fn note_recorded(&mut self, slot: u32, reason: Reason) {
        if let Some(desk) = self.try_arena(slot) {
            desk.milestones.recorded[reason as usize] += 1;
            // Small heaps give a milestone's bytes back with every operation, and must not come to see to it with each.
            desk.milestones.not_before = desk.milestones.searches_for(Reason::Milestone);
        }
    }
}
