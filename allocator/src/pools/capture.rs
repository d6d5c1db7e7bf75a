//! Memory for captured graphs.
//!
//! A graph uses the addresses that it was captured with whenever it is launched. So memory that is
//! allocated while a stream captures comes from a private pool, which keeps its free memory for its
//! graphs (`pools/graphs.rs`) and gives it to no other request.

use std::borrow::Cow;

use aquifer_device::{Code, DeviceError, Operation, Stream};

use crate::allocator::Allocator;
use crate::cross_stream::progress::poll;
use crate::error::AllocError;
use crate::pools::lookup::awaited_launches;
use crate::types::StreamId;

/// Refuses to serve a capturing stream from the default pools: memory freed there goes to others,
/// but the graph would use it whenever it is launched.
pub(crate) fn refuse_capture(stream: &Stream) -> Result<(), AllocError> {
    refuse_capturing(
        stream,
        "memory for a stream that captures must come from a private pool, which keeps it for the graph: hold \
         `Allocator::capture(&stream, &pool)` on this thread while you allocate",
    )
}

/// Refuses to serve a capturing stream with memory outside of all pools, for the same reason.
pub(crate) fn refuse_capture_dedicated(stream: &Stream) -> Result<(), AllocError> {
    refuse_capturing(
        stream,
        "memory that grows, or can be exported, is no pool's, so nothing would keep it for the graph: get it before the capture \
         begins, and keep it as long as the graph",
    )
}

fn refuse_capturing(stream: &Stream, detail: &str) -> Result<(), AllocError> {
    stream.end_abandoned_captures()?;
    if !stream.is_capturing() {
        return Ok(());
    }
    let error = DeviceError::refused(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED);
    Err(error.of_request("nothing was allocated").with_detail(detail).into())
}

/// The stream that memory is asked for, used, or given back on. A body of a conditional node is a
/// part of the work of the stream with the node: so its memory is that stream's, whose other bodies
/// it excludes. Locks a timeline.
pub(crate) fn acting(stream: &Stream) -> Cow<'_, Stream> {
    stream.body_of().map_or(Cow::Borrowed(stream), Cow::Owned)
}

/// Asks, without waiting, whether the launches are done that memory of closed pools waits for.
pub(crate) fn poll_launches(allocator: &Allocator) -> Result<(), AllocError> {
    let launched = awaited_launches(allocator, None);
    poll(&launched.ticks)
}

/// Refuses to serve a request with memory of the default pools if its stream captures unannounced.
pub(crate) fn refuse_unannounced_capture(allocator: &Allocator, stream: StreamId) -> Result<(), AllocError> {
    if allocator.device().info().is_virtual {
        return Ok(());
    }
    let timeline = allocator.state().shared().streams.timeline(stream).cloned();
    timeline.map_or(Ok(()), |timeline| Ok(timeline.refuse_unannounced_capture()?))
}
