//! Transfers in flight, as values that arrive later.
//!
//! Soundness does not depend on this module: this crate owns the memory that is in flight, or the
//! memory carries the ticks of the work that uses it. Dropping a [`Pending`] lets the transfer go
//! on; forgetting one leaks its value.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use aquifer_device::{Operation, Stream, Tick, fork};

use crate::error::Error;
use crate::transfer::counters::AtomicCounters;
use crate::transfer::in_flight::InFlight;
use crate::transfer::job::{Job, JobProgress};
use crate::transfer::waiter::{Signal, Waiter};

/// State that the transfers of one runtime share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) in_flight: InFlight,
    pub(crate) waiter: Arc<Waiter>,
    pub(crate) counters: AtomicCounters,
}

/// A transfer in flight, which yields a value when it is complete.
///
/// Wait for it ([`Pending::wait`]), query it ([`Pending::is_done`]), await it in any executor, or
/// chain it to a stream without waiting for the device ([`Pending::then`]). If it is dropped, the
/// transfer goes on, and the memory that it uses stays until it is done.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Transfer;
/// let device = aquifer::open("sim:24GiB")?;
/// let transfer = Transfer::new(&Allocator::of(&device)?)?;
/// let stream = device.stream()?;
///
/// let pending = transfer.to_device(vec![1.0f32, 2.0, 3.0], &stream)?; // returns at once
/// let buffer: Buffer<f32> = pending.wait()?;
/// let back = pollster::block_on(transfer.to_vec(&buffer)?)?;
/// assert_eq!(back, [1.0, 2.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pending<T> {
    /// The steps that are not known to be complete, in the order of waits: one for each joined
    /// transfer.
    steps: VecDeque<Step>,
    value: Value<T>,
    /// The signal that wakes this task, for the first step.
    signal: Option<Arc<Signal>>,
    shared: Arc<Shared>,
    started: Instant,
}

/// A part of a transfer.
#[derive(Clone, Debug)]
enum Step {
    Tick(Tick),
    Job(Arc<Job>),
}

/// The value of a transfer.
enum Value<T> {
    Here(T),
    Later(Box<dyn FnOnce() -> Result<T, Error> + Send>),
    Taken,
}

// The closure is called once, and what it was called for is `Taken` after a panic.
impl<T: UnwindSafe> UnwindSafe for Value<T> {}
impl<T: RefUnwindSafe> RefUnwindSafe for Value<T> {}

impl<T> Value<T> {
    fn take(&mut self) -> Result<T, Error> {
        match std::mem::replace(self, Value::Taken) {
            Value::Here(value) => Ok(value),
            Value::Later(make) => make(),
            Value::Taken => Err(Error::AlreadyTaken),
        }
    }
}

impl<T> Pending<T> {
    /// A transfer that is complete already.
    pub(crate) fn ready(shared: &Arc<Shared>, value: T) -> Pending<T> {
        Pending::of(shared, VecDeque::new(), Value::Here(value))
    }

    /// Work that was enqueued before the tick.
    pub(crate) fn enqueued(shared: &Arc<Shared>, tick: Tick, value: T) -> Pending<T> {
        Pending::of(shared, [Step::Tick(tick)].into(), Value::Here(value))
    }

    /// Work that was enqueued before the ticks.
    pub(crate) fn enqueued_all(shared: &Arc<Shared>, ticks: Vec<Tick>, value: T) -> Pending<T> {
        Pending::of(shared, ticks.into_iter().map(Step::Tick).collect(), Value::Here(value))
    }

