//! The out-of-memory ladder: the sequence of attempts to serve a request that no cached block
//! serves.
//!
//! Each attempt, a *rung*, is a function that serves the request or does not. A rung that frees
//! something is followed by another search, of the pools that lend, too, because the freed memory
//! may fit although the device has no more to give. The order is PyTorch's, with rungs added:
//!
//! 1. take a block of another stream that is done (`cross_stream`), or wait for one where the
//!    policy says so;
//! 2. **grow**: take memory from the device (mapped memory moves first, `backing/paged/grow.rs`;
//!    where addresses ran out, a segment is taken);
//! 3. take a block of a private pool that lends on OOM; take memory of idle graphs whose pools lend
//!    it, and grow; with `throw_on_cudamalloc_oom`, a request that the limit refused fails here;
//! 4. wait on the host for blocks that other streams still use;
//! 5. make the stream wait for another stream's block, unless blocks never cross streams;
//! 6. release everything unused, mapped memory where it stands in the way, and grow; then what
//!    private pools keep although no graph may use it, as much as the request needs, and grow; then
//!    wait for launches under way whose memory can be lent after them, and grow;
//! 7. where the device refused, have the driver give back what its own pools keep unused, and other
//!    allocators of the process what they cache, and grow;
//! 8. run the reclaimers by priority, each followed by a search, a release and a growth, and all
//!    of them again as long as they free something (`reclaim.rs`);
//! 9. wait until other threads have finished moving memory, search, and grow;
//! 10. split frames that are partly in use, where the configuration allows it, and grow;
//! 11. report that memory has run out.
//!
//! Memory outside of the heaps climbs a shorter one ([`climb_dedicated`]).
//!
//! A rung that fails leaves everything as usable as before (invariant A5). No lock is held between
//! rungs, and none across a driver call, a wait, a reclaimer or an observer.

use crate::allocator::Allocator;
use crate::backing::growth::growth_bytes;
use crate::backing::paged::dedicated::recycle_deferred_releases;
use crate::backing::paged::grow::grow_paged;
use crate::backing::paged::lend::lend;
use crate::backing::paged::split::{Outcome, split_frames};
use crate::backing::segments::{grow_segment, release_where};
use crate::backing::trim::trim_idle_pools;
use crate::backing::trim::{synchronize_free, take_stuck_back, trim_paged};
use crate::config::CrossStream;
use crate::core::limits::Refusal;
use crate::core::pools::Which;
use crate::cross_stream::{reuse_of_others, synchronize_pending, wait_for_other};
use crate::error::AllocError;
use crate::pools::{awaited_launches, poll_launches, refuse_unannounced_capture, wait_for_launched};
use crate::recovery::oom::report::Reclaimed;
use crate::recovery::oom::{Tried, out_of_memory};
use crate::recovery::reclaim::ask_reclaimers;
use crate::types::{Granted, PoolId, Request};

/// The name under which reports count what the driver's own pools gave back.
const DRIVER_POOLS: &str = "the driver's memory pools";

/// The result of a rung: the memory granted, or `None` if the rung did not serve the request.
type Rung = Result<Option<Granted>, AllocError>;

/// Serves a request that no cached block of its own stream serves, by the rungs of the ladder in
/// turn.
#[cold]
#[inline(never)]
pub(crate) fn climb(allocator: &Allocator, request: &Request) -> Result<Granted, AllocError> {
    refuse_unannounced_capture(allocator, request.stream)?;
    allocator.device().settle_graphs();
    poll_launches(allocator)?;
    let mut tried = Tried::default();
    match climb_rungs(allocator, request, &mut tried)? {
        Some(granted) => Ok(granted),
        None => Err(out_of_memory(allocator, request, tried)),
    }
}

fn climb_rungs(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    if let Some(granted) = cross_streams(allocator, request)? {
        return Ok(Some(granted));
    }
    if let Some(granted) = try_grow(allocator, request, tried)? {
        return Ok(Some(granted));
    }
    if let Some(granted) = take_lent_by_pools(allocator, request) {
        return Ok(Some(granted));
    }
    if let Some(granted) = lend_and_grow(allocator, request, tried, false)? {
        return Ok(Some(granted));
    }
    if allocator.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
        allocator.state().shared().counters.events.num_oom_rejections += 1;
        return Ok(None);
    }
    let later: [fn(&Allocator, &Request, &mut Tried) -> Rung; 9] = [
        wait_for_pending,
        wait_for_another_stream,
        release_and_grow,
        |allocator, request, tried| lend_and_grow(allocator, request, tried, true),
        trim_driver_pools,
        trim_others_and_grow,
        reclaim,
        wait_for_others,
        split_and_grow,
    ];
    for rung in later {
        if let Some(granted) = rung(allocator, request, tried)? {
            return Ok(Some(granted));
        }
    }
    Ok(None)
}

