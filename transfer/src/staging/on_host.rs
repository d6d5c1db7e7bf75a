//! Copies between host memory on their way to the threads that make them.
//!
//! What a copy has to come after is waited for by the threads that wake tasks (`waiter`), so that none of those that copy is blocked.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

use aquifer_device::Tick;
use aquifer_device::fork::Mutex;

use super::crew::Crew;
use super::ends::HostCopy;
use super::work::guarded;
use crate::error::TransferError;
use crate::job::Job;
use crate::waiter::{Signal, Waiter};

/// A copy between host memory, and the job that others know it by.
pub(super) struct OnHost {
    copy: Box<dyn HostCopy>,
    job: Arc<Job>,
}

impl OnHost {
    pub(super) fn new(copy: Box<dyn HostCopy>) -> OnHost {
        OnHost { copy, job: Job::new() }
    }

    pub(super) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    pub(super) fn bytes(&self) -> u64 {
        self.copy.bytes()
    }

    /// Copies a piece.
    pub(super) fn copy(&self, range: Range<u64>) -> Result<(), TransferError> {
        if self.job.is_cancelled() {
            return Err(TransferError::Cancelled);
        }
        guarded("the source of a copy", || self.copy.copy(range))
    }

    /// Ends the job. The claims and the source are gone before the job is settled, except for an owner whose drop is foreign code.
    pub(super) fn end(self, result: Result<(), TransferError>) {
        let OnHost { copy, job } = self;
        drop(copy);
        job.finish(result);
    }
}

/// Holds a copy back until all that it comes after is done, without a thread of its own.
struct Gate {
    crew: Arc<Crew>,
    waiter: Arc<Waiter>,
    held: Mutex<Option<Held>>,
}

struct Held {
    copy: OnHost,
    /// What is not known to be done.
    before: VecDeque<Tick>,
    /// Told of the first of these.
    signal: Option<Arc<Signal>>,
}

/// Hands a copy to the crew once the ticks are done. An error of a tick, such as that of a lost device, fails the copy.
pub(super) fn begin(crew: &Arc<Crew>, waiter: &Arc<Waiter>, copy: OnHost, before: Vec<Tick>) {
    // Now, because their streams may capture by the time that they are waited for.
    for tick in &before {
        if let Err(error) = tick.cover() {
            tracing::debug!(%error, "no event could be recorded for what a copy comes after");
        }
    }
    let held = Held { copy, before: before.into(), signal: None };
    Arc::new(Gate { crew: crew.clone(), waiter: waiter.clone(), held: Mutex::new(Some(held)) }).wake();
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(self.clone());
        // Kept locked while a signal takes the waker: who is woken just then must find what it is to let go.
        let mut place = self.held.lock();
        let Some(mut held) = place.take() else { return };
        let passed = match held.poll(&self.waiter, &waker) {
            Poll::Pending => {
                *place = Some(held);
                return;
            }
            Poll::Ready(passed) => passed,
        };
        drop(place);
        let copy = held.copy;
        match passed.and_then(|()| guarded("the driver of the device", || copy.copy.begin())) {
            Ok(()) => self.crew.submit_copy(copy),
            Err(error) => copy.end(Err(error)),
        }
    }
}

impl Held {
    /// Whether all ticks are done. Else `waker` is told when the first of them is.
    fn poll(&mut self, waiter: &Arc<Waiter>, waker: &Waker) -> Poll<Result<(), TransferError>> {
        while let Some(tick) = self.before.front() {
            let signal = match self.signal.take() {
                Some(signal) => signal,
                None => match waiter.watch(tick.clone()) {
                    Ok(signal) => signal,
                    Err(error) => return Poll::Ready(Err(error)),
                },
            };
            match signal.poll(waker) {
                Poll::Pending => {
                    self.signal = Some(signal);
                    return Poll::Pending;
                }
                Poll::Ready(Ok(())) => drop(self.before.pop_front()),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
            }
        }
        Poll::Ready(Ok(()))
    }
}
