//! Timelines and ticks, by which all order between streams is kept.
//!
//! A *tick* `(stream, n)` stands for all work enqueued on a stream so far; `n` is how many events
//! were recorded there. Taking a tick is an atomic load. An event is recorded only when something
//! must be ordered after a tick, and that event covers every tick taken before it. Each stream
//! remembers the ticks that it is already ordered after (a vector clock), so a dependency is paid
//! for once.
//!
//! Invariants (numbered as in ARCHITECTURE.md):
//! * **T1** The counter is raised *before* the event is recorded, and the event covers the ticks
//!   below the raised value, no more. A tick that still shows the old count was taken before the
//!   raise, so its work was enqueued before the record. The same holds when the host waits for the
//!   whole stream or device. The last event of a destroyed stream also covers the ticks taken after
//!   it, because no work comes after it.
//! * **T2** An event keeps a copy of its stream's clock as of the recording. A waiter merges that
//!   copy, never the stream's present clock, and only after the driver's wait succeeded. A failed
//!   record or wait changes no clock. A waiter on another device notes the ticks that the event
//!   covers, and no more, because a clock is about the streams of one device.
//! * **T3** Ticks are numbers, never events. Events are recycled only when complete, or recorded
//!   once more, as the newest of their stream, while nothing else refers to them; query, wait
//!   and recycling happen under the timeline's own lock, or while a reference keeps the event
//!   alive.
//! * **T4** A stream is identified by a number of our own on its device, never by the driver's
//!   handle. A number stands for one stream after another: that of a destroyed stream goes to a new
//!   one once all its work is known to be done, and its ticks count on. The same holds for the
//!   default stream of a thread that has ended, and for an adopted stream that was released. A
//!   stream is destroyed after its last event; if the driver refuses to record one, its ticks are
//!   known to be done once the host has waited for the device. The handle of a per-thread stream
//!   means another stream on every thread, so only its owner makes driver calls with it; when
//!   another thread needs its ticks, an event on the legacy stream covers them. The handle of a
//!   released stream may later mean another stream, so no driver call names it.
//! * **T5** While a stream captures, or is part of a capture that it joined, ticks neither record
//!   on it nor make it wait, and its clock does not change. Ticks that were open when the capture
//!   began stay open unless they were covered. Waiting for an event recorded in a capture changes
//!   only the clock that the stream has within the capture. This holds until the driver has ended
//!   the capture, or no call can end it any more.
//!
//! Locks: a timeline's lock may be taken under the lock of a user's [`crate::Event`], and under
//! those of orders of launches. Under it only leaf locks are taken: that of a capture's scope, and
//! that of holding captures off. Two timelines are never locked at once. The lock is held across
//! driver calls on events of this one stream, together with the stream that waits for one; across
//! the destruction of events that could not be recycled, before a record; and across the calls that
//! begin or join a capture, or ask whether the stream captures.

mod blocking;
mod capturing;
mod expected;
mod owner;
mod recording;
mod reuse;
mod tick;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Weak};

pub use capturing::CapturesHeldOff;
pub use expected::{ExpectedWork, enqueues_expected_work, while_held};
pub use tick::Tick;

use crate::capture::Scope;
use crate::context::{Context, PooledEvent, Waited};
use crate::driver::{Driver, KeptAlive, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork;
use crate::stream_map::StreamMap;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use owner::Owner;
use owner::OwnerCell;
pub(crate) use reuse::ReusableTimelines;

/// The order of events on one stream: which of its [`Tick`]s are done, and how other work is
/// ordered after them.
///
/// A timeline outlives its stream: ticks of a destroyed stream stay valid, and a later stream
/// continues the same timeline.
pub struct Timeline {
    id: u32,
    /// The driver's handle of the stream that the timeline serves now.
    raw: AtomicU64,
    kind: StreamKind,
    /// For a per-thread default stream, the only thread that can use it; no thread once the stream
    /// is gone.
    owner: OwnerCell,
    /// Events recorded so far, or about to be: the `n` of a tick taken now.
    count: AtomicU64,
    /// Ticks below this are known to be done on the host.
    done: AtomicU64,
    context: Arc<Context>,
    /// The value of [`Timeline::device_id_unless_capturing`].
    serves: AtomicU32,
    state: Mutex<TimelineState>,
    /// Notified when captures are held off no more, and when expected work has ended.
    changed: Condvar,
}

/// The relation between a stream and the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum StreamKind {
    /// The stream is the legacy stream, which waits for every blocking stream.
    Legacy,
    /// The stream and the legacy stream wait for each other.
    Blocking,
    /// They do not wait for each other.
    NonBlocking,
}

