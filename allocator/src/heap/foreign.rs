//! Foreign free blocks: those whose owner is not the stream of their heap.
//!
//! They come from memory that one stream borrowed from another. Once all streams are done with a
//! foreign free block, it goes home and merges with its neighbours there.

use std::collections::BTreeMap;

use super::index::{FreeIndex, IndexKind};
use super::{BlockId, Heap, SplitChange, State, signed};

/// The indexes of a pool's foreign free blocks, one for each owner that has any there. A search
/// for memory of other streams looks at all of these in all heaps, so none is empty.
#[derive(Debug, Default)]
pub(super) struct Away {
    indexes: BTreeMap<u32, FreeIndex>,
    /// Indexes that hold nothing, for reuse.
    spare: Vec<FreeIndex>,
}

impl Away {
    pub(super) fn get(&self, owner: u32) -> Option<&FreeIndex> {
        self.indexes.get(&owner)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &FreeIndex)> + '_ {
        self.indexes.iter().map(|(&owner, index)| (owner, index))
    }

    /// The index of an owner, for a foreign free block to be put in, or to be taken out and
    /// [`Away::left`].
    #[cold]
    pub(super) fn index_mut(&mut self, owner: u32, kind: IndexKind) -> &mut FreeIndex {
        let spare = &mut self.spare;
        self.indexes.entry(owner).or_insert_with(|| spare.pop().unwrap_or_else(|| FreeIndex::new(kind)))
    }

    /// Notes that a foreign free block was taken out of the index of its owner.
    #[cold]
    fn left(&mut self, owner: u32) {
        if self.indexes.get(&owner).is_some_and(FreeIndex::is_empty) {
            self.spare.extend(self.indexes.remove(&owner));
        }
    }
}

impl Heap {
    /// Returns foreign free blocks that are done for every stream to the home stream, and merges
    /// them. Returns by how much `inactive_split` of each pool changed.
    pub(crate) fn send_home(&mut self, is_done: impl Fn(u32, u64) -> bool) -> Vec<(u16, SplitChange)> {
        let done = |id: &BlockId| is_done(self.blocks[*id].owner, self.blocks[*id].after);
        let candidates: Vec<BlockId> = self.foreign.iter().copied().filter(done).collect();
        let mut changes = Vec::new();
        for id in candidates {
            // A foreign free block sent home before may have merged with it.
            if !self.foreign.contains(&id) {
                continue;
            }
            let (was_split, size, pool) = (self.blocks[id].is_split(), self.blocks[id].size, self.blocks[id].pool);
            self.unindex(id);
            self.free -= size;
            self.blocks[id].state = State::Waiting;
            let before = if was_split { SplitChange { count: 1, bytes: signed(size) } } else { SplitChange::default() };
            let (_, after) = self.give(id, self.home, 0);
            let count = after.count - before.count;
            changes.push((pool, SplitChange { count, bytes: after.bytes - before.bytes }));
        }
        changes
    }

    /// Free blocks that are away from home.
    pub(crate) fn foreign(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.foreign.iter().copied()
    }

    #[inline]
    pub(super) fn foreign_note(&mut self, id: BlockId) {
        if self.blocks[id].owner != self.home {
            self.foreign.insert(id);
        }
    }

    /// Notes that a foreign free block was taken. Its rest, if there is one, is a foreign free
    /// block.
    pub(super) fn foreign_took(&mut self, id: BlockId, pool: u16, owner: u32, rest: Option<BlockId>) {
        match rest {
            Some(rest) if rest == id => {}
            Some(rest) => {
                self.foreign.remove(&id);
                self.foreign.insert(rest);
            }
            None => self.foreign_forget(id, pool, owner),
        }
    }

    /// Notes that a block became a foreign free block, joined with its neighbours, of which `above`
    /// may be gone.
    #[cold]
    pub(super) fn foreign_joined(&mut self, id: BlockId, above: Option<BlockId>) {
        if let Some(above) = above {
            self.foreign.remove(&above);
        }
        self.foreign.insert(id);
    }

    /// Notes that a foreign free block was taken out of its index.
    #[cold]
    pub(super) fn foreign_forget(&mut self, id: BlockId, pool: u16, owner: u32) {
        self.foreign.remove(&id);
        self.pools[pool].away.left(owner);
    }
}