fn cross_streams(allocator: &Allocator, request: &Request) -> Rung {
    if allocator.config().cross_stream == CrossStream::Off {
        return Ok(None);
    }
    match reuse_of_others(allocator, request)? {
        None if allocator.config().cross_stream == CrossStream::Wait => wait_for_other(allocator, request),
        served => Ok(served),
    }
}

fn try_grow(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    let growth = match allocator.paged_granule_for(request).map(|_| grow_paged(allocator, request)).transpose()? {
        None => grow_segment(allocator, request)?,
        Some(Err(Refusal::Addresses)) => grow_segment(allocator, request)?.map_err(|_| Refusal::Addresses),
        Some(mapped) => mapped,
    };
    Ok(growth.map_err(|refusal| tried.refusal = Some(refusal)).ok())
}

/// Takes a block of a private pool that lends on OOM, unless a graph may use it. A request for a
/// private pool itself is not served from other pools.
fn take_lent_by_pools(allocator: &Allocator, request: &Request) -> Option<Granted> {
    if request.pool.is_private() {
        return None;
    }
    let mut guard = allocator.state().lock();
    let lenders = guard.pools.lenders();
    let pools: Vec<PoolId> = lenders.flat_map(|private| private.lent(request.pool.kind())).collect();
    pools.into_iter().find_map(|pool| guard.take_lent(request, pool))
}

/// Takes memory of idle graphs, as much as the request lacks. A request for a segment is served by
/// the device, so the memory goes back there. Waits for launches under way only if it `waits`.
fn lend_and_grow(allocator: &Allocator, request: &Request, tried: &mut Tried, waits: bool) -> Rung {
    while tried.refusal != Some(Refusal::Addresses) {
        let mut guard = allocator.state().lock();
        let lacking = guard.lacking_bytes(request);
        let bytes = lacking.unwrap_or_else(|| growth_bytes(allocator, &guard, request));
        drop(guard);
        let lent = lend(allocator, bytes, waits)?;
        if lent == 0 {
            break;
        }
        if allocator.paged_granule_for(request).is_none() {
            tried.released += trim_paged(allocator, allocator.memory_reserved().saturating_sub(lent))?;
        }
        if let Some(granted) = try_grow(allocator, request, tried)? {
            return Ok(Some(granted));
        }
    }
    Ok(None)
}

fn wait_for_pending(allocator: &Allocator, request: &Request, _: &mut Tried) -> Rung {
    if !synchronize_pending(allocator, Which::All)? {
        return Ok(None);
    }
    search_again(allocator, request)
}

fn wait_for_another_stream(allocator: &Allocator, request: &Request, _: &mut Tried) -> Rung {
    if allocator.config().cross_stream == CrossStream::Off { Ok(None) } else { wait_for_other(allocator, request) }
}

fn release_and_grow(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    allocator.device().settle();
    let launched = awaited_launches(allocator, None);
    wait_for_launched(allocator, &launched)?;
    tried.released += release_where(allocator, |core| core.whole_segments(Which::Unpromised))?;
    synchronize_free(allocator, Which::All)?;
    tried.released += release_granules_for(allocator, request, tried)?;
    allocator.state().shared().counters.events.num_alloc_retries += 1;
    match try_grow(allocator, request, tried)? {
        None => release_idle_pools_and_grow(allocator, request, tried),
        served => Ok(served),
    }
}

fn release_idle_pools_and_grow(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    loop {
        let shared = allocator.state().shared();
        let target = shared.reserved().saturating_sub(growth_bytes(allocator, &shared, request));
        drop(shared);
        let spares = || allocator.state().shared().paged().map_or(0, |paged| paged.spares.granules());
        let before = spares();
        let released = trim_idle_pools(allocator, target)?;
        // Frames of the reserve do not go back.
        if released == 0 && spares() <= before {
            return Ok(None);
        }
        tried.released += released;
        if let Some(granted) = try_grow(allocator, request, tried)? {
            return Ok(Some(granted));
        }
    }
}

/// Gives free granules back to the device where the request needs that. A request for mapped memory
/// does not, because granules move to it anyway, but for stuck ones, which are taken back here.
/// Only a request that lacks addresses, or one for a segment, into which granules cannot move,
/// makes granules go.
fn release_granules_for(allocator: &Allocator, request: &Request, tried: &Tried) -> Result<u64, AllocError> {
    if allocator.paged_granule_for(request).is_some() && tried.refusal != Some(Refusal::Addresses) {
        if let Err(error) = take_stuck_back(allocator) {
            tracing::debug!(%error, "mappings that a failed call left behind are stuck still");
        }
        return Ok(0);
    }
    trim_paged(allocator, 0)
}