impl StreamKind {
    /// The kind of a stream of which only the handle is known: blocking, unless it is the legacy
    /// stream itself.
    pub(crate) fn of_unknown(raw: RawStream) -> StreamKind {
        if raw.is_legacy() { StreamKind::Legacy } else { StreamKind::Blocking }
    }
}

/// The expected work of a stream (`expected.rs`).
#[derive(Debug, Default)]
struct Expected {
    /// Numbers of what is not enqueued, and the next number.
    open: BTreeSet<u64>,
    next: u64,
    /// The ticks after work on other streams that was not known to be done.
    elsewhere: Vec<(Arc<Timeline>, u64)>,
}

#[derive(Debug, Default)]
struct TimelineState {
    /// The ticks that later work of this stream is ordered after: for each stream, all that are
    /// smaller than the number. A race detector below the driver has clocks of its own, which count
    /// operations and must not trust this one.
    clock: StreamMap,
    /// The same for streams of other devices: ticks smaller than the number come before. It is not
    /// passed on to streams that wait: they wait for the other device themselves.
    peers: HashMap<(u32, u32), u64>,
    /// Recorded events not yet known complete, oldest first.
    events: VecDeque<Recorded>,
    /// True once the stream was destroyed or released: nothing can be recorded on it.
    closed: bool,
    /// True once the stream was destroyed: no work comes any more.
    destroyed: bool,
    /// The capture that the stream is part of.
    capture: Option<Arc<Scope>>,
    /// The ticks of the capture's streams that later work of this one comes after in the graph.
    /// Events recorded in a capture raise the counter, too, so ticks taken there are numbered.
    capture_clock: StreamMap,
    /// Number of calls under way that enqueue work with borrowed memory and wait for it.
    borrowed: u32,
    /// Number of [`CapturesHeldOff`] guards.
    held_off: u32,
    expected: Expected,
}

/// An event on a timeline. It covers every tick smaller than `covers`.
#[derive(Clone, Debug)]
struct Recorded {
    covers: u64,
    clock: StreamMap,
    event: Arc<PooledEvent>,
}

/// The ticks that an event recorded by a user covers, and the clock that it carries.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) covers: u64,
    pub(crate) clock: StreamMap,
    /// The capture that the event is a node of; it orders nothing outside.
    pub(crate) capture: Option<Arc<Scope>>,
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, now) = (self.id, self.now());
        f.debug_struct("Timeline").field("id", &id).field("now", &now).finish_non_exhaustive()
    }
}

impl Timeline {
    pub(crate) fn new(context: Arc<Context>, raw: RawStream, kind: StreamKind, owner: Option<Owner>) -> Arc<Timeline> {
        let timeline = Arc::new(Timeline {
            id: context.next_stream_id(),
            raw: AtomicU64::new(raw.0),
            kind,
            owner: OwnerCell::new(owner),
            count: AtomicU64::new(0),
            done: AtomicU64::new(0),
            serves: AtomicU32::new(context.device_id),
            context,
            state: Mutex::default(),
            changed: Condvar::default(),
        });
        let waited: Weak<dyn Waited> = Arc::downgrade(&timeline) as Weak<dyn Waited>;
        timeline.context.register(waited);
        timeline
    }

    /// The number by which this library identifies the stream, dense per device. A stream may have
    /// the number of one that was destroyed: all work of that one was known to be done before, and
    /// ticks count on.
    #[inline]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The driver's handle of the stream. Not an identity: drivers reuse handles.
    pub fn raw(&self) -> RawStream {
        // A thread that has a stream got it from the thread that created it, after this was set.
        RawStream(self.raw.load(Ordering::Relaxed))
    }

    /// True if the stream is a thread's default stream.
    pub(crate) fn is_per_thread(&self) -> bool {
        self.raw() == RawStream::PER_THREAD
    }

    /// The handle for a driver call of this thread (T4). Fails for another thread's per-thread
    /// default stream, whose handle would mean this thread's stream, and for a stream that is gone,
    /// whose handle may mean a later stream.
    #[inline]
    pub(crate) fn usable(&self, operation: Operation) -> Result<RawStream> {
        fork::check(operation)?;
        if self.is_foreign() { Err(self.unusable_error(operation)) } else { Ok(self.raw()) }
    }

    #[cold]
    fn unusable_error(&self, operation: Operation) -> DeviceError {
        if self.owner.is_closed() { self.closed_error(operation, GONE) } else { foreign_error(operation) }
    }

    #[inline]
    fn is_foreign(&self) -> bool {
        self.owner.is_foreign()
    }

