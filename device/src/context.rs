//! The context: the state that the streams of one device share, which is the driver, the pool of events, and the counters of timelines.
//!
//! Invariants:
//! * An event in `idle` is complete and referenced by nobody (invariant T3: events are recycled only when complete).
//! * Dropping an event makes no driver call: events that cannot be recycled go to `condemned`, and are destroyed at the next call that may
//!   make driver calls.
//! * An *orphan* is memory of the device or the host, or a module of kernels, that only this context still knows. It goes back to the
//!   driver at the next call that may make driver calls. If that fails, it stays an orphan.
//!
//! The context's one lock, of the list of timelines, is a leaf, and its queues are lock-free. So a context can be used under any lock.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crossbeam::queue::SegQueue;
use parking_lot::Mutex;

use crate::capturing_streams::{CapturingStreams, HeldOff};
use crate::counted::Counted;
use crate::driver::{DevicePtr, Driver, DriverKind, RawEvent, RawModule, RawPhysical, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::label::DeviceLabel;
use crate::left::{Left, LeftOwner};
use crate::lost::log_kept;
use crate::sim::thread::Caller;
use crate::sim::{CalledFrom, Checks};
use crate::timeline::Timeline;
use crate::waits::Waits;

/// An orphan: something that is to be given back later.
#[derive(Debug)]
pub(crate) enum Orphan {
    /// A plain allocation.
    Allocation(DevicePtr),
    /// Reserved addresses, and the memory mapped there.
    Reservation(Reservation),
    /// Physical memory that is mapped nowhere.
    Physical(RawPhysical),
    /// A module whose kernels may still run.
    Module(RawModule),
    /// Page-locked memory that copies may still use.
    Host(Left),
}

impl Orphan {
    /// True if no work can use it any more, so that giving it back waits for nothing.
    fn is_unused(&self) -> bool {
        match self {
            Orphan::Physical(_) => true,
            Orphan::Reservation(reservation) => reservation.mapped.is_empty(),
            Orphan::Allocation(_) | Orphan::Module(_) | Orphan::Host(_) => false,
        }
    }
}

impl fmt::Display for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Orphan::Allocation(ptr) => write!(f, "memory at {ptr}"),
            Orphan::Reservation(Reservation { ptr, bytes, mapped }) => {
                write!(f, "{bytes} bytes of addresses at {ptr}, with {} mappings,", mapped.len())
            }
            Orphan::Physical(RawPhysical(handle)) => write!(f, "physical memory {handle:#x}"),
            Orphan::Module(RawModule(handle)) => write!(f, "a module of kernels, {handle:#x},"),
            Orphan::Host(memory) => memory.fmt(f),
        }
    }
}

/// Reserved addresses and the physical memory mapped there, for [`crate::Device::unreserve_later`].
#[derive(Clone, Debug)]
pub struct Reservation {
    /// First address.
    pub ptr: DevicePtr,
    /// Length in bytes.
    pub bytes: u64,
    /// Mappings: first address, length in bytes, and the physical memory mapped there.
    pub mapped: Vec<(DevicePtr, u64, RawPhysical)>,
}

/// State shared by a device, its streams and their timelines.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) driver: Counted,
    /// True if the driver wants to know where calls come from.
    is_simulated: bool,
    /// The checks of how memory is used, on a simulated device.
    pub(crate) checks: Option<Arc<Checks>>,
    /// Process-wide identity of the device, never reused.
    pub(crate) device_id: u32,
    next_stream: AtomicU32,
    idle: SegQueue<RawEvent>,
    condemned: SegQueue<RawEvent>,
    /// Orphans that work may still use, so that the device is waited for.
    orphans: SegQueue<Orphan>,
    /// Orphans that no work can use.
    unused_orphans: SegQueue<Orphan>,
    pub(crate) events_recorded: AtomicU64,
    pub(crate) waits_inserted: AtomicU64,
    /// The capturing streams of all drivers that share the driver's context.
    pub(crate) capturing: Arc<CapturingStreams>,
    /// The timelines of all its streams.
    timelines: Mutex<Vec<Weak<Timeline>>>,
    pub(crate) waits: Arc<Waits>,
}

static NEXT_DEVICE: AtomicU32 = AtomicU32::new(0);

