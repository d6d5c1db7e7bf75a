//! The ladder of memory outside of the heaps.

use crate::allocator::Allocator;
use crate::backing::paged::lend::lend;
use crate::backing::trim::trim_idle_pools;
use crate::core::limits::Refusal;
use crate::error::AllocError;
use crate::pools::capture::refuse_unannounced_capture;
use crate::recovery::oom::{Tried, out_of_memory};
use crate::recovery::reclaim::ask_reclaimers;
use crate::types::Request;

/// Serves a request outside of the heaps by calling `attempt` until it succeeds. Between attempts
/// it makes room as the ladder does: it gives unused memory back to the device, waiting for streams
/// where needed, and runs reclaimers. `tried` says what the request is for.
pub(crate) fn climb_dedicated<T>(
    allocator: &Allocator,
    request: &Request,
    mut tried: Tried,
    mut attempt: impl FnMut() -> Result<Result<T, Refusal>, AllocError>,
) -> Result<T, AllocError> {
    match attempt()? {
        Ok(served) => return Ok(served),
        Err(refusal) => tried.refusal = Some(refusal),
    }
    // The calls that make room would break the capture.
    refuse_unannounced_capture(allocator, request.stream)?;
    while tried.refusal != Some(Refusal::Addresses) && lend(allocator, request.size, false)? > 0 {
        match attempt()? {
            Ok(served) => return Ok(served),
            Err(refusal) => tried.refusal = Some(refusal),
        }
    }
    if allocator.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
        allocator.state().shared().counters.num_oom_rejections.add(1);
        return Err(out_of_memory(allocator, request, tried));
    }
    let mut reclaimers = ask_reclaimers(allocator, request);
    loop {
        // Addresses come back only where nothing is mapped any more.
        let lacks_addresses = tried.refusal == Some(Refusal::Addresses);
        let target = if lacks_addresses { 0 } else { may_stay_beside(allocator, request.size) };
        tried.released += allocator.trim_to(target)?;
        allocator.state().shared().counters.num_alloc_retries.add(1);
        match attempt()? {
            Ok(served) => return Ok(served),
            Err(refusal) => tried.refusal = Some(refusal),
        }
        let of_pools = trim_idle_pools(allocator, target)?;
        if of_pools > 0 {
            tried.released += of_pools;
            match attempt()? {
                Ok(served) => return Ok(served),
                Err(refusal) => tried.refusal = Some(refusal),
            }
        }
        while !lacks_addresses && lend(allocator, request.size, true)? > 0 {
            match attempt()? {
                Ok(served) => return Ok(served),
                Err(refusal) => tried.refusal = Some(refusal),
            }
        }
        while tried.refusal != Some(Refusal::Limit) && tried.ask_others(allocator, request.size) {
            match attempt()? {
                Ok(served) => return Ok(served),
                Err(refusal) => tried.refusal = Some(refusal),
            }
        }
        if !reclaimers.ask() {
            // Memory that other threads were moving was on no list when it was looked for.
            allocator.gate()?.wait();
            return attempt()?.map_err(|refusal| {
                tried.refusal = Some(refusal);
                tried.reclaimers.extend(reclaimers.into_answers());
                out_of_memory(allocator, request, tried)
            });
        }
    }
}

/// How many bytes may stay reserved if the device is to give so many more, within the limit and
/// beside the headroom. As many go at least: the device may refuse memory that it says is free.
fn may_stay_beside(allocator: &Allocator, bytes: u64) -> u64 {
    let reserved = allocator.memory_reserved();
    let free = allocator.device().memory_info().map_or(u64::MAX, |memory| memory.free);
    let on_device = reserved.saturating_add(free).saturating_sub(allocator.config().headroom);
    allocator.limit().unwrap_or(u64::MAX).min(on_device).min(reserved).saturating_sub(bytes)
}
