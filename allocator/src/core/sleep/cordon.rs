//! The cordon: what keeps memory that sleeps apart from the rest, while the rest is in use.
//!
//! * Free memory beside it, in the same granules, is *held*, so that no request takes it.
//! * Its live blocks are marked as used by several streams. So their frees leave the fast path, and
//!   come to `begin_wait` (`../free.rs`), which keeps the blocks until their memory wakes up.
//!
//! Allocations and frees of other memory are as fast as without. The cordon is lifted and put up
//! again under the lock, so no other thread sees memory without it. While the whole allocator
//! sleeps it is not needed, because nothing is allocated.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::ops::Range;

use crate::core::Core;
use crate::core::heap::State;
use crate::core::remap::donors::Donor;
use crate::core::sleep::absent::{Cordon, within};
use crate::types::{After, BlockId};

impl Core {
    /// Puts the cordon up around all memory that sleeps.
    pub(crate) fn put_cordon_up(&mut self) {
        let Some(paged) = &self.paged else { return };
        let sleeping = paged.sleeping.clone();
        if sleeping.is_empty() {
            return;
        }
        let (mut live, mut free) = (Vec::new(), Vec::new());
        {
            let heap = &self.heap;
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
        let held = self.hold_all(free).into_iter().map(|donor| donor.block).collect();
        live.retain(|&id| self.mark_asleep(id));
        let freed = self.waiting.take_where(|waiting| !within(&sleeping, &waiting.block.range()).is_empty());
        if let Some(paged) = &mut self.paged {
            paged.cordon.held = held;
            paged.cordon.marked = live;
            paged.cordon.freed.extend(freed);
        }
    }

    /// Lifts the cordon: blocks that were given back meanwhile are free, and so is what was held.
    pub(crate) fn lift_cordon(&mut self) {
        let Some(paged) = &mut self.paged else { return };
        let Cordon { held, marked, freed } = std::mem::take(&mut paged.cordon);
        marked.into_iter().for_each(|id| self.unmark_asleep(id));
        for block in held {
            self.heap.unhold_as_free(block);
        }
        for waiting in freed {
            if waiting.uses.iter().all(|&one| self.streams.is_done(one)) {
                self.end_wait(&waiting);
            } else {
                self.waiting.push(waiting);
            }
        }
    }

    /// Marks a live block, so that its free takes the slow path. Returns false if it was marked already.
    fn mark_asleep(&mut self, id: BlockId) -> bool {
        let Entry::Vacant(users) = self.other_users.entry(id) else { return false };
        users.insert(Vec::new());
        self.heap.mark_used_elsewhere(id);
        true
    }

    /// Takes the mark away, unless the block was given back, or other streams do use it now.
    fn unmark_asleep(&mut self, id: BlockId) {
        let Entry::Occupied(users) = self.other_users.entry(id) else { return };
        if !users.get().is_empty() {
            return;
        }
        users.remove();
        self.heap.unmark_used_elsewhere(id);
    }
}
