//! Deferred release: blocks that were given back while the device still used them, by their ticks.
//!
//! A block waits for one tick at a time, in the queue of that tick's timeline, by the tick's place
//! there. Once that tick is done, the block moves on to its next unfinished tick. So blocks that
//! are done are found without a look at the others, however many wait. A tick whose timeline fails
//! is never done, and its block stays here.
//!
//! Nothing here makes a driver call: the pool asks the driver, without its lock, about the ticks
//! that [`DeferredBlocks::fronts`] returns.

use std::collections::BTreeMap;

use aquifer_allocator::internal::BlockId;
use aquifer_device::Tick;

/// The blocks that wait.
#[derive(Debug, Default)]
pub(super) struct DeferredBlocks {
    /// By the number of the stream: all are of one device.
    queues: BTreeMap<u32, BTreeMap<(u64, BlockId), Deferred>>,
    blocks: usize,
    next: u64,
}

#[derive(Debug)]
struct Deferred {
    /// Counts up in the order in which blocks were given back.
    number: u64,
    tick: Tick,
    /// The other ticks that must be done.
    rest: Vec<Tick>,
}

impl DeferredBlocks {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// The blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.queues.values().flat_map(BTreeMap::keys).map(|&(_, block)| block)
    }

    /// Defers the release of a block until all ticks are done. Returns `false`, and does nothing,
    /// if all are known to be done.
    pub(super) fn insert(&mut self, block: BlockId, ticks: Vec<Tick>) -> bool {
        let number = self.next;
        self.next += 1;
        let waits = self.enqueue(block, ticks, number);
        self.blocks += usize::from(waits);
        waits
    }

    fn enqueue(&mut self, block: BlockId, mut rest: Vec<Tick>, number: u64) -> bool {
        while let Some(tick) = rest.pop() {
            if !is_known_done(&tick) {
                let queue = self.queues.entry(tick.timeline().id()).or_default();
                queue.insert((tick.n(), block), Deferred { number, tick, rest });
                return true;
            }
        }
        false
    }

    /// Takes out the blocks whose ticks are all known to be done.
    pub(super) fn reap(&mut self) -> Vec<BlockId> {
        let mut done = Vec::new();
        let mut onward = Vec::new();
        self.queues.retain(|_, queue| {
            while let Some(first) = queue.first_entry().filter(|first| is_known_done(&first.get().tick)) {
                let ((_, block), entry) = first.remove_entry();
                onward.push((block, entry));
            }
            !queue.is_empty()
        });
        for (block, Deferred { number, rest, .. }) in onward {
            if !self.enqueue(block, rest, number) {
                done.push(block);
            }
        }
        self.blocks -= done.len();
        done
    }

    /// All ticks that are not known to be done, the last one of each stream.
    pub(super) fn ticks(&self) -> Vec<Tick> {
        let entries = self.queues.values().flat_map(BTreeMap::values);
        let ticks = entries.flat_map(|entry| entry.rest.iter().chain([&entry.tick]));
        let mut last = BTreeMap::new();
        for tick in ticks {
            let at = last.entry(tick.timeline().id()).or_insert(tick);
            *at = if tick.n() > at.n() { tick } else { *at };
        }
        last.into_values().cloned().collect()
    }

    /// The first unfinished tick of each stream, in the order in which their blocks were given
    /// back.
    pub(super) fn fronts(&self) -> Vec<Tick> {
        let mut first: Vec<&Deferred> = self.queues.values().filter_map(|queue| queue.values().next()).collect();
        first.sort_unstable_by_key(|entry| entry.number);
        first.into_iter().map(|entry| entry.tick.clone()).collect()
    }
}

fn is_known_done(tick: &Tick) -> bool {
    tick.is_known_done()
}
