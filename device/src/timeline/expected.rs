//! Work that threads are to enqueue for a stream, after a call that began it has returned.
//!
//! No tick stands for it yet, so waiting for the stream on the host first waits until the threads
//! have enqueued it or given it up. Threads enqueue it on another stream where a capture is in the
//! way, so it leaves the tick after it.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use super::{Expected, Tick, Timeline};
use crate::fork;

thread_local! {
    /// True on threads that enqueue expected work.
    static ENQUEUES: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread one that enqueues expected work: it waits for none, which may be its own.
pub fn enqueues_expected_work() {
    ENQUEUES.set(true);
}

/// See [`while_held`].
static IS_HELD: OnceLock<fn() -> bool> = OnceLock::new();

/// Has a thread wait for no expected work while `is_held` says that it keeps others from something
/// that the work's threads may wait for. Only the first `is_held` counts.
pub fn while_held(is_held: fn() -> bool) {
    IS_HELD.get_or_init(|| is_held);
}

/// Work that threads will enqueue for a stream. It ends when this is dropped.
#[derive(Debug)]
#[must_use = "the work counts as enqueued once it is dropped"]
pub struct ExpectedWork {
    timeline: Arc<Timeline>,
    number: u64,
    /// The tick after the work.
    pub tick: Option<Tick>,
}

impl Timeline {
    /// As [`crate::Stream::expect_work`].
    pub(crate) fn expect_work(self: &Arc<Self>) -> ExpectedWork {
        let mut state = self.state.lock();
        let number = state.expected.next;
        state.expected.next += 1;
        state.expected.open.insert(number);
        ExpectedWork { timeline: self.clone(), number, tick: None }
    }

    /// True if all expected work is enqueued on the stream, or known to be done.
    pub(crate) fn expects_nothing(&self) -> bool {
        let expected = &self.state.lock().expected;
        expected.open.is_empty() && expected.elsewhere.iter().all(|(timeline, n)| timeline.is_known_done(*n))
    }

    /// Waits until the work that is expected now is enqueued, or was given up. Returns the ticks
    /// after work on other streams. Call it without a lock.
    pub(crate) fn wait_for_expected(&self) -> Vec<Tick> {
        let may_wait = !ENQUEUES.get() && !IS_HELD.get().is_some_and(|is_held| is_held());
        let mut state = self.state.lock();
        let next = state.expected.next;
        while may_wait && state.expected.open.first().is_some_and(|&first| first < next) {
            state = self.changed.wait(state);
        }
        state.expected.elsewhere.iter().map(|(timeline, n)| Tick { timeline: timeline.clone(), n: *n }).collect()
    }
}

impl Drop for ExpectedWork {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let mut state = self.timeline.state.lock();
        let Expected { open, elsewhere, .. } = &mut state.expected;
        open.remove(&self.number);
        if let Some(tick) = self.tick.take().filter(|tick| !Arc::ptr_eq(&tick.timeline, &self.timeline)) {
            elsewhere.retain(|(timeline, n)| !timeline.is_known_done(*n));
            elsewhere.push((tick.timeline, tick.n));
        }
        drop(state);
        self.timeline.changed.notify_all();
    }
}
