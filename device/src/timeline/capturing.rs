//! Timelines during captures: the capture that a stream is part of, and the calls that are refused
//! meanwhile (T5).

use std::sync::Arc;

use super::{GONE, StreamKind, Timeline, TimelineState};
use crate::capture::{Scope, StreamHandle};
use crate::capturing_streams::BlockingHeldOff;
use crate::driver::{CaptureStatus, Driver, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::launches::Launches;
use crate::stream_map::StreamMap;
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
use crate::{fork, unfinished};

/// Why a stream cannot be captured now.
const BORROWED: &str = "another thread's blocking copy is under way on the stream: capture once it has returned";

/// Holds captures off on one stream while it lives: see [`crate::Stream::hold_off_captures`].
#[derive(Debug)]
#[must_use = "captures may begin once it is dropped"]
pub struct CapturesHeldOff<'a> {
    timeline: &'a Timeline,
    /// Of the legacy stream: no blocking stream begins to capture either, which would refuse the
    /// events that this one needs.
    _blocking: Option<BlockingHeldOff<'a>>,
}

impl Drop for CapturesHeldOff<'_> {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.timeline.state.lock().held_off -= 1;
        self.timeline.changed.notify_all();
    }
}

/// An identity that no device has: a process never has that many.
const NO_DEVICE: u32 = u32::MAX;

impl Timeline {
    /// True if the stream is known to be part of a capture. No driver call.
    pub(crate) fn is_capturing(&self) -> bool {
        self.state.lock().capture.is_some()
    }

    /// True if a stream of the device is known to be part of a capture. No driver call, no lock.
    pub fn device_captures(&self) -> bool {
        self.context.is_capturing()
    }