/// Has the driver give back memory that its stream-ordered pool and its graphs keep unused, which
/// other parts of the process used. Does not help where our own limit refused. An error is no
/// reason to fail: the request is refused for lack of memory.
fn trim_driver_pools(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    if !matches!(tried.refusal, Some(Refusal::Device | Refusal::Headroom)) {
        return Ok(None);
    }
    let driver = allocator.device().driver();
    let free = || allocator.device().memory_info().map_or(0, |memory| memory.free);
    let before = free();
    for trimmed in [driver.trim_pool(0), driver.trim_graph_memory()] {
        if let Err(error) = trimmed {
            tracing::debug!(%error, "the driver's own pools could not be trimmed");
        }
    }
    let bytes = free().saturating_sub(before);
    if bytes == 0 {
        return Ok(None);
    }
    tried.reclaimers.push(Reclaimed { name: DRIVER_POOLS.to_owned(), bytes, why: None });
    try_grow(allocator, request, tried)
}

/// Has other allocators of the device give back what they cache. Does not help where our own limit
/// refused.
fn trim_others_and_grow(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    while !matches!(tried.refusal, Some(Refusal::Limit) | None) {
        let bytes = growth_bytes(allocator, &allocator.state().shared(), request);
        if !tried.ask_others(allocator, bytes) {
            break;
        }
        if let Some(granted) = try_grow(allocator, request, tried)? {
            return Ok(Some(granted));
        }
    }
    Ok(None)
}

fn reclaim(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    let mut reclaimers = ask_reclaimers(allocator, request);
    while reclaimers.ask() {
        synchronize_pending(allocator, Which::All)?;
        if let Some(granted) = search_again(allocator, request)? {
            return Ok(Some(granted));
        }
        if let Some(granted) = release_and_grow(allocator, request, tried)? {
            return Ok(Some(granted));
        }
    }
    tried.reclaimers.extend(reclaimers.into_answers());
    Ok(None)
}

/// Waits until other threads have finished moving memory or giving it back, and tries again.
/// Meanwhile such memory is neither in a heap nor on the device, so the earlier searches may have
/// missed it.
fn wait_for_others(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    if allocator.paged_granule_for(request).is_none() {
        return Ok(None);
    }
    allocator.gate()?.wait();
    recycle_deferred_releases(allocator, true)?;
    if let Some(granted) = search_again(allocator, request)? {
        return Ok(Some(granted));
    }
    try_grow(allocator, request, tried)
}

/// Splits frames and grows, until that serves the request or no more frames can be split.
fn split_and_grow(allocator: &Allocator, request: &Request, tried: &mut Tried) -> Rung {
    if allocator.paged_granule_for(request).is_none() || tried.refusal == Some(Refusal::Addresses) {
        return Ok(None);
    }
    let mut has_trimmed = false;
    loop {
        match split_frames(allocator, request)? {
            Outcome::Split => {
                if let Some(granted) = try_grow(allocator, request, tried)? {
                    return Ok(Some(granted));
                }
                has_trimmed = false;
            }
            // Free frames that are larger than a granule may be all the memory that is left.
            Outcome::NoRoom if !has_trimmed => {
                has_trimmed = true;
                tried.released += trim_paged(allocator, 0)?;
                // The addresses that the request would get went back with them.
                if let Some(granted) = try_grow(allocator, request, tried)? {
                    return Ok(Some(granted));
                }
            }
            Outcome::NoRoom | Outcome::Nothing => return Ok(None),
        }
    }
}

/// Searches once more after something may have become free, in pools that lend, too.
fn search_again(allocator: &Allocator, request: &Request) -> Rung {
    let mut guard = allocator.state().lock();
    if let Some(granted) = guard.take_own(request) {
        return Ok(Some(granted));
    }
    drop(guard);
    if allocator.config().cross_stream != CrossStream::Off
        && let Some(granted) = reuse_of_others(allocator, request)?
    {
        return Ok(Some(granted));
    }
    Ok(take_lent_by_pools(allocator, request))
}

