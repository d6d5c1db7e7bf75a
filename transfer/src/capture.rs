//! Refusing streams that capture a graph: a graph's work is done later, and perhaps many times, when the memory may belong to somebody else.

use aquifer_device::{Code, DeviceError, Operation, Stream};

/// Refuses a stream that captures; `advice` says what to do instead.
pub(crate) fn refuse(stream: &Stream, advice: &'static str) -> Result<(), DeviceError> {
    if stream.is_capturing() { Err(captured(advice)) } else { Ok(()) }
}

/// The error for a stream that captures.
pub(crate) fn captured(advice: &'static str) -> DeviceError {
    DeviceError::new(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED).with_detail(advice)
}
