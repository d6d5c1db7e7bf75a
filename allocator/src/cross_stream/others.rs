//! Reuse of a free block by another stream than the one that owns it.
//!
//! Stream S may use a block once the block's tick is known done on the host, or once S's later work
//! is ordered after that tick. Both can be learned without waiting. Making S wait would couple the
//! streams, so it is done only where the policy says so, or as a rung of the ladder before memory
//! runs out. It is counted and traced.
//!
//! Other streams' blocks are tried only when a stream's own free blocks do not serve a request, just
//! before memory would be taken from the device. Asking whether ticks are done may record an event
//! on a stream, at most one each time.

use crate::allocator::Allocator;
use crate::cross_stream::progress::{cannot_be_asked, poll};
use crate::error::AllocError;
use crate::types::{Granted, Request, Use};

/// Serves the request from blocks of other streams, or from what they give back, without waiting.
pub(crate) fn reuse_of_others(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let mut guard = allocator.state().lock();
    if let Some(granted) = guard.take_done(request) {
        return Ok(Some(granted));
    }
    let ticks = guard.others_wait_for(request);
    if ticks.is_empty() && guard.waiting().is_empty() {
        return Ok(None);
    }
    let own = guard.streams.timeline(request.stream).cloned();
    drop(guard);
    poll(&ticks)?;
    let clock = own.map(|timeline| timeline.clock()).unwrap_or_default();
    let mut guard = allocator.state().lock();
    guard.end_waits_ordered(request.stream, &clock);
    guard.show_waiting();
    if let Some(granted) = guard.take_done(request) {
        return Ok(Some(granted));
    }
    Ok(guard.take_ordered(request, &clock))
}

/// Serves the request from a block of another stream, for which it makes the request's stream wait.
pub(crate) fn wait_for_other(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let guard = allocator.state().lock();
    let Some(own) = guard.streams.timeline(request.stream).cloned() else { return Ok(None) };
    let Some(Use { stream: owner, after }) = guard.last_use_of_best(request) else { return Ok(None) };
    let Some(other) = guard.streams.timeline(owner).cloned() else { return Ok(None) };
    drop(guard);
    if let Err(error) = own.wait_for(&other, after.last_tick()) {
        return if cannot_be_asked(&error) { Ok(None) } else { Err(error.into()) };
    }
    let clock = own.clock();
    let mut guard = allocator.state().lock();
    // Another thread may have taken the block meanwhile; any block that is ordered now will do.
    let Some(granted) = guard.take_ordered(request, &clock) else { return Ok(None) };
    guard.counters.cross_stream_waits.add(1);
    drop(guard);
    tracing::debug!(
        target: "aquifer::wait",
        stream = request.stream.0,
        waits_for = owner.0,
        bytes = request.size,
        "a stream was made to wait for another one to reuse its memory"
    );
    Ok(Some(granted))
}
