//! When progress events are due.

use crate::core::policy::{EVENT_SHARE, EVENT_SPACING, EVENTS_AT_START};

/// When a stream's next progress event is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    /// Bytes freed so far, without those that the next request took again unchanged, and searches
    /// (allocations) made so far.
    pub(crate) freed: u64,
    pub(crate) searches: u64,
    /// The next event is due when `freed` reaches this,
    due_at: u64,
    /// and not before `searches` reaches this.
    not_before: u64,
    /// Events recorded.
    recorded: u64,
}

impl Default for Progress {
    /// No event is ever due.
    fn default() -> Progress {
        Progress { freed: 0, searches: 0, due_at: u64::MAX, not_before: 0, recorded: 0 }
    }
}

impl Progress {
    /// Events are due from now on.
    pub(crate) fn started() -> Progress {
        Progress { due_at: 0, ..Progress::default() }
    }

    /// True if an event is due now, which counts as recorded then. `reserved` are bytes held from the
    /// device.
    #[inline]
    pub(crate) fn is_due(&mut self, reserved: u64) -> bool {
        self.freed >= self.due_at && self.searches >= self.not_before && self.begin(reserved)
    }

    #[cold]
    fn begin(&mut self, reserved: u64) -> bool {
        self.due_at = self.freed + (reserved / EVENT_SHARE).max(1);
        // If nothing was freed since the start, there is nothing to learn.
        if self.freed > 0 {
            self.recorded += 1;
            self.not_before = self.recorded.saturating_sub(EVENTS_AT_START) * EVENT_SPACING;
        }
        self.freed > 0
    }
}
