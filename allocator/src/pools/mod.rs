//! Private pools: memory that is kept separate from all other memory, as in PyTorch's `MemPool` and
//! graph pools.
//!
//! The two default pools have numbers 0 (small) and 1 (large) in the heap. A private pool has four
//! numbers of its own. Two of them serve captures, and other requests as long as no graph may use
//! what is free in them; the other two serve other requests from then on. A closed pool (its handle
//! was dropped) serves no request. Its blocks are given back to the device as they become free, at
//! the next release, but not before the launches of graphs whose captures allocated from it are
//! done (invariant A7).

use std::any::Any;
use std::sync::Arc;

use aquifer_device::{Code, DeviceError, Operation, Stream};

use crate::allocator::Allocator;
use crate::core::graphs::Launched;
use crate::core::pools::PoolKey;
use crate::cross_stream::{cannot_be_asked, poll, synchronize_all};
use crate::error::AllocError;
use crate::types::{PoolId, StreamId};

pub(crate) mod private_pool;

/// The launches that memory of closed pools still waits for: of all of them, or of one.
pub(crate) fn awaited_launches(allocator: &Allocator, of: Option<PoolKey>) -> Launched {
    let now = allocator.device().wait_mark();
    allocator.state().shared().pools.awaited_launches(&now, of)
}

/// The numbers of the pool that the thread's innermost scope routes to, for a request for the
/// stream; `None` if there is none. If the stream captures, this notes that the graph uses the
/// pool, and that its launches come after earlier work of the stream, because the graph may get
/// memory that this work used.
pub(crate) fn route_and_note(allocator: &Allocator, stream: &Stream) -> Option<[PoolId; 2]> {
    let thread = std::thread::current().id();
    allocator.state().shared().pools.routed(thread)?;
    // Before the allocator's lock is taken, because no timeline is locked under it.
    let captured = stream.launches_of_capture();
    let (numbers, is_new) = allocator.state().shared().pools.route_and_note(thread, captured.as_ref())?;
    if let Some(launches) = captured {
        launches.come_after(stream.tick());
        if is_new {
            // Otherwise all memory would go back once the last handle of the allocator is dropped.
            let allocator: Arc<dyn Any + Send + Sync> = Arc::new(allocator.kept_open());
            launches.keep(&allocator);
        }
    }
    Some(numbers)
}

/// True if a block granted outside of captures may belong to a graph, because one was captured
/// since the request was routed.
pub(crate) fn came_from_a_graph(allocator: &Allocator, pool: PoolId, stream: &Stream) -> bool {
    allocator.state().shared().pools.keeps_for_graphs(pool) && !stream.is_capturing()
}

/// Waits until launches are done. Skips a stream, or the device, that cannot be waited for now
/// because a stream captures.
pub(crate) fn wait_for_launched(allocator: &Allocator, launched: &Launched) -> Result<(), AllocError> {
    synchronize_all(&launched.ticks)?;
    if launched.is_device_pending() {
        match allocator.device().synchronize_enqueued() {
            Err(error) if !cannot_be_asked(&error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

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

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;
