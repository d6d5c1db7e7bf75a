//! A block that rests: given back, and not merged before the next operation.
//!
//! Programs mostly ask for the size that they just gave back. So a block that is given back rests: the next request, if it is
//! for exactly this size and from the same pool, gets it as it is, and nothing is cut, joined or indexed. Any other operation
//! merges it first, so that one block rests at most, and all of the heap's decisions but this one are made as if none did.
//!
//! A resting block is [`State::Waiting`], and counts as one in the identities. It has no part in them that others see: whoever
//! holds every lock merges it first. Heaps that are to decide exactly as PyTorch's do let none rest.

use super::index::{Bins, FreeIndex};
use super::{BlockId, Heap, IndexKind, State, moves};

impl Heap {
    /// Gives a live block of the home stream back, as [`Heap::give`] does, now or before anybody notices. The block that rested
    /// is merged.
    #[inline]
    pub(crate) fn give_to_rest(&mut self, id: BlockId, after: u64) {
        debug_assert!(self.index_kind == IndexKind::Bins);
        let rested = std::mem::replace(&mut self.resting, id);
        let block = &mut self.blocks[id];
        debug_assert!(block.state == State::Live && block.owner == self.home);
        (block.state, block.after) = (State::Waiting, after);
        if rested != BlockId::NONE {
            self.merge(rested);
        }
    }

    /// Merges the block that rests, if one does.
    #[inline]
    pub(crate) fn merge_resting(&mut self) {
        if self.resting != BlockId::NONE {
            let id = std::mem::take(&mut self.resting);
            self.merge(id);
        }
    }

    /// Takes the block that rests, if it is what a request needs; merges it if not.
    #[inline]
    pub(super) fn take_resting(&mut self, pool: u16, size: u64, requested: u64) -> Option<BlockId> {
        let id = std::mem::take(&mut self.resting);
        let block = &mut self.blocks[id];
        if block.size == size && block.pool == pool {
            (block.state, block.requested) = (State::Live, requested);
            self.retaken += size;
            return Some(id);
        }
        self.merge(id);
        None
    }

    #[inline(never)]
    fn merge(&mut self, id: BlockId) {
        let (home, after) = (self.home, self.blocks[id].after);
        self.note_last_use(id, home, after);
        let pool = usize::from(self.blocks[id].pool);
        match &mut self.pools[pool].own {
            FreeIndex::Bins(index) if after != 0 => {
                let joined = moves::join(index, &mut self.blocks.records(), id, home, after);
                self.gave::<Bins>(&joined, pool);
            }
            _ => {
                self.give(id, home, after);
            }
        }
    }
}
