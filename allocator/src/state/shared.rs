//! The shared state: the state that the arenas of an allocator share, under a lock of its own, for
//! slow paths alone.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::internal::Timeline;
use aquifer_device::{Device, Stream};

use crate::accounting::writer::CounterWriter;
use crate::backing::growing::{Growing, Holding};
use crate::backing::paged::granules::Paged;
use crate::backing::paged::pins::Pins;
use crate::cross_stream::waiting_list::WaitingList;
use crate::heap::BlockId;
use crate::pools::table::PoolTable;
use crate::request::{Place, Request};
use crate::state::arena::Arena;
use crate::state::settled::Settled;
use crate::sync::atomic::Ordering;
use crate::tags::Tag;

#[derive(Debug, Default)]
pub(crate) struct SharedState {
    /// `None` while the allocator state is idle.
    pub(crate) device: Option<Device>,
    /// True if free blocks may be lent between streams. Otherwise blocks never leave the stream of
    /// their segment.
    pub(crate) crosses_streams: bool,
    /// The open arenas, by ascending stream.
    pub(crate) arenas: Vec<&'static Arena>,
    /// Which of them slow paths need not visit.
    pub(crate) settled: Settled,
    /// True if all arenas are locked where some would do.
    #[cfg(test)]
    pub(crate) never_settles: bool,
    /// The thread that writes to the shared counters, and how often the work has passed from one
    /// thread to another.
    pub(crate) writer: CounterWriter,
    pub(crate) handovers: u32,
    pub(crate) pools: PoolTable,
    /// Timelines by our own stream number.
    pub(crate) timelines: Vec<Option<Arc<Timeline>>>,
    pub(crate) waiting: WaitingList,
    /// Streams that use a live block beside its own, in order.
    pub(crate) other_users: BTreeMap<Place, Vec<u32>>,
    /// Bytes held from the device; bytes that threads are about to take; and bytes on their way
    /// back to the device, which do not count as held any more.
    pub(crate) reserved: u64,
    pub(crate) growing: Growing,
    pub(crate) leaving: u64,
    /// Bytes that streams took from the device although they could have borrowed.
    pub(crate) unborrowed: u64,
    /// Segments that back each region: address and, for the snapshot, tag of the allocation that
    /// made them.
    pub(crate) segments: BTreeMap<u64, Tag>,
    /// Pinned memory, which stays where it is.
    pub(crate) pins: Pins,
    /// The state of mapped memory; `None` where memory comes in segments.
    pub(crate) paged: Option<Paged>,
}

impl SharedState {
    /// What is held of a device. Nothing, if the state serves an allocator of another one by now.
    pub(crate) fn held_on(&self, device: &Device) -> Holding {
        if self.device.as_ref().is_none_or(|own| own.id() != device.id()) {
            return Holding::default();
        }
        Holding { bytes: self.reserved.saturating_add(self.leaving), growing: self.growing }
    }

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

    /// True if the calling thread may change counters without holding all locks: it is the only one
    /// at work, or each arena counts for itself.
    pub(crate) fn may_count_here(&self) -> bool {
        [CounterWriter::NONE, CounterWriter::SEVERAL, CounterWriter::this_thread()].contains(&self.writer)
    }

    /// Notes that a stream uses a live block beside its own.
    pub(crate) fn note_use(&mut self, arena: &'static Arena, id: BlockId, slot: u32) {
        let used = arena.look(|inner| {
            let block = &mut inner.heap.blocks[id];
            let used = block.owner != slot;
            block.used_elsewhere |= used;
            if used {
                inner.heap.make_irregular(id);
            }
            used
        });
        if used {
            let users = self.other_users.entry(Place { arena: arena.slot, block: id }).or_default();
            if users.is_empty() {
                arena.blocks_used_elsewhere.fetch_add(1, Ordering::Relaxed);
            }
            if let Err(at) = users.binary_search(&slot) {
                users.insert(at, slot);
            }
        }
    }

    /// True while the whole allocator sleeps, so that mapped memory is absent.
    pub(crate) fn is_asleep(&self) -> bool {
        self.paged.as_ref().is_some_and(|paged| paged.is_asleep)
    }

    /// True while the whole allocator sleeps, or the memory at any of these addresses.
    pub(crate) fn sleeps(&self, range: &Range<u64>) -> bool {
        self.paged.as_ref().is_some_and(|paged| paged.is_asleep || paged.sleeps(range))
    }

    /// The tick that the stream's timeline must reach for all work enqueued so far to be done.
    #[inline]
    pub(crate) fn tick_of(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(0, |timeline| timeline.now() + 1)
    }

    /// True if the stream's timeline is known to have reached `after`.
    pub(crate) fn is_known_done(&self, slot: u32, after: u64) -> bool {
        after <= self.done_until(slot)
    }

    /// True if an event after `after` was due on the stream; recording it may have failed.
    pub(crate) fn may_be_covered(&self, slot: u32, after: u64) -> bool {
        self.timeline(slot).is_some_and(|timeline| after <= timeline.now())
    }

    /// The tick that the stream's timeline is known to have reached. A stream that was never
    /// registered has no work to be waited for.
    pub(crate) fn done_until(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(u64::MAX, |timeline| timeline.frontier())
    }

    /// The size of the granules that the request's memory comes in; `None` if it comes in segments.
    /// Blocks that are handed out whole have segments of their own.
    pub(crate) fn paged_granule_for(&self, request: &Request) -> Option<u64> {
        let granule = self.paged.as_ref()?.granule;
        let handed_out_whole = self.pools.owner_of(request.pool).is_some_and(|private| private.options.no_split);
        (!handed_out_whole).then_some(granule)
    }
}
