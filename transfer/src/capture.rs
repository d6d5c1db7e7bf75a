//! Streams that capture a graph: what a graph does is done later, and maybe often, when memory is somebody else's.

use aquifer_device::{Code, DeviceError, Operation, Stream};

/// Refuses a stream that captures; `advice` says what to do instead.
pub(crate) fn refuse(stream: &Stream, advice: &'static str) -> Result<(), DeviceError> {
    if !stream.is_capturing() {
        return Ok(());
    }
    Err(DeviceError::new(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED).with_detail(advice))
}
