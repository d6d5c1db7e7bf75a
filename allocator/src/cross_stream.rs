//! Reuse of free blocks by another stream than their owner's.
//!
//! A block may be used by stream S once its owner's timeline got to the block's tick and the host knows it, or once S's
//! later work is ordered after that tick. Both are learned without waiting. Making S wait couples streams, so it is done
//! only where the policy says so, or as a rung before OOM; it is counted and traced.
//!
//! This runs only when the stream's own free blocks do not serve a request, just before memory would be taken from the
//! device. Asking whether ticks are done may record an event on a stream, at most one each time.

use std::sync::Arc;

use aquifer_device::{DeviceError, ErrorKind, Timeline};

use crate::allocator::Allocator;
use crate::core::{Core, Granted, Request};
use crate::error::AllocError;
use crate::heap::{BlockId, Key};

/// How many blocks of one owner are considered, smallest first.
const CANDIDATES: usize = 32;

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

    /// Serves the request from blocks of other streams, and from strays of its own, without waiting.
    pub(crate) fn borrow(&self, request: &Request) -> Result<Option<Granted>, AllocError> {
        let core = self.shell().lock();
        let ticks = core.lendable(request);
        let nothing = core.best_lent(request, |_, _, _| true).is_none();
        if nothing && ticks.is_empty() && core.heap.strays().len() == 0 && core.waiting.is_empty() {
            return Ok(None);
        }
        let own = core.timeline(request.slot).cloned();
        drop(core);
        self.poll(&ticks)?;
        let clock = own.map(|timeline| timeline.clock()).unwrap_or_default();
        let mut core = self.shell().lock();
        core.settle(self.shell());
        core.sweep_ordered(self.shell(), request.slot, &clock);
        if let Some(granted) = core.take_own(self.shell(), request) {
            return Ok(Some(granted));
        }
        let Some(lent) =
            core.best_lent(request, |core, owner, after| core.is_known_done(owner, after) || after <= clock.of(owner))
        else {
            return Ok(None);
        };
        self.shell().counters.cross_stream_reuses.add(1);
        Ok(Some(core.take_lent(self.shell(), request, lent.block())))
    }

    /// Serves the request from a block of another stream by making the request's stream wait for it.
    pub(crate) fn borrow_waiting(&self, request: &Request) -> Result<Option<Granted>, AllocError> {
        let core = self.shell().lock();
        let Some(own) = core.timeline(request.slot).cloned() else { return Ok(None) };
        let Some(lender) = core.best_lent(request, |_, _, _| true).and_then(|key| core.lender(key)) else {
            return Ok(None);
        };
        drop(core);
        if let Err(error) = own.wait_for(&lender.timeline, lender.after.saturating_sub(1)) {
            return if cannot_be_asked(&error) { Ok(None) } else { Err(error.into()) };
        }
        let clock = own.clock();
        let mut core = self.shell().lock();
        // Somebody may have taken it meanwhile; whatever is ordered now will do.
        let ordered = |core: &Core, owner, after| core.is_known_done(owner, after) || after <= clock.of(owner);
        let Some(key) = core.best_lent(request, ordered) else { return Ok(None) };
        self.shell().counters.cross_stream_reuses.add(1);
        self.shell().counters.cross_stream_waits.add(1);
        let granted = core.take_lent(self.shell(), request, key.block());
        drop(core);
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

impl Core {
    /// The ticks that would let other streams' fitting blocks, or anybody's strays, be used, where not known to be done.
    fn lendable(&self, request: &Request) -> Vec<(Arc<Timeline>, u64)> {
        let mut ticks: Vec<(Arc<Timeline>, u64)> = Vec::new();
        for owner in 0..self.heap.owners(request.pool) {
            let latest = self.unknown_tick(request, owner);
            if let (Some(after), Some(timeline)) = (latest, self.timeline(owner)) {
                ticks.push((timeline.clone(), after));
            }
        }
        ticks
    }

    /// The latest tick among an owner's blocks that could serve the request, if it is not known to be done. An owner's own
    /// blocks count when they are strays: they can merge once they are done.
    fn unknown_tick(&self, request: &Request, owner: u32) -> Option<u64> {
        let index = self.heap.index(request.pool, owner)?;
        let fitting = std::iter::successors(index.best_fit(request.size), |&key| index.after(key)).take(CANDIDATES);
        let strays = self.heap.strays_of(request.pool, owner);
        let fitting = fitting.filter(|_| owner != request.slot).map(Key::block);
        let after = fitting.chain(strays).map(|id| self.heap.blocks[id].after).max()?;
        (!self.is_known_done(owner, after)).then_some(after)
    }

    /// Sends strays that are done home.
    pub(crate) fn settle(&mut self, shell: &crate::shell::Shell) {
        let (timelines, heap) = self.timelines_and_heap();
        let is_done = |owner: u32, after: u64| {
            let timeline = timelines.get(owner as usize).and_then(Option::as_ref);
            after == 0 || timeline.is_none_or(|timeline| timeline.is_known_done(after - 1))
        };
        for (pool, change) in heap.send_home(is_done) {
            let kind = self.heap.pools[usize::from(pool)].kind;
            self.split_changed(shell, kind, change);
        }
    }

    /// The best block of another stream that the request may have by size and by `may_use(core, owner, after)`.
    fn best_lent(&self, request: &Request, may_use: impl Fn(&Core, u32, u64) -> bool) -> Option<Key> {
        let lent = |owner: u32| {
            let index = self.heap.index(request.pool, owner)?;
            let keys = std::iter::successors(index.best_fit(request.size), |&key| index.after(key));
            let fitting = keys.take(CANDIDATES).take_while(|key| self.classes.fits(key.size(), request.size));
            fitting.into_iter().find(|key| may_use(self, owner, self.heap.blocks[key.block()].after))
        };
        (0..self.heap.owners(request.pool)).filter(|&owner| owner != request.slot).filter_map(lent).min()
    }

    fn lender(&self, key: Key) -> Option<Lender> {
        let block = &self.heap.blocks[key.block()];
        Some(Lender { timeline: self.timeline(block.owner)?.clone(), after: block.after })
    }

    fn take_lent(&mut self, shell: &crate::shell::Shell, request: &Request, id: BlockId) -> Granted {
        let block = &self.heap.blocks[id];
        if !block.is_split() && self.is_known_done(block.owner, block.after) {
            self.heap.rehome(id, request.slot);
        }
        self.take(shell, request, id)
    }
}