/// Serves a request outside of the heaps by calling `attempt` until it succeeds. Between attempts
/// it makes room as the ladder does: it gives unused memory back to the device, waiting for streams
/// where needed, and runs reclaimers. `tried` says what the request is for.
pub(crate) fn climb_dedicated<T>(
    allocator: &Allocator,
    request: &Request,
    mut tried: Tried,
    mut take: impl FnMut() -> Result<Result<T, Refusal>, AllocError>,
) -> Result<T, AllocError> {
    let mut attempt = |tried: &mut Tried| -> Result<Option<T>, AllocError> {
        Ok(take()?.map_err(|refusal| tried.refusal = Some(refusal)).ok())
    };
    if let Some(served) = attempt(&mut tried)? {
        return Ok(served);
    }
    // The calls that make room would break the capture.
    refuse_unannounced_capture(allocator, request.stream)?;
    if tried.refusal != Some(Refusal::Addresses)
        && lend(allocator, request.size, false)? > 0
        && let Some(served) = attempt(&mut tried)?
    {
        return Ok(served);
    }
    if allocator.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
        allocator.state().shared().counters.events.num_oom_rejections += 1;
        return Err(out_of_memory(allocator, request, tried));
    }
    let mut reclaimers = ask_reclaimers(allocator, request);
    loop {
        // Addresses come back only where nothing is mapped any more.
        let lacks_addresses = tried.refusal == Some(Refusal::Addresses);
        let target = if lacks_addresses { 0 } else { may_stay_beside(allocator, request.size) };
        tried.released += allocator.trim_to(target)?;
        allocator.state().shared().counters.events.num_alloc_retries += 1;
        if let Some(served) = attempt(&mut tried)? {
            return Ok(served);
        }
        if !lacks_addresses && lend(allocator, request.size, true)? > 0 {
            if let Some(served) = attempt(&mut tried)? {
                return Ok(served);
            }
            // What takes no frames from here finds them on the device.
            tried.released += allocator.trim_to(target)?;
            if let Some(served) = attempt(&mut tried)? {
                return Ok(served);
            }
        }
        while tried.refusal != Some(Refusal::Limit) && tried.ask_others(allocator, request.size) {
            if let Some(served) = attempt(&mut tried)? {
                return Ok(served);
            }
        }
        if !reclaimers.ask() {
            // Memory that other threads were moving was on no list when it was looked for.
            allocator.gate()?.wait();
            return attempt(&mut tried)?.ok_or_else(|| {
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
    let on_device = reserved.saturating_add(free).saturating_sub(allocator.headroom());
    allocator.limit().unwrap_or(u64::MAX).min(on_device).min(reserved).saturating_sub(bytes)
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::{Code, Device, Operation};
    use aquifer_sim::{Fault, SimConfig, SimDriver};

    use super::*;
    use crate::config::Config;

    const MIB: u64 = 1 << 20;

    fn allocator(sim: &std::sync::Arc<SimDriver>, config: &str) -> Allocator {
        Allocator::new(&Device::new(sim.clone()), config.parse::<Config>().unwrap()).unwrap()
    }

    fn refused(allocator: &Allocator, bytes: u64) -> Vec<Reclaimed> {
        match allocator.alloc_bytes(bytes, allocator.device().default_stream()) {
            Err(AllocError::OutOfMemory(report)) => report.reclaimers.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_the_drivers_own_pools_keep_serves_a_request() {
        for config in ["", "backing:segments", "headroom_mb:8"] {
            let sim = SimDriver::new(SimConfig::new(64 * MIB));
            let allocator = allocator(&sim, config);
            sim.set_kept_bytes(16 * MIB, 16 * MIB);
            let block = allocator.alloc_bytes(48 * MIB, allocator.device().default_stream());
            assert!(block.is_ok(), "{config}: {block:?}");
        }
    }

    #[test]
    fn a_report_counts_what_the_drivers_own_pools_gave_back() {
        let sim = SimDriver::new(SimConfig::new(64 * MIB));
        let allocator = allocator(&sim, "");
        sim.set_kept_bytes(16 * MIB, 8 * MIB);
        let reclaimers = refused(&allocator, 80 * MIB);
        assert_eq!(reclaimers, [Reclaimed { name: DRIVER_POOLS.to_owned(), bytes: 24 * MIB, why: None }]);
        assert_eq!(refused(&allocator, 80 * MIB), [], "nothing was there");
    }

    #[test]
    fn the_drivers_own_pools_keep_their_memory_where_our_limit_refused() {
        let sim = SimDriver::new(SimConfig::new(64 * MIB));
        let allocator = allocator(&sim, "limit_mb:32");
        sim.set_kept_bytes(16 * MIB, 0);
        assert_eq!(refused(&allocator, 40 * MIB), []);
        assert_eq!(allocator.device().driver_calls().of(Operation::TrimPool), 0);
    }

    #[test]
    fn a_pool_that_cannot_be_trimmed_does_not_hide_that_memory_ran_out() {
        let sim = SimDriver::new(SimConfig::new(64 * MIB));
        let allocator = allocator(&sim, "");
        sim.set_kept_bytes(16 * MIB, 8 * MIB);
        sim.inject(Fault::Nth { operation: Some(Operation::TrimPool), nth: 1, code: Code::NOT_SUPPORTED });
        let reclaimers = refused(&allocator, 80 * MIB);
        assert_eq!(reclaimers.first().map(|reclaimed| reclaimed.bytes), Some(8 * MIB));
    }
}
