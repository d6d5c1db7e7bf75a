//! What happens when no cached block serves a request: the out-of-memory ladder.
//!
//! Each rung is a function that serves the request or does not, and each that frees something is followed by another search,
//! because what it freed may fit although no more can be had from the device. The order is PyTorch's, with rungs added:
//!
//! 1. blocks of other streams that are done (`cross_stream`), or with a wait where the policy says so;
//! 2. garbage collection by age;
//! 3. **grow**: a segment from the device;
//! 4. private pools that lend on OOM;
//! 5. release oversize segments, and grow;
//! 6. wait on the host for blocks that other streams still use;
//! 7. make the stream wait for another stream's block, unless blocks never cross streams;
//! 8. release everything unused, mapped memory where it stands in the way, and grow;
//! 9. reclaimers by priority, each followed by a search, a release and a growth, and all again as long as they free something
//!    (`reclaim.rs`);
//! 10. wait for memory that is in the hands of other threads, and grow;
//! 11. the report.
//!
//! No lock is held between rungs, and none across a driver call, a wait, a reclaimer or an observer.

use crate::allocator::Allocator;
use crate::backing::segments::{Growth, Refusal};
use crate::config::CrossStream;
use crate::error::AllocError;
use crate::heap::kind_of;
use crate::recovery::oom::Tried;
use crate::shell::core::{Granted, Request};

/// What a rung came to: the request served, or not.
type Rung = Result<Option<Granted>, AllocError>;

impl Allocator {
    /// Serves a request that no cached block of its own stream serves.
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
        if let Some(granted) = self.cross_streams(request)? {
            return Ok(Some(granted));
        }
        self.collect_garbage()?;
        if let Some(granted) = self.try_grow(request, tried)? {
            return Ok(Some(granted));
        }
        if self.config().fail_fast && tried.refusal == Some(Refusal::Limit) {
            self.shell().count(|counters| &counters.num_oom_rejections);
            return Ok(None);
        }
        let later = [
            Self::take_lent_by_pools,
            Self::release_oversize_and_grow,
            Self::wait_for_pending,
            Self::wait_for_lender,
            Self::release_and_grow,
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

    fn cross_streams(&self, request: &Request) -> Rung {
        if self.config().cross_stream == CrossStream::Off {
            return Ok(None);
        }
        let mut whole = self.shell().whole();
        if self.grows_instead_of_borrowing(&mut whole, request) {
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

    /// Blocks of private pools that lend on OOM, unless a graph may use them. A request for a private pool itself is not served
    /// from others.
    fn take_lent_by_pools(&self, request: &Request, _: &mut Tried) -> Rung {
        let mut whole = self.shell().whole();
        if request.pool >= 2 {
            return Ok(None);
        }
        let lenders = whole.pools.private.iter();
        let pools: Vec<u16> = lenders.flat_map(|private| private.lent(kind_of(request.pool))).collect();
        let served = pools.into_iter().find_map(|pool| whole.take_own(&Request { pool, ..*request }));
        Ok(served)
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
        if !self.synchronize_pending(|_| true)? {
            return Ok(None);
        }
        self.search_again(request)
    }

    fn wait_for_lender(&self, request: &Request, _: &mut Tried) -> Rung {
        if self.config().cross_stream == CrossStream::Off { Ok(None) } else { self.borrow_waiting(request) }
    }

    fn release_and_grow(&self, request: &Request, tried: &mut Tried) -> Rung {
        self.device().settle();
        let launched = self.shell().core().awaited_launches(|_| true);
        self.wait_for_launched(&launched)?;
        tried.released += self.release_where(|whole| whole.releasable())?;
        self.synchronize_free(|_| true)?;
        tried.released += self.release_granules_for(request, tried)?;
        self.shell().count(|counters| &counters.num_alloc_retries);
        self.try_grow(request, tried)
    }

    /// Granules move by themselves, but for those that are stuck. They do not move into segments, and those that are mapped keep addresses
    /// from others.
    fn release_granules_for(&self, request: &Request, tried: &Tried) -> Result<u64, AllocError> {
        if self.paged_granule_for(request).is_some() && tried.refusal != Some(Refusal::Addresses) {
            if let Err(error) = self.take_stuck_back() {
                tracing::debug!(%error, "mappings that a failed call left behind are stuck still");
            }
            return Ok(0);
        }
        let pools = self.shell().whole().unpromised_pools();
        self.trim_paged(0, &|pool| pools.contains(&pool))
    }

    fn reclaim(&self, request: &Request, tried: &mut Tried) -> Rung {
        let mut reclaimers = self.ask_reclaimers(request);
        while let Some(freed) = reclaimers.ask() {
            tried.reclaimed = tried.reclaimed.saturating_add(freed);
            self.synchronize_pending(|_| true)?;
            if let Some(granted) = self.search_again(request)? {
                return Ok(Some(granted));
            }
            if let Some(granted) = self.release_and_grow(request, tried)? {
                return Ok(Some(granted));
            }
        }
        Ok(None)
    }

    /// Memory that other threads move, or give back, is in nobody's heap meanwhile, nor on the device. The search that found none
    /// may have been during such an operation, so it is worth another one after those have ended.
    fn wait_for_others(&self, request: &Request, tried: &mut Tried) -> Rung {
        if self.paged_granule_for(request).is_none() {
            return Ok(None);
        }
        self.gate().wait();
        if let Some(granted) = self.search_again(request)? {
            return Ok(Some(granted));
        }
        self.try_grow(request, tried)
    }

    /// Another search after something may have become free.
    fn search_again(&self, request: &Request) -> Rung {
        let mut whole = self.shell().whole();
        if let Some(granted) = whole.take_own(request) {
            return Ok(Some(granted));
        }
        if self.config().cross_stream == CrossStream::Off { Ok(None) } else { self.borrow(request, whole) }
    }
}
