//! Jobs: transfers that threads of the runtime still work on.
//!
//! Invariants: a job is settled once, and wakes all threads and tasks that wait for it. Its lock is
//! a leaf; wakers run without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use aquifer_device::Tick;
use aquifer_device::fork::{Condvar, Mutex};

use crate::error::TransferError;
use crate::foreign_code;

/// A transfer that threads of the runtime work on.
#[derive(Debug, Default)]
pub(crate) struct Job {
    state: Mutex<JobStatus>,
    changed: Condvar,
    cancelled: AtomicBool,
    /// True once a caller has learned of a failure, or asked for it by cancelling.
    reported: AtomicBool,
    /// True once no [`Watched`] is left.
    unwatched: AtomicBool,
}

/// A job whose result a caller may still ask for.
#[derive(Debug)]
pub(crate) struct Watched(pub(crate) Arc<Job>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.unwatched.store(true, Ordering::Release);
    }
}

#[derive(Debug, Default)]
struct JobStatus {
    progress: JobProgress,
    /// The waker of the last poll: one future has the transfer.
    waker: Option<Waker>,
}

/// The progress of a job.
#[derive(Clone, Debug, Default)]
pub(crate) enum JobProgress {
    /// Threads work on it.
    #[default]
    Working,
    /// All its work is enqueued; the tick covers it.
    Enqueued(Tick),
    /// It is complete, or failed.
    Finished(Result<(), TransferError>),
}

impl Job {
    pub(crate) fn new() -> Arc<Job> {
        Arc::default()
    }

    /// Settles a job whose work is enqueued before the tick. It holds no reservation any more.
    pub(crate) fn enqueued(&self, tick: Tick) {
        self.settle(JobProgress::Enqueued(tick));
    }

    /// Settles a job that is complete, or failed. The first call counts.
    pub(crate) fn finish(&self, result: Result<(), TransferError>) {
        self.settle(JobProgress::Finished(result));
    }

    fn settle(&self, progress: JobProgress) {
        let mut state = self.state.lock();
        if !matches!(state.progress, JobProgress::Working) {
            return;
        }
        state.progress = progress;
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            foreign_code::run("a task's waker", move || waker.wake());
        }
    }

    /// Requests that threads begin no more of the work.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.note_reported();
    }

    /// Notes that a caller learns of the result.
    pub(crate) fn note_reported(&self) {
        self.reported.store(true, Ordering::Release);
    }

    /// True, once, if no caller has learned of the result or can ask for it.
    pub(crate) fn report_in_place(&self) -> bool {
        self.unwatched.load(Ordering::Acquire) && !self.reported.swap(true, Ordering::AcqRel)
    }

    /// Whether cancellation was requested.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// The progress.
    pub(crate) fn progress(&self) -> JobProgress {
        self.state.lock().progress.clone()
    }

    /// The progress. While threads work on the job, `waker` is woken at the next change.
    pub(crate) fn poll(&self, waker: &Waker) -> JobProgress {
        let mut state = self.state.lock();
        let progress = state.progress.clone();
        if !matches!(progress, JobProgress::Working) || state.waker.as_ref().is_some_and(|known| known.will_wake(waker))
        {
            return progress;
        }
        let before = state.waker.replace(waker.clone());
        drop(state);
        // Without the lock: it is foreign code.
        drop(before);
        progress
    }

    /// Waits until no thread works on it any more.
    pub(crate) fn wait(&self) -> JobProgress {
        let mut state = self.state.lock();
        while matches!(state.progress, JobProgress::Working) {
            state = self.changed.wait(state);
        }
        state.progress.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use super::*;

    struct Counted;

    impl Wake for Counted {
        fn wake(self: Arc<Self>) {}
    }

    #[test]
    fn a_job_keeps_only_the_waker_of_the_last_poll() {
        let (job, counted) = (Job::new(), Arc::new(Counted));
        for _ in 0..100 {
            // Each is another one, as with executors that make one for each poll.
            let last = Arc::new(Counted);
            job.poll(&Waker::from(last.clone()));
            assert_eq!(Arc::strong_count(&last), 2);
        }
        job.poll(&Waker::from(counted.clone()));
        job.poll(&Waker::from(counted.clone()));
        assert_eq!(Arc::strong_count(&counted), 2);
        job.finish(Ok(()));
        assert_eq!(Arc::strong_count(&counted), 1);
    }
}
