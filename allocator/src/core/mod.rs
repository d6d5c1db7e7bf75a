//! What an allocator knows, and all that it decides: one value, [`Core`].
//!
//! A data structure, which makes no driver call and knows no thread or clock. It reads how far
//! streams got from the counters of their timelines ([`streams`]), and launches of graphs from
//! their records, whose locks are leaves ([`graphs`]). Its parts are private to this folder; the
//! rest of the allocator reads them, and changes them through its methods alone. Each is a decision
//! or the account of what the driver did: [`Core::take_own`], [`Core::free`], [`Core::draft`],
//! [`Core::plan`], [`Core::commit`].
//!
//! | file | what it is about |
//! | --- | --- |
//! | `serve.rs`, `free.rs` | serving requests from free blocks; giving blocks back, and waiting |
//! | `heap/` | regions, blocks, and the free blocks' indexes |
//! | `paged/` | mapped memory: what is mapped where |
//! | `remap/` | moving physical memory: draft, plan, commit |
//! | `policy.rs` | what is bought, moved or asked: facts in, a decision out |
//! | `segments.rs`, `dedicated.rs` | memory in plain driver allocations; memory outside of the heap |
//! | `sleep/` | memory that sleeps |
//! | `streams.rs` | how far streams got; when an event is due |
//! | `pools.rs`, `graphs.rs` | private pools, and the graphs that use them |
//! | `waiting.rs`, `tick_index.rs` | blocks that wait for other streams, by the ticks that they wait for |
//! | `counters.rs`, `limits.rs` | statistics; what is taken from the device just now |

pub(crate) mod counters;
pub(crate) mod dedicated;
pub(crate) mod free;
pub(crate) mod graphs;
pub(crate) mod heap;
pub(crate) mod limits;
pub(crate) mod paged;
pub(crate) mod policy;
pub(crate) mod pools;
pub(crate) mod remap;
pub(crate) mod segments;
mod serve;
pub(crate) mod sleep;
pub(crate) mod streams;
pub(crate) mod tick_index;
pub(crate) mod waiting;

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::Stream;

use crate::core::counters::Counters;
use crate::core::heap::Heap;
use crate::core::limits::{Growing, Holding};
use crate::core::paged::Pins;
use crate::core::paged::granules::Paged;
use crate::core::pools::PoolTable;
use crate::core::streams::{Progress, Streams};
use crate::core::waiting::WaitingList;
use crate::history::History;
use crate::tags::Tag;
use crate::types::{BlockId, Request, StreamId};

#[derive(Debug, Default)]
pub(crate) struct Core {
    /// True if free blocks serve other streams than their owners.
    crosses_streams: bool,
    heap: Heap,
    /// Number of live blocks.
    live: u64,
    /// Operations since the heap's identities were last checked.
    #[cfg(debug_assertions)]
    unchecked: usize,
    pub(crate) counters: Counters,
    pub(crate) history: History,
    pub(crate) pools: PoolTable,
    pub(crate) streams: Streams,
    waiting: WaitingList,
    /// Streams that use a live block beside its own, in order.
    other_users: BTreeMap<BlockId, Vec<StreamId>>,
    /// Bytes held from the device; bytes that threads are about to take; and bytes on their way
    /// back to the device, which do not count as held any more.
    reserved: u64,
    growing: Growing,
    being_released: u64,
    /// Segments that back each region: address and, for the snapshot, tag of the allocation that
    /// made them.
    segments: BTreeMap<u64, Tag>,
    /// Pinned memory, which stays where it is.
    pub(crate) pins: Pins,
    /// True if memory is mapped in granules. Otherwise it comes in segments, and nothing is mapped.
    maps: bool,
    paged: Paged,
    /// Bytes of frames that stay held from the device.
    reserve: u64,
}

impl Core {
    /// A core that nothing was allocated from. `crosses_streams` says whether free blocks serve
    /// other streams than their owners. At most `quarantine` bytes are quarantined.
    pub(crate) fn new(crosses_streams: bool, quarantine: u64, history: History, paged: Option<Paged>) -> Core {
        let mut heap = Heap::new(crosses_streams);
        heap.set_quarantine(quarantine);
        let (maps, paged) = (paged.is_some(), paged.unwrap_or_default());
        Core { crosses_streams, heap, history, maps, paged, ..Core::default() }
    }

    pub(crate) fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Takes out the state of mapped memory, at the end of the allocator.
    pub(crate) fn take_paged(&mut self) -> Paged {
        std::mem::take(&mut self.paged)
    }

