//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's `active_pending_free`.
//!
//! A waiting block carries one tick for each stream that used it, taken when the block was freed. The block becomes free once all these
//! ticks are done or, where blocks may cross streams at all, once its owner's later work is ordered after them (invariant A1).
//!
//! While blocks wait, allocations ask how far the streams got, with at most one driver query for each stream. As long
//! as no stream gets further, fewer allocations ask: down to one in four, besides those that find no memory otherwise.
//! Blocks are listed by the ticks that they wait for (`ticks.rs`), so those that need not wait any more are found
//! without a look at the others. If a request would fail otherwise, the host waits for the streams instead.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_device::internal::Clock;

use crate::accounting::counters::Hot;
use crate::allocator::Allocator;
use crate::cross_stream::progress::Pending;
use crate::cross_stream::ticks::{TickIndex, Use};
use crate::error::AllocError;
use crate::heap::{Block, kind_of};
use crate::history::Action;
use crate::pools::table::Which;
use crate::shell::core::{Core, Place, Request};
use crate::shell::settled::Sought;
use crate::shell::special;
use crate::shell::whole::Whole;
use crate::sync::atomic::Ordering;

/// The most allocations in a row that do not ask, after one that asked in vain. A larger number saves few queries, and memory comes back
/// later.
const PAUSE_MAX: u32 = 3;

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
    owners: BTreeMap<u32, OfOwner>,
    streams: BTreeMap<u32, WaitedFor>,
    pause: Pause,
}

/// The blocks of one owner.
#[derive(Debug, Default)]
struct OfOwner {
    /// The blocks by the ticks of their uses: a block is free to its owner once the owner's later work is ordered after these.
    uses: TickIndex<u64>,
    /// Pool, size and number of each block at home.
    at_home: BTreeSet<(u16, u64, u64)>,
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
struct Waiting {
    place: Place,
    /// Its record in the heap, of which only the links may have changed since.
    block: Block,
    /// The other streams that used it, each with the tick that its timeline must reach.
    uses: Vec<Use>,
    /// The tick that its owner's timeline must reach for the owner's own use to be done.
    own_use: u64,
}

/// A stream that blocks wait for.
#[derive(Debug, Default)]
struct WaitedFor {
    /// Number of the blocks that it used.
    blocks: usize,
    /// Where its timeline had got to when blocks were last freed.
    seen: u64,
}

impl WaitingList {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// True if this allocation is to ask how far streams got. Counts the allocation.
    pub(crate) fn is_to_be_asked_for(&mut self) -> bool {
        let asks = self.pause.left == 0;
        self.pause.left = self.pause.left.saturating_sub(1);
        asks
    }

    /// Notes that streams were asked. The pause until the next time grows while asking is in vain.
    fn note_asked(&mut self, in_vain: bool) {
        let length = if in_vain { (2 * self.pause.length + 1).min(PAUSE_MAX) } else { 0 };
        self.pause = Pause { left: length, length };
    }

    fn push(&mut self, waiting: Waiting) {
        let number = self.next;
        self.next += 1;
        self.bytes += waiting.block.size;
        self.requested += waiting.block.requested;
        self.uses.insert(number, waiting.block.size, &waiting.uses);
        let of_owner = self.owners.entry(waiting.block.owner).or_default();
        of_owner.uses.insert(number, waiting.block.size, &waiting.uses);
        of_owner.blocks += 1;
        if waiting.place.arena == waiting.block.owner {
            of_owner.at_home.insert((waiting.block.pool, waiting.block.size, number));
        }
        waiting.uses.iter().for_each(|&(slot, _)| self.streams.entry(slot).or_default().blocks += 1);
        self.blocks.insert(number, waiting);
    }

    fn take(&mut self, number: u64) -> Option<Waiting> {
        let waiting = self.blocks.remove(&number)?;
        self.bytes -= waiting.block.size;
        self.requested -= waiting.block.requested;
        self.uses.remove(number, waiting.block.size, &waiting.uses);
        if let Some(of_owner) = self.owners.get_mut(&waiting.block.owner) {
            of_owner.uses.remove(number, waiting.block.size, &waiting.uses);
            of_owner.at_home.remove(&(waiting.block.pool, waiting.block.size, number));
            of_owner.blocks -= 1;
            if of_owner.blocks == 0 {
                self.owners.remove(&waiting.block.owner);
            }
        }
        for (slot, _) in &waiting.uses {
            let Some(stream) = self.streams.get_mut(slot) else { continue };
            stream.blocks -= 1;
            if stream.blocks == 0 {
                self.streams.remove(slot);
            }
        }
        Some(waiting)
    }
}

impl Allocator {
    /// Asks how far the streams got that waiting blocks depend on, and frees the blocks that need not wait any more.
    pub(crate) fn poll_waiting(&self) -> Result<(), AllocError> {
        let pending = self.shell().core().pending_of_all();
        self.poll(&pending)?;
        let got_further = self.shell().core().note_asked();
        if got_further {
            self.shell().part(None).sweep_done();
        }
        Ok(())
    }

