//! Timelines during captures: which capture a stream is part of, and what is refused meanwhile (T5).

use std::sync::Arc;

use super::{GONE, State, StreamKind, Timeline};
use crate::capture::Scope;
use crate::capturing_streams::BlockingHeldOff;
use crate::driver::{CaptureStatus, Driver, DriverKind, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::sync::atomic::Ordering;

/// Why a stream cannot be captured now.
const BORROWED: &str = "another thread's blocking copy is under way on the stream: capture once it has returned";

/// The identity of no device: there are never so many in a process.
const NO_DEVICE: u32 = u32::MAX;

impl Timeline {
    /// Whether the stream is known to be part of a capture. No driver call.
    pub(crate) fn is_capturing(&self) -> bool {
        self.state.lock().capture.is_some()
    }

    /// The capture that the stream is known to be part of.
    pub(crate) fn capture(&self) -> Option<Arc<Scope>> {
        self.state.lock().capture.clone()
    }

    /// Refuses to go on while the stream captures and nobody said so: for slow paths, where a capture that somebody else began would
    /// be broken, or its graph be given memory that others reuse. Asks the driver, on devices where others can begin one.
    ///
    /// # Errors
    /// When the stream captures unannounced, and errors of the driver.
    pub fn refuse_unannounced_capture(&self) -> Result<()> {
        self.refuse_unannounced(&self.state.lock())
    }

    pub(super) fn refuse_unannounced(&self, state: &State) -> Result<()> {
        let others_capture = self.context.driver.info().kind == DriverKind::Cuda;
        // The legacy stream never captures, another thread's stream cannot be asked about, and a handle that is gone is no stream.
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

    /// Lets `begin` begin a capture, once no call is under way that would break it. Under the lock, so that no event is recorded into
    /// it by mistake.
    pub(crate) fn begin_capture(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        begin: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let blocking = self.kind == StreamKind::Blocking;
        self.context.capturing.enter(blocking);
        let begun = self.begin_capture_now(scope, begin);
        begun.inspect_err(|_| self.context.capturing.leave(blocking))
    }

    /// As [`Timeline::begin_capture`], of a capture that others have begun, if `ask` finds it.
    pub(crate) fn announce_capture(
        self: &Arc<Self>,
        scope: &Arc<Scope>,
        ask: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let blocking = self.kind == StreamKind::Blocking;
        self.context.capturing.enter_begun(blocking);
        let found = self.begin_capture_now(scope, ask);
        found.inspect_err(|_| self.context.capturing.leave(blocking))
    }

    fn begin_capture_now(self: &Arc<Self>, scope: &Arc<Scope>, begin: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut state = self.state.lock();
        // Somebody may have let go of it since this was called.
        if state.closed || state.is_let_go {
            return Err(self.closed_error(Operation::BeginCapture, GONE));
        }
        if state.capture.is_some() {
            return Err(capture_error(Operation::BeginCapture, "the stream captures already"));
        }
        if state.borrowed > 0 {
            return Err(capture_error(Operation::BeginCapture, BORROWED));
        }
        begin()?;
        scope.join(self);
        self.take_part(&mut state, scope);
        Ok(())
    }

    /// Lets `wait` make the stream wait for an event recorded in a capture, by which the stream joins the capture. What the driver answers
    /// once that has ended is not documented, so it is not asked.
    pub(crate) fn join_capture(self: &Arc<Self>, scope: &Arc<Scope>, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let blocking = self.kind == StreamKind::Blocking;
        self.context.capturing.enter(blocking);
        let joined = self.join_capture_now(scope, wait);
        if !matches!(joined, Ok(true)) {
            self.context.capturing.leave(blocking);
        }
        joined.map(drop)
    }

    /// Whether the stream was not part of the capture before, and is now.
    fn join_capture_now(self: &Arc<Self>, scope: &Arc<Scope>, wait: impl FnOnce() -> Result<()>) -> Result<bool> {
        let mut state = self.state.lock();
        if state.closed || state.is_let_go {
            return Err(self.closed_error(Operation::Wait, GONE));
        }
        if scope.is_over() {
            return Err(DeviceError::new(Operation::Wait, Code::CAPTURED_EVENT)
                .with_detail("the event was recorded in a capture that has ended; record it again to wait for it"));
        }
        if state.borrowed > 0 {
            return Err(capture_error(Operation::Wait, BORROWED));
        }
        wait()?;
        let joins = state.capture.is_none() && scope.join(self);
        if joins {
            self.take_part(&mut state, scope);
        }
        Ok(joins)
    }

    /// Whether captures may begin on the stream, or join it: not while somebody lets go of it.
    pub(crate) fn let_captures_begin(&self, may_begin: bool) {
        self.state.lock().is_let_go = !may_begin;
    }

    fn take_part(&self, state: &mut State, scope: &Arc<Scope>) {
        state.capture = Some(scope.clone());
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

    /// Refuses a call on the legacy stream that would break the capture of a blocking stream (T5); none begins while the answer lives.
    pub(super) fn spare_captures(&self, raw: RawStream, operation: Operation) -> Result<Option<BlockingHeldOff<'_>>> {
        if StreamKind::of_unknown(raw) != StreamKind::Legacy {
            return Ok(None);
        }
        match self.context.capturing.hold_off_blocking() {
            None => Err(capture_error(operation, "this would break the capture in progress on a blocking stream")),
            held_off => Ok(held_off),
        }
    }
}

pub(super) fn capture_error(operation: Operation, detail: &str) -> DeviceError {
    DeviceError::new(operation, Code::CAPTURE_UNSUPPORTED).with_detail(detail)
}

/// Of a stream that captures, as the driver says and nobody else did.
pub(super) fn unannounced_error() -> DeviceError {
    capture_error(
        Operation::CaptureStatus,
        "somebody else captures the stream and did not say so; announce it with `Stream::announce_capture` or \
         `Allocator::capture` when it begins",
    )
}
