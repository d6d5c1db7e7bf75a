//! Captures in progress, by context: drivers that share a context must not break each other's
//! captures.
//!
//! The driver refuses to wait for a context of which any stream captures, and breaks the capture
//! (CUDA programming guide, “Prohibited and Unhandled Operations”).

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use crate::fork::Mutex;

use crate::capturing_streams::CapturingStreams;
use crate::driver::RawStream;

/// A handle, and the thread where it means one stream for each.
type Which = (u64, Option<ThreadId>);

/// The captures in progress in a context, by whichever of its drivers they were begun.
#[derive(Debug, Default)]
pub(super) struct Ongoing {
    /// Streams on which one was begun through a driver, and not ended; with the thread, where the
    /// handle means one for each, and a sign that it runs: the default stream of a thread that has
    /// ended captures no more, and no other thread could end its capture.
    begun: Mutex<HashMap<Which, Weak<()>>>,
    /// Streams of which devices know that they capture, including captures of other libraries.
    pub(super) known: Arc<CapturingStreams>,
}

impl Ongoing {
    /// Those of the context with this handle. Their holder keeps the context, so that no other one
    /// has its handle.
    pub(super) fn of_context(handle: u64) -> Arc<Ongoing> {
        static CONTEXTS: Mutex<Option<HashMap<u64, Weak<Ongoing>>>> = Mutex::new(None);
        let mut contexts = CONTEXTS.lock();
        let contexts = contexts.get_or_insert_default();
        contexts.retain(|_, ongoing| ongoing.strong_count() > 0);
        if let Some(ongoing) = contexts.get(&handle).and_then(Weak::upgrade) {
            return ongoing;
        }
        let ongoing = Arc::new(Ongoing::default());
        contexts.insert(handle, Arc::downgrade(&ongoing));
        ongoing
    }

    pub(super) fn begin(&self, stream: RawStream) {
        // Where the thread is ending already, it is as if it had.
        let runs = RUNS.try_with(Arc::downgrade).unwrap_or_default();
        self.begun.lock().insert(which(stream), runs);
    }

    pub(super) fn end(&self, stream: RawStream) {
        self.begun.lock().remove(&which(stream));
    }

    /// Whether any stream of the context is known to capture.
    pub(super) fn any(&self) -> bool {
        let mut begun = self.begun.lock();
        begun.retain(|(_, thread), runs| thread.is_none() || runs.strong_count() > 0);
        self.known.any() || !begun.is_empty()
    }
}

thread_local! {
    /// Dropped when the thread ends.
    static RUNS: Arc<()> = Arc::default();
}

/// Which stream a handle means on this thread.
fn which(stream: RawStream) -> Which {
    (stream.0, (stream == RawStream::PER_THREAD).then(|| thread::current().id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_have_their_own_as_long_as_somebody_keeps_them() {
        let (one, other) = (Ongoing::of_context(u64::MAX), Ongoing::of_context(u64::MAX - 1));
        one.begin(RawStream(7));
        assert!(Ongoing::of_context(u64::MAX).any() && !other.any());
        one.end(RawStream(8));
        assert!(one.any());
        one.end(RawStream(7));
        thread::scope(|scope| {
            let begun = scope.spawn(|| {
                one.begin(RawStream::PER_THREAD);
                assert!(one.any());
            });
            begun.join().unwrap();
        });
        assert!(!one.any(), "its thread has ended");
        one.known.enter(false);
        assert!(Ongoing::of_context(u64::MAX).any());
        drop(one);
        assert!(!Ongoing::of_context(u64::MAX).any(), "another context with the same handle");
    }
}
