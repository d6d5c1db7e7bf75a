//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's `active_pending_free`.
//!
//! A waiting block carries one tick for each stream that used it, taken when the block was freed. The block becomes free once all these
//! ticks are done or, where blocks may cross streams at all, once its owner's later work is ordered after them (invariant A1).
//!
//! While blocks wait, allocations ask how far the streams got, with at most one driver query for each stream. As long
//! as no stream gets further, fewer allocations ask: down to one in four, besides those that find no memory otherwise.
//! Blocks are listed by the ticks that they wait for (`ticks.rs`), so those that need not wait any more are found
//! without a look at the others. If a request would fail otherwise, the host waits for the streams instead.

use std::collections::BTreeMap;

use aquifer_device::internal::Clock;

use crate::accounting::counters::Hot;
use crate::allocator::Allocator;
use crate::cross_stream::progress::{Pending, poll, synchronize_all};
use crate::cross_stream::ticks::Use;
use crate::cross_stream::waiting_list::Waiting;
use crate::error::AllocError;
use crate::heap::{Block, kind_of};
use crate::history::Action;
use crate::pools::table::Which;
use crate::request::{Place, Request};
use crate::shell::core::Core;
use crate::shell::settled::Sought;
use crate::shell::special;
use crate::shell::whole::Whole;
use crate::sync::atomic::Ordering;

/// Asks how far the streams got that waiting blocks depend on, and frees the blocks that need not wait any more.
pub(crate) fn poll_waiting(allocator: &Allocator) -> Result<(), AllocError> {
    let pending = pending_of_all(&allocator.shell().core());
    poll(&pending)?;
    let got_further = note_asked(&mut allocator.shell().core());
    if got_further {
        sweep_done(&mut allocator.shell().part(None));
    }
    Ok(())
}

/// Waits on the host for the streams that freed memory still depends on, in some pools, so that it becomes free and
/// merges. Returns true if there was anything to wait for. Skips streams that cannot be waited for now.
pub(crate) fn synchronize_pending(allocator: &Allocator, which: Which) -> Result<bool, AllocError> {
    let mut waited = false;
    // Twice, because a block that waited may become a stray (a free block away from home), with a tick of its own stream.
    for _ in 0..2 {
        let mut whole = allocator.shell().part(None);
        let waits = !whole.waiting.is_empty() || whole.has_strays();
        let mut pending = pending(&whole, which);
        pending.extend(pending_strays(&mut whole, which));
        drop(whole);
        if !waits {
            break;
        }
        if !waited && !pending.is_empty() {
            allocator.shell().count(|counters| &counters.num_sync_all_streams);
        }
        waited = true;
        synchronize_all(&pending)?;
        let mut whole = allocator.shell().part(None);
        sweep_done(&mut whole);
        send_strays_home(&mut whole);
    }
    Ok(waited)
}

/// The latest tick of each stream that waiting blocks depend on, in some pools. Ticks known to be done are left out.
fn pending(whole: &Whole, which: Which) -> Pending {
    if let Which::All = which {
        return pending_of_all(whole);
    }
    let mut latest: BTreeMap<u32, u64> = BTreeMap::new();
    let waiting = whole.waiting.blocks.values().filter(|waiting| whole.pools.is_among(waiting.block.pool, which));
    for &(slot, after) in waiting.flat_map(|waiting| &waiting.uses) {
        latest.entry(slot).and_modify(|tick| *tick = after.max(*tick)).or_insert(after);
    }
    unknown(whole, latest.into_iter())
}

/// The ticks of free blocks away from home that are not known to be done, in some pools.
fn pending_strays(whole: &mut Whole, which: Which) -> Pending {
    whole.look_for(Sought::Strays);
    let strays = whole.heaps().flat_map(|heap| heap.strays().map(|id| &heap.blocks[id]));
    let strays = strays.filter(|block| whole.pools.is_among(block.pool, which));
    unknown(whole, strays.map(|block| (block.owner, block.after)))
}

/// Frees the waiting blocks that need not wait any more, if a stream got further since the last time.
fn sweep_done(whole: &mut Whole) {
    if can_sweep(whole) {
        sweep(whole, None);
    }
}

/// Frees the waiting blocks that need not wait any more. Among them are blocks of the stream `owner` if its later work is ordered after
/// all their uses, according to its clock.
pub(crate) fn sweep_ordered(whole: &mut Whole, owner: u32, clock: &Clock) {
    if !whole.waiting.is_empty() {
        sweep(whole, Some((owner, clock)));
    }
}