    /// Waits on the host for the streams that freed memory still depends on, in some pools, so that it becomes free and
    /// merges. Returns true if there was anything to wait for. Skips streams that cannot be waited for now.
    pub(crate) fn synchronize_pending(&self, which: Which) -> Result<bool, AllocError> {
        let mut waited = false;
        // Twice, because a block that waited may become a stray (a free block away from home), with a tick of its own stream.
        for _ in 0..2 {
            let mut whole = self.shell().part(None);
            let waits = !whole.waiting.is_empty() || whole.has_strays();
            let mut pending = whole.pending(which);
            pending.extend(whole.pending_strays(which));
            drop(whole);
            if !waits {
                break;
            }
            if !waited && !pending.is_empty() {
                self.shell().count(|counters| &counters.num_sync_all_streams);
            }
            waited = true;
            self.synchronize_all(&pending)?;
            let mut whole = self.shell().part(None);
            whole.sweep_done();
            whole.send_strays_home();
        }
        Ok(waited)
    }
}

impl Whole {
    /// Enters a block in the list of waiting blocks, when it is freed and other streams used it, too.
    #[cold]
    pub(crate) fn free_shared(&mut self, place: Place, on: Option<u32>) {
        let Place { arena, block: id } = place;
        let arena = self.arena(arena);
        let block = &arena.heap.blocks[id];
        let (kind, size) = (kind_of(block.pool), block.size);
        arena.note(Action::FreeRequested, id);
        arena.given_back(size);
        arena.tally().freed(kind, size, 0);
        arena.heap.set_waiting(id);
        // Arenas may publish meanwhile: not all of their locks are held.
        let publishing = self.shell.publishing.lock();
        self.counters().waits(kind, size);
        drop(publishing);
        let users = self.shared.remove(&place);
        if users.is_some() {
            self.arena(place.arena).arena.shared_blocks.fetch_sub(1, Ordering::Relaxed);
        }
        let block = *self.block(place);
        let mut streams = users.unwrap_or_default();
        streams.extend(on.filter(|on| *on != block.owner && !streams.contains(on)));
        let uses = streams.iter().map(|&slot| (slot, self.tick_of(slot))).collect();
        let own_use = self.tick_of(block.owner);
        self.waiting.push(Waiting { place, block, uses, own_use });
        self.shell.special().fetch_or(special::WAITING, Ordering::Relaxed);
    }

    /// The latest tick of each stream that waiting blocks depend on, in some pools. Ticks known to be done are left out.
    fn pending(&self, which: Which) -> Pending {
        if let Which::All = which {
            return self.pending_of_all();
        }
        let mut latest: BTreeMap<u32, u64> = BTreeMap::new();
        let waiting = self.waiting.blocks.values().filter(|waiting| self.pools.is_among(waiting.block.pool, which));
        for &(slot, after) in waiting.flat_map(|waiting| &waiting.uses) {
            latest.entry(slot).and_modify(|tick| *tick = after.max(*tick)).or_insert(after);
        }
        self.unknown(latest.into_iter())
    }

    /// The ticks of free blocks away from home that are not known to be done, in some pools.
    fn pending_strays(&mut self, which: Which) -> Pending {
        self.look_for(Sought::Strays);
        let strays = self.heaps().flat_map(|heap| heap.strays().map(|id| &heap.blocks[id]));
        let strays = strays.filter(|block| self.pools.is_among(block.pool, which));
        self.unknown(strays.map(|block| (block.owner, block.after)))
    }

    /// Frees the waiting blocks that need not wait any more, if a stream got further since the last time.
    fn sweep_done(&mut self) {
        if self.can_sweep() {
            self.sweep(None);
        }
    }

    /// Frees the waiting blocks that need not wait any more. Among them are blocks of the stream `owner` if its later work is ordered after
    /// all their uses, according to its clock.
    pub(crate) fn sweep_ordered(&mut self, owner: u32, clock: &Clock) {
        if !self.waiting.is_empty() {
            self.sweep(Some((owner, clock)));
        }
    }

