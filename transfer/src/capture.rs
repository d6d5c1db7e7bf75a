//! Refusing streams that capture a graph, and keeping others from it while work is enqueued: a graph's work is done later, and perhaps many
//! times, when the memory may belong to somebody else.

use aquifer_device::internal::CapturesHeldOff;
use aquifer_device::{Code, DeviceError, Operation, Stream};

/// Refuses a stream that captures; `advice` says what to do instead.
pub(crate) fn refuse(stream: &Stream, advice: &'static str) -> Result<(), DeviceError> {
    if stream.is_capturing() { Err(captured(advice)) } else { Ok(()) }
}

/// Refuses a stream that captures, and keeps it from that while work is enqueued on it. Taken after turns, because those may wait for who is about
/// to capture; and kept until the tick after the work was taken, because a tick orders nothing while its stream captures.
pub(crate) fn hold_off<'a>(stream: &'a Stream, advice: &'static str) -> Result<CapturesHeldOff<'a>, DeviceError> {
    stream.hold_off_captures().ok_or_else(|| captured(advice))
}

fn captured(advice: &'static str) -> DeviceError {
    let error = DeviceError::refused(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED);
    error.of_request("nothing was enqueued").with_detail(advice)
}
