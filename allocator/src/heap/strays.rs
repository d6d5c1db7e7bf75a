//! Strays: free blocks away from home, that is, whose owner is not the stream of their heap.
//!
//! They come from memory that one stream borrowed from another. Once a stray is done for everybody it goes home and merges with
//! its neighbours there.

use super::index::IndexView;
use super::{BlockId, Heap, SplitChange, State, signed};

impl Heap {
    /// Returns strays that are done for every stream to the home stream, and merges them. Returns by how much `inactive_split` of each pool
    /// changed.
    pub(crate) fn send_home(&mut self, is_done: impl Fn(u32, u64) -> bool) -> Vec<(u16, SplitChange)> {
        let done = |id: &BlockId| is_done(self.blocks[*id].owner, self.blocks[*id].after);
        let candidates: Vec<BlockId> = self.strays.iter().copied().filter(done).collect();
        let mut changes = Vec::new();
        for id in candidates {
            // A stray sent home before may have merged with it.
            if !self.strays.contains(&id) {
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
    pub(crate) fn strays(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.strays.iter().copied()
    }

    /// Drops the indexes of owners that have no block here any more.
    pub(crate) fn forget_idle_owners(&mut self) {
        let Heap { pools, blocks, .. } = self;
        for pool in pools {
            pool.away.retain(|_, index| IndexView::new(index, blocks).iter().next().is_some());
        }
    }

    #[inline]
    pub(super) fn strays_note(&mut self, id: BlockId) {
        if self.blocks[id].owner != self.home {
            self.strays.insert(id);
        }
    }

    /// Notes that a stray was taken. Its rest, if there is one, is a stray.
    pub(super) fn strays_took(&mut self, id: BlockId, rest: Option<BlockId>) {
        if rest != Some(id) {
            self.strays.remove(&id);
            self.strays.extend(rest);
        }
    }

    /// Notes that a block became a stray, joined with its neighbours, of which `above` may be gone.
    #[cold]
    pub(super) fn strays_joined(&mut self, id: BlockId, above: Option<BlockId>) {
        if let Some(above) = above {
            self.strays.remove(&above);
        }
        self.strays.insert(id);
    }

    #[inline]
    pub(super) fn strays_forget(&mut self, id: BlockId) {
        if !self.strays.is_empty() {
            self.strays.remove(&id);
        }
    }
}
