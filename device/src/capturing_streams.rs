//! How many streams capture, where calls would break that.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::driver::Driver;

/// The streams of a context that are known to capture. While there are any, nothing may wait for the device; while blocking ones
/// do, nothing may be enqueued on the legacy stream. So drivers that make their calls in one context share this:
/// [`crate::Driver::capturing_streams`].
#[derive(Debug, Default)]
pub struct CapturingStreams {
    all: AtomicU32,
    blocking: AtomicU32,
    /// Drivers whose devices are gone, and which must wait for the context to give back what they hold.
    kept: Mutex<Vec<Arc<dyn Driver>>>,
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

    /// Keeps a driver that nobody uses any more until no stream captures.
    pub(crate) fn keep(&self, driver: Arc<dyn Driver>) {
        self.kept.lock().push(driver);
    }

    /// Lets go of the drivers that were kept, unless a stream captures. They make driver calls.
    pub(crate) fn let_go(&self) {
        if !self.any() {
            // Taken out first: no driver call is made under a lock.
            let kept = std::mem::take(&mut *self.kept.lock());
            drop(kept);
        }
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
