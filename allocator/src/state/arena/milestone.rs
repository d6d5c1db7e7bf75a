//! Whether a milestone of an arena is due (`backing/paged/milestones.rs`).

use crate::policy::EVENT_SHARE;
use crate::state::arena::ArenaGuard;

impl ArenaGuard {
    /// True if a milestone is due now. The caller must then record it; it is counted as recorded
    /// here.
    #[inline]
    pub(crate) fn is_milestone_due(&mut self) -> bool {
        let milestones = &self.milestones;
        self.freed_not_retaken() >= milestones.due_at
            && milestones.searches >= milestones.not_before
            && self.begin_milestone()
    }

    /// Bytes freed so far, without those of blocks that the next request took again unchanged.
    #[inline]
    fn freed_not_retaken(&self) -> u64 {
        self.milestones.freed - self.heap.retaken
    }

    #[cold]
    fn begin_milestone(&mut self) -> bool {
        let spacing = self.arena.state.counters.reserved_bytes.read().all.current / EVENT_SHARE;
        let freed = self.freed_not_retaken();
        let milestones = &mut self.milestones;
        // If nothing was freed since the start, there is nothing to learn.
        let useful = freed > 0;
        milestones.due_at = freed + spacing.max(1);
        if useful {
            milestones.note_recorded();
        }
        useful
    }
}
