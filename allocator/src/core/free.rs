//! Giving blocks back.

use std::collections::BTreeMap;

use aquifer_device::Tick;
use aquifer_device::internal::StreamMap;

use crate::core::Core;
use crate::core::heap::{Block, State};
use crate::core::policy::EVENT_SHARE;
use crate::core::pools::Which;
use crate::core::tick_index::TickIndex;
use crate::core::waiting::Waiting;
use crate::history::{Action, FREE};
use crate::size_class::{self, PoolKind};
use crate::types::{After, BlockId, Freed, StreamId, UNKNOWN, latest_by_stream};

/// What became of a block that was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// Its owner may use it again.
    Free,
    /// It waits for other streams.
    Waits,
}

impl Core {
    /// Frees a live block.
    #[inline(always)]
    pub(crate) fn free(&mut self, Freed { block: id, stream, on, bytes }: Freed) -> Then {
        if bytes != UNKNOWN && on.is_none() && self.heap.is_regular(id) {
            let size = size_class::round(bytes);
            let kind = PoolKind::of(size);
            debug_assert!(self.is_as_requested(id, stream, kind, size, bytes), "{:?}", self.heap.block(id));
            self.free_own(id, stream, kind, size, bytes);
            return Then::Free;
        }
        self.free_by_record(id, on)
    }

    /// Frees a live block that may not be what its handle says.
    #[inline(never)]
    fn free_by_record(&mut self, id: BlockId, on: Option<StreamId>) -> Then {
        let block = self.heap.block(id);
        debug_assert_eq!(block.state, State::Live);
        let (size, requested, owner, pool) = (block.size, block.requested, block.owner, block.pool);
        let sleeps = self.paged.sleep.isolates(&block.range());
        let waits = block.used_elsewhere || sleeps;
        // Blocks of private pools are irregular, so that all their frees come here.
        self.pools.end_claim(pool, requested);
        self.heap.forget_irregular(id);
        match on.filter(|&on| on != owner) {
            None if !waits => self.free_own(id, owner, pool.kind(), size, requested),
            Some(on) if !waits && self.crosses_streams => {
                self.note(FREE, id);
                self.given_back(owner, pool.kind(), size, requested);
                let after = self.streams.enqueued(on);
                self.complete(id, on, after, after);
            }
            on => {
                self.begin_wait(id, on);
                return Then::Waits;
            }
        }
        Then::Free
    }

    /// Frees a live block that its own stream alone used.
    #[inline(always)]
    fn free_own(&mut self, id: BlockId, stream: StreamId, kind: PoolKind, size: u64, requested: u64) {
        self.note(FREE, id);
        self.given_back(stream, kind, size, requested);
        let after = self.streams.enqueued(stream);
        if self.heap.quarantines(size) {
            return self.complete(id, stream, after, after);
        }
        if self.heap.give_deferred(stream, id, size, after) {
            self.thin_recent_uses(stream);
        }
        self.debug_check();
    }

    /// Accounts for a live block of a stream that was freed.
    #[inline]
    fn given_back(&mut self, stream: StreamId, kind: PoolKind, size: u64, requested: u64) {
        self.live -= 1;
        self.counters.freed(kind, size, requested);
        if let Some(progress) = self.streams.progress_mut(stream) {
            progress.freed += size;
        }
    }

    /// Makes a block free that was given back and is accounted for: reusable by `owner` at once,
    /// and by others after the work `after`. Its memory itself was used until `last_use`.
    pub(super) fn complete(&mut self, id: BlockId, owner: StreamId, after: After, last_use: After) {
        self.heap.coalesce(owner);
        self.heap.note_last_use(id, owner, last_use);
        self.heap.give_quarantined(id, owner, after);
        self.debug_check();
    }

    /// Enters a block in the list of waiting blocks, as it is freed and other streams used it, too, or
    /// its memory sleeps.
    #[cold]
    fn begin_wait(&mut self, id: BlockId, on: Option<StreamId>) {
        let block = self.heap.block(id);
        let (owner, kind, size) = (block.owner, block.pool.kind(), block.size);
        self.note(&[Action::FreeRequested], id);
        self.given_back(owner, kind, size, 0);
        self.heap.set_waiting(id);
        self.counters.waits(kind, size);
        let block = *self.heap.block(id);
        let mut streams = self.other_users.remove(&id).unwrap_or_default();
        streams.extend(on.filter(|on| !streams.contains(on)));
        let uses = streams.iter().map(|&stream| self.streams.use_so_far(stream)).collect();
        let own_use = self.streams.enqueued(owner);
        let waiting = Waiting { id, block, uses, own_use };
        if self.paged.sleep.has(&block.range()) {
            // Until its memory wakes up.
            self.paged.sleep.keep(waiting);
        } else {
            self.waiting.push(waiting);
        }
    }