impl Context {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<Context> {
        let device_id = NEXT_DEVICE.fetch_add(1, Ordering::Relaxed);
        DeviceLabel::open(device_id, DeviceLabel::from(driver.info()));
        let capturing = driver.capturing_streams();
        let (is_simulated, checks) = (driver.info().kind == DriverKind::Simulated, driver.checks());
        Arc::new(Context {
            is_simulated,
            checks,
            driver: Counted::new(driver),
            device_id,
            next_stream: AtomicU32::new(0),
            idle: SegQueue::new(),
            condemned: SegQueue::new(),
            orphans: SegQueue::new(),
            unused_orphans: SegQueue::new(),
            events_recorded: AtomicU64::new(0),
            waits_inserted: AtomicU64::new(0),
            capturing,
            timelines: Mutex::default(),
            waits: Arc::default(),
        })
    }

    /// Names the place that calls come from, for violations.
    #[inline]
    pub(crate) fn called_from(&self, at: Caller) -> Option<CalledFrom> {
        self.is_simulated.then(|| CalledFrom::new(at))
    }

    /// A number that no timeline of this device has (invariant T4).
    pub(crate) fn next_stream_id(&self) -> u32 {
        self.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    /// What the driver calls a stream that somebody else owns, if it tells.
    pub(crate) fn stream_identity(&self, raw: RawStream) -> Option<u64> {
        let identity = self.driver.stream_id(raw);
        identity.inspect_err(|error| tracing::debug!(%error, "the driver does not identify an adopted stream")).ok()?
    }

    /// Records an event on `stream`. Reuses an idle event if there is one.
    pub(crate) fn record(self: &Arc<Self>, stream: RawStream) -> Result<Arc<PooledEvent>> {
        self.destroy_condemned();
        let raw = match self.idle.pop() {
            Some(raw) => raw,
            None => self.driver.create_event(false)?,
        };
        // Wrapped before recording: a failed record leaves the event idle, and dropping the wrapper returns it.
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
            self.heard_of_peer(owner, self.driver.wait_peer(stream, &owner.driver, event))
        }
    }

