//! The heap's identities H1–H4, checked from scratch.

use std::collections::BTreeSet;

use super::{Block, Heap, State};
use crate::types::{BlockId, StreamId};

impl Heap {
    /// Recomputes every identity of the module documentation.
    ///
    /// # Errors
    /// The first identity that does not hold, described.
    pub fn check(&self) -> Result<(), String> {
        self.check_sentinel()?;
        let (mut total, mut free, mut free_count, mut holes, mut held) = (0, 0, 0, 0, 0);
        let mut empty = BTreeSet::new();
        for region in self.regions() {
            let (mut at, mut before) = (region.addr, None::<(BlockId, &Block)>);
            for (id, block) in self.blocks_of(region) {
                let prev = before.map_or(BlockId::NONE, |(id, _)| id);
                if block.addr != at || block.prev != prev || block.size == 0 || block.state == State::Vacant {
                    return Err(format!("H1: {id:?} {block:?} does not follow {prev:?} at {at:#x}"));
                }
                if before.is_some_and(|(before, _)| self.mergeable(before, id)) {
                    return Err(format!("H3: {prev:?} and {id:?} should be one block"));
                }
                if block.state.is_free() {
                    free += block.size;
                }
                if block.state == State::Free {
                    free_count += 1;
                    self.check_indexed(id, block)?;
                    if block.owner != region.stream && !self.strays.has(id) {
                        return Err(format!("H3: {id:?} {block:?} is not among the strays"));
                    }
                }
                match block.state {
                    State::Hole if !self.holes.is_noted(block.pool, region.stream, block.addr, id) => {
                        return Err(format!("H4: {id:?} {block:?} is not among the holes"));
                    }
                    State::Hole | State::Filling => holes += block.size,
                    State::Held => held += block.size,
                    _ => {}
                }
                if block.state == State::Hole && !block.is_split() {
                    empty.insert(id);
                }
                at += block.size;
                before = Some((id, block));
            }
            if at != region.addr + region.bytes {
                return Err(format!("H1: region at {:#x} ends at {at:#x}", region.addr));
            }
            total += region.bytes;
        }
        if (total, free) != (self.total, self.free) {
            let (noted_total, noted_free) = (self.total, self.free);
            return Err(format!("H2: total {total} free {free}, noted {noted_total} {noted_free}"));
        }
        if (holes, held) != (self.hole_bytes, self.held_bytes) {
            let (noted_holes, noted_held) = (self.hole_bytes, self.held_bytes);
            return Err(format!("H2: holes {holes} held {held}, noted {noted_holes} {noted_held}"));
        }
        if empty != self.empty_reservations {
            return Err(format!("{empty:?} are empty reservations, noted {:?}", self.empty_reservations));
        }
        if !self.holes.is_consistent() {
            return Err("H4: other blocks are among the holes".to_owned());
        }
        let noted = self.free_blocks.count();
        if noted != free_count {
            return Err(format!("H4: {free_count} free blocks, noted {noted}"));
        }
        let indexed: usize =
            self.pools.numbers().flat_map(|pool| self.indexes(pool)).map(|(_, index)| index.len()).sum();
        if indexed != free_count { Err(format!("H4: {indexed} blocks indexed, {free_count} free")) } else { Ok(()) }
    }

    /// Checks the record of [`BlockId::NONE`]: only its links are ever written, and no block uses
    /// it.
    fn check_sentinel(&self) -> Result<(), String> {
        let sentinel = &self.blocks[BlockId::NONE];
        let untouched = sentinel.state == State::Vacant && sentinel.size == 0 && sentinel.owner == StreamId::default();
        if untouched { Ok(()) } else { Err(format!("H4: {sentinel:?} is no block")) }
    }

    fn check_indexed(&self, id: BlockId, block: &Block) -> Result<(), String> {
        let found = self.index(block.pool, self.owner_of(id)).is_some_and(|index| index.contains(id));
        if !found {
            return Err(format!("H4: {id:?} {block:?} is in no index"));
        }
        Ok(())
    }

    fn mergeable(&self, left: BlockId, right: BlockId) -> bool {
        let both = |state: State| [left, right].iter().all(|id| self.blocks[*id].state == state);
        if both(State::Hole) {
            return true;
        }
        both(State::Free) && self.blocks[left].owner == self.blocks[right].owner
    }
}
