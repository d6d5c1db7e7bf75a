//! Refuses streams that capture a graph, and holds captures off while work is enqueued: a graph's
//! work runs later, perhaps many times, when the memory may have another owner.

use aquifer_device::internal::CapturesHeldOff;
use aquifer_device::{Code, DeviceError, Operation, Stream};

/// Refuses a stream that captures, with advice for the caller.
pub(crate) fn refuse(stream: &Stream, advice: &'static str) -> Result<(), DeviceError> {
    if stream.is_capturing() { Err(captured(advice)) } else { Ok(()) }
}

/// Refuses a stream that captures, and holds captures off while work is enqueued on it. Call it
/// after access guards are taken, because these may wait for a thread that is about to capture;
/// hold it until the tick after the work is taken, because a tick orders nothing while its stream
/// captures.
pub(crate) fn hold_off<'a>(stream: &'a Stream, advice: &'static str) -> Result<CapturesHeldOff<'a>, DeviceError> {
    stream.hold_off_captures().ok_or_else(|| captured(advice))
}

fn captured(advice: &'static str) -> DeviceError {
    let error = DeviceError::refused(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED);
    error.of_request("nothing was enqueued").with_detail(advice)
}