    /// True if the record of a live block says what its handle does: what
    /// [`crate::core::heap::Heap::is_regular`] promises.
    fn is_as_requested(&self, id: BlockId, stream: StreamId, kind: PoolKind, size: u64, requested: u64) -> bool {
        let block = self.heap.block(id);
        let is_own = block.state == State::Live && block.owner == stream && !block.used_elsewhere;
        is_own && (block.pool.kind(), block.size, block.requested) == (kind, size, requested)
    }

    /// Frees the waiting blocks that need not wait any more, if a stream got further since the last
    /// time.
    pub(crate) fn end_waits(&mut self) {
        if self.can_end_waits() {
            self.end_waits_of(None);
        }
    }

    /// Frees the waiting blocks that need not wait any more. Among them are blocks of the stream
    /// `owner` if its later work is ordered after all their uses, according to its clock.
    pub(crate) fn end_waits_ordered(&mut self, owner: StreamId, clock: &StreamMap) {
        if !self.waiting.is_empty() {
            self.end_waits_of(Some((owner, clock)));
        }
    }

    fn end_waits_of(&mut self, ordered: Option<(StreamId, &StreamMap)>) {
        let Core { waiting: list, streams, .. } = self;
        // Read before the blocks are looked at, so that progress of a stream meanwhile leads to
        // another look.
        list.streams.iter_mut().for_each(|(&stream, waited_for)| waited_for.seen = streams.known_done(stream));
        let mut free = Vec::new();
        for (&owner, of_owner) in &mut list.owners {
            let clock = ordered.filter(|(of, _)| *of == owner).map(|(_, clock)| clock);
            let ordered = |stream| clock.map_or(After::NOTHING, |clock| After::ordered(clock, stream));
            of_owner.advance(|stream| streams.known_done(stream).max(ordered(stream)));
            free.extend(of_owner.done());
        }
        // In the order in which they were given back.
        free.sort_unstable();
        for number in free {
            let waiting = self.waiting.take(number);
            waiting.into_iter().for_each(|waiting| self.end_wait(&waiting));
        }
    }

    /// Frees a block that need not wait any more.
    pub(crate) fn end_wait(&mut self, waiting: &Waiting) {
        let &Waiting { id, block: Block { owner, pool, size, requested, .. }, own_use, .. } = waiting;
        self.counters.waited(pool.kind(), size, requested);
        // The tick is taken now, because the owner's later events also cover the work that it is
        // ordered after.
        let tick = self.streams.enqueued(owner);
        let done = waiting.uses.iter().all(|&one| self.streams.is_done(one));
        let last_use = if done { own_use } else { tick };
        self.note(&[Action::FreeCompleted], id);
        self.complete(id, owner, tick, last_use);
    }

    /// What waiting blocks of some pools wait for.
    pub(crate) fn waited_for(&self, which: Which) -> Vec<Tick> {
        if let Which::All = which {
            let latest = self.waiting.owners.values().flat_map(TickIndex::latest);
            return self.streams.not_done(latest_by_stream(latest));
        }
        let waiting = self.waiting.blocks.values().filter(|waiting| self.pools.is_among(waiting.block.pool, which));
        self.streams.not_done(latest_by_stream(waiting.flat_map(|waiting| waiting.uses.iter().copied())))
    }

    /// Bytes of waiting blocks, by the stream that they wait for.
    pub(crate) fn waiting_bytes(&self) -> Vec<(StreamId, u64)> {
        let mut bytes: BTreeMap<StreamId, u64> = BTreeMap::new();
        for waiting in self.waiting.blocks.values() {
            let not_done = waiting.uses.iter().filter(|&&one| !self.streams.is_done(one));
            not_done.for_each(|one| *bytes.entry(one.stream).or_default() += waiting.block.size);
        }
        bytes.into_iter().collect()
    }

    /// True if this allocation is to ask how far streams got. A request that no free block serves
    /// asks in any case.
    pub(crate) fn is_poll_due(&mut self) -> bool {
        let is_little = self.waits_little();
        self.waiting.is_to_be_asked_for(is_little)
    }

    /// True if less memory waits than makes a progress event due, where memory is mapped.
    fn waits_little(&self) -> bool {
        self.maps && self.waiting.bytes < self.reserved / EVENT_SHARE
    }

    /// Notes that streams were asked. Returns true if a stream that blocks wait for got further.
    pub(crate) fn note_asked(&mut self) -> bool {
        let (got_further, is_little) = (self.can_end_waits(), self.waits_little());
        self.waiting.note_asked(!got_further, is_little);
        got_further
    }

    /// True if a stream that blocks wait for got further since the list was last searched.
    fn can_end_waits(&self) -> bool {
        let waited_for = &self.waiting.streams;
        waited_for.iter().any(|(&stream, waited_for)| self.streams.known_done(stream) > waited_for.seen)
    }
}
