//! The completion of transfers in flight.
//!
//! Soundness does not depend on this module: this crate owns the memory that is in flight, or the
//! memory carries the ticks of the work that uses it. Dropping a [`Completion`] lets the transfer
//! go on.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use aquifer_device::{Operation, Stream, Tick, fork};

use crate::counters::AtomicCounters;
use crate::error::TransferError;
use crate::in_flight::InFlight;
use crate::job::{Job, JobProgress, Watched};
use crate::waiter::Waiter;

/// State that the transfers of one runtime share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) in_flight: InFlight,
    pub(crate) waiter: Arc<Waiter>,
    pub(crate) counters: AtomicCounters,
}

/// A transfer in flight: to be waited for, queried, polled by a task, or ordered before later work
/// of a stream. Dropping it lets the transfer go on.
pub struct Completion {
    /// The steps that are not known to be complete, in the order of waits: one for each joined
    /// transfer.
    steps: VecDeque<Step>,
    /// The job of the first step's tick, which wakes this task.
    signal: Option<Arc<Job>>,
    /// `None` if it was complete from the start.
    shared: Option<Arc<Shared>>,
    started: Instant,
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion").field("steps", &self.steps.len()).finish_non_exhaustive()
    }
}

/// A part of a transfer.
#[derive(Clone, Debug)]
enum Step {
    Tick(Tick),
    Job(Arc<Watched>),
}

/// For another task: each has a signal of its own.
impl Clone for Completion {
    fn clone(&self) -> Completion {
        let Completion { steps, shared, started, signal: _ } = self;
        Completion { steps: steps.clone(), signal: None, shared: shared.clone(), started: *started }
    }
}

impl Completion {
    /// A transfer that is complete already.
    pub fn complete() -> Completion {
        Completion { steps: VecDeque::new(), signal: None, shared: None, started: Instant::now() }
    }

    /// Work that was enqueued before the ticks.
    pub(crate) fn enqueued(shared: &Arc<Shared>, ticks: impl IntoIterator<Item = Tick>) -> Completion {
        let steps = ticks.into_iter().inspect(|tick| shared.in_flight.note_tick(tick)).map(Step::Tick).collect();
        Completion { steps, shared: Some(shared.clone()), ..Completion::complete() }
    }

    /// Work of threads of the runtime.
    pub(crate) fn job(shared: &Arc<Shared>, job: Arc<Job>) -> Completion {
        shared.in_flight.note_job(&job);
        Completion {
            steps: [Step::Job(Arc::new(Watched(job)))].into(),
            shared: Some(shared.clone()),
            ..Completion::complete()
        }
    }

    /// Waits on the host until the transfer is complete. Counted as a synchronisation if it was
    /// not.
    ///
    /// # Errors
    /// Errors of the transfer and of the driver, such as a lost device.
    pub fn wait(&self) -> Result<(), TransferError> {
        self.wait_as(false)
    }

    /// As [`Completion::wait`], always counted as a synchronisation: for calls that begin a
    /// transfer only to wait for it.
    ///
    /// # Errors
    /// As [`Completion::wait`].
    pub fn wait_counted(&self) -> Result<(), TransferError> {
        self.wait_as(true)
    }

    fn wait_as(&self, is_counted: bool) -> Result<(), TransferError> {
        fork::check(Operation::SynchronizeEvent)?;
        let Completion { steps, shared, started, .. } = self;
        if let Some(Shared { counters, .. }) = shared.as_deref().filter(|_| !steps.is_empty()) {
            if is_counted || !self.is_done()? {
                counters.waiting(*started, || steps.iter().try_for_each(Step::wait))?;
            } else {
                counters.flew(*started);
            }
        }
        steps.iter().try_for_each(Step::result)
    }

