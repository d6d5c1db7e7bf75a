//! Commits or rolls back a remap: accounts for the driver calls, and returns all held memory to the
//! heaps.

use std::ops::Range;

use crate::backing::paged::account::{account_for_granules, note_mapping};
use crate::backing::paged::carry_out::{Done, Filled};
use crate::backing::paged::donors::Donor;
use crate::backing::paged::granules::Stuck;
use crate::backing::paged::lingering::settle_reused;
use crate::backing::paged::plan::Held;
use crate::heap::{BlockId, State};
use crate::history::Action;
use crate::state::guard::StateGuard;
use crate::types::{After, PoolId, Request};

/// Accounts for what the driver did, and releases the held memory to the heap. Returns the free
/// block that the window became, if all went well.
pub(crate) fn settle_plan(guard: &mut StateGuard, request: &Request, held: Held, done: &mut Done) -> Option<BlockId> {
    // A request that is refused raises no peak.
    if let (Some(paged), None) = (&mut guard.paged, &done.error) {
        paged.peak = paged.peak.max(held.peak);
    }
    settle_work(guard, &held.donors, (held.spares, held.create), request.pool, done);
    let moved = settle_reused(guard, request.stream, &held.reused, std::mem::take(&mut done.unmoved));
    note_moved(guard, moved, done.unmapped > 0);
    let used_until = held.reused.iter().map(|donor| donor.after).max().unwrap_or_default();
    let (usable, stuck) = done.filled.iter().partition::<Vec<&Filled>, _>(|filled| filled.usable);
    // Memory that is mapped without access is of no use to a pool.
    if let Some(paged) = guard.paged.as_mut() {
        let bytes = stuck.iter().map(|filled| filled.range.end - filled.range.start).sum::<u64>();
        paged.mapped_bytes[request.pool.kind() as usize] -= bytes;
    }
    // The pieces merge as they are released, so the block of the last one is the whole window.
    let last =
        held.window.iter().filter_map(|&id| release_piece(guard, request, (id, used_until), &usable, &stuck)).last();
    account_for_granules(guard);
    last.filter(|_| done.error.is_none())
}

/// Accounts for what the driver did with donors, with `spares` granules of spare frames and with
/// `create` granules to be created for `pool`.
pub(crate) fn settle_work(
    guard: &mut StateGuard,
    donors: &[Donor],
    (spares, create): (u64, u64),
    pool: PoolId,
    done: &Done,
) {
    settle_donors(guard, donors, done);
    let Some(paged) = guard.paged.as_mut() else { return };
    let (kind, granule) = (pool.kind(), paged.granule);
    paged.in_hands -= spares;
    paged.spares.extend(done.spares.iter());
    for filled in &done.filled {
        paged.put_all(filled.range.start, &filled.frames);
        paged.mapped_bytes[kind as usize] += filled.range.end - filled.range.start;
    }
    guard.growing.end(create * granule);
    if done.created {
        guard.counters.num_device_alloc.add(1);
    }
    if done.unmapped > 0 {
        let moved = donors[..done.unmapped].iter().map(|donor| donor.bytes).sum::<u64>();
        guard.counters.remaps.add(1);
        guard.counters.granules_moved.add(moved / granule);
    }
}

/// Counts memory that moved without being unmapped. `counted` is true if the remap counts already.
fn note_moved(guard: &mut StateGuard, bytes: u64, counted: bool) {
    let Some(granule) = guard.paged.as_ref().map(|paged| paged.granule).filter(|_| bytes > 0) else { return };
    guard.counters.remaps.add(u64::from(!counted));
    guard.counters.granules_moved.add(bytes / granule);
}

fn settle_donors(guard: &mut StateGuard, donors: &[Donor], done: &Done) {
    let mut still_mapped = done.still_mapped.iter();
    for (at, donor) in donors.iter().enumerate() {
        if at < done.unmapped {
            let region = guard.heap.region_of(donor.block);
            let (pool, stream) = (region.pool, region.stream);
            guard.heap.unhold_as_hole(donor.block);
            note_mapping(guard, Action::SegmentUnmap, pool, stream, donor.addr, donor.bytes);
            if let Some(paged) = &mut guard.paged {
                paged.mapped_bytes[pool.kind() as usize] -= donor.bytes;
            }
        } else {
            guard.heap.unhold_as_free(donor.block);
            let frames = still_mapped.next();
            if let (Some(paged), Some(frames)) = (&mut guard.paged, frames) {
                paged.put_all(donor.addr, frames);
            }
        }
    }
}

/// Releases a piece of the window to the heap. The request's stream may be using the memory that it
/// got, at other addresses, until the tick `used_until`. Returns the free block that it is in now,
/// if it is in one.
fn release_piece(
    guard: &mut StateGuard,
    request: &Request,
    (id, used_until): (BlockId, After),
    usable: &[&Filled],
    stuck: &[&Filled],
) -> Option<BlockId> {
    let block = guard.heap.blocks[id];
    // Held: this piece was free memory. Otherwise it is `Filling`, a hole.
    if block.state == State::Held {
        return Some(guard.heap.unhold_as_free(id));
    }
    let range = block.range();
    // Mapped without access, and not unmapped again: no request gets these addresses before they
    // are unmapped.
    let frames = stuck.iter().map(|filled| filled.range.clone());
    let frames: Vec<Range<u64>> = frames.filter(|frame| range.contains(&frame.start)).collect();
    if !frames.is_empty() {
        if let Some(paged) = &mut guard.paged {
            paged.stuck.push_back(Stuck { block: id, frames });
        }
        return None;
    }
    if !usable.iter().any(|filled| filled.range.contains(&block.addr)) {
        guard.heap.unhold_as_hole(id);
        return None;
    }
    let free = guard.heap.unhold_as_used(id, used_until);
    note_mapping(guard, Action::SegmentMap, request.pool, request.stream, block.addr, block.size);
    Some(free)
}
