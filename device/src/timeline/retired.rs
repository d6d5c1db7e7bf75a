//! Timelines of streams that are gone: each serves a later stream.
//!
//! Whoever keeps something for each stream that it met, as allocators and clocks do, would keep more and more of it in a program
//! that makes a stream for each of its requests. So a number stands for one stream after another. All work of the one before is
//! known to be done when the next begins, and its ticks count on from there: as if one stream had gone on, after its host waited for
//! it. Whatever was noted of the number stays true.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Kind, Timeline};
use crate::driver::RawStream;

/// How many timelines are asked whether their work is done before a new one is made.
const LOOKS: usize = 2;

/// The timelines of a device's destroyed streams, those that were not asked for longest first. Its lock is a leaf.
#[derive(Debug, Default)]
pub(crate) struct Retired(Mutex<VecDeque<Arc<Timeline>>>);

impl Retired {
    /// Keeps the timeline of a stream that was destroyed, after its last event was recorded.
    pub(crate) fn keep(&self, timeline: Arc<Timeline>) {
        self.0.lock().push_back(timeline);
    }

    /// A timeline for a new stream of this kind, if the work of an earlier one is done.
    pub(crate) fn reopen(&self, raw: RawStream, kind: Kind) -> Option<Arc<Timeline>> {
        for _ in 0..LOOKS {
            let timeline = self.take(kind)?;
            // One that cannot be asked now may be asked later.
            if timeline.reopen(raw).unwrap_or(false) {
                return Some(timeline);
            }
            self.keep(timeline);
        }
        None
    }

    fn take(&self, kind: Kind) -> Option<Arc<Timeline>> {
        let mut timelines = self.0.lock();
        let at = timelines.iter().position(|timeline| timeline.kind == kind)?;
        timelines.remove(at)
    }
}