    /// Keeps the stream from becoming part of a capture while the result lives. `None` if it is
    /// part of one, or is the legacy stream and a blocking stream captures.
    pub(crate) fn hold_off_captures(&self) -> Option<CapturesHeldOff<'_>> {
        let mut state = self.state.lock();
        if state.capture.is_some() {
            return None;
        }
        state.held_off += 1;
        drop(state);
        let mut held_off = CapturesHeldOff { timeline: self, _blocking: None };
        if self.kind == StreamKind::Legacy {
            held_off._blocking = Some(self.context.capturing.hold_off_blocking()?);
        }
        Some(held_off)
    }

    /// Ends captures that were dropped before they ended: work that is enqueued into one is lost,
    /// and each is in the way of other calls. Call it without a lock: things that their graphs kept
    /// are dropped.
    ///
    /// # Errors
    /// When the stream is part of such a capture, and it cannot be ended now.
    #[inline]
    pub(crate) fn end_abandoned_captures(&self, operation: Operation) -> Result<()> {
        if self.context.is_capturing() { self.end_abandoned(operation) } else { Ok(()) }
    }

    #[cold]
    fn end_abandoned(&self, operation: Operation) -> Result<()> {
        fork::check(operation)?;
        self.capture().map_or(Ok(()), |capture| capture.end_if_abandoned(operation))?;
        unfinished::end_captures(&self.context.capturing);
        Ok(())
    }

    /// Locks the timeline once no guard holds captures off.
    fn lock_to_capture(&self) -> MutexGuard<'_, TimelineState> {
        let mut state = self.state.lock();
        while state.held_off > 0 {
            state = self.changed.wait(state);
        }
        state
    }

    /// The capture that the stream is known to be part of.
    pub(crate) fn capture(&self) -> Option<Arc<Scope>> {
        self.state.lock().capture.clone()
    }

    /// As [`Timeline::capture`], without the lock where there is none.
    pub(crate) fn capture_if_any(&self) -> Option<Arc<Scope>> {
        if self.device_id_unless_capturing() == self.device_id() { None } else { self.capture() }
    }

    /// As [`crate::Stream::launches_of_capture`].
    pub fn launches_of_capture(&self) -> Option<Arc<Launches>> {
        self.capture_if_any().map(|scope| scope.launches.clone())
    }

    /// Fails if the stream captures unannounced. It is for slow paths, which would break a capture
    /// that another library began, or give its graph memory that others reuse. Asks the driver, on
    /// devices where other libraries can begin captures.
    ///
    /// # Errors
    /// When the stream captures unannounced; errors of the driver.
    pub fn refuse_unannounced_capture(&self) -> Result<()> {
        fork::check(Operation::CaptureStatus)?;
        self.refuse_unannounced(&self.state.lock())
    }

    pub(super) fn refuse_unannounced(&self, state: &TimelineState) -> Result<()> {
        let others_capture = !self.context.driver.info().is_virtual;
        // The legacy stream never captures, the driver cannot be asked about another thread's
        // stream, and the handle of a stream that is gone names no stream.
        if !others_capture
            || self.kind == StreamKind::Legacy
            || self.is_foreign()
            || state.closed
            || state.capture.is_some()
        {
            return Ok(());
        }
        match self.context.driver.capture_status(self.raw())? {
            CaptureStatus::None => Ok(()),
            _ => Err(unannounced_error()),
        }
    }

    /// Calls `begin` to begin a capture, once no call is under way that would break it. This
    /// happens under the timeline's lock, so that no event is recorded into the capture by mistake.
    ///
    /// If another library has begun the capture (it `is_begun`), `begin` only looks for it, and
    /// this does not wait for calls under way.
    pub(crate) fn begin_capture(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        handle: StreamHandle,
        is_begun: bool,
        begin: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (blocking, capturing) = (self.kind == StreamKind::Blocking, &self.context.capturing);
        if is_begun {
            capturing.enter_begun(blocking)
        } else {
            capturing.enter(blocking)
        }
        let begun = self.begin_capture_now(scope, handle, begin);
        begun.inspect_err(|_| capturing.leave(blocking))
    }

    fn begin_capture_now(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        handle: StreamHandle,
        begin: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut state = self.lock_to_capture();
        // Another thread may have released the stream since this was called.
        if state.closed {
            return Err(self.closed_error(Operation::BeginCapture, GONE));
        }
        if state.capture.is_some() {
            return Err(DeviceError::in_capture(Operation::BeginCapture, "the stream captures already"));
        }
        if state.borrowed > 0 {
            return Err(DeviceError::in_capture(Operation::BeginCapture, BORROWED));
        }
        begin()?;
        if !self.context.driver.info().is_virtual {
            // Streams that join by calls of another library are recognised by it.
            scope.set_number(self.context.driver.capture_number(self.raw()).unwrap_or(None));
        }
        scope.join(self, handle);
        self.take_part(&mut state, scope);
        Ok(())
    }

    /// Notes that another library made the stream a part of the capture.
    pub(crate) fn note_joined(self: &Arc<Self>, scope: &Arc<Scope>, handle: StreamHandle) -> Result<()> {
        let blocking = self.kind == StreamKind::Blocking;
        self.context.capturing.enter_begun(blocking);
        let joined = self.join_capture_now(scope, handle, || Ok(()));
        if !matches!(joined, Ok(true)) {
            self.context.capturing.leave(blocking);
        }
        joined.map(drop)
    }

    /// Calls `wait` to make the stream wait for an event recorded in a capture, by which the stream
    /// joins the capture. The event covers the ticks of `recorded` below `covers`, and carries
    /// `clock`. If the capture has ended, the driver is not called, because its result is not
    /// documented.
    pub(crate) fn join_capture(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        (recorded, covers, clock): (&Timeline, u64, &StreamMap),
        handle: StreamHandle,
        wait: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let blocking = self.kind == StreamKind::Blocking;
        self.context.capturing.enter(blocking);
        let joined = self.join_capture_now(scope, handle, wait).inspect(|_| {
            let mut state = self.state.lock();
            if state.capture.as_ref().is_some_and(|capture| Arc::ptr_eq(capture, scope)) {
                state.capture_clock.join(clock);
                state.capture_clock.raise(recorded.id, covers);
            }
        });
        if !matches!(joined, Ok(true)) {
            self.context.capturing.leave(blocking);
        }
        joined.map(drop)
    }

    /// Notes that what the stream captures from now on comes after all that `other` has captured,
    /// by a conditional node, of which the one makes a body.
    pub(crate) fn come_after_captured(&self, other: &Timeline) {
        let recorded = other.state.lock();
        let (clock, covers) = (recorded.capture_clock.clone(), other.count.fetch_add(1, Ordering::AcqRel) + 1);
        drop(recorded);
        let mut state = self.state.lock();
        state.capture_clock.join(&clock);
        state.capture_clock.raise(other.id, covers);
    }

    /// Joins the capture. Returns true if the stream was not part of it before, and is now.
    fn join_capture_now(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        handle: StreamHandle,
        wait: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        let mut state = self.lock_to_capture();
        if state.closed {
            return Err(self.closed_error(Operation::Wait, GONE));
        }
        if scope.is_over() {
            return Err(DeviceError::refused(Operation::Wait, Code::CAPTURED_EVENT)
                .with_detail("the event was recorded in a capture that has ended; record it again to wait for it"));
        }
        if state.borrowed > 0 {
            return Err(DeviceError::in_capture(Operation::Wait, BORROWED));
        }
        wait()?;
        let joins = state.capture.is_none() && scope.join(self, handle);
        if joins {
            self.take_part(&mut state, scope);
        }
        Ok(joins)
    }

    fn take_part(&self, state: &mut TimelineState, scope: &Arc<Scope>) {
        state.capture = Some(scope.clone());
        state.capture_clock = StreamMap::default();
        self.serves.store(NO_DEVICE, Ordering::Release);
    }

    /// Ends the stream's part in a capture.
    pub(crate) fn end_capture(&self, scope: &Arc<Scope>) {
        let mut state = self.state.lock();
        let ended = state.capture.take_if(|current| Arc::ptr_eq(current, scope)).is_some();
        if ended {
            self.serves.store(self.context.device_id, Ordering::Release);
            self.context.capturing.leave(self.kind == StreamKind::Blocking);
        }
    }

    /// Refuses a call on the legacy stream that would break the capture of a blocking stream (T5).
    /// No such capture begins while the result lives.
    pub(super) fn protect_captures(&self, raw: RawStream, operation: Operation) -> Result<Option<BlockingHeldOff<'_>>> {
        if StreamKind::of_unknown(raw) != StreamKind::Legacy {
            return Ok(None);
        }
        match self.context.capturing.hold_off_blocking() {
            None => {
                Err(DeviceError::in_capture(operation, "this would break the capture in progress on a blocking stream"))
            }
            held_off => Ok(held_off),
        }
    }
}

/// The error for a stream that captures according to the driver, but whose capture was not
/// announced.
pub(super) fn unannounced_error() -> DeviceError {
    DeviceError::in_capture(
        Operation::CaptureStatus,
        "the stream captures and that was not announced; announce it with `Stream::announce_capture` or \
         `Allocator::capture` when it begins. To fork a capture that is known: `Event::record` on its stream, \
         `Stream::wait_event` on this one, and the same back before the capture ends",
    )
    .of_request("nothing was enqueued")
}
