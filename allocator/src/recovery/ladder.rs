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
//! Memory outside of the heaps climbs the same one ([`climb_dedicated`]), but for the rungs that
//! search blocks.
//!
//! A rung that fails leaves everything as usable as before (invariant A5). No lock is held between
//! rungs, and none across a driver call, a wait, a reclaimer or an observer.

use crate::allocator::Allocator;
use crate::backing::growth::Growth;
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

/// The result of a rung: the memory, or `None` if the rung did not serve the request.
type Rung<T> = Result<Option<T>, AllocError>;

/// A request on the ladder.
struct Climb<'a, T> {
    allocator: &'a Allocator,
    request: &'a Request,
    tried: Tried,
    /// Takes memory from the device, or moves it, unless something refuses.
    take: &'a mut dyn FnMut() -> Result<Result<T, Refusal>, AllocError>,
    /// Makes the memory of a block, if blocks of the heaps serve the request.
    of_block: Option<fn(Granted) -> T>,
    /// True if granules move to the request. Otherwise they stand in its way.
    takes_granules: bool,
}

/// Serves a request that no cached block of its own stream serves, by the rungs of the ladder in
/// turn.
#[cold]
#[inline(never)]
pub(crate) fn climb(allocator: &Allocator, request: &Request) -> Result<Granted, AllocError> {
    let takes_granules = allocator.paged_granule_for(request).is_some();
    let take = &mut || grow(allocator, request, takes_granules);
    let (tried, of_block) = (Tried::default(), Some((|granted| granted) as fn(Granted) -> Granted));
    Climb { allocator, request, tried, take, of_block, takes_granules }.run()
}

/// Serves a request outside of the heaps, as `take` does. `takes_granules` says whether it also
/// takes memory that is free here, and `tried` what the request is for.
pub(crate) fn climb_dedicated<T>(
    allocator: &Allocator,
    request: &Request,
    tried: Tried,
    takes_granules: bool,
    mut take: impl FnMut() -> Result<Result<T, Refusal>, AllocError>,
) -> Result<T, AllocError> {
    let mut climb = Climb { allocator, request, tried, take: &mut take, of_block: None, takes_granules };
    // What is mapped already takes no call that a capture refuses.
    match climb.grow()? {
        Some(served) => Ok(served),
        None => climb.run(),
    }
}

fn grow(allocator: &Allocator, request: &Request, takes_granules: bool) -> Result<Growth, AllocError> {
    if !takes_granules {
        return grow_segment(allocator, request);
    }
    match grow_paged(allocator, request)? {
        Err(Refusal::Addresses) => Ok(grow_segment(allocator, request)?.map_err(|_| Refusal::Addresses)),
        mapped => Ok(mapped),
    }
}

