//! Threads that wait for ticks and wake tasks, so that tasks need neither poll nor block.
//!
//! Each timeline that tasks wait for has a thread, a *lane*. It waits on the host for the earliest
//! requested tick (the driver puts it to sleep meanwhile), and then wakes the tasks. A request for
//! an earlier tick than the one a lane waits for gets another lane. An idle lane ends after a
//! while. A timeline has few lanes; once all are busy, a request for a still earlier tick joins the
//! lane with the earliest tick.
//!
//! Wakers are foreign code, which may wait for any other transfer. A lane with an empty queue runs
//! a waker itself, and is not listed meanwhile. A lane with more to do hands the waker to another
//! thread (`foreign_code`).
//!
//! Invariants: a listed lane serves its queue; every signal in it is settled, at the latest with
//! the error of a lost device.
//!
//! Lock order: the list of lanes, then a lane's queue. A signal's lock is a leaf.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use aquifer_device::fork::Mutex;
use aquifer_device::sim::defer_panics_here;
use aquifer_device::{Code, DeviceError, Operation, Tick};
use parking_lot::Condvar;

use crate::error::TransferError;
use crate::foreign_code;

/// The idle time after which a lane's thread ends.
const IDLE: Duration = Duration::from_secs(2);

/// Most threads that wait for ticks of one timeline.
const LANES_MAX: usize = 4;

/// The lanes of a runtime.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// By device and timeline.
    lanes: Mutex<HashMap<Key, Vec<Arc<Lane>>>>,
}

/// A device and a timeline.
type Key = (u32, u32);

/// The queue of one thread.
#[derive(Debug, Default)]
struct Lane {
    queue: Mutex<Queue>,
    grown: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    entries: BinaryHeap<Reverse<TickRequest>>,
    /// The tick that the thread waits for now, or waited for last.
    waits_for: u64,
}

/// A requested tick. Ordered by its place on the timeline.
#[derive(Debug)]
struct TickRequest {
    tick: Tick,
    signal: Arc<Signal>,
}

impl PartialEq for TickRequest {
    fn eq(&self, other: &Self) -> bool {
        self.tick.n() == other.tick.n()
    }
}

impl Eq for TickRequest {}

impl PartialOrd for TickRequest {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TickRequest {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.tick.n().cmp(&other.tick.n())
    }
}

/// The state of a requested tick, and the waker of its task.
#[derive(Debug)]
pub(crate) struct Signal(Mutex<SignalState>);

#[derive(Debug)]
enum SignalState {
    Open(Option<Waker>),
    Settled(Result<(), DeviceError>),
}

impl Signal {
    /// The result, if the tick is done; else `waker` is woken later, instead of an earlier one.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<(), DeviceError>> {
        // Cloned and dropped without the lock: wakers are foreign code, which may poll this again.
        let next = waker.clone();
        let mut state = self.0.lock();
        let before = match &mut *state {
            SignalState::Settled(result) => return Poll::Ready(result.clone()),
            SignalState::Open(waiting) => waiting.replace(next),
        };
        drop(state);
        drop(before);
        Poll::Pending
    }

    /// Sets the result, and returns the waker to call.
    fn settle(&self, result: Result<(), DeviceError>) -> Option<Waker> {
        match std::mem::replace(&mut *self.0.lock(), SignalState::Settled(result)) {
            SignalState::Open(waker) => waker,
            SignalState::Settled(_) => None,
        }
    }
}

/// Wakes a task. Wakers are foreign code, which may do anything.
pub(crate) fn wake(waker: Waker) {
    foreign_code::run("a task's waker", move || waker.wake());
}

impl Waiter {
    /// A signal that is settled once the tick is done.
    ///
    /// # Errors
    /// When a thread is needed and cannot be started.
    pub(crate) fn watch(self: &Arc<Self>, tick: Tick) -> Result<Arc<Signal>, TransferError> {
        let signal = Arc::new(Signal(Mutex::new(SignalState::Open(None))));
        let key = (tick.timeline().device_id(), tick.timeline().id());
        let entry = TickRequest { tick, signal: signal.clone() };
        let mut lanes = self.lanes.lock();
        let listed = lanes.entry(key).or_default();
        let Some(entry) = listed.iter().try_fold(entry, |entry, lane| lane.take(entry)) else { return Ok(signal) };
        if listed.len() >= LANES_MAX
            && let Some(earliest) = listed.iter().min_by_key(|lane| lane.queue.lock().waits_for)
        {
            earliest.push(entry);
            return Ok(signal);
        }
        let lane = Arc::new(Lane::default());
        lane.queue.lock().entries.push(Reverse(entry));
        let (waiter, own) = (self.clone(), lane.clone());
        thread::Builder::new()
            .name("aquifer-waiter".to_owned())
            .spawn(move || {
                defer_panics_here();
                foreign_code::deferring(|| own.run(&waiter, key));
            })
            .map_err(|cause| TransferError::Thread { what: "waking tasks", cause: Arc::new(cause) })?;
        listed.push(lane);
        Ok(signal)
    }
}

