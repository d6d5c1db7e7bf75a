//! Lending the memory of idle graphs.
//!
//! A graph uses its addresses whenever it is launched, but what the capture freed holds nothing
//! that a launch needs. So once all launches of a pool's graphs are known done, the memory behind
//! these addresses may serve other requests ([`PoolOptions::lends_when_idle`]). The addresses stay.
//!
//! [`PoolOptions::lends_when_idle`]: crate::PoolOptions::lends_when_idle

use crate::allocator::Allocator;
use crate::backing::growth::{buyable, room};
use crate::backing::paged::carry_out::{carry_out, unless_capturing};
use crate::core::pools::Which;
use crate::core::remap::commit::Committed;
use crate::cross_stream::{poll, synchronize_all};
use crate::error::AllocError;

/// Takes free memory of idle graphs, which becomes spare frames: about as much as a request that
/// lacks `bytes` does not get from the device. Asks how far launches got; `waits` for them only
/// where the request would be refused otherwise. Returns how many bytes that were.
pub(crate) fn lend(allocator: &Allocator, bytes: u64, waits: bool) -> Result<u64, AllocError> {
    let state = allocator.state();
    let core = state.shared();
    let mut lending = core.pools.iter().filter(|private| private.options.lends_when_idle).peekable();
    if lending.peek().is_none() {
        return Ok(0);
    }
    let running: Vec<_> = lending.flat_map(|private| private.graphs.running()).collect();
    drop(core);
    if waits && !running.is_empty() {
        state.shared().counters.events.num_sync_all_streams += 1;
        synchronize_all(&running)?;
    } else {
        poll(&running)?;
    }
    let free = state.lock().free_not_done(Which::OfIdleGraphs);
    poll(&free)?;
    let room = room(allocator)?;
    let free = allocator.device().memory_info()?.free;
    let _gate = allocator.gate()?.shared();
    let mut guard = state.lock();
    if guard.is_asleep() {
        return Ok(0);
    }
    // All of it where the device, or the limit, refused although there seems to be enough.
    let left = buyable(allocator, &guard, &room).0.min(free);
    let lacking = if left < bytes { bytes - left } else { bytes };
    let Some(mut remap) = guard.plan_lending(lacking) else { return Ok(0) };
    drop(guard);
    carry_out(allocator.device(), allocator.hooks(), &mut remap);
    let Committed { moved, error, .. } = state.lock().commit(remap);
    if moved > 0 {
        tracing::debug!(target: "aquifer::remap", bytes = moved, "idle graphs lent memory to a request");
    }
    unless_capturing(error.map_or(Ok(()), Err))?;
    Ok(moved)
}
