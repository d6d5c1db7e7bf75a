//! Blocks that were given back while the device still used them, by what they wait for.
//!
//! A block waits for one tick at a time: it stands in the queue of that tick's timeline, by the tick's place there. When that is
//! done it moves on to the next tick that is not. So what is done is found without looking at what is not, however many blocks
//! wait. A tick whose timeline fails is never done, and its block stays here.
//!
//! Nothing here makes a driver call: who asks the driver does so without the pool's lock, about the ticks that
//! [`Waiting::fronts`] names.

use std::collections::BTreeMap;

use aquifer_device::Tick;

use super::slabs::BlockId;

/// The blocks that wait.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// By the number of the stream: all are of one device.
    queues: BTreeMap<u32, BTreeMap<(u64, BlockId), Entry>>,
    blocks: usize,
    next: u64,
}

#[derive(Debug)]
struct Entry {
    /// Entries are numbered in the order in which blocks were given back.
    number: u64,
    tick: Tick,
    /// What must be done after that.
    rest: Vec<Tick>,
}

/// A tick that the first block of a queue waits for.
#[derive(Debug)]
pub(super) struct Front {
    number: u64,
    pub(super) tick: Tick,
}

impl Front {
    /// The stream, and the place on its timeline.
    pub(super) fn place(&self) -> (u32, u64) {
        (self.tick.timeline().id(), self.tick.n())
    }
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Lets a block wait until all ticks are done. Returns `false` if they are known to be already, and keeps nothing then.
    pub(super) fn insert(&mut self, block: BlockId, ticks: Vec<Tick>) -> bool {
        let number = self.next;
        self.next += 1;
        let waits = self.enqueue(block, ticks, number);
        self.blocks += usize::from(waits);
        waits
    }

    fn enqueue(&mut self, block: BlockId, mut rest: Vec<Tick>, number: u64) -> bool {
        let known_done = |tick: &Tick| tick.timeline().is_known_done(tick.n());
        while let Some(tick) = rest.pop() {
            if !known_done(&tick) {
                let queue = self.queues.entry(tick.timeline().id()).or_default();
                queue.insert((tick.n(), block), Entry { number, tick, rest });
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
            while let Some(first) = queue.first_entry().filter(|first| is_done(first.get())) {
                let ((_, block), entry) = first.remove_entry();
                onward.push((block, entry));
            }
            !queue.is_empty()
        });
        for (block, Entry { number, rest, .. }) in onward {
            if !self.enqueue(block, rest, number) {
                done.push(block);
            }
        }
        self.blocks -= done.len();
        done
    }

    /// Everything that is waited for and not known to be done.
    pub(super) fn ticks(&self) -> Vec<Tick> {
        let entries = self.queues.values().flat_map(BTreeMap::values);
        let ticks = entries.flat_map(|entry| entry.rest.iter().chain([&entry.tick]));
        // The last of a stream stands for those before it.
        let mut last = BTreeMap::new();
        for tick in ticks {
            let at = last.entry(tick.timeline().id()).or_insert(tick);
            *at = if tick.n() > at.n() { tick } else { *at };
        }
        last.into_values().cloned().collect()
    }

    /// For each stream that is waited for, the tick that must be done first; in the order in which the blocks were given back.
    pub(super) fn fronts(&self) -> Vec<Front> {
        let first = |queue: &BTreeMap<_, Entry>| {
            queue.first_key_value().map(|(_, entry)| Front { number: entry.number, tick: entry.tick.clone() })
        };
        let mut fronts: Vec<_> = self.queues.values().filter_map(first).collect();
        fronts.sort_unstable_by_key(|front| front.number);
        fronts
    }
}

fn is_done(entry: &Entry) -> bool {
    entry.tick.timeline().is_known_done(entry.tick.n())
}
