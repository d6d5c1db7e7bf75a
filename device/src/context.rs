//! The context: the state that the streams of one device share, which is the driver, the pool of
//! events, and the counters of timelines.
//!
//! Invariants:
//! * An event in `idle` is complete and unreferenced (invariant T3: events are recycled only when
//!   complete).
//! * Dropping an event makes no driver call: events that cannot be recycled go to the queue of
//!   deferred releases (`release.rs`).
//!
//! The lock of the list of timelines is a leaf, and the queues are lock-free, so a context can be
//! used under any lock. Only the lock of adoptions comes before those of timelines; no code of
//! callers runs under it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use crate::fork::Mutex as Leaf;
use crossbeam_queue::SegQueue;

use crate::capturing_streams::{CapturingStreams, HeldOff};
use crate::counted::Counted;
use crate::driver::{DevicePtr, Driver, KeptAlive, RawEvent, RawStream};
use crate::error::{DeviceError, ErrorKind, Operation, Result};
use crate::fork;
use crate::label::DeviceLabel;
use crate::release::{Effort, ReleaseQueue, Work};
use crate::sync::Mutex;
use crate::unfinished;
use crate::waits::Waits;
use crate::witness::{CalledFrom, Caller, Witness};

/// State shared by a device, its streams and their timelines.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) driver: Arc<Counted>,
    /// The witness of a driver that checks programs.
    pub(crate) witness: Option<Arc<dyn Witness>>,
    /// Process-wide identity of the device, never reused.
    pub(crate) device_id: u32,
    next_stream: AtomicU32,
    idle: SegQueue<RawEvent>,
    /// Objects that go back to the driver later.
    pub(crate) releases: Arc<ReleaseQueue>,
    pub(crate) events_recorded: AtomicU64,
    pub(crate) waits_inserted: AtomicU64,
    /// The capturing streams of all drivers that share the driver's context.
    pub(crate) capturing: Arc<CapturingStreams>,
    /// Number of the device's handles that callers have.
    pub(crate) handles: Arc<AtomicUsize>,
    /// The timelines of all its streams.
    timelines: Leaf<Timelines>,
    pub(crate) waits: Arc<Waits>,
    /// Held while a stream is adopted or released, across the driver calls for it, so that no
    /// thread adopts a stream that is half released.
    pub(crate) adopting: Mutex<()>,
}

/// A timeline, which learns from waits for the device (T1).
pub(crate) trait Waited: fmt::Debug + Send + Sync {
    /// Waits until the work that is expected now is enqueued ([`crate::Stream::expect_work`]).
    fn wait_expected(&self);

    /// Raises the counter before the host waits for all work. Returns the value for
    /// [`Waited::mark_done`] after the wait.
    fn begin_wait(&self) -> u64;

    /// Ticks below this are done.
    fn mark_done(&self, covers: u64);

    /// Asks the driver whether all work enqueued so far is done.
    fn is_idle(&self) -> Result<bool>;

    /// The scope of the capture that the stream is known to be part of.
    fn known_capture(&self) -> Option<KeptAlive>;
}

/// Timelines, and some that are gone.
#[derive(Debug, Default)]
struct Timelines {
    known: Vec<Weak<dyn Waited>>,
    /// Number of timelines after the last removal of those that are gone. The next one comes at
    /// twice that number.
    left: usize,
}

static NEXT_DEVICE: AtomicU32 = AtomicU32::new(0);

impl Context {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<Context> {
        fork::watch();
        let device_id = NEXT_DEVICE.fetch_add(1, Ordering::Relaxed);
        DeviceLabel::open(device_id, DeviceLabel::from(driver.info()));
        let capturing = driver.capturing_streams();
        let witness = driver.witness();
        let driver = Arc::new(Counted::new(device_id, driver, capturing.clone()));
        let waits = Arc::<Waits>::default();
        let releases = ReleaseQueue::new(driver.clone(), capturing.clone(), waits.clone());
        Arc::new(Context {
            driver,
            witness,
            device_id,
            next_stream: AtomicU32::new(0),
            idle: SegQueue::new(),
            releases,
            events_recorded: AtomicU64::new(0),
            waits_inserted: AtomicU64::new(0),
            capturing,
            handles: Arc::default(),
            timelines: Leaf::default(),
            waits,
            adopting: Mutex::default(),
        })
    }

    /// Names the place that calls come from, if there is a witness.
    #[inline]
    pub(crate) fn called_from(&self, at: Caller) -> Option<CalledFrom> {
        self.witness.is_some().then(|| CalledFrom::new(at))
    }

