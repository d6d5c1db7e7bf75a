//! The cordon: what keeps memory that sleeps apart from the rest, while the rest is in use.
//!
//! * Free memory beside it, in the same granules, is *held*, so that no request takes it.
//! * Its live blocks are marked as used by several streams. So their frees leave the fast path, and
//!   come to `apply_deferred_free` (`../../state/guard.rs`), which keeps the blocks until their
//!   memory wakes up.
//!
//! Allocations and frees of other memory are as fast as without. The cordon is lifted and put up
//! again under all locks, so no other thread sees memory without it. While the whole allocator
//! sleeps it is not needed, because nothing is allocated.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::backing::paged::absent::{Cordon, within};
use crate::backing::paged::donors::Donor;
use crate::backing::paged::plan::hold_all;
use crate::cross_stream::waiting::end_wait;
use crate::cross_stream::waiting_list::Waiting;
use crate::heap::State;
use crate::request::Place;
use crate::state::guard::StateGuard;
use crate::state::special;

/// Puts the cordon up around all memory that sleeps. All locks are held.
pub(crate) fn put_up(guard: &mut StateGuard) {
    let Some(paged) = &guard.paged else { return };
    let sleeping = paged.sleeping.clone();
    if sleeping.is_empty() {
        return;
    }
    let (mut live, mut free) = (Vec::new(), Vec::new());
    for heap in guard.heaps() {
        let touches = |range: &Range<u64>| !within(&sleeping, range).is_empty();
        for region in heap.regions().filter(|region| touches(&(region.addr..region.addr + region.bytes))) {
            for (id, block) in heap.blocks_of(region) {
                let parts = within(&sleeping, &block.range());
                match block.state {
                    State::Live if !parts.is_empty() => live.push(Place { arena: heap.home, block: id }),
                    State::Free => free.extend(parts.into_iter().map(|part| Donor {
                        arena: heap.home,
                        block: id,
                        addr: part.start,
                        bytes: part.end - part.start,
                        after: 0,
                    })),
                    _ => {}
                }
            }
        }
    }
    // Each block from its high end down, as holding it needs.
    free.sort_unstable_by_key(|donor| (donor.arena, donor.block, Reverse(donor.addr)));
    let held = hold_all(guard, free).into_iter().map(|donor| (donor.arena, donor.block)).collect();
    live.retain(|&place| mark(guard, place));
    let waiting = guard.waiting.blocks.iter();
    let touched = waiting.filter(|(_, waiting)| !within(&sleeping, &waiting.block.range()).is_empty());
    let touched: Vec<u64> = touched.map(|(&number, _)| number).collect();
    let freed = touched.into_iter().filter_map(|number| guard.waiting.take(number)).collect();
    if guard.waiting.is_empty() {
        guard.state.special().fetch_and(!special::WAITING, Ordering::Relaxed);
    }
    if let Some(paged) = &mut guard.paged {
        paged.cordon.held = held;
        paged.cordon.marked = live;
        paged.cordon.freed.extend::<Vec<Waiting>>(freed);
    }
}

/// Lifts the cordon: blocks that were given back meanwhile are free, and so is what was held.
pub(crate) fn lift(guard: &mut StateGuard) {
    let Some(paged) = &mut guard.paged else { return };
    let Cordon { held, marked, freed } = std::mem::take(&mut paged.cordon);
    marked.into_iter().for_each(|place| unmark(guard, place));
    for (arena, block) in held {
        guard.arena(arena).heap.unhold_as_free(block);
    }
    for waiting in freed {
        if waiting.uses.iter().all(|&(slot, after)| guard.is_known_done(slot, after)) {
            end_wait(guard, &waiting);
        } else {
            guard.waiting.push(waiting);
            guard.state.special().fetch_or(special::WAITING, Ordering::Relaxed);
        }
    }
}

/// Marks a live block, so that its free takes the slow path. Returns false if it was marked already.
fn mark(guard: &mut StateGuard, place: Place) -> bool {
    let Entry::Vacant(users) = guard.other_users.entry(place) else { return false };
    users.insert(Vec::new());
    let locked = guard.arena(place.arena);
    locked.heap.blocks[place.block].used_elsewhere = true;
    locked.heap.make_irregular(place.block);
    true
}

/// Takes the mark away, unless the block was given back, or other streams do use it now.
fn unmark(guard: &mut StateGuard, place: Place) {
    let Entry::Occupied(users) = guard.other_users.entry(place) else { return };
    if !users.get().is_empty() {
        return;
    }
    users.remove();
    guard.arena(place.arena).heap.blocks[place.block].used_elsewhere = false;
}