    /// Identity of the device, unique in this process.
    #[inline]
    pub fn device_id(&self) -> u32 {
        self.context.device_id
    }

    /// Identity of the device or, while the stream captures, a number that no device has. So one
    /// read answers both questions.
    #[doc(hidden)]
    #[inline]
    pub fn device_id_unless_capturing(&self) -> u32 {
        self.serves.load(Ordering::Acquire)
    }

    /// The `n` of a tick taken now. No driver call, no lock.
    #[inline]
    pub fn now(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// True if tick `n` is already known to be done. No driver call, no lock.
    #[inline]
    pub fn is_known_done(&self, n: u64) -> bool {
        n < self.done.load(Ordering::Acquire)
    }

    /// Ticks below this are known to be done. No driver call, no lock.
    pub fn frontier(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// True if an event recorded so far covers tick `n`, so that waiting for it records nothing.
    pub fn is_covered(&self, n: u64) -> bool {
        self.is_known_done(n) || self.state.lock().events.back().is_some_and(|last| n < last.covers)
    }

    /// True if the stream still exists, so that events can be recorded on it.
    pub fn is_open(&self) -> bool {
        !self.state.lock().closed
    }

    /// Asks the driver about the oldest events until one is not complete, and returns whether tick
    /// `n` is done.
    ///
    /// # Errors
    /// Errors of the driver's event query.
    pub fn is_done(&self, n: u64) -> Result<bool> {
        fork::check(Operation::QueryEvent)?;
        if !self.is_known_done(n) {
            self.poll(&mut self.state.lock())?;
        }
        Ok(self.is_known_done(n))
    }

    /// Makes sure that an event covers tick `n`, recording one if need be: a *progress event*.
    /// Recording one also asks the driver about earlier ones, so that [`Timeline::frontier`]
    /// follows the device.
    ///
    /// # Errors
    /// Errors of the driver's event calls; a closed or capturing stream cannot record.
    pub fn cover(&self, n: u64) -> Result<()> {
        self.cover_by(n, |state| {
            self.record(state)?;
            self.ask_about_half(state)
        })
    }

    /// As [`Timeline::cover`]: `record` records the event.
    fn cover_by(&self, n: u64, record: impl FnOnce(&mut TimelineState) -> Result<()>) -> Result<()> {
        fork::check(Operation::Record)?;
        let Some(mut state) = self.lock_unless_done(n) else { return Ok(()) };
        if state.events.back().is_some_and(|last| n < last.covers) { Ok(()) } else { record(&mut state) }
    }

    /// Takes the lock; `None` if tick `n` is known to be done. That is checked under the lock, too:
    /// while this thread waits for the lock, another one may learn it and recycle the event that
    /// covers the tick, and on a closed stream no other event could take its place.
    fn lock_unless_done(&self, n: u64) -> Option<MutexGuard<'_, TimelineState>> {
        if self.is_known_done(n) {
            return None;
        }
        let state = self.state.lock();
        (!self.is_known_done(n)).then_some(state)
    }

    /// Waits on the host until tick `n` is done, recording an event if none covers it.
    ///
    /// If the stream is gone and no event covers the tick (its last record failed), this waits for
    /// the whole device.
    ///
    /// # Errors
    /// Errors of the driver's event and synchronisation calls.
    pub fn synchronize(&self, n: u64) -> Result<()> {
        fork::check(Operation::SynchronizeEvent)?;
        let Some(mut state) = self.lock_unless_done(n) else { return Ok(()) };
        let recorded = match self.covering(&mut state, n) {
            Ok(recorded) => recorded,
            Err(_) if state.closed => {
                drop(state);
                return self.context.synchronize();
            }
            Err(error) => return Err(error),
        };
        drop(state);
        // The clone keeps the event out of the pool while this thread waits without the lock (T3).
        recorded.event.synchronize()?;
        self.mark_done(recorded.covers);
        if let Err(error) = self.poll(&mut self.state.lock()) {
            tracing::debug!(%error, "the progress of a stream is not known beyond the tick that was waited for");
        }
        Ok(())
    }

    /// A copy of this stream's clock, to be read where no lock may be taken: the ticks that later
    /// work of this stream is ordered after. While the stream captures, these include the ticks of
    /// other streams of the capture that its later work comes after in the graph.
    ///
    /// Edges of a graph order nothing that was enqueued on those streams before they joined. So all
    /// launches come after that, too ([`Launches::come_after`]), from this call on.
    pub fn clock(&self) -> StreamMap {
        let state = self.state.lock();
        let mut clock = state.clock.clone();
        if let Some(capture) = &state.capture {
            clock.join(&state.capture_clock);
            capture.come_after_members();
        }
        clock
    }

    /// True if work enqueued later on this stream is known to come after tick `n` of `other`. Makes
    /// no driver call.
    pub fn is_ordered_after(&self, other: &Timeline, n: u64) -> bool {
        other.is_known_done(n)
            || if self.is_on_device_of(other) {
                self.id == other.id || n < self.state.lock().clock.get(other.id)
            } else {
                self.state.lock().peers.get(&other.place()).is_some_and(|&covered| n < covered)
            }
    }

    /// The state that the stream shares with the others of its device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn is_on_device_of(&self, other: &Timeline) -> bool {
        self.context.device_id == other.context.device_id
    }

