//! The owning handle of a live block. Dropping it makes no driver call and waits for nothing
//! (invariant A3).

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::{Device, DevicePtr, Operation, Stream, fork};

use crate::error::AllocError;
use crate::state::{AllocatorState, StateGuard};
use crate::types::{BlockId, StreamId};

/// Bit of [`LiveBlock::stream`], set if the device has a witness that watches how work uses the
/// block.
pub(crate) const WATCHED: u32 = 1 << 31;
/// Bit of [`LiveBlock::stream`], set if the block keeps its allocator open, as that of a storage
/// does.
pub(crate) const KEEPS_OPEN: u32 = 1 << 30;

/// The stream in [`LiveBlock::stream`].
#[inline]
pub(crate) fn stream_of(marked: u32) -> StreamId {
    StreamId(marked & (KEEPS_OPEN - 1))
}

/// The stream that memory is asked for, used, or given back on. A body of a conditional node is a
/// part of the work of the stream with the node: so its memory is that stream's, whose other bodies
/// it excludes. Locks a timeline.
pub(crate) fn acting(stream: &Stream) -> Cow<'_, Stream> {
    let with_node = stream.body_of().filter(Stream::is_capturing);
    with_node.map_or(Cow::Borrowed(stream), Cow::Owned)
}

/// A live block of device memory. Dropping it gives the memory back to the allocator, on any
/// thread, without a driver call and without waiting for the device.
///
/// The memory is for work on the stream it was allocated for. Work on another stream must be
/// ordered after that stream. It must also be noted with [`Allocation::record_stream`], unless the
/// allocation's own stream is ordered after that work before the handle is dropped.
// Aligned, so that none of many handles in a row lies in two cache lines: of blocks that are freed
// at random, a handle's line is missed.
#[repr(align(32))]
#[must_use = "dropping the handle gives the memory back"]
pub struct Allocation(LiveBlock);

/// What an [`Allocation`] owns, without its alignment: a heap allocation that is aligned costs
/// several times a plain one.
pub(crate) struct LiveBlock {
    pub(crate) state: &'static AllocatorState,
    /// [`BlockId::NONE`] for an allocation of zero bytes, which has none, and for a handle that was
    /// given up.
    pub(crate) block: BlockId,
    /// The stream's number, and whether [`WATCHED`] and [`KEEPS_OPEN`].
    pub(crate) stream: u32,
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: u64,
}

impl Allocation {
    #[inline]
    pub(crate) fn new(
        state: &'static AllocatorState,
        block: BlockId,
        stream: u32,
        ptr: DevicePtr,
        bytes: u64,
    ) -> Allocation {
        Allocation(LiveBlock { state, block, stream, ptr, bytes })
    }

    pub(crate) fn state(&self) -> &'static AllocatorState {
        self.0.state
    }

    /// The block, which keeps its allocator open from now on: `keeper` is what does. `None` if there
    /// are no bytes.
    pub(crate) fn into_keeping_open(self, keeper: &Arc<impl Any + Send + Sync>) -> Option<LiveBlock> {
        let mut block = self.0;
        block.block.some()?;
        block.state.shared().count_keeping_open(keeper);
        block.stream |= KEEPS_OPEN;
        Some(block)
    }

    /// Its first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        self.0.ptr
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Its addresses.
    pub fn range(&self) -> Range<u64> {
        self.ptr().range(self.bytes())
    }

    /// The [`Stream::id`] of the stream it was allocated for.
    pub fn stream_id(&self) -> u32 {
        stream_of(self.0.stream).0
    }

    /// Notes that `stream` uses the memory, too. The memory is then not reused before all work is
    /// done that is enqueued on `stream` until the handle is dropped. Does nothing for the
    /// allocation's own stream.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        self.0.record_stream(stream)
    }

    /// Gives the memory back in the order of `stream`, which must be ordered after every use of it.
    /// `stream` may reuse the memory at once; the stream it was allocated for may do so only after
    /// the work enqueued on `stream` until now.
    ///
    /// # Errors
    /// When the stream belongs to another device. The memory is then given back as by dropping the
    /// handle.
    #[track_caller]
    pub fn drop_on(self, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        let LiveBlock { stream: own, ptr, bytes, .. } = self.0;
        if own & WATCHED != 0 {
            self.state().report_end(ptr, Some(Location::caller()));
        }
        let (state, block) = self.into_block();
        if block == BlockId::NONE {
            return Ok(());
        }
        let stream = &*acting(stream);
        let on = known(&mut state.shared(), stream);
        state.free(block, own, on.as_ref().ok().copied(), bytes);
        on.map(drop)
    }

    /// Its block, if it has one.
    pub(crate) fn block(&self) -> Option<BlockId> {
        self.0.block.some()
    }

    /// Gives up the handle; the block, if there is one, stays live.
    pub(crate) fn into_block(mut self) -> (&'static AllocatorState, BlockId) {
        (self.0.state, std::mem::replace(&mut self.0.block, BlockId::NONE))
    }
}

impl LiveBlock {
    /// As [`Allocation::record_stream`].
    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        if self.block == BlockId::NONE {
            return Ok(());
        }
        let stream = &*acting(stream);
        let mut shared = self.state.shared();
        let stream = known(&mut shared, stream)?;
        shared.note_use(self.block, stream);
        Ok(())
    }
}

/// The number of a stream of the allocator's device, which becomes known.
fn known(shared: &mut StateGuard, stream: &Stream) -> Result<StreamId, AllocError> {
    let needed = shared.device().map_or(u32::MAX, Device::id);
    if needed != stream.device_id() {
        return Err(AllocError::wrong_device("stream", stream.device_id(), needed));
    }
    Ok(shared.stream(stream))
}

const _: () = assert!(size_of::<Option<Allocation>>() == 32, "two handles fill a cache line");

impl Drop for LiveBlock {
    #[inline]
    fn drop(&mut self) {
        if self.block != BlockId::NONE {
            if self.stream & WATCHED != 0 {
                self.state.report_end(self.ptr, None);
            }
            self.state.free(self.block, self.stream, None, self.bytes);
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation")
            .field("ptr", &self.ptr())
            .field("bytes", &self.bytes())
            .field("stream", &self.stream_id())
            .finish_non_exhaustive()
    }
}
