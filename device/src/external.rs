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

    /// A default stream of the device's own, which is not released.
    pub(crate) fn of_default(stream: Stream) -> ExternalStream {
        ExternalStream { stream, identity: None, released: true }
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
    /// ([`crate::Timeline::is_open`]), and waiting for a tick that no event covers waits for the whole device.
    pub fn release(&mut self) -> Result<()> {
        if self.released {
            return Ok(());
        }
        fork::check(Operation::StreamId)?;
        // First, so that no capture begins after the check.
        self.stream.timeline().let_captures_begin(false);
        if let Err(error) = self.refuse_capture() {
            self.stream.timeline().let_captures_begin(true);
            return Err(error);
        }
        self.let_go()
    }

    /// Refuses to release a stream that captures, because nobody here could end the capture any more. A capture that its owner ended is
    /// over.
    fn refuse_capture(&self) -> Result<()> {
        let Some(scope) = self.stream.timeline().capture() else { return Ok(()) };
        let operation = Operation::CaptureStatus;
        let raw = self.stream.usable(operation)?;
        if self.stream.driver().capture_status(raw)? == CaptureStatus::None {
            scope.give_up();
            return Ok(());
        }
        Err(DeviceError::refused(operation, Code::CAPTURE_UNSUPPORTED)
            .of_request("the stream was not released")
            .with_detail("an adopted stream cannot be released while it captures: end the capture first"))
    }

    fn let_go(&mut self) -> Result<()> {
        self.released = true;
        self.stream.timeline().let_captures_begin(false);
        let goes_on = Capture::end_on(&self.stream);
        let closed = self.stream.timeline().close_released();
        goes_on.inspect(|capture| capture.give_up());
        self.stream.driver().release_stream(self.stream.raw());
        if let Some((identity, retired)) = self.identity.take()
            && let Some(retired) = retired.upgrade()
        {
            retired.keep_released(identity, self.stream.timeline().clone());
        }
        closed
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
