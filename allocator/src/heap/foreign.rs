//! Foreign free blocks: those whose owner is not the stream of their heap.
//!
//! They come from memory that one stream borrowed from another. Once all streams are done with a
//! foreign free block, it goes home and merges with its neighbours there.

use super::index::{Bins, IndexView};
use super::{BlockId, Heap, State};

/// The indexes of a pool's foreign free blocks, one for each owner that has any there, or had one
/// since the last [`Away::prune`].
#[derive(Debug, Default)]
pub(super) struct Away {
    /// By ascending owner.
    indexes: Vec<(u32, Bins)>,
    /// Indexes that hold nothing, for reuse.
    spare: Vec<Bins>,
}

impl Away {
    fn place(&self, owner: u32) -> Result<usize, usize> {
        self.indexes.binary_search_by_key(&owner, |&(other, _)| other)
    }

    pub(super) fn get(&self, owner: u32) -> Option<&Bins> {
        Some(&self.indexes[self.place(owner).ok()?].1)
    }

    /// The indexes that are not empty.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Bins)> + '_ {
        self.indexes.iter().filter(|(_, index)| !index.is_empty()).map(|(owner, index)| (*owner, index))
    }

    /// The index of an owner, for a foreign free block to be put in, or to be taken out.
    #[cold]
    pub(super) fn index_mut(&mut self, owner: u32) -> &mut Bins {
        let place = self.place(owner).unwrap_or_else(|place| self.add(place, owner));
        &mut self.indexes[place].1
    }

    fn add(&mut self, place: usize, owner: u32) -> usize {
        let index = self.spare.pop().unwrap_or_default();
        self.indexes.insert(place, (owner, index));
        place
    }

    /// Lays aside the indexes that are empty.
    fn prune(&mut self) {
        let empty = self.indexes.extract_if(.., |(_, index)| index.is_empty());
        self.spare.extend(empty.map(|(_, index)| index));
    }
}

impl Heap {
    /// Returns foreign free blocks that are done for every stream to the home stream, and merges
    /// them. Returns true if any went home.
    pub(crate) fn send_home(&mut self, mut is_done: impl FnMut(u32, u64) -> bool) -> bool {
        let mut candidates = Vec::new();
        for (owner, index) in self.pools.iter().flat_map(|pool| pool.away.iter()) {
            candidates.extend(index.iter_from(&self.blocks, 1).filter(|&id| is_done(owner, self.blocks[id].after)));
        }
        let any = !candidates.is_empty();
        for id in candidates {
            // A foreign free block sent home before may have merged with it.
            if !self.blocks.get(id).is_some_and(|block| block.state == State::Free && block.owner != self.home) {
                continue;
            }
            self.unindex(id);
            self.free -= self.blocks[id].size;
            self.blocks[id].state = State::Waiting;
            self.give(id, self.home, 0);
        }
        any
    }

    /// Lays aside the indexes of streams that have no foreign free block here now.
    pub(crate) fn prune_foreign(&mut self) {
        self.pools.iter_mut().for_each(|pool| pool.away.prune());
    }

    /// Free blocks that are away from home.
    pub(crate) fn foreign(&self) -> impl Iterator<Item = BlockId> + '_ {
        let indexes = self.pools.iter().flat_map(|pool| pool.away.iter());
        indexes.flat_map(|(_, index)| IndexView::new(index, &self.blocks).iter_from(1)).map(|key| key.block())
    }

    /// True if any free block is away from home.
    pub(crate) fn has_foreign(&self) -> bool {
        self.foreign > 0
    }
}
