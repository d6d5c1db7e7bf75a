//! A sign that a thread runs: per-thread default streams end with their thread, which no handler
//! reports.

use std::sync::{Arc, Weak};

/// The sign of one thread.
#[derive(Clone, Debug)]
pub struct RunningThread(Weak<()>);

thread_local! {
    /// Dropped when the thread ends.
    static RUNS: Arc<()> = Arc::default();
}

impl RunningThread {
    /// The sign of the calling thread. A thread that is ending counts as ended.
    pub fn current() -> RunningThread {
        RunningThread(RUNS.try_with(Arc::downgrade).unwrap_or_default())
    }

    /// True once the thread has ended.
    pub fn has_ended(&self) -> bool {
        self.0.strong_count() == 0
    }
}
