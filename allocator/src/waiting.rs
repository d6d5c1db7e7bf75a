//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's `active_pending_free`.
//!
//! A waiting block carries one tick for each stream that used it, taken when it was freed. It becomes free once every one
//! of them is done or, where blocks may cross streams at all, once its owner's later work is ordered after them.
//!
//! While blocks wait, each allocation asks how far the streams got: at most one driver query a stream. The list itself is
//! gone through only when one of them got further than it was.

use crate::sync::atomic::Ordering;
use std::sync::Arc;

use aquifer_device::{Clock, Timeline};

use crate::core::Core;
use crate::heap::{BlockId, kind_of};
use crate::shell::{Shell, special};

/// The blocks that wait, and the streams they wait for.
#[derive(Debug, Default)]
pub(crate) struct WaitingList {
    blocks: Vec<Waiting>,
    streams: Vec<WaitedFor>,
}

/// A block that waits.
#[derive(Debug)]
struct Waiting {
    block: BlockId,
    /// Streams that used it, and where their timelines must have got to.
    uses: Vec<(u32, u64)>,
}

/// A stream that blocks wait for.
#[derive(Debug)]
struct WaitedFor {
    slot: u32,
    /// The latest tick that a block waits for.
    latest: u64,
    /// Where its timeline had got to when the list was last gone through.
    seen: u64,
}

/// Where timelines must have got to for memory to become free.
pub(crate) type Pending = Vec<(Arc<Timeline>, u64)>;

impl WaitingList {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    fn push(&mut self, waiting: Waiting) {
        for &(slot, after) in &waiting.uses {
            match self.streams.iter_mut().find(|stream| stream.slot == slot) {
                Some(stream) => stream.latest = stream.latest.max(after),
                None => self.streams.push(WaitedFor { slot, latest: after, seen: 0 }),
            }
        }
        self.blocks.push(waiting);
    }
}

impl Core {
    /// Puts a freed block, used by other streams beside its own, among the waiting ones.
    #[cold]
    pub(crate) fn free_shared(&mut self, shell: &Shell, id: BlockId, on: Option<u32>) {
        let block = &self.heap.blocks[id];
        shell.counters.freed_waiting(kind_of(block.pool), block.size);
        let mut streams = self.shared.remove(&id).unwrap_or_default();
        streams.extend(on.filter(|on| !streams.contains(on)));
        let uses = streams.iter().map(|&slot| (slot, self.tick_of(slot))).collect();
        self.heap.set_waiting(id);
        self.waiting.push(Waiting { block: id, uses });
        shell.special.fetch_or(special::WAITING, Ordering::Relaxed);
    }

    /// The latest tick of each stream that waiting blocks, of the pools that `of` picks, depend on; those known to be done
    /// are left out.
    pub(crate) fn pending(&self, of: impl Fn(u16) -> bool) -> Pending {
        let mut latest: Vec<(u32, u64)> = Vec::new();
        for waiting in self.waiting.blocks.iter().filter(|waiting| of(self.heap.blocks[waiting.block].pool)) {
            for &(slot, after) in &waiting.uses {
                match latest.iter_mut().find(|(other, _)| *other == slot) {
                    Some((_, tick)) => *tick = after.max(*tick),
                    None => latest.push((slot, after)),
                }
            }
        }
        self.unknown(latest.into_iter())
    }

    /// As [`Core::pending`] for all pools, without going through the blocks.
    pub(crate) fn pending_of_all(&self) -> Pending {
        self.unknown(self.waiting.streams.iter().map(|stream| (stream.slot, stream.latest)))
    }

    /// The ticks of free blocks that are away from home, of the pools that `of` picks, and not known to be done.
    pub(crate) fn pending_strays(&self, of: impl Fn(u16) -> bool) -> Pending {
        let strays = self.heap.strays().filter(|id| of(self.heap.blocks[*id].pool));
        self.unknown(strays.map(|id| (self.heap.blocks[id].owner, self.heap.blocks[id].after)))
    }

    fn unknown(&self, ticks: impl Iterator<Item = (u32, u64)>) -> Pending {
        let unknown = ticks.filter(|&(slot, after)| !self.is_known_done(slot, after));
        unknown.filter_map(|(slot, after)| Some((self.timeline(slot)?.clone(), after))).collect()
    }

    /// Frees the waiting blocks that need not wait any more, if any stream got further since the last time.
    pub(crate) fn sweep_done(&mut self, shell: &Shell) {
        let advanced = |stream: &WaitedFor| self.frontier(stream.slot) > stream.seen;
        if self.waiting.streams.iter().any(advanced) {
            self.sweep(shell, None);
        }
    }

    /// Frees the waiting blocks that need not wait any more, among them those of the stream `owner` whose later work, which
    /// is ordered after what its clock says, comes after every use.
    pub(crate) fn sweep_ordered(&mut self, shell: &Shell, owner: u32, clock: &Clock) {
        if !self.waiting.is_empty() {
            self.sweep(shell, Some((owner, clock)));
        }
    }

    fn sweep(&mut self, shell: &Shell, ordered: Option<(u32, &Clock)>) {
        let WaitingList { mut blocks, streams } = std::mem::take(&mut self.waiting);
        // Read before the blocks are looked at: what a stream reaches meanwhile then makes for another sweep.
        let seen: Vec<(u32, u64)> = streams.iter().map(|stream| (stream.slot, self.frontier(stream.slot))).collect();
        blocks.retain(|waiting| {
            let owner = self.heap.blocks[waiting.block].owner;
            let clock = ordered.filter(|(slot, _)| *slot == owner).map(|(_, clock)| clock);
            let passed = |&(slot, after): &(u32, u64)| {
                self.is_known_done(slot, after) || slot == owner || clock.is_some_and(|clock| after <= clock.of(slot))
            };
            let free = waiting.uses.iter().all(passed);
            if free {
                let block = &self.heap.blocks[waiting.block];
                shell.counters.waited(kind_of(block.pool), block.size, block.requested);
                // The tick is taken now: the owner's later events cover what it is ordered after, too.
                self.complete(shell, waiting.block, owner, self.tick_of(owner));
            }
            !free
        });
        if blocks.is_empty() {
            shell.special.fetch_and(!special::WAITING, Ordering::Relaxed);
        }
        let mut list = WaitingList::default();
        blocks.into_iter().for_each(|waiting| list.push(waiting));
        for stream in &mut list.streams {
            stream.seen = seen.iter().find(|(slot, _)| *slot == stream.slot).map_or(0, |&(_, seen)| seen);
        }
        self.waiting = list;
    }

    fn frontier(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(0, |timeline| timeline.frontier())
    }

    /// Bytes waiting, by stream waited for.
    pub(crate) fn waiting_bytes(&self) -> Vec<(u32, u64)> {
        let mut bytes: Vec<(u32, u64)> = Vec::new();
        for waiting in &self.waiting.blocks {
            let size = self.heap.blocks[waiting.block].size;
            for &(slot, after) in &waiting.uses {
                if self.is_known_done(slot, after) {
                    continue;
                }
                match bytes.iter_mut().find(|(other, _)| *other == slot) {
                    Some((_, sum)) => *sum += size,
                    None => bytes.push((slot, size)),
                }
            }
        }
        bytes
    }
}
