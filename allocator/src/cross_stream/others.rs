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
use crate::cross_stream::waiting::sweep_ordered;
use crate::error::AllocError;
use crate::heap::{Block, BlockId};
use crate::state::guard::{Granted, StateGuard};
use crate::types::{After, Request, StreamId};

/// Serves the request from blocks of other streams, or from what they give back, without waiting.
pub(crate) fn reuse_of_others(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let mut guard = allocator.state().lock();
    if let Some(granted) = take_done(&mut guard, request) {
        return Ok(Some(granted));
    }
    let ticks = guard.heap.ticks_of_others(request.stream, request.pool, request.size);
    let ticks = guard.streams.not_done(ticks.into_iter());
    if ticks.is_empty() && guard.waiting.is_empty() {
        return Ok(None);
    }
    let own = guard.streams.timeline(request.stream).cloned();
    drop(guard);
    poll(&ticks)?;
    let clock = own.map(|timeline| timeline.clock()).unwrap_or_default();
    let mut guard = allocator.state().lock();
    sweep_ordered(&mut guard, request.stream, &clock);
    if let Some(granted) = take_done(&mut guard, request) {
        return Ok(Some(granted));
    }
    let best =
        best_until(&guard, request, |guard, owner| guard.streams.known_done(owner).max(After::ordered(&clock, owner)));
    Ok(best.map(|block| take_of_other(&mut guard, request, block)))
}

/// Serves the request from a block of another stream, for which it makes the request's stream wait.
pub(crate) fn wait_for_other(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let guard = allocator.state().lock();
    let Some(own) = guard.streams.timeline(request.stream).cloned() else { return Ok(None) };
    let Some(block) = best_until(&guard, request, |_, _| After::ALL) else { return Ok(None) };
    let &Block { owner, after, .. } = &guard.heap.blocks[block];
    let Some(other) = guard.streams.timeline(owner).cloned() else { return Ok(None) };
    drop(guard);
    if let Err(error) = own.wait_for(&other, after.last_tick()) {
        return if cannot_be_asked(&error) { Ok(None) } else { Err(error.into()) };
    }
    let clock = own.clock();
    let mut guard = allocator.state().lock();
    // Another thread may have taken the block meanwhile; any block that is ordered now will do.
    let best =
        best_until(&guard, request, |guard, owner| guard.streams.known_done(owner).max(After::ordered(&clock, owner)));
    let Some(block) = best else { return Ok(None) };
    guard.counters.cross_stream_waits.add(1);
    let granted = take_of_other(&mut guard, request, block);
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

/// Serves the request from memory that is known done: from what came back to the stream's regions,
/// else from that of others.
fn take_done(guard: &mut StateGuard, request: &Request) -> Option<Granted> {
    if guard.return_strays()
        && let Some(granted) = guard.take_own(request)
    {
        return Some(granted);
    }
    let best = best_until(guard, request, |guard, owner| guard.streams.known_done(owner))?;
    Some(take_of_other(guard, request, best))
}

/// The best block of another stream whose tick is at most the result of `until` for its owner.
fn best_until(
    guard: &StateGuard,
    request: &Request,
    until: impl Fn(&StateGuard, StreamId) -> After,
) -> Option<BlockId> {
    guard.heap.best_of_others(request.stream, request.pool, request.size, |owner| until(guard, owner))
}

fn take_of_other(guard: &mut StateGuard, request: &Request, block: BlockId) -> Granted {
    guard.counters.cross_stream_reuses.add(1);
    guard.take(request, block)
}
