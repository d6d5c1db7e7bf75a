//! The cordon: what keeps memory that sleeps apart from the rest, while the rest is in use.
//!
//! * Free memory beside it, in the same granules, is *held*, so that no request takes it.
//! * Its live blocks are marked as used by several streams. So their frees leave the fast path, and
//!   come to `begin_wait` (`../../state/free.rs`), which keeps the blocks until their memory wakes up.
//!
//! Allocations and frees of other memory are as fast as without. The cordon is lifted and put up
//! again under the lock, so no other thread sees memory without it. While the whole allocator
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
use crate::heap::{BlockId, State};
use crate::state::guard::StateGuard;
use crate::state::special;
use crate::types::After;

/// Puts the cordon up around all memory that sleeps.
pub(crate) fn put_up(guard: &mut StateGuard) {
    let Some(paged) = &guard.paged else { return };
    let sleeping = paged.sleeping.clone();
    if sleeping.is_empty() {
        return;
    }
    let (mut live, mut free) = (Vec::new(), Vec::new());
    {
        let heap = &guard.heap;
        let touches = |range: &Range<u64>| !within(&sleeping, range).is_empty();
        for region in heap.regions().filter(|region| touches(&(region.addr..region.addr + region.bytes))) {
            for (id, block) in heap.blocks_of(region) {
                let parts = within(&sleeping, &block.range());
                match block.state {
                    State::Live if !parts.is_empty() => live.push(id),
                    State::Free => free.extend(parts.into_iter().map(|part| Donor {
                        block: id,
                        addr: part.start,
                        bytes: part.end - part.start,
                        after: After::NOTHING,
                    })),
                    _ => {}
                }
            }
        }
    }
    // Each block from its high end down, as holding it needs.
    free.sort_unstable_by_key(|donor| (donor.block, Reverse(donor.addr)));
    let held = hold_all(guard, free).into_iter().map(|donor| donor.block).collect();
    live.retain(|&id| mark(guard, id));
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
    marked.into_iter().for_each(|id| unmark(guard, id));
    for block in held {
        guard.heap.unhold_as_free(block);
    }
    for waiting in freed {
        if waiting.uses.iter().all(|&one| guard.streams.is_done(one)) {
            end_wait(guard, &waiting);
        } else {
            guard.waiting.push(waiting);
            guard.state.special().fetch_or(special::WAITING, Ordering::Relaxed);
        }
    }
}

/// Marks a live block, so that its free takes the slow path. Returns false if it was marked already.
fn mark(guard: &mut StateGuard, id: BlockId) -> bool {
    let Entry::Vacant(users) = guard.other_users.entry(id) else { return false };
    users.insert(Vec::new());
    guard.heap.blocks[id].used_elsewhere = true;
    guard.heap.make_irregular(id);
    true
}

/// Takes the mark away, unless the block was given back, or other streams do use it now.
fn unmark(guard: &mut StateGuard, id: BlockId) {
    let Entry::Occupied(users) = guard.other_users.entry(id) else { return };
    if !users.get().is_empty() {
        return;
    }
    users.remove();
    guard.heap.blocks[id].used_elsewhere = false;
}
