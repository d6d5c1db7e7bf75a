//! Clean-up that a failing driver or a capture in progress interrupted, after the last handle was
//! dropped: captures to be ended, and the release queues of devices that were closed.
//!
//! Each is tried again whenever a device of the process is opened or settled, and captures also
//! when one is in the way of a call. Invariant: an unfinished clean-up is in the list, or one
//! thread is trying it.
//!
//! The list's lock is a leaf: nothing is called or dropped under it.

use std::sync::Arc;

use crate::fork::{self, Mutex};

/// A clean-up that may have to be tried several times.
pub(crate) trait CleanUp: Send + Sync {
    /// Tries to finish. Returns true if nothing is left to do.
    fn finish(&self) -> bool;

    /// True if this ends a capture.
    fn ends_capture(&self) -> bool {
        false
    }
}

static UNFINISHED: Mutex<Vec<Arc<dyn CleanUp>>> = Mutex::new(Vec::new());

/// Adds a clean-up to the list. Makes no driver call.
pub(crate) fn keep(clean_up: Arc<dyn CleanUp>) {
    UNFINISHED.lock().push(clean_up);
}

/// Tries a clean-up now, and adds it to the list if it cannot be finished.
pub(crate) fn finish_or_keep(clean_up: Arc<dyn CleanUp>) {
    if !clean_up.finish() {
        keep(clean_up);
    }
}

/// Tries everything in the list.
pub(crate) fn finish_all() {
    finish_those(|_| true);
}

/// Tries to end the captures in the list.
pub(crate) fn end_captures() {
    finish_those(|clean_up| clean_up.ends_capture());
}

fn finish_those(is_one: impl Fn(&dyn CleanUp) -> bool) {
    if fork::is_child() {
        return;
    }
    let those: Vec<_> = UNFINISHED.lock().extract_if(.., |clean_up| is_one(&**clean_up)).collect();
    those.into_iter().for_each(finish_or_keep);
}
