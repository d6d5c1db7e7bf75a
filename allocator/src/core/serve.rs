//! Serving requests from free blocks.

use aquifer_device::Tick;
use aquifer_device::internal::StreamMap;

use crate::core::Core;
use crate::core::heap::Owner;
use crate::core::heap::strays::LOOKS;
use crate::core::pools::Which;
use crate::core::streams::Streams;
use crate::history::{Action, Subject};
use crate::tags::Tag;
use crate::types::{After, BlockId, Granted, PoolId, Request, StreamId, Use, latest_by_stream};

impl Core {
    /// Serves a request from its stream's free blocks. `None` also if the stream is not known yet.
    /// Inlined so that request and result stay in registers.
    #[inline(always)]
    pub(crate) fn take_own(&mut self, request: &Request) -> Option<Granted> {
        let &Request { stream, pool, size, requested, .. } = request;
        let progress = self.streams.progress_mut(stream)?;
        progress.searches += 1;
        let block = match self.heap.reuse_last_freed(stream, pool, size, requested) {
            Some(block) => {
                progress.freed -= size;
                block
            }
            None => {
                if self.heap.make_room(stream) {
                    self.thin_recent_uses(stream);
                }
                match self.heap.take_best(Owner::in_own_regions(stream), pool, size, requested) {
                    Some(block) => block,
                    None => self.take_further(request)?,
                }
            }
        };
        Some(self.taken(request, block))
    }

    /// Serves a request that no free block in its stream's regions serves: after merging the
    /// stream's deferred blocks, from its strays, and from those of its blocks that are in
    /// quarantine, the oldest first.
    #[cold]
    #[inline(never)]
    fn take_further(&mut self, request: &Request) -> Option<BlockId> {
        let &Request { stream, pool, size, requested, .. } = request;
        let own = Owner::in_own_regions(stream);
        let strays = Owner { has_strays: true, ..own };
        let heap = &mut self.heap;
        let merged = heap.coalesce(stream).then(|| heap.take_best(own, pool, size, requested)).flatten();
        let mut found = merged.or_else(|| heap.take_best(strays, pool, size, requested));
        while found.is_none() && heap.end_oldest_quarantine(|block| block.pool == pool && block.owner == stream) {
            let of_own = heap.take_best(own, pool, size, requested);
            found = of_own.or_else(|| heap.take_best(strays, pool, size, requested));
        }
        found
    }

    /// Takes the request's bytes from a free block that its stream may use.
    pub(crate) fn take(&mut self, request: &Request, free: BlockId) -> Granted {
        let block = self.heap.take(free, request.stream, request.size, request.requested);
        self.taken(request, block)
    }

    /// Serves a request of no private pool from the heap pool `from`, which lends. What is asked of
    /// the block's pool meanwhile is about the request, not about where it lies.
    pub(crate) fn take_lent(&mut self, request: &Request, from: PoolId) -> Option<Granted> {
        let granted = self.take_own(&Request { pool: from, is_regular: false, ..*request })?;
        self.heap.lend(granted.block, request.pool);
        Some(granted)
    }

    /// Accounts for a block that became live.
    #[inline(always)]
    fn taken(&mut self, request: &Request, id: BlockId) -> Granted {
        if !request.is_regular {
            self.heap.make_irregular(id);
        }
        let block = self.heap.tag(id, request.tag);
        let (addr, size, kind) = (block.addr, block.size, block.pool.kind());
        self.live += 1;
        self.counters.allocated(kind, size, request.requested);
        self.note(&[Action::Alloc], id);
        self.debug_check();
        Granted { block: id, addr }
    }

    /// Serves a request from memory that is known done: from what came back to the stream's
    /// regions, else from that of others.
    pub(crate) fn take_done(&mut self, request: &Request) -> Option<Granted> {
        if self.return_strays(LOOKS)
            && let Some(granted) = self.take_own(request)
        {
            return Some(granted);
        }
        self.take_of_others(request, |streams, owner| streams.known_done(owner))
    }

