//! How often the host waited for a device as a whole: the only way to know that work on unknown
//! streams is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The waits for a device, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    begun: AtomicU64,
    /// Number of the last wait that succeeded.
    done: AtomicU64,
}

impl Waits {
    /// Begins a wait, and returns its number.
    pub(crate) fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Ends a wait that succeeded.
    pub(crate) fn end(&self, number: u64) {
        self.done.fetch_max(number, Ordering::AcqRel);
    }

    /// A mark for all work enqueued until now, on any stream.
    pub(crate) fn mark(self: &Arc<Self>) -> WaitMark {
        WaitMark { waits: self.clone(), begun: self.begun.load(Ordering::Acquire) }
    }
}

/// A mark for all work that was enqueued on a device when the mark was made, on any stream and by
/// any library: [`crate::Device::wait_mark`].
#[derive(Clone, Debug)]
pub struct WaitMark {
    waits: Arc<Waits>,
    begun: u64,
}

impl WaitMark {
    /// True if the work is known to be done, because the host has waited for the device since. No
    /// driver call.
    pub fn is_passed(&self) -> bool {
        self.waits.done.load(Ordering::Acquire) > self.begun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_waits_that_began_later_count() {
        let waits = Arc::new(Waits::default());
        let early = waits.begin();
        let mark = waits.mark();
        waits.end(early);
        assert!(!mark.is_passed(), "it may miss work enqueued after it began");
        let late = waits.begin();
        assert!(!mark.is_passed() && !waits.mark().is_passed());
        waits.end(late);
        assert!(mark.is_passed() && !waits.mark().is_passed());
    }
}
