//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's
//! `active_pending_free`.
//!
//! A waiting block carries its uses by other streams, as of when it was freed. It becomes free once
//! these are done or, where blocks may cross streams at all, once its owner's later work is ordered
//! after them (invariant A1). Blocks are listed by the ticks that they wait for (`tick_index.rs`),
//! so those that need not wait any more are found without a look at the others.

use std::collections::BTreeMap;

use crate::core::heap::Block;
use crate::core::tick_index::TickIndex;
use crate::types::{After, BlockId, StreamId, Use};

/// The most allocations in a row that do not ask, after one that asked in vain. A larger number
/// saves few queries, and memory comes back later.
const PAUSE_MAX: u32 = 3;
/// How many allocations pass while little memory waits. They are off the fast path until it is
/// asked for, so this is no larger than it takes to make asking cheap.
const PAUSE_OF_LITTLE: u32 = 63;

/// The blocks that wait, and the streams they wait for.
#[derive(Debug, Default)]
pub(crate) struct WaitingList {
    /// The blocks by number, in the order in which they were given back.
    pub(super) blocks: BTreeMap<u64, Waiting>,
    next: u64,
    /// Bytes of all of them, and the bytes that were requested.
    pub(super) bytes: u64,
    requested: u64,
    /// The blocks of each owner by the ticks of their uses: a block is free once these are done, and
    /// to its owner once the owner's later work is ordered after them.
    pub(super) owners: BTreeMap<StreamId, TickIndex<u64>>,
    pub(super) streams: BTreeMap<StreamId, WaitedFor>,
    pause: Pause,
}

/// How many more allocations do not ask how far streams got.
#[derive(Debug, Default)]
struct Pause {
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
pub(super) struct WaitedFor {
    /// Number of the blocks that it used.
    blocks: usize,
    /// Where its timeline had got to when blocks were last freed.
    pub(super) seen: After,
}

impl WaitingList {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True if this allocation is to ask how far streams got. Counts the allocation. `is_little`
    /// says whether little memory waits.
    pub(super) fn is_to_be_asked_for(&mut self, is_little: bool) -> bool {
        if !is_little {
            self.pause.left = self.pause.left.min(PAUSE_MAX);
        }
        let asks = self.pause.left == 0;
        self.pause.left = self.pause.left.saturating_sub(1);
        asks
    }

    /// Notes that streams were asked. The pause until the next time grows while asking is in vain.
    pub(super) fn note_asked(&mut self, in_vain: bool, is_little: bool) {
        let length = if in_vain { (2 * self.pause.length + 1).min(PAUSE_MAX) } else { 0 };
        self.pause = Pause { left: if is_little { PAUSE_OF_LITTLE } else { length }, length };
    }

    /// Bytes that were requested for the blocks.
    pub(crate) fn requested(&self) -> u64 {
        self.requested
    }

    /// Takes out the blocks that a condition is true of.
    pub(crate) fn take_where(&mut self, is_wanted: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
        let wanted = self.blocks.iter().filter(|(_, waiting)| is_wanted(waiting));
        let wanted: Vec<u64> = wanted.map(|(&number, _)| number).collect();
        wanted.into_iter().filter_map(|number| self.take(number)).collect()
    }

    pub(crate) fn push(&mut self, waiting: Waiting) {
        let number = self.next;
        self.next += 1;
        self.bytes += waiting.block.size;
        self.requested += waiting.block.requested;
        self.owners.entry(waiting.block.owner).or_default().insert(number, waiting.block.size, &waiting.uses);
        waiting.uses.iter().for_each(|one| self.streams.entry(one.stream).or_default().blocks += 1);
        self.blocks.insert(number, waiting);
    }

    pub(super) fn take(&mut self, number: u64) -> Option<Waiting> {
        let waiting = self.blocks.remove(&number)?;
        self.bytes -= waiting.block.size;
        self.requested -= waiting.block.requested;
        if let Some(of_owner) = self.owners.get_mut(&waiting.block.owner) {
            of_owner.remove(number, waiting.block.size, &waiting.uses);
            if of_owner.is_empty() {
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