    /// Merges all deferred blocks, so that free blocks are what they seem.
    pub(crate) fn coalesce_all(&mut self) {
        self.heap.coalesce_all();
    }

    /// Lets requests have all blocks in quarantine.
    pub(crate) fn end_quarantine(&mut self) {
        self.heap.end_quarantine(|_| true);
    }

    /// What is mapped: nothing where memory comes in segments.
    pub(crate) fn paged(&self) -> &Paged {
        &self.paged
    }

    /// Bytes of the granules that memory is mapped in; `None` where it comes in segments.
    pub(crate) fn granule(&self) -> Option<u64> {
        self.maps.then_some(self.paged.granule)
    }

    pub(crate) fn waiting(&self) -> &WaitingList {
        &self.waiting
    }

    /// Number of live blocks.
    #[inline]
    pub(crate) fn live(&self) -> u64 {
        self.live
    }

    /// Bytes held from the device.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Bytes held from the device, on their way back there, and about to be taken.
    pub(crate) fn held_at_most(&self) -> u64 {
        self.reserved.saturating_add(self.being_released).saturating_add(self.growing.now)
    }

    /// Bytes that threads are about to take.
    pub(crate) fn growing(&self) -> Growing {
        self.growing
    }

    /// The tag of the allocation that made each segment, by address.
    pub(crate) fn segments(&self) -> &BTreeMap<u64, Tag> {
        &self.segments
    }

    /// Bytes of frames that stay held from the device.
    pub(crate) fn reserve(&self) -> u64 {
        self.reserve
    }

    pub(crate) fn set_reserve(&mut self, bytes: u64) {
        self.reserve = bytes;
    }

    /// Gives a device access to every mapping that comes.
    pub(crate) fn add_peer(&mut self, ordinal: u32) {
        self.paged.access.push(ordinal);
    }

    /// Notes bytes that are about to be taken from the device.
    pub(crate) fn begin_growing(&mut self, bytes: u64) {
        self.growing.begin(bytes);
    }

    /// Notes that they were taken, or not.
    pub(crate) fn end_growing(&mut self, bytes: u64) {
        self.growing.end(bytes);
    }

    /// Notes bytes that do not count as held any more, and are on their way back to the device.
    pub(crate) fn begin_releasing(&mut self, bytes: u64) {
        self.being_released += bytes;
    }

    /// Notes that they are back.
    pub(crate) fn end_releasing(&mut self, bytes: u64) {
        self.being_released -= bytes;
    }

    /// What is held of the device.
    pub(crate) fn holding(&self) -> Holding {
        Holding { bytes: self.reserved.saturating_add(self.being_released), growing: self.growing }
    }

    /// The number of a stream, which becomes known.
    #[inline]
    pub(crate) fn stream(&mut self, stream: &Stream) -> StreamId {
        let id = StreamId::of(stream);
        if self.streams.timeline(id).is_none() {
            let progress = if self.maps { Progress::started() } else { Progress::default() };
            self.streams.add(stream, progress);
        }
        id
    }

    /// Number of live blocks that other streams use, too.
    #[cfg(test)]
    pub(crate) fn used_elsewhere(&self) -> usize {
        self.other_users.len()
    }

    /// Notes that a stream uses a live block beside its own.
    pub(crate) fn note_use(&mut self, id: BlockId, stream: StreamId) {
        if self.heap.block(id).owner == stream {
            return;
        }
        self.heap.mark_used_elsewhere(id);
        let users = self.other_users.entry(id).or_default();
        if let Err(at) = users.binary_search(&stream) {
            users.insert(at, stream);
        }
    }

    /// True while the whole allocator sleeps, so that mapped memory has gone back.
    pub(crate) fn is_asleep(&self) -> bool {
        self.paged.sleep.is_whole
    }

    /// True while the whole allocator sleeps, or the memory at any of these addresses.
    pub(crate) fn sleeps(&self, range: &Range<u64>) -> bool {
        self.paged.sleep.is_whole || self.paged.sleep.has(range)
    }

    /// The size of the granules that the request's memory comes in; `None` if it comes in segments.
    /// Blocks that are handed out whole have segments of their own.
    pub(crate) fn paged_granule_for(&self, request: &Request) -> Option<u64> {
        let granule = self.granule()?;
        let handed_out_whole = self.pools.owner_of(request.pool).is_some_and(|private| private.options.no_split);
        (!handed_out_whole).then_some(granule)
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests;
