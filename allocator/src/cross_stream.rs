//! Reuse of free blocks by another stream than their owner's.
//!
//! A block may be used by stream S once its owner's timeline got to the block's tick and the host knows it, or once S's
//! later work is ordered after that tick. Both are learned without waiting. Making S wait couples streams, so it is done
//! only where the policy says so, or as a rung before OOM; it is counted and traced.
//!
//! A borrowed block stays in the arena of its region's home stream, and its handle refers to that arena; only a whole segment
//! that is done for everybody moves to the borrower's.
//!
//! This runs only when the stream's own free blocks at home do not serve a request, just before memory would be taken from the
//! device, and not for a stream that does so all the time, while memory of its own costs little. What it has away from home serves it first. Asking whether ticks are done may record an event on a stream, at most one each time.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::{DeviceError, ErrorKind, Timeline};

use crate::allocator::Allocator;
use crate::core::{Core, Granted, Place, Request};
use crate::error::AllocError;
use crate::heap::{Heap, Key, kind_of};
use crate::whole::Whole;

/// How many blocks of one owner are considered, smallest first.
const CANDIDATES: usize = 32;
/// A stream that borrows for more than one allocation in so many, and a few at the start, gets memory of its own instead,
const BORROW_SPACING: u64 = 16;
const BORROW_ADVANCE: u64 = 8;
/// as long as all such memory is at most this share of what is reserved, or so many bytes.
const OWN_SHARE: u64 = 128;
const OWN_LEAST: u64 = 32 << 20;

/// A block of another stream that would serve a request, if waited for.
struct Lender {
    timeline: Arc<Timeline>,
    after: u64,
}

