//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's `active_pending_free`.
//!
//! A waiting block carries one tick for each stream that used it, taken when the block was freed. The block becomes free once all these
//! ticks are done or, where blocks may cross streams at all, once its owner's later work is ordered after them (invariant A1).
//!
//! While blocks wait, allocations ask how far the streams got, with at most one driver query for each stream. As long as no stream gets
//! further, fewer allocations ask: down to one in four, besides those that find no memory otherwise. The list of blocks is searched only
//! when a stream got further. If a request would fail otherwise, the host waits for the streams instead.

use std::collections::BTreeMap;

use aquifer_device::Clock;

use crate::accounting::counters::Hot;
use crate::allocator::Allocator;
use crate::cross_stream::progress::Pending;
use crate::error::AllocError;
use crate::heap::{Block, kind_of};
use crate::history::Action;
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
    blocks: Vec<Waiting>,
    streams: Vec<WaitedFor>,
    pause: Pause,
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
    /// Its record, of which only the links may have changed since.
    block: Block,
    /// Streams that used it, each with the tick that its timeline must reach.
    uses: Vec<(u32, u64)>,
    /// The tick that its owner's timeline must reach for the owner's own use to be done.
    own_use: u64,
}

/// A stream that blocks wait for.
#[derive(Debug)]
struct WaitedFor {
    slot: u32,
    /// The latest tick that a block waits for.
    latest: u64,
    /// Where its timeline had got to when the list was last searched.
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
        waiting.wait_for(&mut self.streams);
        self.blocks.push(waiting);
    }

    /// Renews the list of streams from the blocks that are left, after the list of blocks was searched.
    fn wait_anew(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.latest = 0);
        self.blocks.iter().for_each(|waiting| waiting.wait_for(&mut self.streams));
        self.streams.retain(|stream| stream.latest > 0);
    }
}