    /// A number that no timeline of this device has (invariant T4).
    pub(crate) fn next_stream_id(&self) -> u32 {
        self.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    /// The driver's number of a stream, if it has one.
    pub(crate) fn stream_identity(&self, raw: RawStream) -> Option<u64> {
        let identity = self.driver.stream_id(raw);
        identity.inspect_err(|error| tracing::debug!(%error, "the driver does not identify an adopted stream")).ok()?
    }

    /// False if the handle of an adopted stream now names another stream. True where the driver
    /// does not tell, as while the stream captures.
    pub(crate) fn is_same_stream(&self, raw: RawStream, identity: u64) -> bool {
        match self.driver.stream_id(raw) {
            Ok(now) => now.is_none_or(|now| now == identity),
            // A driver may notice by itself that the handle is not that of the stream that it
            // knows.
            Err(error) => error.kind != ErrorKind::InvalidUse,
        }
    }

    /// Records an event on `stream`: `again` if it is given, which nothing else refers to, or else
    /// an idle one if there is one.
    pub(crate) fn record(
        self: &Arc<Self>,
        stream: RawStream,
        again: Option<Arc<PooledEvent>>,
    ) -> Result<Arc<PooledEvent>> {
        self.releases.destroy_events();
        if let Some(event) = again {
            event.complete.store(false, Ordering::Release);
            self.driver.record(event.raw, stream)?;
            self.events_recorded.fetch_add(1, Ordering::Relaxed);
            return Ok(event);
        }
        let raw = match self.idle.pop() {
            Some(raw) => raw,
            None => self.driver.create_event(false)?,
        };
        // Wrapped before recording: a failed record leaves the event idle, and dropping the wrapper
        // returns it.
        let event = PooledEvent { raw, complete: AtomicBool::new(true), context: self.clone() };
        self.driver.record(raw, stream)?;
        event.complete.store(false, Ordering::Release);
        self.events_recorded.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::new(event))
    }

    /// Makes a stream wait for an event, of this or another device.
    pub(crate) fn wait(&self, stream: RawStream, owner: &Context, event: RawEvent) -> Result<()> {
        if self.device_id == owner.device_id {
            self.driver.wait(stream, event)
        } else {
            self.complete_with_peer(owner, self.driver.wait_peer(stream, &*owner.driver, event))
        }
    }

    /// Completes the result of a call that involved a peer: if the peer is the device that is lost,
    /// the error says so, and names the error by which it was lost.
    pub(crate) fn complete_with_peer<T>(&self, peer: &Context, answer: Result<T>) -> Result<T> {
        answer.map_err(|error| {
            let is_peers = error.is_device_lost() && self.driver.lost().is_none() && peer.driver.is_lost();
            match (is_peers, peer.driver.lost()) {
                (false, _) => error,
                (true, Some(_)) => peer.driver.note_lost(error),
                (true, None) => {
                    let label = DeviceLabel::from(peer.driver.info());
                    peer.driver.note_lost(error.with_more(format_args!("{label} is lost")))
                }
            }
        })
    }