    /// Completes the result of a call that involved a peer: if the peer is the device that is lost, the error says so, and names the error
    /// by which it was lost.
    pub(crate) fn heard_of_peer<T>(&self, peer: &Context, answer: Result<T>) -> Result<T> {
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

    /// Keeps an orphan until the next call that may make driver calls. Makes no driver call itself.
    pub(crate) fn orphan(&self, orphan: Orphan) {
        let queue = if orphan.is_unused() { &self.unused_orphans } else { &self.orphans };
        queue.push(orphan);
    }

    /// True if a stream of any driver in this context captures.
    pub(crate) fn is_capturing(&self) -> bool {
        self.capturing.any()
    }

    /// Waits on the host until the device is idle; refused while a stream captures, because that would break the capture.
    pub(crate) fn synchronize(&self) -> Result<()> {
        match self.capturing.hold_off() {
            Some(held_off) => self.wait_for_all(&held_off),
            None => Err(DeviceError::new(Operation::Synchronize, Code::CAPTURE_UNSUPPORTED)
                .with_detail("the device cannot be waited for while one of its streams captures")),
        }
    }

    /// As [`Context::synchronize`], while the caller holds captures off.
    pub(crate) fn wait_for_all(&self, _: &HeldOff<'_>) -> Result<()> {
        let wait = self.waits.begin();
        let timelines: Vec<Arc<Timeline>> = self.timelines.lock().iter().filter_map(Weak::upgrade).collect();
        let reached: Vec<u64> = timelines.iter().map(|timeline| timeline.begin_wait()).collect();
        self.driver.synchronize()?;
        timelines.iter().zip(reached).for_each(|(timeline, reached)| timeline.mark_done(reached));
        self.waits.end(wait);
        Ok(())
    }

    /// Registers a stream's timeline, so that it is updated when the host has waited for the device.
    pub(crate) fn know(&self, timeline: &Arc<Timeline>) {
        let mut timelines = self.timelines.lock();
        timelines.retain(|known| known.strong_count() > 0);
        timelines.push(Arc::downgrade(timeline));
    }

    /// Frees plain memory; refused while a stream captures, because the driver waits for the device first.
    pub(crate) fn free(&self, ptr: DevicePtr) -> Result<()> {
        let Some(_held_off) = self.capturing.hold_off() else {
            return Err(DeviceError::new(Operation::Free, Code::CAPTURE_UNSUPPORTED)
                .with_detail("memory cannot be freed while a stream captures: freeing waits for the device"));
        };
        self.driver.free(ptr)
    }

    /// Gives orphans back. Those that cannot go now stay orphans. While a stream captures, these are all of them, because waiting for the
    /// device would break the capture.
    pub(crate) fn free_orphans(&self) {
        if let Some(held_off) = self.capturing.hold_off() {
            self.capturing.let_go(&held_off);
            let owners = self.free_orphans_of(&self.orphans);
            self.free_unused_orphans();
            drop(held_off);
            drop(owners);
        }
    }

    /// Gives back the orphans that no work can use, without waiting.
    pub(crate) fn free_unused_orphans(&self) {
        // None of them is memory of the host.
        let _no_owners = self.free_orphans_of(&self.unused_orphans);
    }

    /// True if there is an orphan.
    pub(crate) fn has_orphans(&self) -> bool {
        !self.orphans.is_empty() || !self.unused_orphans.is_empty()
    }

    /// Gives back all orphans, for the last time. One that fails does not keep others from going, and is tried once more.
    fn free_every_orphan(&self) -> Vec<LeftOwner> {
        let mut owners = Vec::new();
        for queue in [&self.orphans, &self.orphans, &self.unused_orphans, &self.unused_orphans] {
            for _ in 0..queue.len() {
                if self.driver.lost().is_none() {
                    owners.extend(self.free_orphans_of(queue));
                }
            }
        }
        owners
    }

    /// Gives back the orphans of a queue. After a failure the rest stays, so that not each fails in turn. Returns the owners of registered
    /// memory that went back, to be dropped where foreign code may run.
    fn free_orphans_of(&self, queue: &SegQueue<Orphan>) -> Vec<LeftOwner> {
        let mut owners = Vec::new();
        while let Some(orphan) = queue.pop() {
            match self.free_orphan(orphan) {
                Ok(owner) => owners.extend(owner),
                Err((error, orphan)) => {
                    log_kept(&error, format_args!("{orphan} could not be freed; it will be tried again"));
                    self.orphan(orphan);
                    break;
                }
            }
        }
        owners
    }

    fn free_orphan(&self, orphan: Orphan) -> std::result::Result<Option<LeftOwner>, (DeviceError, Orphan)> {
        let gone = match orphan {
            Orphan::Allocation(ptr) => self.driver.free(ptr).map_err(|error| (error, orphan)),
            Orphan::Physical(physical) => self.driver.release_physical(physical).map_err(|error| (error, orphan)),
            Orphan::Reservation(reservation) => self.free_reservation(reservation),
            // Waits for the device first, because neither unloading nor freeing page-locked memory waits for anything.
            Orphan::Module(module) => self
                .driver
                .synchronize()
                .and_then(|()| self.driver.unload_module(module))
                .map_err(|error| (error, orphan)),
            Orphan::Host(memory) => return self.free_host(memory),
        };
        gone.map(|()| None)
    }

    fn free_host(&self, memory: Left) -> std::result::Result<Option<LeftOwner>, (DeviceError, Orphan)> {
        match self.driver.synchronize() {
            // SAFETY: no work can have begun to use it since it was left to the device, which was waited for.
            Ok(()) => unsafe { memory.free(&self.driver) }.map_err(|(error, memory)| (error, Orphan::Host(memory))),
            Err(error) => Err((error, Orphan::Host(memory))),
        }
    }

    /// Gives back a reservation. Waits for the device first, because unmapping, unlike freeing a plain allocation, waits for nothing.
    fn free_reservation(&self, mut reservation: Reservation) -> std::result::Result<(), (DeviceError, Orphan)> {
        let waited = if reservation.mapped.is_empty() { Ok(()) } else { self.driver.synchronize() };
        let mut gone = waited;
        while gone.is_ok()
            && let Some(&(ptr, bytes, physical)) = reservation.mapped.last()
        {
            gone = self.driver.unmap(ptr, bytes);
            if gone.is_ok() {
                reservation.mapped.pop();
                self.orphan(Orphan::Physical(physical));
            }
        }
        let gone = gone.and_then(|()| self.driver.unreserve(reservation.ptr, reservation.bytes));
        gone.map_err(|error| (error, Orphan::Reservation(reservation)))
    }

    fn destroy_condemned(&self) {
        while let Some(raw) = self.condemned.pop() {
            if let Err(error) = self.driver.destroy_event(raw) {
                tracing::debug!(%error, "an event could not be destroyed");
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        while let Some(raw) = self.idle.pop() {
            self.condemned.push(raw);
        }
        self.destroy_condemned();
        match self.capturing.hold_off() {
            None => self.capturing.keep(self.driver.shared()),
            Some(held_off) => {
                self.capturing.let_go(&held_off);
                let owners = self.free_every_orphan();
                drop(held_off);
                drop(owners);
            }
        }
        DeviceLabel::close(self.device_id);
    }
}

/// A recorded event; goes back to the pool when the last reference is dropped, if it is complete by then.
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
        let queue = if *self.complete.get_mut() { &self.context.idle } else { &self.context.condemned };
        queue.push(self.raw);
    }
}
