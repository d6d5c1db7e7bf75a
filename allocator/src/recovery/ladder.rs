//! The out-of-memory ladder: the sequence of attempts to serve a request that no cached block serves.
//!
//! Each attempt, a *rung*, is a function that serves the request or does not. A rung that frees something is followed by another search,
//! of the pools that lend, too, because the freed memory may fit although the device has no more to give. The order is PyTorch's, with
//! rungs added:
//!
//! 1. take a block of another stream that is done (`cross_stream`), or wait for one where the policy says so;
//! 2. collect garbage by age;
//! 3. **grow**: take memory from the device (mapped memory moves first, `backing/paged/grow.rs`);
//! 4. take a block of a private pool that lends on OOM;
//! 5. release oversize segments, and grow;
//! 6. wait on the host for blocks that other streams still use;
//! 7. make the stream wait for another stream's block, unless blocks never cross streams;
//! 8. release everything unused, mapped memory where it stands in the way, and grow;
//! 9. where the device refused, have the driver give back what its own pools keep unused, and grow;
//! 10. run the reclaimers by priority, each followed by a search, a release and a growth, and all of them again as long as they free
//!     something (`reclaim.rs`);
//! 11. wait until other threads have finished moving memory, search, and grow;
//! 12. report that memory has run out.
//!
//! A rung that fails leaves everything as usable as before (invariant A5). No lock is held between rungs, and none across a driver
//! call, a wait, a reclaimer or an observer.

use crate::allocator::Allocator;
use crate::backing::headroom::Refusal;
use crate::backing::segments::Growth;
use crate::config::CrossStream;
use crate::error::AllocError;
use crate::heap::kind_of;
use crate::pools::table::Which;
use crate::recovery::oom::Tried;
use crate::recovery::reclaim::Reclaimed;
use crate::shell::core::{Granted, Request};

/// The name under which reports count what the driver's own pools gave back.
const DRIVER_POOLS: &str = "the driver's memory pools";

/// The result of a rung: the memory granted, or `None` if the rung did not serve the request.
type Rung = Result<Option<Granted>, AllocError>;

impl Allocator {
    /// Serves a request that no cached block of its own stream serves, by the rungs of the ladder in turn.
    #[cold]
    #[inline(never)]
    pub(crate) fn climb(&self, request: &Request) -> Result<Granted, AllocError> {
        self.refuse_unannounced_capture(request.slot)?;
        self.poll_launches()?;
        let mut tried = Tried::default();
        match self.climb_rungs(request, &mut tried)? {
            Some(granted) => Ok(granted),
            None => Err(self.out_of_memory(request, tried)),
        }
    }

