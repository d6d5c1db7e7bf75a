//! Timelines and ticks: one idea that orders everything.
//!
//! A *tick* `(stream, n)` stands for all work enqueued on a stream so far; `n` is how many events were recorded there.
//! Taking one is an atomic load. Only when something must be ordered after a tick is an event recorded, and that event
//! covers every tick taken before it. Each stream remembers what it is already ordered after (a vector clock), so a
//! dependency is paid for once.
//!
//! Invariants (numbered as in ARCHITECTURE.md):
//! * **T1** The counter is raised *before* the event is recorded, and the event covers the ticks below the raised value,
//!   no more. A tick that still shows the old count was taken before the raise, so its work was enqueued before the
//!   record. The last event of a destroyed stream covers all ticks: no work comes after it.
//! * **T2** An event keeps a copy of its stream's clock at recording; a waiter merges that copy, never the stream's present
//!   clock, and only after the driver's wait succeeded. A failed record or wait changes no clock.
//! * **T3** Ticks are numbers, never events. Events are recycled only when complete; query, wait and recycling happen under
//!   the timeline's own lock, or while a reference keeps the event alive.
//! * **T4** A stream's identity is our own number, never the driver's handle. A per-thread stream's ticks are covered by an
//!   event on the legacy stream when another thread needs them, because only its owner can record on it.
//! * **T5** While a stream is being captured nothing is recorded on it or waited for by it through ticks; ticks open at the
//!   start stay open unless they were covered, and clock changes made during the capture are discarded.
//!
//! Locks: a timeline's lock is a leaf. It is held across driver calls on events of this one stream, and two timelines are
//! never locked at once.

mod clock;
mod tick;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

pub use clock::Clock;
pub use tick::Tick;

use crate::context::{Context, PooledEvent};
use crate::driver::{Driver, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};

/// The order of events on one stream: which ticks are done, and how to order work after them.
///
/// A timeline outlives its stream: ticks of a destroyed stream stay meaningful.
#[derive(Debug)]
pub struct Timeline {
    id: u32,
    raw: RawStream,
    /// The only thread that can record on the stream, for a per-thread default stream.
    owner: Option<ThreadId>,
    /// Events recorded so far, or about to be: the `n` of a tick taken now.
    count: AtomicU64,
    /// Ticks below this are known to be done on the host.
    done: AtomicU64,
    context: Arc<Context>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What later work of this stream is ordered after.
    clock: Clock,
    /// Recorded events not yet known complete, oldest first.
    events: VecDeque<Recorded>,
    /// The stream was destroyed or released: nothing can be recorded on it.
    closed: bool,
    /// The clock to go back to when the capture in progress ends.
    captured: Option<Clock>,
}

/// An event on a timeline. It covers every tick smaller than `covers`.
#[derive(Clone, Debug)]
struct Recorded {
    covers: u64,
    clock: Clock,
    event: Arc<PooledEvent>,
}

impl Timeline {
    pub(crate) fn new(context: Arc<Context>, raw: RawStream, owner: Option<ThreadId>) -> Arc<Timeline> {
        Arc::new(Timeline {
            id: context.next_stream_id(),
            raw,
            owner,
            count: AtomicU64::new(0),
            done: AtomicU64::new(0),
            context,
            state: Mutex::default(),
        })
    }

    /// Our own number of the stream: dense per device, never reused.
    #[inline]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The driver's handle of the stream. Not an identity: drivers reuse handles.
    pub fn raw(&self) -> RawStream {
        self.raw
    }

    /// Identity of the device, unique in this process.
    #[inline]
    pub fn device_id(&self) -> u32 {
        self.context.device_id
    }

