//! The core: the state that the arenas of an allocator share, under a lock of its own, for slow paths alone.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use aquifer_device::{Device, Stream, Timeline};

use crate::accounting::tally::Writer;
use crate::backing::headroom::Growing;
use crate::backing::paged::{Paged, Pins};
use crate::backing::segments::Releasing;
use crate::cross_stream::waiting::WaitingList;
use crate::heap::BlockId;
use crate::pools::table::PoolTable;
use crate::shell::arena::Arena;
use crate::size_class::SizeClasses;
use crate::tags::Tag;

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
    pub(crate) arena: &'static Arena,
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
}

/// A block, and the stream in whose arena it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    pub(crate) arena: u32,
    pub(crate) block: BlockId,
}

#[derive(Debug, Default)]
pub(crate) struct Core {
    /// `None` while the shell is idle.
    pub(crate) device: Option<Device>,
    pub(crate) classes: SizeClasses,
    /// Whether a free block may move between streams; if not, blocks never leave the stream of their segment.
    pub(crate) crosses_streams: bool,
    /// The open arenas, by ascending stream.
    pub(crate) arenas: Vec<&'static Arena>,
    /// Who counts where, and how often the work has passed from one thread to another.
    pub(crate) writer: Writer,
    pub(crate) handovers: u32,
    pub(crate) pools: PoolTable,
    /// Timelines by our own stream number.
    pub(crate) timelines: Vec<Option<Arc<Timeline>>>,
    pub(crate) waiting: WaitingList,
    /// Streams that use a live block beside its own.
    pub(crate) shared: BTreeMap<Place, Vec<u32>>,
    /// Live allocations of the raw interface, by address.
    pub(crate) raw: HashMap<u64, (&'static Arena, BlockId)>,
    /// Bytes held from the device, and bytes that threads are about to take.
    pub(crate) reserved: u64,
    pub(crate) growing: Growing,
    /// Bytes taken from the device by streams that could have borrowed.
    pub(crate) unborrowed: u64,
    /// Segments that back each region: address and, for the snapshot, tag of the allocation that made them.
    pub(crate) segments: BTreeMap<u64, Tag>,
    /// Segments that the driver is asked to take back, by address.
    pub(crate) releasing: BTreeMap<u64, Releasing>,
    /// Releases begun so far.
    pub(crate) releases: u64,
    /// Memory that stays where it is.
    pub(crate) pins: Pins,
    /// Where memory comes in granules.
    pub(crate) paged: Option<Paged>,
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

    /// Notes that a stream uses a live block beside its own.
    pub(crate) fn note_use(&mut self, arena: &'static Arena, id: BlockId, slot: u32) {
        let used = arena.look(|desk| {
            let block = &mut desk.heap.blocks[id];
            block.shared |= block.owner != slot;
            block.owner != slot
        });
        if used {
            let users = self.shared.entry(Place { arena: arena.slot, block: id }).or_default();
            if !users.contains(&slot) {
                users.push(slot);
            }
        }
    }

    /// Whether mapped memory was given back until the allocator wakes up.
    pub(crate) fn is_asleep(&self) -> bool {
        self.paged.as_ref().is_some_and(|paged| paged.absent.is_some())
    }

    /// Where the stream's timeline must have got to for everything enqueued so far to be done.
    #[inline]
    pub(crate) fn tick_of(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(0, |timeline| timeline.now() + 1)
    }

    /// Whether the stream's timeline is known to have got to `after`.
    pub(crate) fn is_known_done(&self, slot: u32, after: u64) -> bool {
        after <= self.done_until(slot)
    }

    /// Where the stream's timeline is known to have got to, at least. A stream that never came here has nothing to do.
    pub(crate) fn done_until(&self, slot: u32) -> u64 {
        self.timeline(slot).map_or(u64::MAX, |timeline| timeline.frontier())
    }

    /// The size of the granules that the request's memory comes in; `None` if it comes in segments. Blocks that are handed out
    /// whole have segments of their own.
    pub(crate) fn paged_granule_for(&self, request: &Request) -> Option<u64> {
        let granule = self.paged.as_ref()?.granule;
        let handed_out_whole = self.pools.owner_of(request.pool).is_some_and(|private| private.options.no_split);
        (!handed_out_whole).then_some(granule)
    }
}
