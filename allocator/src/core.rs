//! The state under the heap's lock, and the two operations that everybody pays for: taking a free block and giving one back.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aquifer_device::{Device, Stream, Timeline};

use crate::heap::{BlockId, Heap, SplitChange, State, kind_of};
use crate::history::{Action, History};
use crate::pools::PoolTable;
use crate::segments::Releasing;
use crate::shell::{Shell, bury};
use crate::size_class::{PoolKind, SizeClasses};
use crate::tags::Tag;
use crate::waiting::WaitingList;

/// A request on its way through the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Bytes the caller asked for.
    pub(crate) requested: u64,
    /// Bytes after rounding.
    pub(crate) size: u64,
    /// The pool it is served from.
    pub(crate) pool: u16,
    /// The stream it is for.
    pub(crate) slot: u32,
    pub(crate) tag: Tag,
}

/// What an allocation needs to know of its block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Core {
    /// `None` while the shell is idle.
    pub(crate) device: Option<Device>,
    pub(crate) classes: SizeClasses,
    /// Whether a free block may move between streams; if not, blocks never leave the stream of their segment.
    pub(crate) crosses_streams: bool,
    pub(crate) heap: Heap,
    pub(crate) pools: PoolTable,
    /// Timelines by our own stream number.
    pub(crate) timelines: Vec<Option<Arc<Timeline>>>,
    pub(crate) waiting: WaitingList,
    /// Streams that use a live block beside its own.
    pub(crate) shared: HashMap<BlockId, Vec<u32>>,
    /// Live allocations of the raw interface, by address.
    pub(crate) raw: HashMap<u64, BlockId>,
    pub(crate) history: History,
    /// Live blocks: the shell cannot be recycled before this is 0.
    pub(crate) live: u64,
    /// Bytes held from the device, and bytes that threads are about to take.
    pub(crate) reserved: u64,
    pub(crate) growing: u64,
    /// Segments that back each region: address and, for the snapshot, tag of the allocation that made them.
    pub(crate) segments: BTreeMap<u64, Tag>,
    /// Segments that the driver is asked to take back, by address.
    pub(crate) releasing: BTreeMap<u64, Releasing>,
    /// Releases begun so far.
    pub(crate) releases: u64,
    /// Operations since the heap's identities were last checked.
    #[cfg(debug_assertions)]
    pub(crate) unchecked: usize,
}

impl Core {
    /// Registers a stream, and returns its number here.
    #[inline]
    pub(crate) fn slot(&mut self, stream: &Stream) -> u32 {
        let slot = stream.id();
        if !matches!(self.timelines.get(slot as usize), Some(Some(_))) {
            self.register(stream);
        }
        slot
    }

    #[cold]
    fn register(&mut self, stream: &Stream) {
        let slot = stream.id() as usize;
        if slot >= self.timelines.len() {
            self.timelines.resize(slot + 1, None);
        }
        self.timelines[slot] = Some(stream.timeline().clone());
    }

    #[inline]
    pub(crate) fn timeline(&self, slot: u32) -> Option<&Arc<Timeline>> {
        self.timelines.get(slot as usize)?.as_ref()
    }

    /// The timelines beside the heap, for work on the heap that asks them.
    pub(crate) fn timelines_and_heap(&mut self) -> (&[Option<Arc<Timeline>>], &mut Heap) {
        (&self.timelines, &mut self.heap)
    }

    /// Notes that a stream uses a live block beside its own.
    pub(crate) fn note_use(&mut self, id: BlockId, slot: u32) {
        let block = &mut self.heap.blocks[id];
        if block.owner == slot {
            return;
        }
        block.shared = true;
        let users = self.shared.entry(id).or_default();
        if !users.contains(&slot) {
            users.push(slot);
        }
    }

    /// Where the stream's timeline must have got to for everything enqueued so far to be done.
    #[inline]
    pub(crate) fn tick_of(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(0, |timeline| timeline.now() + 1)
    }

    /// Whether the stream's timeline is known to have got to `after`.
    pub(crate) fn is_known_done(&self, slot: u32, after: u64) -> bool {
        after == 0 || self.timeline(slot).is_none_or(|timeline| timeline.is_known_done(after - 1))
    }