    /// Whether the transfer is complete or has failed, so that [`Completion::wait`] would not wait.
    /// Queries the driver.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_done(&self) -> Result<bool, TransferError> {
        for step in &self.steps {
            if !step.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all of it is enqueued: no thread works on it any more.
    pub fn is_enqueued(&self) -> bool {
        self.steps.iter().all(|step| matches!(step, Step::Tick(_)))
    }

    /// Orders later work of `stream` after the transfer. Waits on the host only while threads are
    /// still enqueuing.
    ///
    /// # Errors
    /// Errors of the transfer so far, and of the driver. The transfer goes on.
    pub fn order(&self, stream: &Stream) -> Result<(), TransferError> {
        for step in &self.steps {
            if let Some(tick) = step.enqueued()? {
                stream.wait_for(&tick)?;
            }
        }
        Ok(())
    }

    /// Both transfers.
    #[must_use]
    pub fn join(mut self, mut other: Completion) -> Completion {
        self.steps.append(&mut other.steps);
        let started = self.started.min(other.started);
        Completion { shared: self.shared.take().or(other.shared), started, ..self }
    }

    /// Cancels the transfer: threads of the runtime begin no more of it, and enqueued work goes on.
    pub fn cancel(&self) {
        for step in &self.steps {
            if let Step::Job(job) = step {
                job.0.cancel();
            }
        }
    }

    /// Cancels the transfer and waits until no thread works on it any more.
    pub fn abandon(&self) {
        self.cancel();
        for step in &self.steps {
            if let Step::Job(job) = step {
                job.0.wait();
            }
        }
    }

    /// As [`Future::poll`]: `waker` of the context is woken when there is progress. Nothing polls
    /// the device: a thread that sleeps until it is done wakes the task.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        let flies = !self.steps.is_empty();
        let polled = self.poll_steps(context.waker());
        if let Some(shared) = self.shared.as_ref().filter(|_| flies && polled.is_ready()) {
            shared.counters.flew(self.started);
        }
        polled
    }

    /// Drops finished steps. `waker` is woken when the first unfinished one is done.
    fn poll_steps(&mut self, waker: &Waker) -> Poll<Result<(), TransferError>> {
        if let Err(error) = fork::check(Operation::SynchronizeEvent) {
            return Poll::Ready(Err(error.into()));
        }
        while let (Some(step), Some(shared)) = (self.steps.front().cloned(), &self.shared) {
            let progress = match &step {
                Step::Tick(tick) => JobProgress::Enqueued(tick.clone()),
                Step::Job(job) => job.0.poll(waker),
            };
            match progress {
                JobProgress::Working => return Poll::Pending,
                JobProgress::Finished(result) => step.report(result)?,
                JobProgress::Enqueued(tick) => {
                    if self.signal.is_none() && !tick.is_done()? {
                        self.signal = Some(shared.waiter.watch(tick));
                    }
                    match self.signal.as_ref().map(|signal| signal.poll(waker)) {
                        Some(JobProgress::Working) => return Poll::Pending,
                        Some(JobProgress::Finished(result)) => result?,
                        Some(JobProgress::Enqueued(_)) | None => {}
                    }
                }
            }
            self.signal = None;
            self.steps.pop_front();
        }
        Poll::Ready(Ok(()))
    }
}

/// Whether a tick is done. Records an event if none covers the tick, because recording one failed
/// before: the answer would never change otherwise.
fn is_done(tick: &Tick) -> Result<bool, TransferError> {
    if tick.is_done()? {
        return Ok(true);
    }
    tick.cover()?;
    Ok(tick.is_done()?)
}

impl Step {
    fn progress(&self) -> JobProgress {
        match self {
            Step::Tick(tick) => JobProgress::Enqueued(tick.clone()),
            Step::Job(job) => job.0.progress(),
        }
    }

    fn is_done(&self) -> Result<bool, TransferError> {
        match self.progress() {
            JobProgress::Working => Ok(false),
            JobProgress::Enqueued(tick) => is_done(&tick),
            JobProgress::Finished(_) => Ok(true),
        }
    }

    /// Waits until the step's work is enqueued. Returns the tick after it, unless it is complete.
    fn enqueued(&self) -> Result<Option<Tick>, TransferError> {
        if let Step::Job(job) = self {
            job.0.wait();
        }
        match self.progress() {
            JobProgress::Working => Ok(None),
            JobProgress::Enqueued(tick) => Ok(Some(tick)),
            JobProgress::Finished(result) => self.report(result).map(|()| None),
        }
    }

    fn wait(&self) -> Result<(), TransferError> {
        self.enqueued()?.map_or(Ok(()), |tick| Ok(tick.synchronize()?))
    }

    /// The result of a step that is done.
    fn result(&self) -> Result<(), TransferError> {
        match self.progress() {
            JobProgress::Finished(result) => self.report(result),
            JobProgress::Working | JobProgress::Enqueued(_) => Ok(()),
        }
    }

    /// Passes a result on to the caller, so that the memory does not report it.
    fn report(&self, result: Result<(), TransferError>) -> Result<(), TransferError> {
        if let Step::Job(job) = self {
            job.0.note_reported();
        }
        result
    }
}
