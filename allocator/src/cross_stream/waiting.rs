//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's
//! `active_pending_free`.
//!
//! A waiting block carries one tick for each stream that used it, taken when the block was freed.
//! The block becomes free once all these ticks are done or, where blocks may cross streams at all,
//! once its owner's later work is ordered after them (invariant A1).
//!
//! While blocks wait, allocations ask how far the streams got, with at most one driver query for
//! each stream. With mapped memory they ask only while a 64th of what is reserved waits. As long as
//! no stream gets further, fewer allocations ask: down to one in four. Allocations that find no
//! memory otherwise ask in any case. Blocks are listed by the ticks that they wait for (`ticks.rs`),
//! so those that need not wait any more are found without a look at the others. If a request would
//! fail otherwise, the host waits for the streams instead.

use std::collections::BTreeMap;

use aquifer_device::internal::Clock;

use crate::allocator::Allocator;
use crate::cross_stream::progress::{Pending, poll, synchronize_all};
use crate::cross_stream::waiting_list::Waiting;
use crate::error::AllocError;
use crate::heap::Block;
use crate::history::Action;
use crate::policy::EVENT_SHARE;
use crate::pools::table::Which;
use crate::state::guard::StateGuard;
use crate::state::shared::SharedState;
use crate::state::special;
use crate::sync::atomic::Ordering;
use crate::types::{After, StreamId, latest_by_stream};

/// Asks how far the streams got that waiting blocks depend on, and frees the blocks that need not
/// wait any more.
pub(crate) fn poll_waiting(allocator: &Allocator) -> Result<(), AllocError> {
    let pending = pending_of_all(&allocator.state().shared());
    poll(&pending)?;
    let got_further = note_asked(&mut allocator.state().shared());
    if got_further {
        sweep_done(&mut allocator.state().lock());
    }
    Ok(())
}

/// Waits on the host for the streams that freed memory still depends on, in some pools, so that it
/// becomes free and merges. Returns true if there was anything to wait for. Skips streams that
/// cannot be waited for now.
pub(crate) fn synchronize_pending(allocator: &Allocator, which: Which) -> Result<bool, AllocError> {
    let mut waited = false;
    // Twice, because a block that waited may become a stray, with a tick of its own stream.
    for _ in 0..2 {
        let mut guard = allocator.state().lock();
        let waits = !guard.waiting.is_empty() || guard.heap.has_strays();
        let mut pending = pending(&guard, which);
        pending.extend(pending_strays(&guard, which));
        if !waits {
            break;
        }
        if !waited && !pending.is_empty() {
            guard.counters.num_sync_all_streams.add(1);
        }
        drop(guard);
        waited = true;
        synchronize_all(&pending)?;
        let mut guard = allocator.state().lock();
        sweep_done(&mut guard);
        while guard.return_strays() {}
    }
    Ok(waited)
}

/// The latest tick of each stream that waiting blocks depend on, in some pools. Ticks known to be
/// done are left out.
fn pending(guard: &SharedState, which: Which) -> Pending {
    if let Which::All = which {
        return pending_of_all(guard);
    }
    let waiting = guard.waiting.blocks.values().filter(|waiting| guard.pools.is_among(waiting.block.pool, which));
    guard.streams.not_done(latest_by_stream(waiting.flat_map(|waiting| waiting.uses.iter().copied())))
}

/// The ticks of strays that are not known to be done, in some pools.
fn pending_strays(shared: &SharedState, which: Which) -> Pending {
    let strays = shared.heap.ticks_of_strays().filter(|&(_, pool)| shared.pools.is_among(pool, which));
    shared.streams.not_done(strays.map(|(last_use, _)| last_use))
}

/// Frees the waiting blocks that need not wait any more, if a stream got further since the last
/// time.
fn sweep_done(guard: &mut StateGuard) {
    if can_sweep(guard) {
        sweep(guard, None);
    }
}

/// Frees the waiting blocks that need not wait any more. Among them are blocks of the stream
/// `owner` if its later work is ordered after all their uses, according to its clock.
pub(crate) fn sweep_ordered(guard: &mut StateGuard, owner: StreamId, clock: &Clock) {
    if !guard.waiting.is_empty() {
        sweep(guard, Some((owner, clock)));
    }
}