    /// The `n` of a tick taken now. No driver call, no lock.
    #[inline]
    pub fn now(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Whether tick `n` is already known to be done. No driver call, no lock.
    #[inline]
    pub fn is_known_done(&self, n: u64) -> bool {
        n < self.done.load(Ordering::Acquire)
    }

    /// Ticks below this are known to be done. No driver call, no lock.
    pub fn frontier(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Whether some event recorded so far covers tick `n`, so that waiting for it records nothing.
    pub fn is_covered(&self, n: u64) -> bool {
        self.is_known_done(n) || self.state.lock().events.back().is_some_and(|last| n < last.covers)
    }

    /// Whether the stream still exists, so that events can be recorded on it.
    pub fn is_open(&self) -> bool {
        !self.state.lock().closed
    }

    /// Asks the driver about the oldest events until one is not complete, and tells whether tick `n` is done.
    ///
    /// # Errors
    /// Those of the driver's event query.
    pub fn is_done(&self, n: u64) -> Result<bool> {
        if !self.is_known_done(n) {
            self.poll(&mut self.state.lock())?;
        }
        Ok(self.is_known_done(n))
    }

    /// Makes sure that an event covers tick `n`, recording one if need be: a *milestone*.
    ///
    /// # Errors
    /// Those of the driver's event calls; a closed or capturing stream cannot record.
    pub fn cover(&self, n: u64) -> Result<()> {
        if self.is_known_done(n) { Ok(()) } else { self.covering(&mut self.state.lock(), n).map(|_| ()) }
    }

    /// Waits on the host until tick `n` is done, recording an event if none covers it.
    ///
    /// Where the stream is gone and nothing covers the tick (its last record failed), this waits for the whole device.
    ///
    /// # Errors
    /// Those of the driver's event and synchronisation calls.
    pub fn synchronize(&self, n: u64) -> Result<()> {
        if self.is_known_done(n) {
            return Ok(());
        }
        let mut state = self.state.lock();
        let recorded = match self.covering(&mut state, n) {
            Ok(recorded) => recorded,
            Err(_) if state.closed => {
                let reached = self.now() + 1;
                drop(state);
                self.context.driver.synchronize()?;
                self.mark_done(reached);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        drop(state);
        // The clone keeps the event out of the pool while this thread waits without the lock (T3).
        recorded.event.synchronize()?;
        self.mark_done(recorded.covers);
        self.poll(&mut self.state.lock())
    }

    /// A copy of what later work of this stream is ordered after, to be consulted where no lock may be taken.
    pub fn clock(&self) -> Clock {
        self.state.lock().clock.clone()
    }

    /// Whether everything enqueued later on this stream comes after tick `n` of `other`, as far as is known now.
    /// Makes no driver call.
    pub fn is_ordered_after(&self, other: &Timeline, n: u64) -> bool {
        if other.is_known_done(n) {
            return true;
        }
        // Numbers of streams are those of their device.
        let same_device = self.context.device_id == other.context.device_id;
        same_device && (self.id == other.id || n < self.state.lock().clock.of(other.id))
    }

    /// Orders everything enqueued later on this stream after tick `n` of `other`: nothing if that is known already,
    /// else at most one event recorded there and one wait here.
    ///
    /// # Errors
    /// Those of the driver's event and wait calls, or if this is another thread's default stream. Nothing is ordered then
    /// and no clock changed.
    pub fn wait_for(&self, other: &Timeline, n: u64) -> Result<()> {
        if self.is_ordered_after(other, n) {
            return Ok(());
        }
        if self.context.device_id != other.context.device_id {
            return Err(DeviceError::new(Operation::Wait, Code::INVALID_VALUE)
                .with_detail("the tick belongs to another device; wait for it on the host with `Tick::synchronize`"));
        }
        self.check_owner(Operation::Wait)?;
        if self.state.lock().captured.is_some() {
            return Err(capture_error(Operation::Wait, "a capturing stream cannot wait for a tick from outside"));
        }
        let recorded = {
            let mut state = other.state.lock();
            let recorded = other.covering(&mut state, n)?;
            self.context.driver.wait(self.raw, recorded.event.raw)?;
            recorded
        };
        self.context.waits_inserted.fetch_add(1, Ordering::Relaxed);
        self.absorb(other.id, recorded.covers, &recorded.clock);
        Ok(())
    }

    /// Notes that this stream now waits for an event of `stream` that covers its ticks below `covers` (T2).
    pub(crate) fn absorb(&self, stream: u32, covers: u64, clock: &Clock) {
        let mut state = self.state.lock();
        state.clock.merge(clock);
        state.clock.raise(stream, covers);
    }

    /// Raises the counter, lets `record` record an event, and returns what that event covers and knows (T1, T2).
    pub(crate) fn record_with<T>(&self, record: impl FnOnce() -> Result<T>) -> Result<(T, u64, Clock)> {
        self.check_owner(Operation::Record)?;
        let state = self.state.lock();
        let covers = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        record().map(|recorded| (recorded, covers, state.clock.clone()))
    }

    /// Records the last event of the stream, so that all its ticks stay answerable, and closes it. If the stream is
    /// destroyed, so that nobody enqueues on it any more, the event covers ticks taken later, too.
    pub(crate) fn close(&self, destroyed: bool) -> Result<()> {
        let mut state = self.state.lock();
        let last = if state.captured.is_some() { Ok(None) } else { self.record(&mut state).map(Some) };
        state.closed = true;
        if last?.is_some()
            && destroyed
            && let Some(last) = state.events.back_mut()
        {
            last.covers = u64::MAX;
        }
        Ok(())
    }

    pub(crate) fn begin_capture(&self) {
        let mut state = self.state.lock();
        state.captured = Some(state.clock.clone());
    }

    pub(crate) fn end_capture(&self) {
        let mut state = self.state.lock();
        if let Some(before) = state.captured.take() {
            state.clock = before;
        }
    }

    /// The oldest event that covers tick `n`; records one if there is none.
    fn covering(&self, state: &mut State, n: u64) -> Result<Recorded> {
        match state.events.iter().find(|recorded| n < recorded.covers) {
            Some(recorded) => Ok(recorded.clone()),
            None => self.record(state),
        }
    }

    fn record(&self, state: &mut State) -> Result<Recorded> {
        if state.closed {
            return Err(DeviceError::new(Operation::Record, Code::INVALID_HANDLE)
                .with_detail("the stream was destroyed or released and its last event could not be recorded"));
        }
        if state.captured.is_some() {
            return Err(capture_error(
                Operation::Record,
                "ticks of a capturing stream order nothing outside the graph",
            ));
        }
        let on = if self.is_foreign() { RawStream::LEGACY } else { self.raw };
        let covers = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        let event = self.context.record(on)?;
        let recorded = Recorded { covers, clock: state.clock.clone(), event };
        state.events.push_back(recorded.clone());
        Ok(recorded)
    }

    /// Whether this is the default stream of another thread.
    fn is_foreign(&self) -> bool {
        self.owner.is_some_and(|owner| owner != std::thread::current().id())
    }

    /// Refuses what the driver would do to the calling thread's default stream instead of another thread's (T4).
    pub(crate) fn check_owner(&self, operation: Operation) -> Result<()> {
        if self.is_foreign() {
            return Err(DeviceError::new(operation, Code::INVALID_VALUE)
                .with_detail("only its own thread can do this with a per-thread default stream"));
        }
        Ok(())
    }

    fn poll(&self, state: &mut State) -> Result<()> {
        while let Some(oldest) = state.events.front() {
            if !oldest.event.query()? {
                break;
            }
            self.mark_done(oldest.covers);
            state.events.pop_front();
        }
        Ok(())
    }

    fn mark_done(&self, covers: u64) {
        self.done.fetch_max(covers, Ordering::AcqRel);
    }
}

fn capture_error(operation: Operation, detail: &str) -> DeviceError {
    DeviceError::new(operation, Code::CAPTURE_UNSUPPORTED).with_detail(detail)
}
