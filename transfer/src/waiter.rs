//! Threads that wait for ticks and wake tasks, so that tasks need neither poll nor block.
//!
//! Each timeline that tasks wait for has a thread. It waits on the host for the earliest requested
//! tick (the driver puts it to sleep meanwhile), and then wakes the tasks. A request for an earlier
//! tick than the one that a thread waits for gets another thread. An idle thread ends after a
//! while. A timeline has few threads; once all are busy, a request for a still earlier tick joins
//! the thread with the earliest tick.
//!
//! Wakers are foreign code, which may wait for any other transfer. A thread with an empty queue
//! runs a waker itself, and is not listed meanwhile. A thread with more to do hands the waker to
//! another thread (`foreign_code`).
//!
//! Invariants: a listed thread serves its queue; every signal in it is settled, at the latest with
//! the error of a lost device.
//!
//! Lock order: the list of threads, then a thread's queue. A signal's lock is a leaf.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use aquifer_device::fork::{Condvar, Mutex};
use aquifer_device::internal::defer_panics_here;
use aquifer_device::{Tick, executor};

use crate::error::TransferError;
use crate::foreign_code::{self, DRIVER, guarded};

/// The idle time after which a thread ends.
const IDLE: Duration = Duration::from_secs(2);

/// Most threads that wait for ticks of one timeline.
const THREADS_MAX: usize = 4;

/// The threads of a runtime that wait for ticks.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// By device and timeline.
    threads: Mutex<HashMap<Key, Vec<Arc<TickThread>>>>,
}

/// A device and a timeline.
type Key = (u32, u32);

/// One thread.
#[derive(Debug, Default)]
struct TickThread {
    queue: Mutex<Queue>,
    grown: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// By the tick's place on the timeline, then in the order of the requests.
    entries: BTreeMap<(u64, u64), TickRequest>,
    requests: u64,
    /// The tick that the thread waits for now, or waited for last.
    waits_for: u64,
}

/// A requested tick.
#[derive(Debug)]
struct TickRequest {
    tick: Tick,
    signal: Arc<Signal>,
}

/// The state of a requested tick, and the waker of its task.
#[derive(Debug)]
pub(crate) struct Signal(Mutex<SignalState>);

#[derive(Debug)]
enum SignalState {
    Open(Option<Waker>),
    Settled(Result<(), TransferError>),
}

impl Signal {
    /// The result, if the tick is done; else `waker` is woken later, instead of an earlier one.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<(), TransferError>> {
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
    fn settle(&self, result: Result<(), TransferError>) -> Option<Waker> {
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
        let mut threads = self.threads.lock();
        let listed = threads.entry(key).or_default();
        let Some(entry) = listed.iter().try_fold(entry, |entry, thread| thread.take(entry)) else { return Ok(signal) };
        if listed.len() >= THREADS_MAX
            && let Some(earliest) = listed.iter().min_by_key(|thread| thread.queue.lock().waits_for)
        {
            earliest.push(entry);
            return Ok(signal);
        }
        let thread = Arc::new(TickThread::default());
        thread.queue.lock().push(entry);
        let (waiter, own) = (self.clone(), thread.clone());
        let work = move || {
            defer_panics_here();
            foreign_code::with_deferring(true, || own.run(&waiter, key));
        };
        executor::spawn(thread::Builder::new().name("aquifer-waiter".to_owned()), work)
            .map_err(|cause| TransferError::Thread { what: "waking tasks", cause: Arc::new(cause) })?;
        listed.push(thread);
        Ok(signal)
    }
}

impl Queue {
    fn push(&mut self, entry: TickRequest) {
        self.requests += 1;
        self.entries.insert((entry.tick.n(), self.requests), entry);
    }
}

impl TickThread {
    fn run(self: &Arc<Self>, waiter: &Waiter, key: Key) {
        while let Some(TickRequest { tick, signal }) = self.next(waiter, key) {
            let Some(waker) = signal.settle(guarded(DRIVER, || Ok(tick.synchronize()?))) else { continue };
            drop((tick, signal));
            if !self.leave(waiter, key) {
                wake(waker);
                continue;
            }
            foreign_code::with_deferring(false, || wake(waker));
            if !self.come_back(waiter, key) {
                return;
            }
        }
    }

    /// Removes the thread from the list if its queue is empty, and returns whether it is.
    fn leave(&self, waiter: &Waiter, key: Key) -> bool {
        let mut threads = waiter.threads.lock();
        let is_idle = self.queue.lock().entries.is_empty();
        if is_idle && let Some(listed) = threads.get_mut(&key) {
            listed.retain(|thread| !std::ptr::eq(&raw const **thread, self));
            if listed.is_empty() {
                threads.remove(&key);
            }
        }
        is_idle
    }

    /// Lists the thread again, unless there are enough others.
    fn come_back(self: &Arc<Self>, waiter: &Waiter, key: Key) -> bool {
        let mut threads = waiter.threads.lock();
        let listed = threads.entry(key).or_default();
        let has_room = listed.len() < THREADS_MAX;
        if has_room {
            listed.push(self.clone());
        }
        has_room
    }

    /// Accepts an entry unless its tick is earlier than the one that the thread waits for; returns
    /// it otherwise.
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
        self.queue.lock().push(entry);
        self.grown.notify_one();
    }

    /// The earliest requested tick; `None` when there was none for a while, and the thread is no
    /// longer listed.
    fn next(&self, waiter: &Waiter, key: Key) -> Option<TickRequest> {
        loop {
            let mut queue = self.queue.lock();
            if queue.entries.is_empty() {
                queue = self.grown.wait_for(queue, IDLE).0;
            }
            if let Some((_, entry)) = queue.entries.pop_first() {
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
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    struct Unpark(thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    /// Waits as a task does.
    fn settled(signal: &Signal) -> Result<(), TransferError> {
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
        // A thread that waits for the later one, for ever.
        let busy = Arc::new(TickThread::default());
        busy.queue.lock().waits_for = later.n();
        let key = (earlier.timeline().device_id(), earlier.timeline().id());
        waiter.threads.lock().insert(key, vec![busy.clone()]);
        settled(&waiter.watch(earlier).unwrap()).unwrap();
        let after = waiter.watch(later).unwrap();
        assert_eq!(busy.queue.lock().entries.len(), 1, "a later tick joins the present thread");
        assert!(after.poll(Waker::noop()).is_pending());
    }
}
