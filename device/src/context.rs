//! What the streams of one device share: the driver, the pool of events, and the counters of the timeline.
//!
//! Invariants:
//! * An event in `idle` is complete and referenced by nobody (invariant T3: events are recycled only when complete).
//! * Dropping an event makes no driver call: events that cannot be recycled go to `condemned` and are destroyed at the
//!   next call that may talk to the driver.
//!
//! No locks of its own; the queues are lock-free, so a context can be used under any lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crossbeam::queue::SegQueue;

use crate::counted::Counted;
use crate::driver::{DevicePtr, Driver, RawEvent, RawStream};
use crate::error::Result;

/// State shared by a device, its streams and their timelines.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) driver: Counted,
    /// Process-wide identity of the device, never reused.
    pub(crate) device_id: u32,
    next_stream: AtomicU32,
    idle: SegQueue<RawEvent>,
    condemned: SegQueue<RawEvent>,
    orphans: SegQueue<DevicePtr>,
    pub(crate) events_recorded: AtomicU64,
    pub(crate) waits_inserted: AtomicU64,
    /// Blocking streams that capture: what the legacy stream must keep from touching.
    pub(crate) blocking_captures: AtomicU32,
}

static NEXT_DEVICE: AtomicU32 = AtomicU32::new(0);

impl Context {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<Context> {
        Arc::new(Context {
            driver: Counted::new(driver),
            device_id: NEXT_DEVICE.fetch_add(1, Ordering::Relaxed),
            next_stream: AtomicU32::new(0),
            idle: SegQueue::new(),
            condemned: SegQueue::new(),
            orphans: SegQueue::new(),
            events_recorded: AtomicU64::new(0),
            waits_inserted: AtomicU64::new(0),
            blocking_captures: AtomicU32::new(0),
        })
    }

    /// A stream identity that was never given out before on this device (invariant T4).
    pub(crate) fn next_stream_id(&self) -> u32 {
        self.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    /// Records an event on `stream`, reusing an idle one where there is one.
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

    /// Frees a plain allocation when somebody next talks to the driver. Makes no driver call.
    pub(crate) fn free_later(&self, ptr: DevicePtr) {
        self.orphans.push(ptr);
    }

    /// Frees what [`Context::free_later`] collected. What cannot be freed now stays collected.
    pub(crate) fn free_orphans(&self) {
        while let Some(ptr) = self.orphans.pop() {
            if let Err(error) = self.driver.free(ptr) {
                tracing::warn!(%error, %ptr, "device memory could not be freed; it will be tried again");
                self.orphans.push(ptr);
                return;
            }
        }
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
        self.free_orphans();
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
    /// Asks the driver whether the event completed.
    pub(crate) fn query(&self) -> Result<bool> {
        let complete = self.complete.load(Ordering::Acquire) || self.context.driver.query_event(self.raw)?;
        if complete {
            self.complete.store(true, Ordering::Release);
        }
        Ok(complete)
    }

    /// Waits on the host until the event completed.
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
