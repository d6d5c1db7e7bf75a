//! Quarantine: freed blocks that serve no request for a while, so that work which still uses them is
//! found.
//!
//! A driver that checks programs knows a stale address only while no other block has it. So a freed
//! block is kept from requests, the oldest leaving first: when there are too many, when its pool has
//! no other block for a request, and when its granule, or its segment, would be wholly free without
//! it. The latter counts for each slow path ([`Heap::coalesce_all`]). So no memory is bought, no
//! request is refused, and none stays here, because of quarantined blocks.
//!
//! A quarantined block is free memory: it counts as free, and has the owner and the tick of a free
//! block. It is in no index, and its neighbours do not merge with it.

use std::collections::VecDeque;
use std::ops::Range;

use super::{Block, Heap, State};
use crate::types::{After, BlockId, PoolId, StreamId};

/// The most blocks in quarantine. They are looked at one by one.
const BLOCKS_MAX: usize = 1024;

/// The blocks in quarantine.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// In the order in which they were freed.
    blocks: VecDeque<BlockId>,
    bytes: u64,
    /// The most bytes. 0 if there is no quarantine.
    bytes_max: u64,
}

impl Heap {
    /// Keeps freed blocks in quarantine from now on, of so many bytes together.
    pub(crate) fn set_quarantine(&mut self, bytes_max: u64) {
        self.quarantine.bytes_max = bytes_max;
    }

    /// True if freed blocks of this size are quarantined.
    #[inline(always)]
    pub(crate) fn quarantines(&self, size: u64) -> bool {
        size <= self.quarantine.bytes_max
    }

    /// Frees a live or waiting block as [`Heap::give`] does, and quarantines it.
    pub(crate) fn give_quarantined(&mut self, id: BlockId, owner: StreamId, after: After) {
        let block = &mut self.blocks[id];
        debug_assert!(matches!(block.state, State::Live | State::Waiting));
        (block.state, block.owner, block.after, block.used_elsewhere) = (State::Quarantined, owner, after, false);
        self.free += block.size;
        self.quarantine.bytes += block.size;
        self.quarantine.blocks.push_back(id);
        while self.quarantine.bytes > self.quarantine.bytes_max || self.quarantine.blocks.len() > BLOCKS_MAX {
            self.end_quarantine_at(0);
        }
    }

    /// Lets requests have a block in quarantine, by its place there.
    fn end_quarantine_at(&mut self, place: usize) {
        let Some(id) = self.quarantine.blocks.remove(place) else { return };
        let Block { size, owner, after, .. } = self.blocks[id];
        self.quarantine.bytes -= size;
        self.free -= size;
        self.give(id, owner, after);
    }

    /// Lets requests have the oldest block of a pool in quarantine that a condition is true of.
    /// Returns false if there is none.
    pub(crate) fn end_oldest_quarantine(&mut self, pool: PoolId, condition: impl Fn(&Block) -> bool) -> bool {
        let is_wanted = |&id: &BlockId| self.blocks[id].pool == pool && condition(&self.blocks[id]);
        let place = self.quarantine.blocks.iter().position(is_wanted);
        place.inspect(|&place| self.end_quarantine_at(place)).is_some()
    }

    /// Ends the quarantine of a pool.
    pub(crate) fn end_quarantine_of(&mut self, pool: PoolId) {
        while self.end_oldest_quarantine(pool, |_| true) {}
    }

    /// Ends the quarantine of all blocks.
    pub(crate) fn end_quarantine(&mut self) {
        while !self.quarantine.blocks.is_empty() {
            self.end_quarantine_at(0);
        }
    }

    /// Ends the quarantine of blocks without which a granule, or a segment, would be wholly free.
    pub(super) fn end_quarantine_of_whole_granules(&mut self) {
        let (mut place, mut stretch) = (0, 0..0);
        while let Some(&id) = self.quarantine.blocks.get(place) {
            let Block { addr, size, region, .. } = self.blocks[id];
            if !stretch.contains(&addr) {
                stretch = self.free_stretch(id);
            }
            let region = self.region(region);
            let (granule, start) = if region.is_paged() { (region.granules.granule(), 0) } else { (region.bytes, region.addr) };
            // The granules that the block touches, as far as they are free.
            let from = (addr - start) / granule * granule + start;
            let to = (addr + size - start).next_multiple_of(granule) + start;
            let (from, to) = (from.max(stretch.start), to.min(stretch.end));
            if (from - start).next_multiple_of(granule) + granule <= to - start {
                self.end_quarantine_at(place);
            } else {
                place += 1;
            }
        }
    }

    /// The addresses of the free and quarantined blocks around a quarantined one.
    fn free_stretch(&self, id: BlockId) -> Range<u64> {
        let is_free = |&id: &BlockId| id.some().is_some_and(|id| self.blocks[id].state.is_free());
        let below = std::iter::successors(Some(id), |&id| Some(self.blocks[id].prev).filter(is_free)).last();
        let above = std::iter::successors(Some(id), |&id| Some(self.blocks[id].next).filter(is_free)).last();
        self.blocks[below.unwrap_or(id)].addr..self.blocks[above.unwrap_or(id)].range().end
    }
}