fn sweep(whole: &mut Whole, ordered: Option<(u32, &Clock)>) {
    let mut list = std::mem::take(&mut whole.waiting);
    // Read before the blocks are looked at, so that progress of a stream meanwhile leads to another sweep.
    list.streams.iter_mut().for_each(|(&slot, stream)| stream.seen = frontier(whole, slot));
    list.uses.advance(|slot| whole.done_until(slot));
    let mut free = list.uses.done().clone();
    if let Some((owner, clock)) = ordered
        && let Some(of_owner) = list.owners.get_mut(&owner)
    {
        of_owner.uses.advance(|slot| whole.done_until(slot).max(clock.of(slot)));
        free.extend(of_owner.uses.done());
    }
    free.into_iter().filter_map(|number| list.take(number)).for_each(|waiting| end_wait(whole, &waiting));
    if list.is_empty() {
        whole.shell.special().fetch_and(!special::WAITING, Ordering::Relaxed);
    }
    whole.waiting = list;
}

/// Frees a block that need not wait any more.
fn end_wait(whole: &mut Whole, waiting: &Waiting) {
    let &Waiting { place: Place { arena, block: id }, block: Block { owner, pool, size, requested, .. }, .. } = waiting;
    let kind = kind_of(pool);
    whole.counters().waited(kind, size);
    // The tick is taken now, because the owner's later events also cover the work that it is ordered after.
    let tick = whole.tick_of(owner);
    let done = waiting.uses.iter().all(|&(slot, after)| whole.is_known_done(slot, after));
    let last_use = if done { waiting.own_use } else { tick };
    let arena = whole.arena(arena);
    arena.tally().change(Hot::Requested, kind, -requested.cast_signed());
    arena.note(Action::FreeCompleted, id);
    arena.complete(id, owner, tick, last_use);
}

/// The uses by other streams that keep a waiting block of the request's own stream from serving it. Of several such blocks, the
/// smallest counts.
pub(crate) fn uses_of_own(whole: &Whole, request: &Request) -> Option<Vec<Use>> {
    let own = &whole.waiting.owners.get(&request.slot)?.at_home;
    let &(_, _, best) = own.range((request.pool, request.size, 0)..=(request.pool, u64::MAX, u64::MAX)).next()?;
    whole.waiting.blocks.get(&best).map(|waiting| waiting.uses.clone())
}

/// Bytes that waiting blocks hold.
pub(crate) fn waiting_held(whole: &Whole) -> u64 {
    whole.waiting.bytes
}

/// For each tick not known done, the bytes of the blocks that wait for it.
pub(crate) fn awaited(whole: &Whole) -> impl Iterator<Item = (Use, u64)> + '_ {
    whole.waiting.uses.ticks().filter(|&((slot, after), _)| !whole.is_known_done(slot, after))
}

/// Bytes of waiting blocks, by the stream that they wait for.
pub(crate) fn waiting_bytes(core: &Core) -> Vec<(u32, u64)> {
    let mut bytes: BTreeMap<u32, u64> = BTreeMap::new();
    for (block, slots) in waiting_blocks(core) {
        slots.into_iter().for_each(|slot| *bytes.entry(slot).or_default() += block.size);
    }
    bytes.into_iter().collect()
}

/// Bytes that were requested for waiting blocks.
pub(crate) fn waiting_requested(core: &Core) -> u64 {
    core.waiting.requested
}

/// The blocks that wait, each with the streams that are not known to be done with it.
pub(crate) fn waiting_blocks(core: &Core) -> impl Iterator<Item = (&Block, Vec<u32>)> {
    core.waiting.blocks.values().map(|waiting| {
        let not_done = waiting.uses.iter().filter(|&&(slot, after)| !core.is_known_done(slot, after));
        (&waiting.block, not_done.map(|&(slot, _)| slot).collect())
    })
}

/// As [`Whole::pending`] for all pools, but without a look at the blocks.
fn pending_of_all(core: &Core) -> Pending {
    unknown(core, core.waiting.uses.latest())
}

/// Notes that streams were asked. Returns true if a stream that blocks wait for got further.
fn note_asked(core: &mut Core) -> bool {
    let got_further = can_sweep(core);
    core.waiting.note_asked(!got_further);
    got_further
}

/// True if a stream that blocks wait for got further since the list was last searched.
fn can_sweep(core: &Core) -> bool {
    core.waiting.streams.iter().any(|(&slot, stream)| frontier(core, slot) > stream.seen)
}

/// Those of the given ticks that are not known to be done.
pub(crate) fn unknown(core: &Core, ticks: impl Iterator<Item = (u32, u64)>) -> Pending {
    let unknown = ticks.filter(|&(slot, after)| !core.is_known_done(slot, after));
    unknown.filter_map(|(slot, after)| Some((core.timeline(slot)?.clone(), after))).collect()
}

fn frontier(core: &Core, slot: u32) -> u64 {
    core.timeline(slot).map_or(0, |timeline| timeline.frontier())
}

/// Returns strays that are done to their home streams.
pub(crate) fn send_strays_home(whole: &mut Whole) {
    whole.look_for(Sought::Strays);
    let (core, arenas) = whole.core_and_arenas();
    for arena in arenas {
        for (pool, change) in arena.heap.send_home(|owner, after| core.is_known_done(owner, after)) {
            arena.split_changed(kind_of(pool), change);
        }
    }
}