    /// Work of threads of the runtime. `value` runs when the result is taken.
    pub(crate) fn job(
        shared: &Arc<Shared>,
        job: Arc<Job>,
        value: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Pending<T> {
        Pending::of(shared, [Step::Job(job)].into(), Value::Later(Box::new(value)))
    }

    /// A transfer that begins now.
    fn of(shared: &Arc<Shared>, steps: VecDeque<Step>, value: Value<T>) -> Pending<T> {
        for step in &steps {
            match step {
                Step::Tick(tick) => shared.in_flight.note_tick(tick),
                Step::Job(job) => shared.in_flight.note_job(job),
            }
        }
        Pending { steps, value, signal: None, shared: shared.clone(), started: Instant::now() }
    }

    /// Waits on the host until the transfer is complete. Counted as a synchronisation if it was
    /// not.
    ///
    /// # Errors
    /// Errors of the transfer and of the driver, such as a lost device.
    pub fn wait(self) -> Result<T, Error> {
        self.wait_as(false)
    }

    /// As [`Pending::wait`], always counted as a synchronisation: for calls that begin a transfer
    /// only to wait for it.
    pub(crate) fn wait_counted(self) -> Result<T, Error> {
        self.wait_as(true)
    }

    fn wait_as(mut self, is_counted: bool) -> Result<T, Error> {
        fork::check(Operation::SynchronizeEvent)?;
        let Pending { steps, shared, started, .. } = &self;
        if !steps.is_empty() {
            if is_counted || !self.is_done()? {
                shared.counters.waiting(*started, || steps.iter().try_for_each(Step::wait))?;
            } else {
                shared.counters.flew(*started);
            }
        }
        self.finish()
    }

    /// Whether the transfer is complete or has failed, so that [`Pending::wait`] would not wait.
    /// Queries the driver.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_done(&self) -> Result<bool, Error> {
        for step in &self.steps {
            if !step.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all of it is enqueued: no thread works on it any more.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.steps.iter().all(|step| matches!(step, Step::Tick(_)))
    }

    /// Continues with the transfer's value as soon as the transfer is enqueued: orders later work
    /// of `stream` after it, without waiting for the device, and calls `next`. Waits on the host
    /// only while threads are still enqueuing.
    ///
    /// Device memory in the value is ready on `stream` ([`OnStreams::ready_on`]): any work of
    /// `stream` may use it, and it may be dropped at any time. The host should not read the value
    /// in `next`, because it would have to wait; page-locked memory waits by itself when it is
    /// read.
    ///
    /// # Errors
    /// Errors of the transfer so far, and of the driver. The transfer goes on.
    pub fn then<R>(self, stream: &Stream, next: impl FnOnce(&Stream, T) -> R) -> Result<R, Error>
    where
        T: OnStreams,
    {
        let value = self.enqueued_for(stream)?;
        value.ready_on(stream)?;
        Ok(next(stream, value))
    }

    /// Orders later work of `stream` after the transfer, and returns its value.
    pub(crate) fn enqueued_for(mut self, stream: &Stream) -> Result<T, Error> {
        for step in &self.steps {
            if let Some(tick) = step.enqueued()? {
                stream.wait_for(&tick)?;
            }
        }
        self.value.take()
    }

    /// Converts the transfer's value when it is taken.
    pub fn map<R>(self, change: impl FnOnce(T) -> R + Send + 'static) -> Pending<R>
    where
        T: Send + 'static,
    {
        self.and_then(move |value| Ok(change(value)))
    }

    /// Converts the transfer's value when it is taken; the conversion may fail.
    pub(crate) fn and_then<R>(mut self, change: impl FnOnce(T) -> Result<R, Error> + Send + 'static) -> Pending<R>
    where
        T: Send + 'static,
    {
        self.make(move |mut value| value.take().and_then(change))
    }

    /// Makes the value in another way if taking it fails.
    pub(crate) fn or_else(mut self, recover: impl FnOnce(Error) -> Result<T, Error> + Send + 'static) -> Pending<T>
    where
        T: Send + 'static,
    {
        match self.value {
            Value::Later(_) => self.make(move |mut value| value.take().or_else(recover)),
            Value::Here(_) | Value::Taken => self,
        }
    }

    /// Makes another value when this one is taken.
    fn make<R>(&mut self, make: impl FnOnce(Value<T>) -> Result<R, Error> + Send + 'static) -> Pending<R>
    where
        T: Send + 'static,
    {
        let value = std::mem::replace(&mut self.value, Value::Taken);
        let value = Value::Later(Box::new(move || make(value)));
        let steps = std::mem::take(&mut self.steps);
        Pending { steps, value, signal: None, shared: self.shared.clone(), started: self.started }
    }

    /// The values of two transfers, when both are complete.
    pub fn join<U>(mut self, mut other: Pending<U>) -> Pending<(T, U)>
    where
        T: Send + 'static,
        U: Send + 'static,
    {
        let mut others = std::mem::replace(&mut other.value, Value::Taken);
        self.steps.append(&mut other.steps);
        self.started = self.started.min(other.started);
        self.make(move |mut value| Ok((value.take()?, others.take()?)))
    }

    /// The values of all transfers, in order, when all are complete. `None` if there are none.
    pub fn all(pendings: impl IntoIterator<Item = Pending<T>>) -> Option<Pending<Vec<T>>>
    where
        T: Send + 'static,
    {
        let mut pendings = pendings.into_iter();
        let mut first = pendings.next()?;
        let mut others = Vec::new();
        for mut pending in pendings {
            first.steps.append(&mut pending.steps);
            others.push(std::mem::replace(&mut pending.value, Value::Taken));
        }
        Some(first.make(move |value| std::iter::once(value).chain(others).map(|mut value| value.take()).collect()))
    }

    /// Cancels the transfer: threads of the runtime begin no more of it, and enqueued work goes on.
    /// Drops the value.
    pub fn cancel(self) {
        for step in &self.steps {
            if let Step::Job(job) = step {
                job.cancel();
            }
        }
    }

    /// Cancels the transfer and waits until no thread works on it any more.
    pub(crate) fn abandon(self) {
        for step in &self.steps {
            if let Step::Job(job) = step {
                job.cancel();
                job.wait();
            }
        }
    }

    /// The value of the complete transfer.
    fn finish(&mut self) -> Result<T, Error> {
        self.steps.iter().try_for_each(Step::result)?;
        self.value.take()
    }

    /// Drops finished steps. `waker` is woken when the first unfinished one is done.
    fn poll_steps(&mut self, waker: &Waker) -> Poll<Result<(), Error>> {
        if let Err(error) = fork::check(Operation::SynchronizeEvent) {
            return Poll::Ready(Err(error.into()));
        }
        while let Some(step) = self.steps.front().cloned() {
            let progress = match step {
                Step::Tick(tick) => JobProgress::Enqueued(tick),
                Step::Job(job) => job.poll(waker),
            };
            match progress {
                JobProgress::Working => return Poll::Pending,
                JobProgress::Finished(result) => result?,
                JobProgress::Enqueued(tick) => {
                    if self.signal.is_none() && !tick.is_done()? {
                        self.signal = Some(self.shared.waiter.watch(tick)?);
                    }
                    match self.signal.as_ref().map(|signal| signal.poll(waker)) {
                        Some(Poll::Pending) => return Poll::Pending,
                        Some(Poll::Ready(result)) => result?,
                        None => {}
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
fn is_done(tick: &Tick) -> Result<bool, Error> {
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
            Step::Job(job) => job.progress(),
        }
    }

    fn is_done(&self) -> Result<bool, Error> {
        match self.progress() {
            JobProgress::Working => Ok(false),
            JobProgress::Enqueued(tick) => is_done(&tick),
            JobProgress::Finished(_) => Ok(true),
        }
    }

    /// Waits until the step's work is enqueued. Returns the tick after it, unless it is complete.
    fn enqueued(&self) -> Result<Option<Tick>, Error> {
        if let Step::Job(job) = self {
            job.wait();
        }
        match self.progress() {
            JobProgress::Working => Ok(None),
            JobProgress::Enqueued(tick) => Ok(Some(tick)),
            JobProgress::Finished(result) => result.map(|()| None),
        }
    }

    fn wait(&self) -> Result<(), Error> {
        self.enqueued()?.map_or(Ok(()), |tick| Ok(tick.synchronize()?))
    }

    /// The result of a step that is done.
    fn result(&self) -> Result<(), Error> {
        match self.progress() {
            JobProgress::Finished(result) => result,
            JobProgress::Working | JobProgress::Enqueued(_) => Ok(()),
        }
    }
}

/// A value that streams can use before its transfer is complete: device memory, and types made of
/// it.
pub trait OnStreams {
    /// Makes each piece of device memory in the value ready on `stream`, as
    /// [`aquifer_allocator::Storage::ready_on`] does: work of `stream` may use it without access
    /// guards, and it may be dropped at any time. A struct calls this for each of its fields.
    ///
    /// # Errors
    /// As [`aquifer_allocator::Storage::ready_on`].
    fn ready_on(&self, stream: &Stream) -> Result<(), Error>;
}

impl OnStreams for () {
    fn ready_on(&self, _stream: &Stream) -> Result<(), Error> {
        Ok(())
    }
}

impl<T> OnStreams for crate::buffer::Buffer<T> {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        Ok(self.storage().ready_on(stream)?)
    }
}

impl<T: OnStreams> OnStreams for Vec<T> {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.iter().try_for_each(|value| value.ready_on(stream))
    }
}

impl<T: OnStreams> OnStreams for Option<T> {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.iter().try_for_each(|value| value.ready_on(stream))
    }
}

impl<T: OnStreams, U: OnStreams> OnStreams for (T, U) {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.0.ready_on(stream)?;
        self.1.ready_on(stream)
    }
}

impl<T: OnStreams, U: OnStreams, V: OnStreams> OnStreams for (T, U, V) {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        self.0.ready_on(stream)?;
        self.1.ready_on(stream)?;
        self.2.ready_on(stream)
    }
}

/// A thread of the runtime that sleeps until the device is done wakes the task; nothing polls.
impl<T> Future for Pending<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let pending = self.get_mut();
        let flies = !pending.steps.is_empty();
        let polled = pending.poll_steps(context.waker());
        if flies && polled.is_ready() {
            pending.shared.counters.flew(pending.started);
        }
        match polled {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(())) => Poll::Ready(pending.value.take()),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        }
    }
}

/// Polling pins no field.
impl<T> Unpin for Pending<T> {}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("steps", &self.steps).finish_non_exhaustive()
    }
}
