//! The scope of one capture, to which its streams and the events recorded in it refer.
//!
//! Invariant: a scope is over once the driver has ended the capture, or nobody can end it any more. Until then all of its streams count as
//! capturing (T5), afterwards none does.

use std::ptr;
use std::sync::Arc;

use crate::fork::Mutex as Leaf;

use crate::launches::Launches;
use crate::sync::Mutex;
use crate::timeline::Timeline;

/// A capture.
#[derive(Debug)]
pub(crate) struct Scope {
    /// Launches of the graph that results from the capture.
    pub(crate) launches: Arc<Launches>,
    /// Held while the driver ends the capture, so that a later capture on the stream is not ended in its place. Taken before locks of
    /// timelines.
    pub(super) ending: Mutex<()>,
    /// A leaf, below the lock of a timeline.
    members: Leaf<Members>,
}

#[derive(Debug, Default)]
struct Members {
    over: bool,
    /// True if the capture goes on although nobody holds it.
    left: bool,
    /// Its streams: the one that it began on, and those that joined by waiting for one of its events. They stay here when it is over,
    /// because the capture may end where no driver call can be made, and dropping the last handles of a device may make some.
    streams: Vec<Arc<Timeline>>,
}

impl Scope {
    /// The scope of a capture that this library began (`ours`), or that another library began.
    pub(super) fn new(ours: bool) -> Arc<Scope> {
        Arc::new(Scope { launches: Launches::new(ours), ending: Mutex::new(()), members: Leaf::default() })
    }

    /// Adds a stream. Returns false if the capture is over already.
    pub(crate) fn join(&self, timeline: &Arc<Timeline>) -> bool {
        let mut members = self.members.lock();
        if !members.over {
            members.streams.push(timeline.clone());
        }
        !members.over
    }

    /// True if the capture is over.
    pub(crate) fn is_over(&self) -> bool {
        self.members.lock().over
    }

    /// True if the capture began on this stream.
    pub(crate) fn began_on(&self, timeline: &Timeline) -> bool {
        self.members.lock().streams.first().is_some_and(|first| ptr::eq(&raw const **first, timeline))
    }

    /// The stream that the capture began on.
    pub(super) fn origin(&self) -> Option<Arc<Timeline>> {
        self.members.lock().streams.first().cloned()
    }

    /// Notes that the capture goes on although nobody holds it.
    pub(super) fn leave(&self) {
        self.members.lock().left = true;
    }

    /// True if the capture began on this stream and nobody holds it.
    pub(crate) fn is_left_to(&self, timeline: &Timeline) -> bool {
        self.began_on(timeline) && self.members.lock().left
    }

    /// Makes the capture over for all its streams. Makes no driver call.
    pub(crate) fn close(self: &Arc<Self>) {
        let mut members = self.members.lock();
        members.over = true;
        let streams = members.streams.clone();
        drop(members);
        streams.iter().for_each(|stream| stream.end_capture(self));
    }

    /// As [`Scope::close`], for a capture that ended elsewhere, or that nobody can end any more: it gives no graph here.
    pub(crate) fn give_up(self: &Arc<Self>) {
        let alone = self.ending.lock();
        if self.is_over() {
            return;
        }
        let kept = self.launches.note_gone();
        self.close();
        drop(alone);
        // Dropping what it kept runs foreign code.
        drop(kept);
    }
}