/// Calls the driver. A panic must not end the lane, which other tasks count on.
fn guarded(wait: impl FnOnce() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
    catch_unwind(AssertUnwindSafe(wait)).unwrap_or_else(|_| {
        tracing::error!("the driver panicked while a task waited for the device");
        let error = DeviceError::new(Operation::SynchronizeEvent, Code(999)).of_request("a tick was not waited for");
        Err(error.with_detail("the driver panicked"))
    })
}

impl Lane {
    fn run(self: &Arc<Self>, waiter: &Waiter, key: Key) {
        while let Some(TickRequest { tick, signal }) = self.next(waiter, key) {
            let Some(waker) = signal.settle(guarded(|| tick.synchronize())) else { continue };
            drop((tick, signal));
            if !self.leave(waiter, key) {
                wake(waker);
                continue;
            }
            foreign_code::not_deferring(|| wake(waker));
            if !self.come_back(waiter, key) {
                return;
            }
        }
    }

    /// Removes the lane from the list if its queue is empty, and returns whether it is.
    fn leave(&self, waiter: &Waiter, key: Key) -> bool {
        let mut lanes = waiter.lanes.lock();
        let is_idle = self.queue.lock().entries.is_empty();
        if is_idle && let Some(listed) = lanes.get_mut(&key) {
            listed.retain(|lane| !std::ptr::eq(&raw const **lane, self));
            if listed.is_empty() {
                lanes.remove(&key);
            }
        }
        is_idle
    }

    /// Lists the lane again, unless there are enough others.
    fn come_back(self: &Arc<Self>, waiter: &Waiter, key: Key) -> bool {
        let mut lanes = waiter.lanes.lock();
        let listed = lanes.entry(key).or_default();
        let has_room = listed.len() < LANES_MAX;
        if has_room {
            listed.push(self.clone());
        }
        has_room
    }

    /// Accepts an entry unless its tick is earlier than the one that the lane waits for; returns it
    /// otherwise.
    fn take(&self, entry: TickRequest) -> Option<TickRequest> {
        let queue = self.queue.lock();
        if entry.tick.n() < queue.waits_for {
            return Some(entry);
        }
        drop(queue);
        self.push(entry);
        None
    }

    fn push(&self, entry: TickRequest) {
        self.queue.lock().entries.push(Reverse(entry));
        self.grown.notify_one();
    }

    /// The earliest requested tick; `None` when there was none for a while, and the lane is no
    /// longer listed.
    fn next(&self, waiter: &Waiter, key: Key) -> Option<TickRequest> {
        loop {
            let mut queue = self.queue.lock();
            if queue.entries.is_empty() {
                self.grown.wait_for(&mut queue, IDLE);
            }
            if let Some(Reverse(entry)) = queue.entries.pop() {
                queue.waits_for = entry.tick.n();
                return Some(entry);
            }
            drop(queue);
            if self.leave(waiter, key) {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use aquifer_device::Device;
    use aquifer_device::sim::{SimConfig, SimDriver};

    use super::*;

    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// Waits as a task does.
    fn settled(signal: &Signal) -> Result<(), DeviceError> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            match signal.poll(&waker) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }

    /// Two ticks of one stream, the earlier one first.
    fn ticks() -> [Tick; 2] {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let stream = device.stream().unwrap();
        let memory = device.alloc(1 << 20).unwrap();
        [0, 1].map(|byte| {
            stream.fill(memory, byte, 1 << 20).unwrap();
            let tick = stream.tick();
            tick.cover().unwrap();
            tick
        })
    }

    #[test]
    fn an_earlier_tick_does_not_wait_for_a_later_one() {
        let [earlier, later] = ticks();
        let waiter = Arc::new(Waiter::default());
        // A lane that waits for the later one, for ever.
        let busy = Arc::new(Lane::default());
        busy.queue.lock().waits_for = later.n();
        let key = (earlier.timeline().device_id(), earlier.timeline().id());
        waiter.lanes.lock().insert(key, vec![busy.clone()]);
        settled(&waiter.watch(earlier).unwrap()).unwrap();
        let after = waiter.watch(later).unwrap();
        assert_eq!(busy.queue.lock().entries.len(), 1, "what is not earlier is left to it");
        assert!(after.poll(Waker::noop()).is_pending());
    }

    #[test]
    fn a_driver_that_panics_is_an_error() {
        assert!(guarded(|| panic!("a driver's")).unwrap_err().to_string().contains("panicked"));
    }
}
