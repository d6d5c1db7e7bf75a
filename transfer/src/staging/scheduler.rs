//! The scheduler of a ring's worker threads: which thread takes which task, sleeps or is woken, and
//! when threads start and end.
//!
//! A thread starts when there is a task and no thread is free, up to a bound. Threads sleep when
//! there is no task. Where all of them wait for streams, which may stand still for long, one more
//! thread starts; at most one waits for each stream. Whenever the lock is released while there is a
//! task, one sleeping thread is woken, or a new one starts, which then does the same. So no task is
//! left undone, and one task does not wake many threads. Threads end once the scheduler is closed
//! and all jobs have ended; the last one releases the chunks.
//!
//! Tasks are performed without the lock. It is a leaf: nothing else is locked, and no driver is
//! called, under it.

use super::ring::Ring;
use super::task::{Followup, Submission, Task, TaskResult};
use crate::config::Sizes;
use crate::error::TransferError;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The operations of worker threads.
pub(super) trait Executor<J, C> {
    /// Performs a task. Must not panic: the job and the chunk would leak.
    fn perform(&self, task: Task<J, C>) -> TaskResult<J, C>;

    /// Ends jobs, and releases chunks.
    fn settle(&self, after: Followup<J, C>);

    /// Starts a thread that calls [`Scheduler::work`].
    fn spawn(&self) -> Result<(), TransferError>;
}

/// A ring and the threads that work on it.
#[derive(Debug)]
pub(super) struct Scheduler<J, C> {
    state: Mutex<SchedulerState<J, C>>,
    /// Notified of a task, and of the end.
    changed: Condvar,
}

#[derive(Debug)]
struct SchedulerState<J, C> {
    ring: Ring<J, C>,
    /// Threads that run or are about to start.
    threads: usize,
    /// Threads that wait for a task.
    asleep: usize,
    /// Threads that wait for a stream.
    waiting: usize,
    /// The most threads, once one more could not be started.
    threads_max: Option<usize>,
    closed: bool,
}

/// The present size of a ring and of its worker pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolSize {
    pub(super) chunks: usize,
    pub(super) chunk_bytes: usize,
    pub(super) threads: usize,
}

impl<J: Clone, C> Scheduler<J, C> {
    pub(super) fn new(sizes: Sizes) -> Self {
        let ring = Ring::new(sizes);
        let state = SchedulerState { ring, threads: 0, asleep: 0, waiting: 0, threads_max: None, closed: false };
        Scheduler { state: Mutex::new(state), changed: Condvar::default() }
    }

    /// Accepts a job. Retries to start missing threads.
    ///
    /// # Errors
    /// The device is lost. If no thread can be started at all, the job fails with that error.
    pub(super) fn submit(&self, order: Submission<J>, executor: &impl Executor<J, C>) -> Result<(), TransferError> {
        let mut state = self.state.lock();
        state.ring.submit(order)?;
        state.threads_max = None;
        self.release(state, executor);
        Ok(())
    }

    /// Ends the threads once all jobs have ended.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Takes all chunks out that no task uses, if no job is under way. The next job gets others.
    pub(super) fn strip_idle(&self) -> Vec<C> {
        let mut state = self.state.lock();
        if state.ring.is_idle() { state.ring.strip() } else { Vec::new() }
    }

    pub(super) fn size(&self) -> PoolSize {
        let state = self.state.lock();
        let (chunks, chunk_bytes) = state.ring.chunks();
        PoolSize { chunks, chunk_bytes, threads: state.threads }
    }

    /// The loop of a worker thread.
    pub(super) fn work(&self, executor: &impl Executor<J, C>) {
        let mut state = self.state.lock();
        loop {
            match state.ring.next() {
                Some(task) => state = self.perform(state, task, executor),
                None if state.closed && state.ring.is_idle() => break,
                None => {
                    state.asleep += 1;
                    state = self.changed.wait(state);
                    state.asleep -= 1;
                }
            }
        }
        if state.threads == 1 {
            let chunks = state.ring.strip();
            drop(state);
            drop(chunks);
            state = self.state.lock();
        }
        state.threads -= 1;
        drop(state);
        self.changed.notify_all();
    }

    fn perform<'a>(
        &'a self,
        mut state: MutexGuard<'a, SchedulerState<J, C>>,
        task: Task<J, C>,
        executor: &impl Executor<J, C>,
    ) -> MutexGuard<'a, SchedulerState<J, C>> {
        let waits = usize::from(matches!(task, Task::Wait(_)));
        state.waiting += waits;
        self.release(state, executor);
        let done = executor.perform(task);
        state = self.state.lock();
        state.waiting -= waits;
        let after = state.ring.complete(done);
        if after.is_empty() {
            return state;
        }
        self.release(state, executor);
        executor.settle(after);
        self.state.lock()
    }

    /// Releases the lock. Wakes or starts a thread if there is a task, and wakes all at the end.
    fn release(&self, mut state: MutexGuard<'_, SchedulerState<J, C>>, executor: &impl Executor<J, C>) {
        if state.closed && state.ring.is_idle() {
            self.changed.notify_all();
        }
        if !state.ring.has_task() {
            return;
        }
        if state.asleep > 0 {
            self.changed.notify_one();
            return;
        }
        let bound = state.ring.sizes().threads;
        let enough = state.threads >= state.threads_max.unwrap_or(bound).min(bound);
        if enough && state.waiting < state.threads {
            return;
        }
        state.threads += 1;
        drop(state);
        if let Err(error) = executor.spawn() {
            self.not_spawned(&error, executor);
        }
    }

    /// Goes on with the threads that run. Without any, all jobs fail; the next job tries again.
    fn not_spawned(&self, error: &TransferError, executor: &impl Executor<J, C>) {
        let mut after = Followup::default();
        let mut state = self.state.lock();
        state.threads -= 1;
        if state.threads == 0 {
            state.threads_max = None;
            state.ring.fail_all(error, &mut after);
        } else {
            state.threads_max = Some(state.threads);
        }
        drop(state);
        executor.settle(after);
    }

    /// Waits until no thread and no chunk is left, which follows [`Scheduler::close`].
    #[cfg(test)]
    pub(super) fn join(&self) {
        let mut state = self.state.lock();
        while state.threads > 0 {
            state = self.changed.wait(state);
        }
    }
}

#[cfg(all(test, aquifer_shuttle))]
#[path = "schedules.rs"]
mod schedules;

#[cfg(all(test, not(aquifer_shuttle)))]
#[path = "scheduler_tests.rs"]
mod tests;
