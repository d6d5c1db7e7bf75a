//! Timelines of streams that are gone: each serves a later stream.
//!
//! Whoever keeps something for each stream that it met, as allocators and clocks do, would keep more and more of it in a program
//! that makes a stream for each of its requests. So a number stands for one stream after another. All work of the one before is
//! known to be done when the next begins, and its ticks count on from there: as if one stream had gone on, after its host waited for
//! it. Whatever was noted of the number stays true.
//!
//! When a thread ends, its default stream makes no driver call any more: whatever the driver keeps for the thread may be gone. An
//! event on the legacy stream tells later that its work is done. As every blocking stream waits for such an event, they are recorded for
//! several ended threads at a time, when another thread asks for its stream.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Owner, StreamKind, Timeline};
use crate::driver::RawStream;

/// How many timelines are asked whether their work is done before a new one is made.
const LOOKS: usize = 2;

/// How many threads have ended before events are recorded for them, and for how many at most.
const ENDED: usize = 16;

/// The timelines of a device's streams that are gone. Its locks are leaves.
#[derive(Debug, Default)]
pub(crate) struct Retired {
    /// Those whose last event was recorded; what was not asked for longest comes first.
    closed: Mutex<VecDeque<Arc<Timeline>>>,
    /// Those of ended threads' default streams, whose last events are yet to be recorded.
    ended: Mutex<VecDeque<Arc<Timeline>>>,
}

impl Retired {
    /// Keeps the timeline of a stream that was destroyed, after its last event was recorded.
    pub(crate) fn keep(&self, timeline: Arc<Timeline>) {
        self.closed.lock().push_back(timeline);
    }

    /// Keeps the timeline of an ended thread's default stream. Makes no driver call.
    pub(crate) fn keep_ended(&self, timeline: Arc<Timeline>) {
        self.ended.lock().push_back(timeline);
    }

    /// Records the last events of ended threads' default streams, if there are several. What cannot be done now will be tried again.
    pub(crate) fn close_ended(&self) {
        for timeline in self.take_ended() {
            match timeline.close_ended() {
                Ok(()) => self.keep(timeline),
                Err(error) => {
                    tracing::debug!(%error, "an ended thread's last event could not be recorded yet");
                    self.keep_ended(timeline);
                }
            }
        }
    }

    fn take_ended(&self) -> Vec<Arc<Timeline>> {
        let mut ended = self.ended.lock();
        if ended.len() < ENDED { Vec::new() } else { ended.drain(..ENDED).collect() }
    }

    /// A timeline for a new stream of this kind, if the work of an earlier one is done. The stream is its owner's alone, if it has one.
    pub(crate) fn reopen(&self, raw: RawStream, kind: StreamKind, owner: Option<Owner>) -> Option<Arc<Timeline>> {
        for _ in 0..LOOKS {
            let timeline = self.take(kind)?;
            // One that cannot be asked now may be asked later.
            if timeline.reopen(raw, owner).unwrap_or(false) {
                return Some(timeline);
            }
            self.keep(timeline);
        }
        None
    }

    fn take(&self, kind: StreamKind) -> Option<Arc<Timeline>> {
        let mut timelines = self.closed.lock();
        let at = timelines.iter().position(|timeline| timeline.kind == kind)?;
        timelines.remove(at)
    }
}
