//! The types that the parts of the allocator have in common.

use std::collections::BTreeMap;

use aquifer_device::Stream;
use aquifer_device::internal::{StreamMap, Timeline};

use crate::size_class::PoolKind;
use crate::tags::Tag;

/// Number of a block in the slab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub(crate) u32);

impl BlockId {
    /// No block. A record with this number exists, but no block ever uses it: it is vacant and of
    /// size 0. Its links may be written, so that an operation which changes a neighbour needs no
    /// branch on whether there is one.
    pub(crate) const NONE: BlockId = BlockId(0);

    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }

    /// The block, if it is one.
    #[inline]
    pub(crate) fn some(self) -> Option<BlockId> {
        (self != BlockId::NONE).then_some(self)
    }
}

impl From<BlockId> for u32 {
    #[inline]
    fn from(id: BlockId) -> u32 {
        id.0
    }
}

/// A stream, by its number on its device ([`Stream::id`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The first stream of a device. A heap that knows no streams gets this one.
    pub const FIRST: StreamId = StreamId(0);

    #[inline]
    pub(crate) fn of(stream: &Stream) -> StreamId {
        StreamId(stream.id())
    }

    #[inline]
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<StreamId> for u32 {
    #[inline]
    fn from(stream: StreamId) -> u32 {
        stream.0
    }
}

/// A point in the work of one stream. Memory that carries it may be used by other streams once all
/// work before that point is done. Points of one stream are ordered as its work is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct After(u64);

impl After {
    /// Before all work: nothing is to be waited for.
    pub const NOTHING: After = After(0);
    /// After all work that there will ever be.
    pub(crate) const ALL: After = After(u64::MAX);

    /// After all work that was enqueued on the stream so far.
    #[inline]
    pub(crate) fn enqueued(timeline: &Timeline) -> After {
        After(timeline.now() + 1)
    }

    /// After all work that the host knows to be done.
    #[inline]
    pub(crate) fn known_done(timeline: &Timeline) -> After {
        After(timeline.frontier())
    }

    /// After the work of `stream` that the owner of a clock is ordered after.
    pub(crate) fn ordered(clock: &StreamMap, stream: StreamId) -> After {
        After(clock.get(stream.0))
    }

    /// The last tick of the stream that comes before.
    #[inline]
    pub(crate) fn last_tick(self) -> u64 {
        self.0.saturating_sub(1)
    }
}

/// A use of memory by a stream: its work until `after`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Use {
    pub(crate) stream: StreamId,
    pub(crate) after: After,
}

/// A pool of the heap. There are a small and a large default pool; private pools have several each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolId(u16);

impl PoolId {
    /// The small default pool.
    pub const SMALL: PoolId = PoolId(0);
    /// The large default pool.
    pub const LARGE: PoolId = PoolId(1);

    /// A pool by its number: even for small pools, odd for large ones.
    #[inline]
    pub(crate) const fn numbered(number: u16) -> PoolId {
        PoolId(number)
    }

    #[inline]
    pub(crate) const fn number(self) -> u16 {
        self.0
    }

    /// The default pool of a kind.
    #[inline]
    pub(crate) fn default_of(kind: PoolKind) -> PoolId {
        PoolId(kind as u16)
    }

    /// True if it belongs to a private pool.
    #[inline]
    pub(crate) fn is_private(self) -> bool {
        self > PoolId::LARGE
    }

    #[inline]
    pub(crate) fn kind(self) -> PoolKind {
        if self.0.is_multiple_of(2) { PoolKind::Small } else { PoolKind::Large }
    }
}

/// The latest use by each stream.
pub(crate) fn latest_by_stream(uses: impl Iterator<Item = Use>) -> impl Iterator<Item = Use> {
    let mut latest: BTreeMap<StreamId, After> = BTreeMap::new();
    for Use { stream, after } in uses {
        let of_stream = latest.entry(stream).or_default();
        *of_stream = after.max(*of_stream);
    }
    latest.into_iter().map(|(stream, after)| Use { stream, after })
}

/// An unknown number of bytes.
pub(crate) const UNKNOWN: u64 = u64::MAX;

/// A block that its holder gives back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) block: BlockId,
    /// The stream that it was allocated for.
    pub(crate) stream: StreamId,
    /// The stream whose later work gets the memory, if it is another one.
    pub(crate) on: Option<StreamId>,
    /// Requested bytes; [`UNKNOWN`] if the caller does not know.
    pub(crate) bytes: u64,
}

/// The pool and the stream that memory is mapped for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recipient {
    pub(crate) pool: PoolId,
    pub(crate) stream: StreamId,
}

/// What a request is served with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
}

/// A request on its way through the allocator.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Request {
    /// Bytes that the caller requested.
    pub(crate) requested: u64,
    /// Bytes after rounding.
    pub(crate) size: u64,
    /// The pool that it is served from.
    pub(crate) pool: PoolId,
    /// The stream that it is for.
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
    /// True if the size and the pool follow from the requested bytes, so that a free finds both
    /// from the handle alone. Blocks of other requests are *irregular*: the heap marks them, and a
    /// free reads their record.
    pub(crate) is_regular: bool,
}

impl Request {
    pub(crate) fn recipient(&self) -> Recipient {
        Recipient { pool: self.pool, stream: self.stream }
    }
}

/// After so many ticks.
#[cfg(test)]
pub(crate) const fn ticks(ticks: u64) -> After {
    After(ticks)
}

/// A use by the stream with a number, of so many ticks.
#[cfg(test)]
pub(crate) const fn used_until(stream: u32, until: u64) -> Use {
    Use { stream: StreamId(stream), after: ticks(until) }
}
