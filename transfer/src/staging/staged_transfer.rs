//! A staged transfer, and the steps that its pieces go through.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use aquifer_allocator::{Buffer, Claim};
use aquifer_device::fork::Mutex;
use aquifer_device::sim::caller;
use aquifer_device::{AccessKind, CopyEnd, DeviceError, DevicePtr, HostPtr, RawStream, RequestError, Stream, Tick};

use super::config::PAGE;
use super::ends::{HostSource, HostTarget};
use super::task::{self, Order, Way};
use crate::capture;
use crate::enqueue::enqueue_block;
use crate::error::TransferError;
use crate::foreign_code::guarded;
use crate::job::Job;
use crate::layout::{Block, Rows};
use crate::pinned::PinnedBuffer;

/// What to do instead where a stream began a capture since a transfer was accepted.
const CAPTURES_NOW: &str = "the stream began a capture before all of this transfer was enqueued: wait for a transfer before its stream captures";

/// A chunk of the ring.
pub(super) type Chunk = PinnedBuffer<u8>;
/// A piece of a job, and the chunk that it goes through.
pub(super) type Piece = task::Piece<Arc<StagedTransfer>, Chunk>;

/// The device end of a staged transfer: some rows of bytes of reserved memory.
pub(crate) struct DeviceEnd {
    reserved: Claim,
    ptr: DevicePtr,
    rows: Rows<1>,
}

impl DeviceEnd {
    /// Some bytes of a buffer, which must lie within it. Reserves all of its memory.
    ///
    /// # Errors
    /// As [`Claim::take`].
    pub(crate) fn reserve<T: Copy>(
        buffer: &Buffer<T>,
        rows: Rows<1>,
        kind: AccessKind,
    ) -> Result<DeviceEnd, TransferError> {
        Ok(DeviceEnd { reserved: Claim::take(buffer.storage(), kind)?, ptr: buffer.ptr(), rows })
    }

    /// Enqueues a copy of a block of bytes to or from a chunk, in which they are adjacent.
    ///
    /// # Safety
    /// As [`enqueue_block`], for the chunk from `chunk` on.
    #[allow(unsafe_code, reason = "passed on from the driver")]
    unsafe fn enqueue(&self, stream: &Stream, block: Block<1>, chunk: HostPtr, way: Way) -> Result<(), DeviceError> {
        let Block { first, at: [at], width, height, pitches: [pitch] } = block;
        let (here, there) = ((first, width, CopyEnd::Host(chunk)), (at, pitch, CopyEnd::Device(self.ptr)));
        let (from, to) = if way == Way::Up { (here, there) } else { (there, here) };
        let block = Block { first, at: [from.0, to.0], width, height, pitches: [from.1, to.1] };
        // SAFETY: passed on to the caller.
        unsafe { enqueue_block(stream, block, (from.2, to.2), 1) }
    }
}

/// A staged transfer.
pub(super) struct StagedTransfer {
    host: HostEnd,
    device: DeviceEnd,
    stream: Stream,
    priority: i32,
    job: Arc<Job>,
    /// Where the program asked for it, on a simulated device.
    asked: Option<&'static Location<'static>>,
    /// The tick after the latest of its copies.
    last: Mutex<Option<Tick>>,
}

pub(super) enum HostEnd {
    Source(Arc<dyn HostSource>),
    Target(Arc<dyn HostTarget>),
}

impl StagedTransfer {
    /// A transfer of all bytes of a host end and a device's end, of which there must be as many. The host end, which may be code of the
    /// caller's, is asked this once.
    ///
    /// # Errors
    /// When memory and stream are of different devices, or the ends of different lengths.
    pub(super) fn new(
        host: HostEnd,
        device: DeviceEnd,
        stream: &Stream,
        priority: i32,
    ) -> Result<StagedTransfer, TransferError> {
        let (is, needed) = (stream.device_id(), device.reserved.storage().device_id());
        if is != needed {
            return Err(RequestError::wrong_device("stream", is, needed).into());
        }
        refuse_capture(stream)?;
        if stream.raw() == RawStream::PER_THREAD {
            let what = "a stream that other threads can use, too: staged copies are enqueued by threads of the runtime";
            return Err(TransferError::Request(RequestError::Unsupported { what }));
        }
        check_lengths(&host, device.rows.len())?;
        // Threads take the turns later, and by then streams that used the memory may capture.
        device.reserved.prepare(stream)?;
        Ok(StagedTransfer {
            host,
            device,
            stream: stream.clone(),
            priority,
            job: Job::new(),
            asked: caller(),
            last: Mutex::new(None),
        })
    }

    /// Bytes of either end.
    pub(super) fn bytes(&self) -> u64 {
        self.device.rows.len()
    }

    pub(super) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// As the ring takes it.
    pub(super) fn order(self) -> Order<Arc<StagedTransfer>> {
        let (way, phase) = match &self.host {
            HostEnd::Source(source) => (Way::Up, source.phase() % PAGE as u64),
            HostEnd::Target(_) => (Way::Down, 0),
        };
        let (bytes, lane, priority) = (self.bytes(), self.stream.id(), self.priority);
        Order { way, bytes, phase, lane, priority, work: Arc::new(self) }
    }

    /// Ends the job. The claim and the host end are gone before the job is settled, except for an owner whose drop is foreign code.
    pub(super) fn end(self, result: Result<(), TransferError>) {
        let StagedTransfer { host, device, stream, job, last, .. } = self;
        let upload = matches!(host, HostEnd::Source(_));
        drop(device);
        drop(host);
        match result {
            Ok(()) if upload => job.enqueued(last.into_inner().unwrap_or_else(|| stream.tick())),
            result => job.finish(result),
        }
    }