impl Allocator {
    /// Polls the ticks that the given streams' blocks depend on. A stream that cannot be asked now is passed over.
    pub(crate) fn poll(&self, ticks: &[(Arc<Timeline>, u64)]) -> Result<(), AllocError> {
        for (timeline, after) in ticks {
            let n = after.saturating_sub(1);
            match timeline.cover(n).and_then(|()| timeline.is_done(n)) {
                Ok(_) => {}
                Err(error) if cannot_be_asked(&error) => {
                    tracing::debug!(%error, stream = timeline.id(), "a stream could not be asked how far it got");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whether a request gets memory of its own although its stream might borrow. Borrowing takes all locks each time, so a
    /// stream that keeps borrowing should not have to.
    pub(crate) fn grows_rather(&self, request: &Request) -> bool {
        let bytes = self.growth_bytes(request);
        let mut whole = self.shell().whole();
        let often = whole.try_arena(request.slot).is_some_and(|arena| {
            let searches: u64 = arena.heap.pools.iter().map(|pool| pool.searches).sum();
            arena.borrows >= BORROW_ADVANCE + searches / BORROW_SPACING
        });
        let sum = whole.unborrowed.saturating_add(bytes);
        let grows = often && sum <= (whole.reserved / OWN_SHARE).max(OWN_LEAST);
        whole.unborrowed += if grows { bytes } else { 0 };
        grows
    }

    /// Serves the request from blocks of other streams, and from strays of its own, without waiting.
    pub(crate) fn borrow(&self, request: &Request) -> Result<Option<Granted>, AllocError> {
        let mut whole = self.shell().whole();
        if let Some((_, place)) = whole.best_lent(request, |_, owner, _| owner == request.slot) {
            return Ok(Some(whole.take_lent(request, place)));
        }
        let ticks = whole.lendable(request);
        let nothing = whole.best_lent(request, |_, _, _| true).is_none();
        if nothing && ticks.is_empty() && !whole.has_strays() && whole.waiting.is_empty() {
            return Ok(None);
        }
        let own = whole.timeline(request.slot).cloned();
        drop(whole);
        self.poll(&ticks)?;
        let clock = own.map(|timeline| timeline.clock()).unwrap_or_default();
        let mut whole = self.shell().whole();
        whole.settle();
        whole.sweep_ordered(request.slot, &clock);
        if let Some(granted) = whole.take_own(request) {
            return Ok(Some(granted));
        }
        let ordered = |core: &Core, owner, after| core.is_known_done(owner, after) || after <= clock.of(owner);
        let Some((_, place)) = whole.best_lent(request, ordered) else { return Ok(None) };
        if whole.block(place).owner != request.slot {
            whole.counters().cross_stream_reuses.add(1);
        }
        Ok(Some(whole.take_lent(request, place)))
    }

    /// Serves the request from a block of another stream by making the request's stream wait for it.
    pub(crate) fn borrow_waiting(&self, request: &Request) -> Result<Option<Granted>, AllocError> {
        let whole = self.shell().whole();
        let Some(own) = whole.timeline(request.slot).cloned() else { return Ok(None) };
        let Some(lender) = whole.best_lent(request, |_, _, _| true).and_then(|(_, place)| whole.lender(place)) else {
            return Ok(None);
        };
        drop(whole);
        if let Err(error) = own.wait_for(&lender.timeline, lender.after.saturating_sub(1)) {
            return if cannot_be_asked(&error) { Ok(None) } else { Err(error.into()) };
        }
        let clock = own.clock();
        let mut whole = self.shell().whole();
        // Somebody may have taken it meanwhile; whatever is ordered now will do.
        let ordered = |core: &Core, owner, after| core.is_known_done(owner, after) || after <= clock.of(owner);
        let Some((_, place)) = whole.best_lent(request, ordered) else { return Ok(None) };
        whole.counters().cross_stream_reuses.add(1);
        whole.counters().cross_stream_waits.add(1);
        let granted = whole.take_lent(request, place);
        drop(whole);
        tracing::debug!(
            stream = request.slot,
            waits_for = lender.timeline.id(),
            bytes = request.size,
            "a stream was made to wait for another one to reuse its memory"
        );
        Ok(Some(granted))
    }
}

/// Whether a stream just cannot be asked or waited for at present: it is captured, or gone without a last event.
pub(crate) fn cannot_be_asked(error: &DeviceError) -> bool {
    matches!(error.kind, ErrorKind::Capture | ErrorKind::InvalidUse)
}

impl Whole {
    /// The ticks that would let other streams' fitting blocks, or anybody's strays, be used, where not known to be done.
    fn lendable(&self, request: &Request) -> Vec<(Arc<Timeline>, u64)> {
        let mut latest: BTreeMap<u32, u64> = BTreeMap::new();
        for heap in self.heaps() {
            for owner in heap.owners(request.pool) {
                let after = latest_tick(heap, request, owner).unwrap_or(0);
                latest.entry(owner).and_modify(|tick| *tick = after.max(*tick)).or_insert(after);
            }
        }
        latest.retain(|&owner, after| !self.is_known_done(owner, *after));
        latest.into_iter().filter_map(|(owner, after)| Some((self.timeline(owner)?.clone(), after))).collect()
    }

    /// Sends strays that are done home.
    pub(crate) fn settle(&mut self) {
        let (core, arenas) = self.core_and_arenas();
        for arena in arenas {
            for (pool, change) in arena.heap.send_home(|owner, after| core.is_known_done(owner, after)) {
                arena.split_changed(kind_of(pool), change);
            }
        }
    }

    /// The best block that the request may have by size and by `may_use(core, owner, after)`, of those that other streams
    /// own or that are away from home.
    fn best_lent(&self, request: &Request, may_use: impl Fn(&Core, u32, u64) -> bool) -> Option<(Key, Place)> {
        let lent = |heap: &Heap, owner: u32| {
            let index = heap.index(request.pool, owner)?;
            let keys = std::iter::successors(index.best_fit(request.size), |&key| index.after(key));
            let fitting = keys.take(CANDIDATES).filter(|key| self.classes.fits(key.size(), request.size));
            fitting.into_iter().find(|key| may_use(self, owner, heap.blocks[key.block()].after))
        };
        let places = self.heaps().flat_map(|heap| {
            let owners = heap.owners(request.pool).filter(|&owner| owner != request.slot || owner != heap.home);
            owners.filter_map(move |owner| {
                let key = lent(heap, owner)?;
                Some((key, Place { arena: heap.home, block: key.block() }))
            })
        });
        places.min_by_key(|&(key, _)| key)
    }

    /// The stream that owns the block that would serve the request best, and the tick that it would have to be waited for.
    pub(crate) fn tick_of_lender(&self, request: &Request) -> Option<(u32, u64)> {
        let (_, place) = self.best_lent(request, |_, _, _| true)?;
        let block = self.block(place);
        Some((block.owner, block.after))
    }

    fn lender(&self, place: Place) -> Option<Lender> {
        let block = self.block(place);
        Some(Lender { timeline: self.timeline(block.owner)?.clone(), after: block.after })
    }

    fn take_lent(&mut self, request: &Request, place: Place) -> Granted {
        self.arena(request.slot).borrows += 1;
        let block = self.block(place);
        let is_segment = !block.is_split() && !self.heap_of(place.arena).region(block.region).is_paged();
        if is_segment && self.is_known_done(block.owner, block.after) {
            let region = self.arena(place.arena).heap.remove_region(place.block);
            let own = self.arena(request.slot);
            let block = own.heap.add_region(region.addr, region.bytes, region.pool);
            return own.take(request, block);
        }
        let borrower = self.timeline(request.slot).cloned();
        let lender = self.arena(place.arena);
        borrower.iter().for_each(|borrower| lender.know(borrower));
        lender.take(request, place.block)
    }
}

/// The latest tick among an owner's blocks in a heap that could serve the request. The own blocks of the request's stream count
/// when they are strays: they can merge once they are done.
fn latest_tick(heap: &Heap, request: &Request, owner: u32) -> Option<u64> {
    let index = heap.index(request.pool, owner)?;
    let fitting = std::iter::successors(index.best_fit(request.size), |&key| index.after(key)).take(CANDIDATES);
    let strays = heap.strays_of(request.pool, owner);
    let fitting = fitting.filter(|_| owner != request.slot).map(Key::block);
    fitting.chain(strays).map(|id| heap.blocks[id].after).max()
}