impl<T> Climb<'_, T> {
    fn run(mut self) -> Result<T, AllocError> {
        refuse_unannounced_capture(self.allocator, self.request.stream)?;
        self.allocator.device().settle_graphs();
        poll_launches(self.allocator)?;
        match self.rungs()? {
            Some(served) => Ok(served),
            None => Err(out_of_memory(self.allocator, self.request, self.tried)),
        }
    }

    fn rungs(&mut self) -> Rung<T> {
        let first = [Self::cross_streams, Self::grow_at_first, Self::take_lent_by_pools, Self::lend_and_grow];
        if let Some(served) = self.first_that_serves(&first)? {
            return Ok(Some(served));
        }
        if self.allocator.config().fail_fast && self.tried.refusal == Some(Refusal::Limit) {
            self.allocator.state().shared().counters.events.num_oom_rejections += 1;
            return Ok(None);
        }
        self.first_that_serves(&[
            Self::wait_for_pending,
            Self::wait_for_another_stream,
            Self::release_and_grow,
            Self::lend_and_grow_after_launches,
            Self::trim_driver_pools,
            Self::trim_others_and_grow,
            Self::reclaim,
            Self::wait_for_others,
            Self::split_and_grow,
        ])
    }

    fn first_that_serves(&mut self, rungs: &[fn(&mut Self) -> Rung<T>]) -> Rung<T> {
        rungs.iter().find_map(|rung| rung(self).transpose()).transpose()
    }

    fn cross_streams(&mut self) -> Rung<T> {
        match self.reuse_of_others()? {
            None if self.allocator.config().cross_stream == CrossStream::Wait => self.wait_for_another_stream(),
            served => Ok(served),
        }
    }

    fn reuse_of_others(&mut self) -> Rung<T> {
        let Some(of_block) = self.of_block.filter(|_| self.allocator.config().cross_stream != CrossStream::Off) else {
            return Ok(None);
        };
        Ok(reuse_of_others(self.allocator, self.request)?.map(of_block))
    }

    /// Memory outside of the heaps was tried before the ladder.
    fn grow_at_first(&mut self) -> Rung<T> {
        if self.tried.refusal.is_some() { Ok(None) } else { self.grow() }
    }

    fn grow(&mut self) -> Rung<T> {
        Ok((self.take)()?.map_err(|refusal| self.tried.refusal = Some(refusal)).ok())
    }

    /// Takes a block of a private pool that lends on OOM, unless a graph may use it. A request for a
    /// private pool itself is not served from other pools.
    fn take_lent_by_pools(&mut self) -> Rung<T> {
        let request = self.request;
        let Some(of_block) = self.of_block.filter(|_| !request.pool.is_private()) else { return Ok(None) };
        let mut guard = self.allocator.state().lock();
        let lenders = guard.pools.lenders();
        let pools: Vec<PoolId> = lenders.flat_map(|private| private.lent(request.pool.kind())).collect();
        Ok(pools.into_iter().find_map(|pool| guard.take_lent(request, pool)).map(of_block))
    }

    fn lend_and_grow(&mut self) -> Rung<T> {
        self.lend(false)
    }

    fn lend_and_grow_after_launches(&mut self) -> Rung<T> {
        self.lend(true)
    }

    /// Takes memory of idle graphs, as much as the request lacks. A request to which granules do not
    /// move is served by the device, so the memory goes back there. Waits for launches under way
    /// only if it `waits`.
    fn lend(&mut self, waits: bool) -> Rung<T> {
        let allocator = self.allocator;
        while !self.lacks_addresses() {
            let lacking = self.of_block.and_then(|_| allocator.state().lock().lacking_bytes(self.request));
            let lent = lend(allocator, lacking.unwrap_or_else(|| self.growth()), waits)?;
            if lent == 0 {
                break;
            }
            if !self.takes_granules {
                self.tried.released += trim_paged(allocator, allocator.memory_reserved().saturating_sub(lent))?;
            }
            if let Some(served) = self.grow()? {
                return Ok(Some(served));
            }
        }
        Ok(None)
    }

    fn wait_for_pending(&mut self) -> Rung<T> {
        if synchronize_pending(self.allocator, Which::All)? { self.search_again() } else { Ok(None) }
    }

    fn wait_for_another_stream(&mut self) -> Rung<T> {
        let Some(of_block) = self.of_block.filter(|_| self.allocator.config().cross_stream != CrossStream::Off) else {
            return Ok(None);
        };
        Ok(wait_for_other(self.allocator, self.request)?.map(of_block))
    }

    fn release_and_grow(&mut self) -> Rung<T> {
        let allocator = self.allocator;
        allocator.device().settle();
        wait_for_launched(allocator, &awaited_launches(allocator, None))?;
        self.tried.released += release_where(allocator, |core| core.whole_segments(Which::NotForGraphs))?;
        synchronize_free(allocator, Which::All)?;
        self.tried.released += self.release_granules()?;
        allocator.state().shared().counters.events.num_alloc_retries += 1;
        match self.grow()? {
            None => self.release_idle_pools_and_grow(),
            served => Ok(served),
        }
    }

    fn release_idle_pools_and_grow(&mut self) -> Rung<T> {
        loop {
            let target = self.allocator.memory_reserved().saturating_sub(self.growth());
            let spares = || self.allocator.state().shared().paged().spares.granules();
            let before = spares();
            let released = trim_idle_pools(self.allocator, target)?;
            // Frames of the reserve do not go back.
            if released == 0 && spares() <= before {
                return Ok(None);
            }
            self.tried.released += released;
            if let Some(served) = self.grow()? {
                return Ok(Some(served));
            }
        }
    }

    /// Gives free granules back to the device where they stand in the way: where the request lacks
    /// addresses, or granules do not move to it. Elsewhere only stuck ones are taken back here.
    fn release_granules(&mut self) -> Result<u64, AllocError> {
        if self.takes_granules && !self.lacks_addresses() {
            if let Err(error) = take_stuck_back(self.allocator) {
                tracing::debug!(%error, "mappings that a failed call left behind are stuck still");
            }
            return Ok(0);
        }
        trim_paged(self.allocator, 0)
    }

    /// Has the driver give back memory that its stream-ordered pool and its graphs keep unused,
    /// which other parts of the process used. Does not help where our own limit refused. An error is
    /// no reason to fail: the request is refused for lack of memory.
    fn trim_driver_pools(&mut self) -> Rung<T> {
        if !matches!(self.tried.refusal, Some(Refusal::Device | Refusal::Headroom)) {
            return Ok(None);
        }
        let (device, driver) = (self.allocator.device(), self.allocator.device().driver());
        let free = || device.memory_info().map_or(0, |memory| memory.free);
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
        self.tried.reclaimers.push(Reclaimed { name: DRIVER_POOLS.to_owned(), bytes, why: None });
        self.grow()
    }

    /// Has other allocators of the device give back what they cache. Does not help where our own
    /// limit refused.
    fn trim_others_and_grow(&mut self) -> Rung<T> {
        while !matches!(self.tried.refusal, Some(Refusal::Limit) | None) {
            let bytes = self.growth();
            if !self.tried.ask_others(self.allocator, bytes) {
                break;
            }
            if let Some(served) = self.grow()? {
                return Ok(Some(served));
            }
        }
        Ok(None)
    }

    fn reclaim(&mut self) -> Rung<T> {
        let mut reclaimers = ask_reclaimers(self.allocator, self.request);
        while reclaimers.ask() {
            synchronize_pending(self.allocator, Which::All)?;
            if let Some(served) = self.search_again()? {
                return Ok(Some(served));
            }
            if let Some(served) = self.release_and_grow()? {
                return Ok(Some(served));
            }
        }
        self.tried.reclaimers.extend(reclaimers.into_answers());
        Ok(None)
    }

    /// Waits until other threads have finished moving memory or giving it back, and tries again.
    /// Meanwhile such memory is neither in a heap nor on the device, so the earlier searches may
    /// have missed it.
    fn wait_for_others(&mut self) -> Rung<T> {
        if self.allocator.granule_bytes().is_none() {
            return Ok(None);
        }
        self.allocator.gate()?.wait();
        recycle_deferred_releases(self.allocator, true)?;
        match self.search_again()? {
            None => self.grow(),
            served => Ok(served),
        }
    }

    /// Splits frames and grows, until that serves the request or no more frames can be split.
    fn split_and_grow(&mut self) -> Rung<T> {
        if self.of_block.is_none() || !self.takes_granules || self.lacks_addresses() {
            return Ok(None);
        }
        let mut has_trimmed = false;
        loop {
            match split_frames(self.allocator, self.request)? {
                Outcome::Split => has_trimmed = false,
                // Free frames that are larger than a granule may be all the memory that is left.
                Outcome::NoRoom if !has_trimmed => {
                    has_trimmed = true;
                    self.tried.released += trim_paged(self.allocator, 0)?;
                }
                Outcome::NoRoom | Outcome::Nothing => return Ok(None),
            }
            // The addresses that the request would get may have gone back.
            if let Some(served) = self.grow()? {
                return Ok(Some(served));
            }
        }
    }

    /// Searches once more after something may have become free, in pools that lend, too.
    fn search_again(&mut self) -> Rung<T> {
        let Some(of_block) = self.of_block else { return Ok(None) };
        if let Some(granted) = self.allocator.state().lock().take_own(self.request) {
            return Ok(Some(of_block(granted)));
        }
        match self.reuse_of_others()? {
            None => self.take_lent_by_pools(),
            served => Ok(served),
        }
    }

    fn lacks_addresses(&self) -> bool {
        self.tried.refusal == Some(Refusal::Addresses)
    }

    /// Bytes that the device must give if nothing here helps.
    fn growth(&self) -> u64 {
        self.tried.growth(self.allocator, &self.allocator.state().shared(), self.request)
    }
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
