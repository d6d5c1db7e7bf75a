//! Who wakes tasks: threads that wait for ticks, so that tasks need neither poll nor block.
//!
//! Each timeline that tasks wait for has a thread, a *lane*, which waits on the host for the earliest tick asked about (the driver puts it
//! to sleep meanwhile) and then wakes who asked. A lane ends when it had nothing to do for a while.
//!
//! Invariants: a lane that is listed takes what is put into its queue; every signal put there is settled, at the latest with the error of
//! a device that is lost.
//!
//! Lock order: the list of lanes, then a lane's queue. A signal's lock is a leaf.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use aquifer_device::{DeviceError, Tick};
use parking_lot::{Condvar, Mutex};

use crate::error::TransferError;

/// How long a lane stays without work before its thread ends.
const IDLE: Duration = Duration::from_secs(2);

/// The lanes of a runtime.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// By device and timeline.
    lanes: Mutex<HashMap<(u32, u32), Arc<Lane>>>,
}

/// What one thread waits for.
#[derive(Debug, Default)]
struct Lane {
    queue: Mutex<BinaryHeap<Reverse<Entry>>>,
    grown: Condvar,
}

/// A tick that somebody asked about. Ordered by its place on the timeline.
#[derive(Debug)]
struct Entry {
    tick: Tick,
    signal: Arc<Signal>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.tick.n() == other.tick.n()
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.tick.n().cmp(&other.tick.n())
    }
}

/// Whether a tick is done, and whom to wake when it is.
#[derive(Debug)]
pub(crate) struct Signal(Mutex<State>);

#[derive(Debug)]
enum State {
    Open(Option<Waker>),
    Settled(Result<(), DeviceError>),
}

impl Signal {
    /// The answer, if there is one; else `waker` will be woken, and no other.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<(), DeviceError>> {
        let mut state = self.0.lock();
        match &mut *state {
            State::Settled(result) => Poll::Ready(result.clone()),
            State::Open(waiting) => {
                *waiting = Some(waker.clone());
                Poll::Pending
            }
        }
    }

    fn settle(&self, result: Result<(), DeviceError>) {
        let before = std::mem::replace(&mut *self.0.lock(), State::Settled(result));
        if let State::Open(Some(waker)) = before {
            wake(waker);
        }
    }
}

/// Wakers are foreign code: one that panics must not take a thread of the runtime with it.
pub(crate) fn wake(waker: Waker) {
    if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
        tracing::error!("a task's waker panicked");
    }
}

impl Waiter {
    /// A signal that is settled once the tick is done.
    ///
    /// # Errors
    /// When a thread is needed and cannot be started.
    pub(crate) fn watch(self: &Arc<Self>, tick: Tick) -> Result<Arc<Signal>, TransferError> {
        let signal = Arc::new(Signal(Mutex::new(State::Open(None))));
        let key = (tick.timeline().device_id(), tick.timeline().id());
        let entry = Reverse(Entry { tick, signal: signal.clone() });
        let mut lanes = self.lanes.lock();
        if let Some(lane) = lanes.get(&key) {
            lane.queue.lock().push(entry);
            lane.grown.notify_one();
            return Ok(signal);
        }
        let lane = Arc::new(Lane::default());
        lane.queue.lock().push(entry);
        let (waiter, own) = (self.clone(), lane.clone());
        thread::Builder::new()
            .name("aquifer-waiter".to_owned())
            .spawn(move || own.run(&waiter, key))
            .map_err(|source| TransferError::Thread { what: "waking tasks", source: Arc::new(source) })?;
        lanes.insert(key, lane);
        Ok(signal)
    }
}

impl Lane {
    fn run(&self, waiter: &Waiter, key: (u32, u32)) {
        while let Some(Entry { tick, signal }) = self.next(waiter, key) {
            signal.settle(tick.synchronize());
        }
    }

    /// The earliest tick asked about; `None` when there was none for a while, and then this lane is not listed any more.
    fn next(&self, waiter: &Waiter, key: (u32, u32)) -> Option<Entry> {
        loop {
            let mut queue = self.queue.lock();
            if queue.is_empty() {
                self.grown.wait_for(&mut queue, IDLE);
            }
            if let Some(Reverse(entry)) = queue.pop() {
                return Some(entry);
            }
            drop(queue);
            let mut lanes = waiter.lanes.lock();
            if self.queue.lock().is_empty() {
                lanes.remove(&key);
                return None;
            }
        }
    }
}
