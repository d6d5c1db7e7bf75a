//! How many streams capture, where calls would break that.

use std::sync::atomic::{AtomicU32, Ordering};

/// The streams of a context that are known to capture. While there are any, nothing may wait for the device; while blocking ones
/// do, nothing may be enqueued on the legacy stream. So drivers that make their calls in one context share this:
/// [`crate::Driver::capturing_streams`].
#[derive(Debug, Default)]
pub struct CapturingStreams {
    all: AtomicU32,
    blocking: AtomicU32,
}

impl CapturingStreams {
    /// A stream captures from now on, which may be a blocking one.
    pub(crate) fn enter(&self, blocking: bool) {
        self.all.fetch_add(1, Ordering::AcqRel);
        self.blocking.fetch_add(blocking.into(), Ordering::AcqRel);
    }

    /// It does not any more.
    pub(crate) fn leave(&self, blocking: bool) {
        self.all.fetch_sub(1, Ordering::AcqRel);
        self.blocking.fetch_sub(blocking.into(), Ordering::AcqRel);
    }

    /// Whether any stream captures.
    pub(crate) fn any(&self) -> bool {
        self.all.load(Ordering::Acquire) > 0
    }

    /// Whether any blocking stream does.
    pub(crate) fn any_blocking(&self) -> bool {
        self.blocking.load(Ordering::Acquire) > 0
    }
}