    /// Whether reading the source waits for storage.
    pub(super) fn is_storage(&self) -> bool {
        matches!(&self.host, HostEnd::Source(source) if source.is_storage())
    }

    fn check_wanted(&self) -> Result<(), TransferError> {
        if self.job.is_cancelled() { Err(TransferError::Cancelled) } else { Ok(()) }
    }
}

/// Fills a chunk with its piece of the source.
pub(super) fn fill(piece: &mut Piece) -> Result<(), TransferError> {
    let Piece { work: transfer, range, chunk, .. } = piece;
    transfer.check_wanted()?;
    let into = chunk.write()?;
    match &transfer.host {
        HostEnd::Source(source) => {
            guarded("the source of a transfer", || source.read(range.start, part_mut(into, range.end - range.start)?))
        }
        HostEnd::Target(_) => Ok(()),
    }
}

/// Enqueues the copy of a filled chunk to the device, or of the device's bytes into a chunk. The tick after it is covered by an event.
pub(super) fn send(piece: &mut Piece, way: Way) -> Result<Tick, TransferError> {
    let Piece { work: transfer, range, chunk, .. } = piece;
    transfer.check_wanted()?;
    let starved = transfer.is_storage() && transfer.is_caught_up()?;
    let tick = enqueue(transfer, range.clone(), chunk, way)?;
    transfer.note(&tick);
    if let HostEnd::Source(source) = &transfer.host {
        source.sent(range.end - range.start, starved);
    }
    Ok(tick)
}

#[allow(unsafe_code, reason = "a copy goes on after the call")]
fn enqueue(transfer: &StagedTransfer, range: Range<u64>, chunk: &mut Chunk, way: Way) -> Result<Tick, TransferError> {
    capture::refuse(&transfer.stream, CAPTURES_NOW)?;
    let _place = transfer.asked.and_then(|asked| transfer.stream.called_from(asked));
    let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let on_device = transfer.device.reserved.turn(&transfer.stream)?;
    let (part, kind) = match way {
        Way::Up => (chunk.try_slice(..bytes)?.part(), AccessKind::Read),
        Way::Down => (chunk.try_slice_mut(..bytes)?.part(), AccessKind::Write),
    };
    let in_chunk = part.memory.access(&transfer.stream, kind)?;
    let _held_off = capture::hold_off(&transfer.stream, CAPTURES_NOW)?;
    let enqueued = transfer.device.rows.blocks(range, |block| {
        // SAFETY: the blocks of the range fill the part. The access to the chunk notes the copies. Until they are done nothing
        // touches the bytes that they write, writes those that they read, or reuses the memory.
        unsafe { transfer.device.enqueue(&transfer.stream, block, part.ptr, way) }
    });
    drop((in_chunk, on_device));
    enqueued?;
    let tick = transfer.stream.tick();
    // Without an event the tick is still answerable, at the cost of waiting for later transfer, too.
    if let Err(error) = tick.cover() {
        tracing::debug!(%error, "no event could be recorded after a staged copy");
    }
    Ok(tick)
}

/// Stores what arrived in a chunk in the target.
pub(super) fn store(piece: &Piece) -> Result<(), TransferError> {
    let Piece { work: transfer, range, chunk, .. } = piece;
    transfer.check_wanted()?;
    let from = chunk.read()?;
    match &transfer.host {
        HostEnd::Target(target) => {
            guarded("the target of a transfer", || target.write(range.start, part(from, range.end - range.start)?))
        }
        HostEnd::Source(_) => Ok(()),
    }
}

impl StagedTransfer {
    /// Whether the copies enqueued so far are done.
    fn is_caught_up(&self) -> Result<bool, TransferError> {
        let last = self.last.lock().clone();
        last.map_or(Ok(true), |tick| Ok(tick.is_done()?))
    }

    fn note(&self, tick: &Tick) {
        let mut last = self.last.lock();
        if last.as_ref().is_none_or(|last| last.n() < tick.n()) {
            *last = Some(tick.clone());
        }
    }
}

impl fmt::Debug for StagedTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedTransfer")
            .field("ptr", &self.device.ptr)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

fn check_lengths(host: &HostEnd, device: u64) -> Result<(), TransferError> {
    let (from, to) = match host {
        HostEnd::Source(source) => (source.bytes(), device),
        HostEnd::Target(target) => (device, target.bytes()),
    };
    if from == to { Ok(()) } else { Err(TransferError::LengthMismatch { from, to }) }
}

fn part(chunk: &[u8], bytes: u64) -> Result<&[u8], TransferError> {
    let len = chunk.len() as u64;
    let end = usize::try_from(bytes).ok();
    end.and_then(|end| chunk.get(..end)).ok_or(TransferError::Request(RequestError::OutOfBounds {
        start: 0,
        end: bytes,
        len,
    }))
}

fn part_mut(chunk: &mut [u8], bytes: u64) -> Result<&mut [u8], TransferError> {
    let len = chunk.len() as u64;
    let end = usize::try_from(bytes).ok();
    end.and_then(|end| chunk.get_mut(..end)).ok_or(TransferError::Request(RequestError::OutOfBounds {
        start: 0,
        end: bytes,
        len,
    }))
}

/// Copies of chunks must not become part of a graph, which would run them again when the chunks are others'.
pub(super) fn refuse_capture(stream: &Stream) -> Result<(), TransferError> {
    Ok(capture::refuse(stream, "staged copies cannot be captured into a graph: copy outside of the capture")?)
}