impl Waiting {
    /// Enters the block's streams in the list of streams that blocks wait for.
    fn wait_for(&self, streams: &mut Vec<WaitedFor>) {
        for &(slot, after) in &self.uses {
            match streams.iter_mut().find(|stream| stream.slot == slot) {
                Some(stream) => stream.latest = stream.latest.max(after),
                None => streams.push(WaitedFor { slot, latest: after, seen: 0 }),
            }
        }
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

    /// Waits on the host for the streams that freed memory still depends on, in the pools for which `of` is true, so that it becomes free
    /// and merges. Returns true if there was anything to wait for. Skips streams that cannot be waited for now.
    pub(crate) fn synchronize_pending(&self, of: impl Fn(u16) -> bool) -> Result<bool, AllocError> {
        let mut waited = false;
        // Twice, because a block that waited may become a stray (a free block away from home), with a tick of its own stream.
        for _ in 0..2 {
            let mut whole = self.shell().part(None);
            let waits = !whole.waiting.is_empty() || whole.has_strays();
            let mut pending = whole.pending(&of);
            pending.extend(whole.pending_strays(&of));
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
        self.counters().waits(kind, size);
        let users = self.shared.remove(&place);
        if users.is_some() {
            self.arena(place.arena).arena.shared_blocks.fetch_sub(1, Ordering::Relaxed);
        }
        let mut streams = users.unwrap_or_default();
        streams.extend(on.filter(|on| !streams.contains(on)));
        let uses = streams.iter().map(|&slot| (slot, self.tick_of(slot))).collect();
        let block = *self.block(place);
        let own_use = self.tick_of(block.owner);
        self.waiting.push(Waiting { place, block, uses, own_use });
        self.shell.special().fetch_or(special::WAITING, Ordering::Relaxed);
    }

    /// The latest tick of each stream that waiting blocks depend on, in the pools for which `of` is true. Ticks known to be done are left
    /// out.
    fn pending(&self, of: impl Fn(u16) -> bool) -> Pending {
        let mut latest: Vec<(u32, u64)> = Vec::new();
        for waiting in self.waiting.blocks.iter().filter(|waiting| of(waiting.block.pool)) {
            for &(slot, after) in &waiting.uses {
                match latest.iter_mut().find(|(other, _)| *other == slot) {
                    Some((_, tick)) => *tick = after.max(*tick),
                    None => latest.push((slot, after)),
                }
            }
        }
        self.unknown(latest.into_iter())
    }

    /// The ticks of free blocks away from home that are not known to be done, in the pools for which `of` is true.
    fn pending_strays(&mut self, of: impl Fn(u16) -> bool) -> Pending {
        self.look_for(Sought::Strays);
        let strays = self.heaps().flat_map(|heap| heap.strays().map(|id| &heap.blocks[id]));
        self.unknown(strays.filter(|block| of(block.pool)).map(|block| (block.owner, block.after)))
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
        list.streams.iter_mut().for_each(|stream| stream.seen = self.frontier(stream.slot));
        list.blocks.retain(|waiting| {
            let Waiting { block: Block { owner, .. }, .. } = *waiting;
            let clock = ordered.filter(|(slot, _)| *slot == owner).map(|(_, clock)| clock);
            let passed = |&(slot, after): &(u32, u64)| {
                self.is_known_done(slot, after) || slot == owner || clock.is_some_and(|clock| after <= clock.of(slot))
            };
            let free = waiting.uses.iter().all(passed);
            if free {
                let (block, counters) = (&waiting.block, self.counters());
                let (kind, requested) = (kind_of(block.pool), block.requested.cast_signed());
                counters.waited(kind, block.size);
                // The tick is taken now, because the owner's later events also cover the work that it is ordered after.
                let tick = self.tick_of(owner);
                let done = waiting.uses.iter().all(|&(slot, after)| slot == owner || self.is_known_done(slot, after));
                let last_use = if done { waiting.own_use } else { tick };
                let arena = self.arena(waiting.place.arena);
                arena.tally().change(Hot::Requested, kind, -requested);
                arena.note(Action::FreeCompleted, waiting.place.block);
                arena.complete(waiting.place.block, owner, tick, last_use);
            }
            !free
        });
        if list.blocks.is_empty() {
            self.shell.special().fetch_and(!special::WAITING, Ordering::Relaxed);
        }
        list.wait_anew();
        self.waiting = list;
    }

    /// The uses by other streams that keep a waiting block of the request's own stream from serving it. Of several such blocks, the
    /// smallest counts.
    pub(crate) fn uses_of_own(&self, request: &Request) -> Option<Vec<(u32, u64)>> {
        let serves = |waiting: &&Waiting| {
            let block = &waiting.block;
            let own = waiting.place.arena == request.slot && block.owner == request.slot && block.pool == request.pool;
            own && block.size >= request.size
        };
        let best = self.waiting.blocks.iter().filter(serves).min_by_key(|waiting| waiting.block.size)?;
        Some(best.uses.iter().copied().filter(|&(slot, _)| slot != request.slot).collect())
    }

    /// Bytes that waiting blocks hold; and, for each tick not known done, the bytes of the blocks that wait for it.
    pub(crate) fn awaited(&self) -> (u64, BTreeMap<(u32, u64), u64>) {
        let (mut held, mut awaited) = (0, BTreeMap::new());
        for waiting in &self.waiting.blocks {
            let size = waiting.block.size;
            held += size;
            let not_done = waiting.uses.iter().filter(|&&(slot, after)| !self.is_known_done(slot, after));
            not_done.for_each(|&tick| *awaited.entry(tick).or_default() += size);
        }
        (held, awaited)
    }

    /// The blocks that wait for streams for which `of` is true.
    pub(crate) fn waiting_for(&self, of: impl Fn(u32) -> bool) -> impl Iterator<Item = Place> {
        let waits = move |waiting: &&Waiting| {
            waiting.uses.iter().any(|&(slot, after)| of(slot) && !self.is_known_done(slot, after))
        };
        self.waiting.blocks.iter().filter(waits).map(|waiting| waiting.place)
    }

    /// Bytes of waiting blocks, by the stream that they wait for.
    pub(crate) fn waiting_bytes(&self) -> Vec<(u32, u64)> {
        let mut bytes: Vec<(u32, u64)> = Vec::new();
        for (block, slots) in self.waiting_blocks() {
            for slot in slots {
                match bytes.iter_mut().find(|(other, _)| *other == slot) {
                    Some((_, sum)) => *sum += block.size,
                    None => bytes.push((slot, block.size)),
                }
            }
        }
        bytes
    }

    /// Bytes that were requested for waiting blocks.
    pub(crate) fn waiting_requested(&self) -> u64 {
        self.waiting.blocks.iter().map(|waiting| waiting.block.requested).sum()
    }

    /// The blocks that wait, each with the streams that are not known to be done with it.
    pub(crate) fn waiting_blocks(&self) -> impl Iterator<Item = (&Block, Vec<u32>)> {
        self.waiting.blocks.iter().map(|waiting| {
            let not_done = waiting.uses.iter().filter(|&&(slot, after)| !self.is_known_done(slot, after));
            (&waiting.block, not_done.map(|&(slot, _)| slot).collect())
        })
    }
}

impl Core {
    /// As [`Whole::pending`] for all pools, but without a look at the blocks.
    fn pending_of_all(&self) -> Pending {
        self.unknown(self.waiting.streams.iter().map(|stream| (stream.slot, stream.latest)))
    }

    /// Notes that streams were asked. Returns true if a stream that blocks wait for got further.
    fn note_asked(&mut self) -> bool {
        let got_further = self.can_sweep();
        self.waiting.note_asked(!got_further);
        got_further
    }

    /// True if a stream that blocks wait for got further since the list was last searched.
    fn can_sweep(&self) -> bool {
        self.waiting.streams.iter().any(|stream| self.frontier(stream.slot) > stream.seen)
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
