//! All that an allocator knows, under its one lock.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::internal::Timeline;
use aquifer_device::{Device, Stream};

use crate::accounting::counters::Counters;
use crate::backing::limits::{Growing, Holding};
use crate::backing::paged::granules::Paged;
use crate::backing::paged::pins::Pins;
use crate::backing::paged::progress_events::Progress;
use crate::cross_stream::waiting_list::WaitingList;
use crate::heap::{BlockId, Heap};
use crate::history::History;
use crate::pools::table::PoolTable;
use crate::tags::Tag;
use crate::types::Request;

/// A stream that the allocator knows.
#[derive(Debug, Default)]
pub(crate) struct OfStream {
    /// `None` for a number that no stream has had here so far.
    timeline: Option<Arc<Timeline>>,
    pub(crate) progress: Progress,
}

/// The tick that the timeline of one of the streams is known to have reached. A stream that was never
/// registered has no work to be waited for.
pub(crate) fn done_until(streams: &[OfStream], slot: u32) -> u64 {
    let timeline = streams.get(slot as usize).and_then(|of_stream| of_stream.timeline.as_ref());
    timeline.map_or(u64::MAX, |timeline| timeline.frontier())
}

#[derive(Debug, Default)]
pub(crate) struct SharedState {
    /// `None` while the allocator state is idle.
    pub(crate) device: Option<Device>,
    /// True if free blocks serve other streams than their owners.
    pub(crate) crosses_streams: bool,
    pub(crate) heap: Heap,
    /// Number of live blocks.
    pub(crate) live: u64,
    /// Operations since the heap's identities were last checked.
    #[cfg(debug_assertions)]
    pub(crate) unchecked: usize,
    pub(crate) counters: Counters,
    pub(crate) history: History,
    pub(crate) pools: PoolTable,
    /// The streams by our own number.
    pub(crate) streams: Vec<OfStream>,
    pub(crate) waiting: WaitingList,
    /// Streams that use a live block beside its own, in order.
    pub(crate) other_users: BTreeMap<BlockId, Vec<u32>>,
    /// Bytes held from the device; bytes that threads are about to take; and bytes on their way
    /// back to the device, which do not count as held any more.
    pub(crate) reserved: u64,
    pub(crate) growing: Growing,
    pub(crate) leaving: u64,
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
    pub(crate) fn stream(&mut self, stream: &Stream) -> u32 {
        let slot = stream.id();
        if !matches!(self.streams.get(slot as usize), Some(OfStream { timeline: Some(_), .. })) {
            self.register(stream);
        }
        slot
    }

    #[cold]
    fn register(&mut self, stream: &Stream) {
        let slot = stream.id() as usize;
        if slot >= self.streams.len() {
            self.streams.resize_with(slot + 1, OfStream::default);
        }
        let progress = if self.paged.is_some() { Progress::started() } else { Progress::default() };
        self.streams[slot] = OfStream { timeline: Some(stream.timeline().clone()), progress };
    }

    #[inline]
    pub(crate) fn timeline(&self, slot: u32) -> Option<&Arc<Timeline>> {
        self.streams.get(slot as usize)?.timeline.as_ref()
    }

    /// The timelines of all streams.
    pub(crate) fn timelines(&self) -> impl Iterator<Item = &Arc<Timeline>> + '_ {
        self.streams.iter().filter_map(|of_stream| of_stream.timeline.as_ref())
    }

    /// Notes that a stream uses a live block beside its own.
    pub(crate) fn note_use(&mut self, id: BlockId, slot: u32) {
        let block = &mut self.heap.blocks[id];
        if block.owner == slot {
            return;
        }
        block.used_elsewhere = true;
        self.heap.make_irregular(id);
        let users = self.other_users.entry(id).or_default();
        if let Err(at) = users.binary_search(&slot) {
            users.insert(at, slot);
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
        done_until(&self.streams, slot)
    }

    /// The size of the granules that the request's memory comes in; `None` if it comes in segments.
    /// Blocks that are handed out whole have segments of their own.
    pub(crate) fn paged_granule_for(&self, request: &Request) -> Option<u64> {
        let granule = self.paged.as_ref()?.granule;
        let handed_out_whole = self.pools.owner_of(request.pool).is_some_and(|private| private.options.no_split);
        (!handed_out_whole).then_some(granule)
    }
}
