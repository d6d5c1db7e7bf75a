//! External streams: streams that another library owns.

use crate::driver::CaptureStatus;
use crate::error::{Operation, Result};
use crate::fork;
use crate::release::Object;
use crate::stream::Stream;

/// A stream that another library owns, adopted so that ticks can be taken on it.
///
/// Its owner may enqueue work on it at any time; an event recorded on it covers that work, too.
/// Release it before its owner destroys it. Dropping this releases the stream, and ends a capture
/// that this library began on it. Memory of the stream that is given back after its release can be
/// reused once the host has waited for the device. A stream that is adopted again has another
/// number. So adopt a stream once, or use [`crate::Device::stream_from_raw`], instead of adopting
/// it for each call.
#[derive(Debug)]
pub struct ExternalStream {
    stream: Stream,
    released: bool,
}

impl ExternalStream {
    pub(crate) fn new(stream: Stream) -> ExternalStream {
        ExternalStream { stream, released: false }
    }

    /// A stream that the device has already, which is not released.
    pub(crate) fn of_device(stream: Stream) -> ExternalStream {
        ExternalStream { stream, released: true }
    }

    /// The adopted stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Records a last event and releases the stream. The owner may destroy it then: that event
    /// still answers whether its ticks are done, and calls on clones of the stream fail.
    ///
    /// # Errors
    /// When the stream is known to capture, and the driver does not report that the capture is
    /// over. The stream then stays adopted, and can be released after the capture's end. Errors of
    /// the driver: the stream then still counts as released, and waiting for a tick that no
    /// event covers waits for the whole device.
    pub fn release(&mut self) -> Result<()> {
        self.end(false)
    }

    /// Releases the stream. With `no_more_work`, its owner enqueues nothing on it any more, so its
    /// number can serve a later stream.
    pub(crate) fn end(&mut self, no_more_work: bool) -> Result<()> {
        if self.released {
            return Ok(());
        }
        fork::check(Operation::StreamId)?;
        // A capture that its owner ended is over.
        if let Some(scope) = self.stream.timeline().capture() {
            let raw = self.stream.usable(Operation::CaptureStatus)?;
            if self.stream.driver().capture_status(raw)? == CaptureStatus::None {
                scope.give_up();
            }
        }
        self.close(false, no_more_work)
    }

    /// Releases the stream, and also one that captures if `even_capturing`: no call can end its
    /// capture afterwards.
    fn close(&mut self, even_capturing: bool, no_more_work: bool) -> Result<()> {
        let timeline = self.stream.timeline();
        let adopting = self.stream.context().adopting.lock();
        let closed = timeline.close_released(even_capturing, no_more_work);
        if timeline.is_open() {
            return closed;
        }
        self.released = true;
        self.stream.driver().release_stream(self.stream.raw());
        drop(adopting);
        closed
    }

    /// Closes the stream, which its owner destroyed without releasing it. No driver call names its
    /// handle any more.
    pub(crate) fn note_destroyed(mut self) {
        self.released = true;
        let timeline = self.stream.timeline();
        timeline.close_without_event();
        timeline.capture().filter(|scope| scope.began_on(timeline)).into_iter().for_each(|scope| scope.give_up());
    }
}

impl Drop for ExternalStream {
    fn drop(&mut self) {
        if fork::is_child() || self.released {
            return;
        }
        let timeline = self.stream.timeline();
        let scope = timeline.capture().filter(|scope| scope.began_on(timeline));
        if let Some(scope) = scope.as_ref().filter(|scope| !scope.announced) {
            match scope.end_to_discard(timeline) {
                Ok(graph) => self.stream.context().releases.release(Object::Graph(graph)),
                Err(error) => tracing::warn!(%error, "a capture on an adopted stream could not be ended"),
            }
        }
        if let Err(error) = self.close(true, false) {
            tracing::warn!(%error, "an adopted stream was dropped without release and its last event could not be \
                recorded");
        }
        // Once the stream is closed, so that no event is recorded into the capture.
        scope.inspect(|scope| scope.give_up());
    }
}