    /// True if a stream of any driver in this context captures.
    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.any()
    }

    /// Holds captures off while the result lives. `None` while a stream captures. Captures that
    /// were dropped and could not be ended are tried again first.
    pub(crate) fn hold_off(&self) -> Option<HeldOff<'_>> {
        self.capturing.hold_off().or_else(|| {
            unfinished::end_captures(&self.capturing);
            self.capturing.hold_off()
        })
    }

    /// Releases objects of the queue. Returns how many bytes of pinned memory were released.
    pub(crate) fn settle(&self, effort: Effort) -> u64 {
        if fork::is_child() || (effort != Effort::Waiting && !self.releases.any()) {
            return 0;
        }
        // Objects that no work can use go without it.
        let held_off = if effort == Effort::Waiting || self.releases.any_in_use() { self.hold_off() } else { None };
        let work = held_off.as_ref().map(|held_off| AllWork { context: self, held_off, was_waited_for: false });
        let settled = self.releases.settle(effort, work.as_ref().map(|work| work as &dyn Work));
        drop(held_off);
        // Runs code of callers.
        drop(settled.owners);
        settled.host_bytes
    }

    /// Gives memory of allocators that are gone back, as far as no work uses it any more. Waits for
    /// nothing.
    pub(crate) fn settle_left(&self) {
        if !fork::is_child() && self.releases.any_memory() {
            self.settle(Effort::WithoutWaiting);
        }
    }

    /// Holds captures off for a call that would break one; refused while a stream captures.
    fn hold_off_for(&self, operation: Operation, detail: &str) -> Result<HeldOff<'_>> {
        fork::check(operation)?;
        self.hold_off().ok_or_else(|| DeviceError::in_capture(operation, detail))
    }

    /// Waits on the host until the device is idle; refused while a stream captures, because that
    /// would break the capture.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.wait_for_all(&self.hold_off_to_wait()?)
    }

    /// Waits until the work that is expected now is enqueued.
    pub(crate) fn wait_expected(&self) {
        self.timelines().iter().for_each(|timeline| timeline.wait_expected());
    }

    /// As [`Context::synchronize`]. Then gives memory back that was left to the device.
    pub(crate) fn synchronize_and_settle(&self) -> Result<()> {
        let held_off = self.hold_off_to_wait()?;
        self.wait_for_all(&held_off)?;
        if self.releases.any_memory() {
            let work = AllWork { context: self, held_off: &held_off, was_waited_for: true };
            let settled = self.releases.settle(Effort::WithoutWaiting, Some(&work));
            drop(held_off);
            drop(settled.owners);
        }
        Ok(())
    }

    fn hold_off_to_wait(&self) -> Result<HeldOff<'_>> {
        self.hold_off_for(Operation::Synchronize, "the device cannot be waited for while one of its streams captures")
    }

    /// As [`Context::synchronize`], while the caller holds captures off.
    pub(crate) fn wait_for_all(&self, _: &HeldOff<'_>) -> Result<()> {
        let wait = self.waits.begin();
        let timelines = self.timelines();
        let reached: Vec<u64> = timelines.iter().map(|timeline| timeline.begin_wait()).collect();
        self.driver.synchronize()?;
        timelines.iter().zip(reached).for_each(|(timeline, reached)| timeline.mark_done(reached));
        self.waits.end(wait);
        Ok(())
    }

    /// The timelines of its streams that something refers to.
    fn timelines(&self) -> Vec<Arc<dyn Waited>> {
        self.timelines.lock().known.iter().filter_map(Weak::upgrade).collect()
    }

    /// The scopes of the captures that streams are known to be part of.
    pub(crate) fn captures(&self) -> Vec<KeptAlive> {
        self.timelines().into_iter().filter_map(|timeline| timeline.known_capture()).collect()
    }

    /// Registers a stream's timeline, so that it is updated when the host has waited for the
    /// device.
    pub(crate) fn register(&self, timeline: Weak<dyn Waited>) {
        let mut timelines = self.timelines.lock();
        let Timelines { known, left } = &mut *timelines;
        if known.len() > 2 * *left {
            known.retain(|known| known.strong_count() > 0);
            *left = known.len();
        }
        known.push(timeline);
    }

    /// Frees plain memory; refused while a stream captures, because the driver waits for the device
    /// first.
    pub(crate) fn free(&self, ptr: DevicePtr) -> Result<()> {
        let detail = "memory cannot be freed while a stream captures: freeing waits for the device";
        let _held_off = self.hold_off_for(Operation::Free, detail)?;
        self.driver.free(ptr)
    }

    /// Unmaps memory; refused while a stream captures, because CUDA does not say whether that
    /// breaks the capture.
    pub(crate) fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let detail = "memory cannot be unmapped while a stream captures: that might break the capture";
        let _held_off = self.hold_off_for(Operation::Unmap, detail)?;
        self.driver.unmap(ptr, bytes)
    }
}

/// The work of a device, as its timelines know it.
struct AllWork<'a> {
    context: &'a Context,
    held_off: &'a HeldOff<'a>,
    /// True if the host has waited for it just now.
    was_waited_for: bool,
}

impl Work for AllWork<'_> {
    fn wait(&self) -> Result<()> {
        self.context.wait_for_all(self.held_off)
    }

    fn is_over(&self) -> bool {
        self.was_waited_for || self.context.timelines().iter().all(|timeline| timeline.is_idle().unwrap_or(false))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        while let Some(raw) = self.idle.pop() {
            self.releases.add_event(raw);
        }
        unfinished::finish_or_keep(self.releases.clone());
        DeviceLabel::close(self.device_id);
    }
}

/// A recorded event; goes back to the pool when the last reference is dropped, if it is complete.
#[derive(Debug)]
pub(crate) struct PooledEvent {
    pub(crate) raw: RawEvent,
    complete: AtomicBool,
    context: Arc<Context>,
}

impl PooledEvent {
    /// Asks the driver whether the event is complete.
    pub(crate) fn query(&self) -> Result<bool> {
        let complete = self.complete.load(Ordering::Acquire) || self.context.driver.query_event(self.raw)?;
        if complete {
            self.complete.store(true, Ordering::Release);
        }
        Ok(complete)
    }

    /// Notes that the event is complete, because a later event on the same stream is.
    pub(crate) fn note_complete(&self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Waits on the host until the event is complete.
    pub(crate) fn synchronize(&self) -> Result<()> {
        if !self.complete.load(Ordering::Acquire) {
            self.context.driver.synchronize_event(self.raw)?;
            self.complete.store(true, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        if *self.complete.get_mut() {
            self.context.idle.push(self.raw);
        } else {
            self.context.releases.add_event(self.raw);
        }
    }
}