    fn sweep(&mut self, ordered: Option<(u32, &Clock)>) {
        let mut list = std::mem::take(&mut self.waiting);
        // Read before the blocks are looked at, so that progress of a stream meanwhile leads to another sweep.
        list.streams.iter_mut().for_each(|(&slot, stream)| stream.seen = self.frontier(slot));
        list.uses.advance(|slot| self.done_until(slot));
        let mut free = list.uses.done().clone();
        if let Some((owner, clock)) = ordered
            && let Some(of_owner) = list.owners.get_mut(&owner)
        {
            of_owner.uses.advance(|slot| self.done_until(slot).max(clock.of(slot)));
            free.extend(of_owner.uses.done());
        }
        free.into_iter().filter_map(|number| list.take(number)).for_each(|waiting| self.end_wait(&waiting));
        if list.is_empty() {
            self.shell.special().fetch_and(!special::WAITING, Ordering::Relaxed);
        }
        self.waiting = list;
    }

    /// Frees a block that need not wait any more.
    fn end_wait(&mut self, waiting: &Waiting) {
        let &Waiting { place: Place { arena, block: id }, block: Block { owner, pool, size, requested, .. }, .. } =
            waiting;
        let kind = kind_of(pool);
        self.counters().waited(kind, size);
        // The tick is taken now, because the owner's later events also cover the work that it is ordered after.
        let tick = self.tick_of(owner);
        let done = waiting.uses.iter().all(|&(slot, after)| self.is_known_done(slot, after));
        let last_use = if done { waiting.own_use } else { tick };
        let arena = self.arena(arena);
        arena.tally().change(Hot::Requested, kind, -requested.cast_signed());
        arena.note(Action::FreeCompleted, id);
        arena.complete(id, owner, tick, last_use);
    }

    /// The uses by other streams that keep a waiting block of the request's own stream from serving it. Of several such blocks, the
    /// smallest counts.
    pub(crate) fn uses_of_own(&self, request: &Request) -> Option<Vec<Use>> {
        let own = &self.waiting.owners.get(&request.slot)?.at_home;
        let &(_, _, best) = own.range((request.pool, request.size, 0)..=(request.pool, u64::MAX, u64::MAX)).next()?;
        self.waiting.blocks.get(&best).map(|waiting| waiting.uses.clone())
    }

    /// Bytes that waiting blocks hold.
    pub(crate) fn waiting_held(&self) -> u64 {
        self.waiting.bytes
    }

    /// For each tick not known done, the bytes of the blocks that wait for it.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = (Use, u64)> + '_ {
        self.waiting.uses.ticks().filter(|&((slot, after), _)| !self.is_known_done(slot, after))
    }
}

impl Core {
    /// Bytes of waiting blocks, by the stream that they wait for.
    pub(crate) fn waiting_bytes(&self) -> Vec<(u32, u64)> {
        let mut bytes: BTreeMap<u32, u64> = BTreeMap::new();
        for (block, slots) in self.waiting_blocks() {
            slots.into_iter().for_each(|slot| *bytes.entry(slot).or_default() += block.size);
        }
        bytes.into_iter().collect()
    }

    /// Bytes that were requested for waiting blocks.
    pub(crate) fn waiting_requested(&self) -> u64 {
        self.waiting.requested
    }

    /// The blocks that wait, each with the streams that are not known to be done with it.
    pub(crate) fn waiting_blocks(&self) -> impl Iterator<Item = (&Block, Vec<u32>)> {
        self.waiting.blocks.values().map(|waiting| {
            let not_done = waiting.uses.iter().filter(|&&(slot, after)| !self.is_known_done(slot, after));
            (&waiting.block, not_done.map(|&(slot, _)| slot).collect())
        })
    }

    /// As [`Whole::pending`] for all pools, but without a look at the blocks.
    fn pending_of_all(&self) -> Pending {
        self.unknown(self.waiting.uses.latest())
    }

    /// Notes that streams were asked. Returns true if a stream that blocks wait for got further.
    fn note_asked(&mut self) -> bool {
        let got_further = self.can_sweep();
        self.waiting.note_asked(!got_further);
        got_further
    }

    /// True if a stream that blocks wait for got further since the list was last searched.
    fn can_sweep(&self) -> bool {
        self.waiting.streams.iter().any(|(&slot, stream)| self.frontier(slot) > stream.seen)
    }

    /// Those of the given ticks that are not known to be done.
    pub(crate) fn unknown(&self, ticks: impl Iterator<Item = (u32, u64)>) -> Pending {
        let unknown = ticks.filter(|&(slot, after)| !self.is_known_done(slot, after));
        unknown.filter_map(|(slot, after)| Some((self.timeline(slot)?.clone(), after))).collect()
    }

    fn frontier(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(0, |timeline| timeline.frontier())
    }
}
