//! External streams: streams that another library owns.

use std::sync::Weak;

use crate::capture::Capture;
use crate::driver::CaptureStatus;
use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork;
use crate::stream::Stream;
use crate::timeline::Retired;

/// A stream that another library owns, adopted so that ticks can be taken on it.
///
/// Its owner may enqueue work on it at any time; an event recorded on it covers that work, too. Release it before its owner destroys it.
/// Dropping this releases the stream, and ends a capture that this library began on it. Memory of the stream that is given back after its
/// release can be reused by its work if it is adopted again, or by any once the host has waited for the device.
#[derive(Debug)]
pub struct ExternalStream {
    stream: Stream,
    /// The driver's number of the stream, and where its timeline goes on release.
    identity: Option<(u64, Weak<Retired>)>,
    released: bool,
}

impl ExternalStream {
    pub(crate) fn new(stream: Stream, identity: Option<(u64, Weak<Retired>)>) -> ExternalStream {
        ExternalStream { stream, identity, released: false }
    }

    /// A stream that the device has already, which is not released.
    pub(crate) fn of_device(stream: Stream) -> ExternalStream {
        ExternalStream { stream, identity: None, released: true }
    }

    /// The driver's number of the stream, if the driver tells.
    pub(crate) fn identity(&self) -> Option<u64> {
        self.identity.as_ref().map(|&(identity, _)| identity)
    }

    /// The adopted stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Records a last event and releases the stream. The owner may destroy it then: that event still tells whether its ticks are done, and
    /// calls on clones of the stream fail, unless it is adopted again.
    ///
    /// # Errors
    /// When the stream is known to capture, and the driver does not report that the capture is over. The stream then stays adopted, and can
    /// be released after the capture's end. Errors of the driver: the stream then counts as released all the same
    /// and waiting for a tick that no event covers waits for the whole device.
    pub fn release(&mut self) -> Result<()> {
        if self.released {
            return Ok(());
        }
        fork::check(Operation::StreamId)?;
        Self::refuse_captures(&self.stream)?;
        self.let_go()
    }

    /// Refuses to release a stream that captures. Otherwise no capture begins on it any more.
    pub(crate) fn refuse_captures(stream: &Stream) -> Result<()> {
        // First, so that no capture begins after the check.
        stream.timeline().let_captures_begin(false);
        Self::refuse_capture(stream).inspect_err(|_| stream.timeline().let_captures_begin(true))
    }

    /// Refuses to release a stream that captures, because nobody here could end the capture any more. A capture that its owner ended is
    /// over.
    fn refuse_capture(stream: &Stream) -> Result<()> {
        let Some(scope) = stream.timeline().capture() else { return Ok(()) };
        let operation = Operation::CaptureStatus;
        let raw = stream.usable(operation)?;
        if stream.driver().capture_status(raw)? == CaptureStatus::None {
            scope.give_up();
            return Ok(());
        }
        Err(DeviceError::refused(operation, Code::CAPTURE_UNSUPPORTED)
            .of_request("the stream was not released")
            .with_detail("an adopted stream cannot be released while it captures: end the capture first"))
    }

    /// Releases the stream. Ends a capture that began on it.
    pub(crate) fn let_go(&mut self) -> Result<()> {
        self.released = true;
        self.stream.timeline().let_captures_begin(false);
        let goes_on = Capture::end_on(&self.stream);
        let adopting = self.stream.context().adopting.lock();
        let closed = self.stream.timeline().close_released();
        self.stream.driver().release_stream(self.stream.raw());
        if let Some((identity, retired)) = self.identity.take()
            && let Some(retired) = retired.upgrade()
        {
            retired.keep_released(identity, self.stream.timeline().clone());
        }
        drop(adopting);
        // After the lock, because this runs code of callers.
        goes_on.inspect(|capture| capture.give_up());
        closed
    }

    /// Closes the stream, which its owner destroyed without releasing it. No driver call names its handle any more.
    pub(crate) fn note_destroyed(mut self) {
        self.released = true;
        let timeline = self.stream.timeline();
        timeline.close_without_event();
        timeline.capture().filter(|scope| scope.began_on(timeline)).into_iter().for_each(|scope| scope.give_up());
        let retired = self.identity.as_ref().and_then(|(_, retired)| retired.upgrade());
        if let Some(retired) = retired.filter(|_| !timeline.is_capturing()) {
            retired.keep(timeline.clone());
        }
    }
}

impl Drop for ExternalStream {
    fn drop(&mut self) {
        if !fork::is_child()
            && !self.released
            && let Err(error) = self.let_go()
        {
            tracing::warn!(%error, "an adopted stream was dropped without release and its last event could not be recorded");
        }
    }
}
