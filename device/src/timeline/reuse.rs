//! Timelines of streams that are gone. Each serves a later stream.
//!
//! Allocators and clocks keep something for each stream number. In a program that makes a stream
//! for each of its requests, they would keep more and more. So a number stands for one stream after
//! another. All work of the earlier stream is known to be done when the next one begins, and ticks
//! count on from there, as if one stream had gone on after the host waited for it. Everything that
//! was noted about the number stays true.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::{Owner, StreamKind, Timeline};
use crate::driver::RawStream;
use crate::fork::Mutex;

/// How many timelines are asked whether their work is done before a new one is made.
const LOOKS: usize = 2;

/// The closed timelines of a device, by kind of stream. The one whose work was not asked about for
/// longest comes first. Its lock is a leaf.
#[derive(Debug, Default)]
pub(crate) struct ReusableTimelines(Mutex<HashMap<StreamKind, VecDeque<Arc<Timeline>>>>);

impl ReusableTimelines {
    /// Adds the timeline of a stream that is gone.
    pub(crate) fn add(&self, timeline: Arc<Timeline>) {
        self.0.lock().entry(timeline.kind).or_default().push_back(timeline);
    }

    /// A timeline for a new stream of this kind, if the work of an earlier one is done. With
    /// `owner`, only that thread can use the new stream.
    pub(crate) fn reopen(&self, raw: RawStream, kind: StreamKind, owner: Option<Owner>) -> Option<Arc<Timeline>> {
        for _ in 0..LOOKS {
            let timeline = self.0.lock().get_mut(&kind)?.pop_front()?;
            // A timeline that cannot be asked now may be asked later.
            if timeline.reopen(raw, owner).unwrap_or(false) {
                return Some(timeline);
            }
            self.add(timeline);
        }
        None
    }
}