    /// The stream's identity among the streams of all devices.
    fn place(&self) -> (u32, u32) {
        (self.context.device_id, self.id)
    }

    /// Orders work enqueued later on this stream after tick `n` of `other`, which may be of another
    /// device. If that order is known already, this does nothing; otherwise it costs at most one
    /// event recorded there and one wait here.
    ///
    /// # Errors
    /// When this is another thread's default stream, or the devices are of different kinds; errors
    /// of the driver's event and wait calls. Nothing is ordered then, and no clock changes.
    pub fn wait_for(&self, other: &Timeline, n: u64) -> Result<()> {
        fork::check(Operation::Wait)?;
        if self.is_ordered_after(other, n) {
            return Ok(());
        }
        if self.context.driver.info().kind != other.context.driver.info().kind {
            return Err(DeviceError::refused(Operation::Wait, Code::INVALID_VALUE).with_detail(
                "the tick belongs to a device of another kind; wait for it on the host with `Tick::synchronize`",
            ));
        }
        let raw = self.usable(Operation::Wait)?;
        let state = self.state.lock();
        let (closed, captures) = (state.closed, state.capture.is_some());
        drop(state);
        if closed {
            return Err(self.closed_error(Operation::Wait, GONE));
        }
        if captures {
            return Err(DeviceError::in_capture(
                Operation::Wait,
                "a capturing stream cannot be ordered after work from outside of the capture: \
                 before it begins, order the stream after that (`Stream::wait_for`), or wait for it on the host; \
                 to order streams within the capture, record an event on the one and have the other wait for it \
                 (`Event::record`, `Stream::wait_event`)",
            ));
        }
        let _held_off = self.protect_captures(raw, Operation::Wait)?;
        self.refuse_unannounced_capture()?;
        let recorded = {
            let Some(mut state) = other.lock_unless_done(n) else { return Ok(()) };
            let recorded = other.covering(&mut state, n)?;
            self.context.wait(raw, &other.context, recorded.event.raw)?;
            recorded
        };
        self.context.waits_inserted.fetch_add(1, Ordering::Relaxed);
        self.absorb(other, recorded.covers, &recorded.clock);
        Ok(())
    }

    /// Notes that this stream now waits for an event of `other` that covers its ticks below
    /// `covers` (T2). While the stream captures, only a node of a graph waits, so nothing is noted
    /// (T5).
    pub(crate) fn absorb(&self, other: &Timeline, covers: u64, clock: &StreamMap) {
        let mut state = self.state.lock();
        if state.capture.is_some() {
            return;
        }
        if self.is_on_device_of(other) {
            state.clock.join(clock);
            state.clock.raise(other.id, covers);
        } else {
            let covered = state.peers.entry(other.place()).or_default();
            *covered = covers.max(*covered);
        }
    }
}

impl Waited for Timeline {
    /// The counter of a destroyed stream stays: its last event covers every tick, and so does this
    /// wait.
    fn wait_expected(&self) {
        drop(self.wait_for_expected());
    }

    fn begin_wait(&self) -> u64 {
        let state = self.state.lock();
        if state.destroyed { self.now() + 1 } else { self.count.fetch_add(1, Ordering::AcqRel) + 1 }
    }

    fn mark_done(&self, covers: u64) {
        self.done.fetch_max(covers, Ordering::AcqRel);
    }

    fn is_idle(&self) -> Result<bool> {
        let now = self.now();
        self.cover(now)?;
        self.is_done(now)
    }

    fn known_capture(&self) -> Option<KeptAlive> {
        self.capture().map(|scope| scope as KeptAlive)
    }
}

/// The reason why nothing can be enqueued on a stream any more.
const GONE: &str = "the stream was destroyed or released";

#[cold]
fn foreign_error(operation: Operation) -> DeviceError {
    DeviceError::refused(operation, Code::INVALID_HANDLE).with_detail(
        "a per-thread default stream can be used by its own thread alone; other threads may only use its ticks",
    )
}
