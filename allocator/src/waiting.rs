//! Blocks that were given back while other streams may still use them (`record_stream`): PyTorch's `active_pending_free`.
//!
//! A waiting block carries one tick for each stream that used it, taken when it was freed. It becomes free once every one
//! of them is done or, where blocks may cross streams at all, once its owner's later work is ordered after them.

use std::sync::Arc;

use aquifer_device::{Clock, Timeline};

use crate::core::Core;
use crate::heap::BlockId;
use crate::shell::{Shell, special};

/// A block that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) block: BlockId,
    /// Streams that used it, and where their timelines must have got to.
    pub(crate) uses: Vec<(u32, u64)>,
}

/// Up to which tick a timeline must be done for some waiting blocks to become free.
pub(crate) type Pending = Vec<(Arc<Timeline>, u64)>;

impl Core {
    /// Puts a freed block, used by the given streams beside its own, among the waiting ones.
    #[cold]
    pub(crate) fn free_shared(&mut self, shell: &Shell, id: BlockId, on: Option<u32>) {
        let mut streams = self.shared.remove(&id).unwrap_or_default();
        streams.extend(on.filter(|on| !streams.contains(on)));
        let uses: Vec<(u32, u64)> = streams.iter().map(|&slot| (slot, self.tick_of(slot))).collect();
        self.heap.set_waiting(id);
        self.waiting.push(Waiting { block: id, uses });
        shell.special.fetch_or(special::WAITING, std::sync::atomic::Ordering::Relaxed);
    }

    /// The latest tick of each stream that waiting blocks depend on and that is not known to be done.
    pub(crate) fn pending(&self) -> Pending {
        let mut latest: Vec<(u32, u64)> = Vec::new();
        for &(slot, after) in self.waiting.iter().flat_map(|waiting| &waiting.uses) {
            match latest.iter_mut().find(|(other, _)| *other == slot) {
                Some((_, tick)) => *tick = after.max(*tick),
                None => latest.push((slot, after)),
            }
        }
        let known = |&(slot, after): &(u32, u64)| !self.is_known_done(slot, after);
        latest
            .into_iter()
            .filter(known)
            .filter_map(|(slot, after)| Some((self.timeline(slot)?.clone(), after)))
            .collect()
    }

    /// Frees the waiting blocks that need not wait any more; `clocks` are those of their owners, where that counts.
    pub(crate) fn sweep_waiting(&mut self, shell: &Shell, clocks: &[(u32, Clock)]) {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.retain(|entry| {
            let owner = self.heap.blocks[entry.block].owner;
            let clock = clocks.iter().find(|(slot, _)| *slot == owner).map(|(_, clock)| clock);
            let passed = |&(slot, after): &(u32, u64)| {
                self.is_known_done(slot, after) || slot == owner || clock.is_some_and(|clock| after <= clock.of(slot))
            };
            let free = entry.uses.iter().all(passed);
            if free {
                // Taken now: the owner's later events cover what it is ordered after, too.
                self.complete(shell, entry.block, owner, self.tick_of(owner));
            }
            !free
        });
        if waiting.is_empty() {
            shell.special.fetch_and(!special::WAITING, std::sync::atomic::Ordering::Relaxed);
        }
        self.waiting = waiting;
    }

    /// Bytes waiting, by stream waited for.
    pub(crate) fn waiting_bytes(&self) -> Vec<(u32, u64)> {
        let mut bytes: Vec<(u32, u64)> = Vec::new();
        for entry in &self.waiting {
            let size = self.heap.blocks[entry.block].size;
            for &(slot, after) in &entry.uses {
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