    /// Serves a request from the free blocks that its stream may reuse at once.
    #[inline]
    pub(crate) fn take_own(&mut self, shell: &Shell, request: &Request) -> Option<Granted> {
        let Request { pool, slot, size, requested, .. } = *request;
        let (block, change) = self.heap.take_best(&self.classes, pool, slot, size, requested)?;
        Some(self.taken(shell, request, block, change))
    }

    /// Takes the request's bytes from a free block that the stream may use.
    pub(crate) fn take(&mut self, shell: &Shell, request: &Request, free: BlockId) -> Granted {
        let (block, change) = self.heap.take(&self.classes, free, request.slot, request.size, request.requested);
        self.taken(shell, request, block, change)
    }

    /// Accounts for a block that became live.
    #[inline]
    fn taken(&mut self, shell: &Shell, request: &Request, id: BlockId, change: SplitChange) -> Granted {
        let block = &mut self.heap.blocks[id];
        block.tag = request.tag.0;
        let (addr, size, kind) = (block.addr, block.size, kind_of(block.pool));
        self.live += 1;
        shell.counters.allocated(kind, size, request.requested);
        self.split_changed(shell, kind, change);
        if self.classes.is_oversize(size) {
            shell.counters.oversize_allocations.add(1);
        }
        if self.history.is_on() {
            let pool = self.pools.history_id(request.pool);
            self.history.note(Action::Alloc, pool, addr, request.requested, request.slot, request.tag);
        }
        self.debug_check();
        Granted { block: id, addr }
    }

    /// Gives a live block back; `on` is the stream that its memory is handed to, where that is not its own.
    #[inline]
    pub(crate) fn free(&mut self, shell: &Shell, id: BlockId, on: Option<u32>) {
        let block = &self.heap.blocks[id];
        debug_assert_eq!(block.state, State::Live);
        let (size, requested, owner, shared) = (block.size, block.requested, block.owner, block.shared);
        let kind = kind_of(block.pool);
        self.live -= 1;
        if self.classes.is_oversize(size) {
            shell.counters.oversize_allocations.sub(1);
        }
        if self.history.is_on() {
            self.note_free(Action::FreeRequested, id);
        }
        let heir = match on.filter(|&on| on != owner) {
            None if !shared => owner,
            Some(on) if !shared && self.crosses_streams => on,
            on => return self.free_shared(shell, id, on),
        };
        shell.counters.freed(kind, size, requested);
        self.complete(shell, id, heir, self.tick_of(heir));
    }

    #[cold]
    fn note_free(&mut self, action: Action, id: BlockId) {
        let block = &self.heap.blocks[id];
        let pool = self.pools.history_id(block.pool);
        self.history.note(action, pool, block.addr, block.requested, block.owner, Tag(block.tag));
    }

    /// A block that was given back, and is accounted for, becomes free: reusable by `owner` at once, by others after `after`.
    #[inline]
    pub(crate) fn complete(&mut self, shell: &Shell, id: BlockId, owner: u32, after: u64) {
        let kind = kind_of(self.heap.blocks[id].pool);
        if self.history.is_on() {
            self.note_free(Action::FreeCompleted, id);
        }
        let (_, change) = self.heap.give(id, owner, after);
        self.split_changed(shell, kind, change);
        self.debug_check();
    }

    #[inline]
    pub(crate) fn split_changed(&self, shell: &Shell, kind: PoolKind, change: SplitChange) {
        shell.counters.inactive_split.change(kind, change.count);
        shell.counters.inactive_split_bytes.change(kind, change.bytes);
    }

    /// Checks the heap's identities, in debug builds, now and then: a whole check costs as much as there are blocks, so as
    /// many operations as that pass in between.
    #[inline]
    fn debug_check(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.unchecked += 1;
            if self.unchecked > 64 + self.heap.blocks.records() {
                self.unchecked = 0;
                debug_assert_eq!(self.heap.check(), Ok(()));
            }
        }
    }

    /// Hands every segment to the device, to be freed when somebody next talks to it, and lets the device go.
    pub(crate) fn bury(mut self) {
        let Some(device) = self.device.take() else { return };
        for region in self.heap.regions() {
            device.free_later(aquifer_device::DevicePtr(region.addr));
        }
        // The device goes last: whoever closes it must not leave its driver to the timelines that this thread drops.
        drop(self);
        bury(device);
    }
}
