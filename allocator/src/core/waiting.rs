//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's
//! `active_pending_free`.
//!
//! A waiting block carries its uses by other streams, as of when it was freed. It becomes free once
//! these are done or, where blocks may cross streams at all, once its owner's later work is ordered
//! after them (invariant A1). Blocks are listed by the ticks that they wait for (`tick_index.rs`), so
//! those that need not wait any more are found without a look at the others.

use std::collections::BTreeMap;

use aquifer_device::internal::Clock;

use crate::core::Core;
use crate::core::heap::Block;
use crate::core::policy::EVENT_SHARE;
use crate::core::pools::Which;
use crate::core::streams::Pending;
use crate::core::tick_index::TickIndex;
use crate::history::Action;
use crate::types::{After, BlockId, StreamId, Use, latest_by_stream};

/// The most allocations in a row that do not ask, after one that asked in vain. A larger number
/// saves few queries, and memory comes back later.
const PAUSE_MAX: u32 = 3;
/// How many allocations pass while little memory waits. They are off the fast path until it is asked
/// for, so this is no larger than it takes to make asking cheap.
const PAUSE_OF_LITTLE: u32 = 63;

/// The blocks that wait, and the streams they wait for.
#[derive(Debug, Default)]
pub(crate) struct WaitingList {
    /// The blocks by number, in the order in which they were given back.
    blocks: BTreeMap<u64, Waiting>,
    next: u64,
    /// Bytes of all of them, and the bytes that were requested.
    bytes: u64,
    requested: u64,
    /// The blocks by the ticks of their uses: a block is free once these are done.
    uses: TickIndex<u64>,
    owners: BTreeMap<StreamId, OfOwner>,
    streams: BTreeMap<StreamId, WaitedFor>,
    pause: Pause,
}

/// The blocks of one owner.
#[derive(Debug, Default)]
struct OfOwner {
    /// The blocks by the ticks of their uses: a block is free to its owner once the owner's later
    /// work is ordered after these.
    uses: TickIndex<u64>,
    blocks: usize,
}

/// How many more allocations do not ask how far streams got.
#[derive(Debug, Default)]
struct Pause {
    left: u32,
    length: u32,
}

/// A block that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) id: BlockId,
    /// Its record in the heap, of which only the links may have changed since.
    pub(crate) block: Block,
    /// Its uses by other streams.
    pub(crate) uses: Vec<Use>,
    /// The end of its owner's own use.
    pub(crate) own_use: After,
}

/// A stream that blocks wait for.
#[derive(Debug, Default)]
struct WaitedFor {
    /// Number of the blocks that it used.
    blocks: usize,
    /// Where its timeline had got to when blocks were last freed.
    seen: After,
}

impl WaitingList {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// True if this allocation is to ask how far streams got. Counts the allocation. `is_little`
    /// says whether little memory waits.
    fn is_to_be_asked_for(&mut self, is_little: bool) -> bool {
        if !is_little {
            self.pause.left = self.pause.left.min(PAUSE_MAX);
        }
        let asks = self.pause.left == 0;
        self.pause.left = self.pause.left.saturating_sub(1);
        asks
    }

    /// Notes that streams were asked. The pause until the next time grows while asking is in vain.
    fn note_asked(&mut self, in_vain: bool, is_little: bool) {
        let length = if in_vain { (2 * self.pause.length + 1).min(PAUSE_MAX) } else { 0 };
        self.pause = Pause { left: if is_little { PAUSE_OF_LITTLE } else { length }, length };
    }

    /// Bytes that were requested for the blocks.
    pub(crate) fn requested(&self) -> u64 {
        self.requested
    }

    /// Takes out the blocks that a condition is true of.
    pub(crate) fn take_where(&mut self, is_wanted: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let wanted = self.blocks.iter().filter(|(_, waiting)| is_wanted(waiting));
        let wanted: Vec<u64> = wanted.map(|(&number, _)| number).collect();
        wanted.into_iter().filter_map(|number| self.take(number)).collect()
    }

    pub(crate) fn push(&mut self, waiting: Waiting) {
        let number = self.next;
        self.next += 1;
        self.bytes += waiting.block.size;
        self.requested += waiting.block.requested;
        self.uses.insert(number, waiting.block.size, &waiting.uses);
        let of_owner = self.owners.entry(waiting.block.owner).or_default();
        of_owner.uses.insert(number, waiting.block.size, &waiting.uses);
        of_owner.blocks += 1;
        waiting.uses.iter().for_each(|one| self.streams.entry(one.stream).or_default().blocks += 1);
        self.blocks.insert(number, waiting);
    }

    fn take(&mut self, number: u64) -> Option<Waiting> {
        let waiting = self.blocks.remove(&number)?;
        self.bytes -= waiting.block.size;
        self.requested -= waiting.block.requested;
        self.uses.remove(number, waiting.block.size, &waiting.uses);
        if let Some(of_owner) = self.owners.get_mut(&waiting.block.owner) {
            of_owner.uses.remove(number, waiting.block.size, &waiting.uses);
            of_owner.blocks -= 1;
            if of_owner.blocks == 0 {
                self.owners.remove(&waiting.block.owner);
            }
        }
        for Use { stream, .. } in &waiting.uses {
            let Some(waited_for) = self.streams.get_mut(stream) else { continue };
            waited_for.blocks -= 1;
            if waited_for.blocks == 0 {
                self.streams.remove(stream);
            }
        }
        Some(waiting)
    }
}

impl Core {
    /// Frees the waiting blocks that need not wait any more, if a stream got further since the last
    /// time.
    pub(crate) fn end_waits(&mut self) {
        if self.can_end_waits() {
            self.end_waits_of(None);
        }
    }

    /// Frees the waiting blocks that need not wait any more. Among them are blocks of the stream
    /// `owner` if its later work is ordered after all their uses, according to its clock.
    pub(crate) fn end_waits_ordered(&mut self, owner: StreamId, clock: &Clock) {
        if !self.waiting.is_empty() {
            self.end_waits_of(Some((owner, clock)));
        }
    }

    fn end_waits_of(&mut self, ordered: Option<(StreamId, &Clock)>) {
        let Core { waiting: list, streams, .. } = self;
        // Read before the blocks are looked at, so that progress of a stream meanwhile leads to another
        // look.
        list.streams.iter_mut().for_each(|(&stream, waited_for)| waited_for.seen = streams.known_done(stream));
        list.uses.advance(|stream| streams.known_done(stream));
        let mut free = list.uses.done().clone();
        if let Some((owner, clock)) = ordered
            && let Some(of_owner) = list.owners.get_mut(&owner)
        {
            of_owner.uses.advance(|stream| streams.known_done(stream).max(After::ordered(clock, stream)));
            free.extend(of_owner.uses.done());
        }
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
        self.note(Action::FreeCompleted, id);
        self.complete(id, owner, tick, last_use);
    }

    /// What waiting blocks of some pools wait for.
    pub(crate) fn waited_for(&self, which: Which) -> Pending {
        if let Which::All = which {
            return self.streams.not_done(self.waiting.uses.latest());
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

    /// True if this allocation is to ask how far streams got. A request that no free block serves asks
    /// in any case.
    pub(crate) fn is_poll_due(&mut self) -> bool {
        let is_little = self.waits_little();
        self.waiting.is_to_be_asked_for(is_little)
    }

    /// True if less memory waits than makes a progress event due, where memory is mapped.
    fn waits_little(&self) -> bool {
        self.paged.is_some() && self.waiting.bytes < self.reserved / EVENT_SHARE
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