fn sweep(guard: &mut StateGuard, ordered: Option<(StreamId, &Clock)>) {
    let mut list = std::mem::take(&mut guard.waiting);
    // Read before the blocks are looked at, so that progress of a stream meanwhile leads to another
    // sweep.
    list.streams.iter_mut().for_each(|(&stream, waited_for)| waited_for.seen = guard.streams.known_done(stream));
    list.uses.advance(|stream| guard.streams.known_done(stream));
    let mut free = list.uses.done().clone();
    if let Some((owner, clock)) = ordered
        && let Some(of_owner) = list.owners.get_mut(&owner)
    {
        of_owner.uses.advance(|stream| guard.streams.known_done(stream).max(After::ordered(clock, stream)));
        free.extend(of_owner.uses.done());
    }
    free.into_iter().filter_map(|number| list.take(number)).for_each(|waiting| end_wait(guard, &waiting));
    if list.is_empty() {
        guard.state.special().fetch_and(!special::WAITING, Ordering::Relaxed);
    }
    guard.waiting = list;
}

/// Frees a block that need not wait any more.
pub(crate) fn end_wait(guard: &mut StateGuard, waiting: &Waiting) {
    let &Waiting { id, block: Block { owner, pool, size, requested, .. }, own_use, .. } = waiting;
    guard.counters.waited(pool.kind(), size, requested);
    // The tick is taken now, because the owner's later events also cover the work that it is
    // ordered after.
    let tick = guard.streams.enqueued(owner);
    let done = waiting.uses.iter().all(|&one| guard.streams.is_done(one));
    let last_use = if done { own_use } else { tick };
    guard.note(Action::FreeCompleted, id);
    guard.complete(id, owner, tick, last_use);
}

/// Bytes of waiting blocks, by the stream that they wait for.
pub(crate) fn waiting_bytes(shared: &SharedState) -> Vec<(StreamId, u64)> {
    let mut bytes: BTreeMap<StreamId, u64> = BTreeMap::new();
    for (block, streams) in waiting_blocks(shared) {
        streams.into_iter().for_each(|stream| *bytes.entry(stream).or_default() += block.size);
    }
    bytes.into_iter().collect()
}

/// Bytes that were requested for waiting blocks.
pub(crate) fn waiting_requested(shared: &SharedState) -> u64 {
    shared.waiting.requested
}

/// The blocks that wait, each with the streams that are not known to be done with it.
pub(crate) fn waiting_blocks(shared: &SharedState) -> impl Iterator<Item = (&Block, Vec<StreamId>)> {
    shared.waiting.blocks.values().map(|waiting| {
        let not_done = waiting.uses.iter().filter(|&&one| !shared.streams.is_done(one));
        (&waiting.block, not_done.map(|one| one.stream).collect())
    })
}

/// As [`pending`] for all pools, but without a look at the blocks.
fn pending_of_all(shared: &SharedState) -> Pending {
    shared.streams.not_done(shared.waiting.uses.latest())
}

/// True if this allocation is to ask how far streams got. A request that no free block serves asks
/// in any case.
pub(crate) fn is_poll_due(shared: &mut SharedState) -> bool {
    let is_little = waits_little(shared);
    shared.waiting.is_to_be_asked_for(is_little)
}

/// True if less memory waits than makes a progress event due, where memory is mapped.
fn waits_little(shared: &SharedState) -> bool {
    shared.paged.is_some() && shared.waiting.bytes < shared.reserved / EVENT_SHARE
}

/// Notes that streams were asked. Returns true if a stream that blocks wait for got further.
fn note_asked(shared: &mut SharedState) -> bool {
    let (got_further, is_little) = (can_sweep(shared), waits_little(shared));
    shared.waiting.note_asked(!got_further, is_little);
    got_further
}

/// True if a stream that blocks wait for got further since the list was last searched.
fn can_sweep(shared: &SharedState) -> bool {
    shared.waiting.streams.iter().any(|(&stream, waited_for)| shared.streams.known_done(stream) > waited_for.seen)
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::config::Config;

    #[test]
    fn a_little_that_waits_is_freed_though_requests_are_served_without_it() {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
        drop(allocator.alloc_bytes(512 << 20, &one).unwrap());
        let block = allocator.alloc_bytes(1000, &one).unwrap();
        two.wait_for(&one.tick()).unwrap();
        two.fill(block.ptr(), 1, 1000).unwrap();
        block.record_stream(&two).unwrap();
        drop(block);
        drop(allocator.alloc_bytes(4 << 20, &one).unwrap());
        two.synchronize().unwrap();
        for _ in 0..200 {
            drop(allocator.alloc_bytes(4 << 20, &one).unwrap());
        }
        assert_eq!(allocator.stats().active.all.current, 0);
        assert_eq!(allocator.state().special().load(Ordering::Relaxed) & special::WAITING, 0);
    }
}
