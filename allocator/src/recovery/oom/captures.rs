//! Memory that cannot go back to the device while a stream captures.
//!
//! The driver waits for the device before it takes a segment back, and how far a capturing stream got can be neither asked nor waited for.
//! Both would break the capture. So no segment goes back meanwhile, nor do granules that a capturing stream used last.

use std::collections::BTreeSet;

use crate::accounting::Releasable;
use crate::heap::{Block, BlockId, Heap, State};
use crate::shell::core::{Core, Place};
use crate::shell::whole::Whole;

/// Bytes that cannot go back while a stream captures: parts of what is in [`super::remedies::Holds`]. Where that is not known exactly, they
/// are too many.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Captured {
    /// The part of the unused bytes that are promised to nobody.
    pub(super) loose: u64,
    /// The part of the unused bytes that are pinned.
    pub(super) pinned_free: u64,
    /// Bytes that were given back, but wait for capturing streams.
    pub(super) waiting: u64,
    /// Other bytes that are promised to nobody: in live blocks, for example.
    pub(super) rest: u64,
    /// The part of the bytes of private pools that do not serve the request.
    pub(super) pools: u64,
    /// The part of the bytes of the request's own private pool,
    pub(super) own_pool: u64,
    /// and of its unused ones.
    pub(super) own_pool_loose: u64,
}

impl Captured {
    /// Counts a block that keeps `held` bytes, of which a `part` could go back. `of_own` tells whether it is in the request's own private
    /// pool, or in another one; `None` if it is in neither.
    pub(super) fn add(&mut self, state: State, held: u64, part: &Releasable, of_own: Option<bool>) {
        let is_free = state == State::Free;
        match of_own {
            Some(false) => self.pools += held,
            Some(true) => {
                self.own_pool += held;
                self.own_pool_loose += if is_free { part.bytes } else { 0 };
            }
            None => {
                let waits = state == State::Waiting;
                self.loose += if is_free { part.bytes } else { 0 };
                self.waiting += if waits { part.bytes } else { 0 };
                self.pinned_free += if is_free { part.pinned } else { 0 };
                self.rest += held - if is_free || waits { part.bytes } else { 0 };
            }
        }
    }

    /// Unused bytes, which would go back if no stream captured.
    pub(super) fn cached(&self) -> u64 {
        self.loose + self.waiting
    }

    /// All bytes outside of private pools.
    pub(super) fn outside(&self) -> u64 {
        self.loose + self.waiting + self.rest
    }

    /// True if there are any.
    pub(super) fn any(&self) -> bool {
        self.outside() + self.pools + self.own_pool > 0
    }
}

/// The captures of the device's streams, as far as they are known.
pub(super) struct Captures {
    /// True if any stream captures.
    any: bool,
    /// Blocks that capturing streams use, beside their owners.
    used: BTreeSet<Place>,
}

impl Captures {
    /// Bytes that could not go back now because of a block, even if nobody had it: all frames that it touches.
    pub(super) fn kept_by(&self, core: &Core, heap: &Heap, id: BlockId, block: &Block) -> u64 {
        if !self.any || !block.state.has_memory() {
            return 0;
        }
        let is_paged = heap.region(block.region).is_paged();
        let Some(paged) = core.paged.as_ref().filter(|_| is_paged) else { return block.size };
        let is_done = block.state == State::Free && core.is_known_done(block.owner, block.after);
        let captured = core.captures_on(block.owner) && !is_done;
        if !captured && !self.used.contains(&Place { arena: heap.home, block: id }) {
            return 0;
        }
        let ends = [block.addr, block.addr + block.size - 1].map(|addr| paged.frame_at(addr));
        let [Some(first), Some(last)] = ends else { return block.size };
        last.end - first.start
    }

    /// Bytes of memory apart from heaps that could not go back now, even if nobody had them.
    pub(super) fn kept_apart(&self, core: &Core) -> u64 {
        let owned = core.paged.iter().filter(|_| self.any).flat_map(|paged| paged.owned.values());
        owned.filter(|owned| core.captures_on(owned.slot)).map(|owned| owned.size).sum()
    }
}

impl Whole {
    pub(super) fn captures(&self) -> Captures {
        let any = self.device.as_ref().is_some_and(aquifer_device::Device::is_capturing);
        let mut used = BTreeSet::new();
        if any {
            let shared = self.shared.iter().filter(|(_, users)| users.iter().any(|&slot| self.captures_on(slot)));
            used.extend(shared.map(|(&place, _)| place));
            used.extend(self.waiting_for(|slot| self.captures_on(slot)));
        }
        Captures { any, used }
    }
}

impl Core {
    /// True if the stream with this number captures.
    pub(super) fn captures_on(&self, slot: u32) -> bool {
        let Some((device, timeline)) = self.device.as_ref().zip(self.timeline(slot)) else { return false };
        timeline.device_id_unless_capturing() != device.id()
    }
}
