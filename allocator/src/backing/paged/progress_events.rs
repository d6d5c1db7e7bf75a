//! Progress events: events recorded ahead of need, so that the host knows what is done.
//!
//! Before memory can move, the host must know that its last use is done, which takes an event. An
//! event recorded only when memory has to move would complete only after everything queued before
//! it. So a stream records one whenever much was given back since the last one, within a budget
//! (`policy.rs`). Others are recorded when a request needs to know.

use aquifer_device::Stream;

/// Records an event on the stream.
#[cold]
pub(crate) fn record_progress(stream: &Stream) {
    let timeline = stream.timeline();
    // A stream that captures, or one that is gone, records none. The host then learns in other ways
    // what is done there.
    if let Err(error) = timeline.cover(timeline.now()) {
        tracing::debug!(%error, stream = stream.id(), "no progress event could be recorded");
    }
}