    fn climb_rungs(&self, request: &Request, tried: &mut Tried) -> Rung {
        if let Some(granted) = self.cross_streams(request, tried)? {
            return Ok(Some(granted));
        }
        self.collect_garbage()?;
        if let Some(granted) = self.try_grow(request, tried)? {
            self.shell().core().unborrowed += tried.instead_of_borrowing;
            return Ok(Some(granted));
        }
        if let Some(granted) = self.take_lent_by_pools(request) {
            return Ok(Some(granted));
        }
        if self.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
            self.shell().count(|counters| &counters.num_oom_rejections);
            return Ok(None);
        }
        let later = [
            Self::release_oversize_and_grow,
            Self::wait_for_pending,
            Self::wait_for_lender,
            Self::release_and_grow,
            Self::trim_driver_pools,
            Self::reclaim,
            Self::wait_for_others,
        ];
        for rung in later {
            if let Some(granted) = rung(self, request, tried)? {
                return Ok(Some(granted));
            }
        }
        Ok(None)
    }

    fn cross_streams(&self, request: &Request, tried: &mut Tried) -> Rung {
        if self.config().cross_stream == CrossStream::Off {
            return Ok(None);
        }
        let mut whole = self.shell().part(Some(request.slot));
        tried.instead_of_borrowing = self.growth_instead_of_borrowing(&mut whole, request);
        if tried.instead_of_borrowing > 0 {
            return Ok(None);
        }
        match self.borrow(request, whole)? {
            None if self.config().cross_stream == CrossStream::Wait => self.borrow_waiting(request),
            served => Ok(served),
        }
    }

    fn try_grow(&self, request: &Request, tried: &mut Tried) -> Rung {
        let growth = match self.paged_granule_for(request) {
            Some(_) => self.grow_paged(request)?,
            None => self.grow_segment(request)?,
        };
        match growth {
            Growth::Grown(granted) => Ok(Some(granted)),
            Growth::Refused(refusal) => {
                tried.refusal = Some(refusal);
                Ok(None)
            }
        }
    }

    /// Takes a block of a private pool that lends on OOM, unless a graph may use it. A request for a private pool itself is not served from
    /// other pools.
    fn take_lent_by_pools(&self, request: &Request) -> Option<Granted> {
        if request.pool >= 2 {
            return None;
        }
        let mut whole = self.shell().part(Some(request.slot));
        let lenders = whole.pools.lenders();
        let pools: Vec<u16> = lenders.flat_map(|private| private.lent(kind_of(request.pool))).collect();
        pools.into_iter().find_map(|pool| whole.take_own(&Request { pool, is_regular: false, ..*request }))
    }

    fn release_oversize_and_grow(&self, request: &Request, tried: &mut Tried) -> Rung {
        let mut sufficient = false;
        let released = self.release_where(|whole| match whole.oversize_to_release(request) {
            Some(chosen) => {
                let least = whole.classes.max_split_size().unwrap_or(0);
                let sum: u64 = chosen.iter().map(|place| whole.block(*place).size).sum();
                sufficient = sum >= request.size.max(least);
                chosen
            }
            None => Vec::new(),
        })?;
        tried.released += released;
        if sufficient { self.try_grow(request, tried) } else { Ok(None) }
    }

    fn wait_for_pending(&self, request: &Request, _: &mut Tried) -> Rung {
        if !self.synchronize_pending(Which::All)? {
            return Ok(None);
        }
        self.search_again(request)
    }

    fn wait_for_lender(&self, request: &Request, _: &mut Tried) -> Rung {
        if self.config().cross_stream == CrossStream::Off { Ok(None) } else { self.borrow_waiting(request) }
    }

    fn release_and_grow(&self, request: &Request, tried: &mut Tried) -> Rung {
        self.device().settle();
        let launched = self.shell().core().awaited_launches(None);
        self.wait_for_launched(&launched)?;
        tried.released += self.release_where(|whole| whole.releasable())?;
        self.synchronize_free(Which::All)?;
        tried.released += self.release_granules_for(request, tried)?;
        self.shell().count(|counters| &counters.num_alloc_retries);
        self.try_grow(request, tried)
    }

    /// Gives free granules back to the device where the request needs that. A request for mapped memory does not, because granules move to
    /// it anyway, but for stuck ones, which are taken back here. Only a request that lacks addresses, or one for a segment, into which
    /// granules cannot move, makes granules go.
    fn release_granules_for(&self, request: &Request, tried: &Tried) -> Result<u64, AllocError> {
        if self.paged_granule_for(request).is_some() && tried.refusal != Some(Refusal::Addresses) {
            if let Err(error) = self.take_stuck_back() {
                tracing::debug!(%error, "mappings that a failed call left behind are stuck still");
            }
            return Ok(0);
        }
        self.trim_paged(0)
    }

    /// Has the driver give back memory that its stream-ordered pool and its graphs keep unused, which other parts of
    /// the process used. Does not help where our own limit refused. An error is no reason to fail: the request is
    /// refused for lack of memory.
    fn trim_driver_pools(&self, request: &Request, tried: &mut Tried) -> Rung {
        if !matches!(tried.refusal, Some(Refusal::Device | Refusal::Headroom)) {
            return Ok(None);
        }
        let driver = self.device().driver();
        let free = || self.device().memory_info().map_or(0, |memory| memory.free);
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
        self.try_grow(request, tried)
    }

    fn reclaim(&self, request: &Request, tried: &mut Tried) -> Rung {
        let mut reclaimers = self.ask_reclaimers(request);
        while reclaimers.ask() {
            self.synchronize_pending(Which::All)?;
            if let Some(granted) = self.search_again(request)? {
                return Ok(Some(granted));
            }
            if let Some(granted) = self.release_and_grow(request, tried)? {
                return Ok(Some(granted));
            }
        }
        tried.reclaimers.extend(reclaimers.into_answers());
        Ok(None)
    }

    /// Waits until other threads have finished moving memory or giving it back, and tries again. Meanwhile such memory is neither in a heap
    /// nor on the device, so the earlier searches may have missed it.
    fn wait_for_others(&self, request: &Request, tried: &mut Tried) -> Rung {
        if self.paged_granule_for(request).is_none() {
            return Ok(None);
        }
        self.gate()?.wait();
        if let Some(granted) = self.search_again(request)? {
            return Ok(Some(granted));
        }
        self.try_grow(request, tried)
    }

    /// Searches once more after something may have become free, in pools that lend, too.
    fn search_again(&self, request: &Request) -> Rung {
        let mut whole = self.shell().part(Some(request.slot));
        if let Some(granted) = whole.take_own(request) {
            return Ok(Some(granted));
        }
        if self.config().cross_stream == CrossStream::Off {
            drop(whole);
        } else if let Some(granted) = self.borrow(request, whole)? {
            return Ok(Some(granted));
        }
        Ok(self.take_lent_by_pools(request))
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::sim::{Fault, SimConfig, SimDriver};
    use aquifer_device::{Code, Device, Operation};

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
