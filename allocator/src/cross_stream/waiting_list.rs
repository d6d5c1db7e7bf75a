//! The blocks that wait for other streams, by the ticks that they wait for.

use std::collections::BTreeMap;

use crate::cross_stream::ticks::TickIndex;
use crate::heap::{Block, BlockId};
use crate::types::{After, StreamId, Use};

/// The most allocations in a row that do not ask, after one that asked in vain. A larger number
/// saves few queries, and memory comes back later.
const PAUSE_MAX: u32 = 3;
/// How many allocations pass while little memory waits. They are off the fast path until it is asked
/// for, so this is no larger than it takes to make asking cheap.
const PAUSE_OF_LITTLE: u32 = 63;

/// The blocks that wait, and the streams they wait for.
#[derive(Debug, Default)]
pub(crate) struct WaitingList {
    /// The blocks by number, in the order in which they were given back.
    pub(crate) blocks: BTreeMap<u64, Waiting>,
    next: u64,
    /// Bytes of all of them, and the bytes that were requested.
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    /// The blocks by the ticks of their uses: a block is free once these are done.
    pub(crate) uses: TickIndex<u64>,
    pub(crate) owners: BTreeMap<StreamId, OfOwner>,
    pub(crate) streams: BTreeMap<StreamId, WaitedFor>,
    pause: Pause,
}

/// The blocks of one owner.
#[derive(Debug, Default)]
pub(crate) struct OfOwner {
    /// The blocks by the ticks of their uses: a block is free to its owner once the owner's later
    /// work is ordered after these.
    pub(crate) uses: TickIndex<u64>,
    blocks: usize,
}

/// How many more allocations do not ask how far streams got.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    left: u32,
    length: u32,
}

/// A block that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) id: BlockId,
    /// Its record in the heap, of which only the links may have changed since.
    pub(crate) block: Block,
    /// Its uses by other streams.
    pub(crate) uses: Vec<Use>,
    /// The end of its owner's own use.
    pub(crate) own_use: After,
}

/// A stream that blocks wait for.
#[derive(Debug, Default)]
pub(crate) struct WaitedFor {
    /// Number of the blocks that it used.
    blocks: usize,
    /// Where its timeline had got to when blocks were last freed.
    pub(crate) seen: After,
}

impl WaitingList {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// True if this allocation is to ask how far streams got. Counts the allocation. `is_little`
    /// says whether little memory waits.
    pub(crate) fn is_to_be_asked_for(&mut self, is_little: bool) -> bool {
        if !is_little {
            self.pause.left = self.pause.left.min(PAUSE_MAX);
        }
        let asks = self.pause.left == 0;
        self.pause.left = self.pause.left.saturating_sub(1);
        asks
    }

    /// Notes that streams were asked. The pause until the next time grows while asking is in vain.
    pub(crate) fn note_asked(&mut self, in_vain: bool, is_little: bool) {
        let length = if in_vain { (2 * self.pause.length + 1).min(PAUSE_MAX) } else { 0 };
        self.pause = Pause { left: if is_little { PAUSE_OF_LITTLE } else { length }, length };
    }

    pub(crate) fn push(&mut self, waiting: Waiting) {
        let number = self.next;
        self.next += 1;
        self.bytes += waiting.block.size;
        self.requested += waiting.block.requested;
        self.uses.insert(number, waiting.block.size, &waiting.uses);
        let of_owner = self.owners.entry(waiting.block.owner).or_default();
        of_owner.uses.insert(number, waiting.block.size, &waiting.uses);
        of_owner.blocks += 1;
        waiting.uses.iter().for_each(|one| self.streams.entry(one.stream).or_default().blocks += 1);
        self.blocks.insert(number, waiting);
    }

    pub(crate) fn take(&mut self, number: u64) -> Option<Waiting> {
        let waiting = self.blocks.remove(&number)?;
        self.bytes -= waiting.block.size;
        self.requested -= waiting.block.requested;
        self.uses.remove(number, waiting.block.size, &waiting.uses);
        if let Some(of_owner) = self.owners.get_mut(&waiting.block.owner) {
            of_owner.uses.remove(number, waiting.block.size, &waiting.uses);
            of_owner.blocks -= 1;
            if of_owner.blocks == 0 {
                self.owners.remove(&waiting.block.owner);
            }
        }
        for Use { stream, .. } in &waiting.uses {
            let Some(waited_for) = self.streams.get_mut(stream) else { continue };
            waited_for.blocks -= 1;
            if waited_for.blocks == 0 {
                self.streams.remove(stream);
            }
        }
        Some(waiting)
    }
}