    /// Serves a request from memory of other streams that is known done, or that the request's
    /// stream is ordered after, according to its clock.
    pub(crate) fn take_ordered(&mut self, request: &Request, clock: &StreamMap) -> Option<Granted> {
        self.take_of_others(request, |streams, owner| streams.known_done(owner).max(After::ordered(clock, owner)))
    }

    /// Takes the best block of another stream whose last use is before what `until` gives for its
    /// owner.
    fn take_of_others(&mut self, request: &Request, until: impl Fn(&Streams, StreamId) -> After) -> Option<Granted> {
        self.heap.end_quarantine(|block| block.pool == request.pool);
        let until = |owner| until(&self.streams, owner);
        let best = self.heap.best_of_others(request.stream, request.pool, request.size, until)?;
        self.counters.events.cross_stream_reuses += 1;
        Some(self.take(request, best))
    }

    /// The last use of the best block of another stream.
    pub(crate) fn last_use_of_best(&self, request: &Request) -> Option<Use> {
        let best = self.heap.best_of_others(request.stream, request.pool, request.size, |_| After::ALL)?;
        Some(self.heap.block(best).last_use())
    }

    /// What free blocks of other streams that would serve a request wait for.
    pub(crate) fn others_wait_for(&self, request: &Request) -> Vec<Tick> {
        let uses = self.heap.ticks_of_others(request.stream, request.pool, request.size);
        self.streams.not_done(uses.into_iter())
    }

    /// What all strays of some pools wait for.
    pub(crate) fn strays_wait_for(&self, which: Which) -> Vec<Tick> {
        let strays = self.heap.ticks_of_strays(usize::MAX).filter(|&(_, pool)| self.pools.is_among(pool, which));
        self.streams.not_done(latest_by_stream(strays.map(|(last_use, _)| last_use)))
    }

    /// True if an event is to be recorded on a stream now, so that the host learns how far it gets.
    /// The caller must then record it; it is counted as recorded here.
    #[inline]
    pub(crate) fn is_progress_event_due(&mut self, stream: StreamId) -> bool {
        let reserved = self.reserved;
        self.streams.progress_mut(stream).is_some_and(|progress| progress.is_due(reserved))
    }

    /// Notes in the history, if that is on, what happened to a live or waiting block.
    #[inline]
    pub(super) fn note(&mut self, actions: &[Action], id: BlockId) {
        if self.history.is_on() {
            self.note_always(actions, id);
        }
    }

    #[inline(never)]
    fn note_always(&mut self, actions: &[Action], id: BlockId) {
        let block = self.heap.block(id);
        let pool = self.heap.history_id(block.pool);
        let (tag, stream) = (Tag(block.tag), block.owner);
        let subject = Subject { addr: block.addr, size: block.requested, stream, tag, pool };
        self.history.note(actions, subject);
    }

    /// Notes the last uses of granules in the logs that are not known done.
    pub(crate) fn note_recent_uses(&mut self) {
        let Core { heap, streams, .. } = self;
        heap.note_recent_uses(|stream| streams.known_done(stream));
    }

    /// Gives strays that are done to the streams of their regions, after a look at no more than
    /// `looks`. Returns true if fewer are noted now.
    pub(crate) fn return_strays(&mut self, looks: usize) -> bool {
        let Core { heap, streams, .. } = self;
        heap.return_strays(looks, |stream| streams.known_done(stream))
    }

    /// Checks the heap's identities now and then, in debug builds. The cost of a check grows with
    /// the number of blocks, so as many operations pass between two checks.
    #[inline]
    pub(super) fn debug_check(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.unchecked += 1;
            if self.unchecked > 64 + self.heap.records_count() {
                self.unchecked = 0;
                debug_assert_eq!(self.heap.check(), Ok(()));
            }
        }
    }

    /// Makes room in a stream's log of last uses.
    #[cold]
    #[inline(never)]
    pub(super) fn thin_recent_uses(&mut self, stream: StreamId) {
        let done = self.streams.known_done(stream);
        self.heap.thin_recent_uses(stream, done);
    }
}
