//! A staged transfer, and the steps that its pieces go through.

use std::panic::Location;
use std::sync::Arc;

use aquifer_allocator::Reservation;
use aquifer_device::fork::Mutex;
use aquifer_device::internal::{ExpectedWork, caller};
use aquifer_device::{AccessKind, CopyEnd, DeviceError, DevicePtr, ErrorKind, HostPtr, RawStream, Stream, Tick};

use super::endpoints::{HostSource, HostTarget};
use super::task::{self, Submission, Way};
use crate::config::PAGE;
use crate::copy::DevicePart;
use crate::enqueue::{covered_tick, enqueue_block, hold_off_captures};
use crate::error::TransferError;
use crate::foreign_code::guarded;
use crate::job::Job;
use crate::pinned::PinnedBuffer;
use crate::rows::{RowBlock, Rows};

/// The advice where the runtime's own stream captures.
const CAPTURES_NOW: &str = "a stream of transfers must not be captured while it has transfers: wait for them before";

/// A chunk of the ring.
pub(super) type Chunk = PinnedBuffer;
/// A piece of a job, and the chunk that it goes through.
pub(super) type Piece = task::Piece<Arc<StagedTransfer>, Chunk>;

/// The device end of a staged transfer: some rows of bytes of reserved memory.
pub(crate) struct DeviceEndpoint {
    reserved: Reservation,
    ptr: DevicePtr,
    rows: Rows<1>,
}

impl DeviceEndpoint {
    /// Some bytes of device memory, which must lie within it. Reserves all of its storage.
    ///
    /// # Errors
    /// As [`Reservation::acquire`].
    pub(crate) fn reserve(
        memory: DevicePart<'_>,
        rows: Rows<1>,
        kind: AccessKind,
    ) -> Result<DeviceEndpoint, TransferError> {
        Ok(DeviceEndpoint { reserved: Reservation::acquire(memory.storage, kind)?, ptr: memory.ptr, rows })
    }

    /// Enqueues a copy of a block of bytes to or from a chunk, in which they are adjacent.
    ///
    /// # Safety
    /// As [`enqueue_block`], for the chunk from `chunk` on.
    #[allow(unsafe_code, reason = "passed on from the driver")]
    unsafe fn enqueue(&self, stream: &Stream, block: RowBlock<1>, chunk: HostPtr, way: Way) -> Result<(), DeviceError> {
        let RowBlock { first, at: [at], width, height, pitches: [pitch] } = block;
        let (here, there) = ((first, width, CopyEnd::Host(chunk)), (at, pitch, CopyEnd::Device(self.ptr)));
        let (from, to) = if way == Way::Up { (here, there) } else { (there, here) };
        let block = RowBlock { first, at: [from.0, to.0], width, height, pitches: [from.1, to.1] };
        // SAFETY: passed on to the caller.
        unsafe { enqueue_block(stream, block, (from.2, to.2), 1) }
    }
}

/// A staged transfer.
pub(super) struct StagedTransfer {
    host: HostEndpoint,
    device: DeviceEndpoint,
    stream: Stream,
    /// For copies that `stream` cannot take, because it captures, is gone, or is one thread's.
    own: Stream,
    /// The work enqueued on `stream` before the transfer, covered by an event.
    before: Tick,
    /// An upload, to be waited for with the stream.
    expected: Option<ExpectedWork>,
    priority: i32,
    job: Arc<Job>,
    /// The caller's place in the program, if the device has a witness.
    asked: Option<&'static Location<'static>>,
    /// A tick after the copy that was enqueued last.
    last: Mutex<Option<Tick>>,
}

/// The host end of a staged transfer: an upload has a source, a download a target.
pub(crate) enum HostEndpoint {
    Source(Arc<dyn HostSource>),
    Target(Arc<dyn HostTarget>),
}

impl HostEndpoint {
    /// Length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            HostEndpoint::Source(source) => source.bytes(),
            HostEndpoint::Target(target) => target.bytes(),
        }
    }
}

impl StagedTransfer {
    /// As [`super::Staging::begin`].
    pub(super) fn new(
        host: HostEndpoint,
        device: DeviceEndpoint,
        (stream, own): (&Stream, &Stream),
        priority: i32,
    ) -> Result<StagedTransfer, TransferError> {
        debug_assert_eq!(host.bytes(), device.rows.len());
        // Threads access the memory later, and streams that used it may capture then.
        device.reserved.prepare(stream)?;
        let before = stream.tick();
        if !own.is_ordered_after(&before) {
            before.cover()?;
        }
        // A thread that waits for the stream may hold an access guard that a download needs, but
        // none that an upload does.
        let expected = matches!(host, HostEndpoint::Source(_)).then(|| stream.expect_work());
        let (stream, own, job, last) = (stream.clone(), own.clone(), Job::new(), Mutex::new(None));
        Ok(StagedTransfer { host, device, stream, own, before, expected, priority, job, asked: caller(), last })
    }

    /// The length of either end.
    pub(super) fn bytes(&self) -> u64 {
        self.device.rows.len()
    }

    pub(super) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// The transfer as a job of the ring.
    pub(super) fn order(self) -> Submission<Arc<StagedTransfer>> {
        let (way, phase) = match &self.host {
            HostEndpoint::Source(source) => (Way::Up, source.phase() % PAGE as u64),
            HostEndpoint::Target(_) => (Way::Down, 0),
        };
        let (bytes, stream, priority) = (self.bytes(), self.stream.id(), self.priority);
        Submission { way, bytes, phase, stream, priority, work: Arc::new(self) }
    }

    /// Ends the job. The reservation and the host end are dropped before the job is settled, except
    /// for an owner whose drop is foreign code.
    pub(super) fn end(self, result: Result<(), TransferError>) {
        let StagedTransfer { host, device, stream, mut expected, job, last, .. } = self;
        let last = last.into_inner();
        if let (Err(error), HostEndpoint::Source(_)) = (&result, &host) {
            let (job, error) = (job.clone(), error.clone());
            device.reserved.note_failure(move || job.report_in_place().then(|| error.clone().into_cause()));
        }
        expected.iter_mut().for_each(|expected| expected.tick.clone_from(&last));
        drop(device);
        drop(host);
        match result {
            Ok(()) if expected.is_some() => job.enqueued(last.unwrap_or_else(|| stream.tick())),
            result => job.finish(result),
        }
        drop(expected);
    }

    /// Whether reading the source waits for storage.
    pub(super) fn is_storage(&self) -> bool {
        matches!(&self.host, HostEndpoint::Source(source) if source.is_storage())
    }

    fn check_wanted(&self) -> Result<(), TransferError> {
        if self.job.is_cancelled() { Err(TransferError::Cancelled) } else { Ok(()) }
    }
}

/// Fills a chunk with its piece of the source.
pub(super) fn fill(piece: &mut Piece) -> Result<(), TransferError> {
    let bytes = piece.bytes();
    let Piece { work: transfer, range, chunk, .. } = piece;
    transfer.check_wanted()?;
    let HostEndpoint::Source(source) = &transfer.host else { return Ok(()) };
    let mut into = chunk.as_slice_mut().into_slice(..bytes)?.into_write()?;
    guarded("the source of a transfer", || source.read(range.start, &mut into))
}

/// Enqueues the copy of a filled chunk to the device, or of the device's bytes to a chunk. An event
/// covers the tick after it.
pub(super) fn send(piece: &mut Piece, way: Way) -> Result<(), TransferError> {
    let transfer = piece.work.clone();
    transfer.check_wanted()?;
    let StagedTransfer { stream, own, before, .. } = &*transfer;
    if stream.raw() != RawStream::PER_THREAD {
        let enqueued = enqueue(piece, way, stream);
        let captures = |error: &TransferError| error.device().is_some_and(|error| error.kind == ErrorKind::Capture);
        if !enqueued.as_ref().is_err_and(|error| captures(error) || !stream.timeline().is_open()) {
            return enqueued;
        }
    }
    own.wait_for(before)?;
    enqueue(piece, way, own)
}

/// Stores the bytes that arrived in a chunk in the target.
pub(super) fn store(piece: &Piece) -> Result<(), TransferError> {
    let Piece { work: transfer, range, chunk, .. } = piece;
    transfer.check_wanted()?;
    let HostEndpoint::Target(target) = &transfer.host else { return Ok(()) };
    let from = chunk.try_slice(..piece.bytes())?.read()?;
    guarded("the target of a transfer", || target.write(range.start, &from))
}

#[allow(unsafe_code, reason = "a copy goes on after the call")]
fn enqueue(piece: &mut Piece, way: Way, stream: &Stream) -> Result<(), TransferError> {
    let bytes = piece.bytes();
    let Piece { work: transfer, range, chunk, .. } = piece;
    let hold_off = || -> Result<_, TransferError> {
        let held_off = hold_off_captures(stream, CAPTURES_NOW)?;
        stream.timeline().refuse_unannounced_capture()?;
        Ok(held_off)
    };
    // Before an access is noted for the stream: other streams could not wait for it during a
    // capture. But no other thread keeps the memory of an upload meanwhile, and for a download the
    // access may wait for a thread that is about to capture.
    let _held_off = (way == Way::Up).then(&hold_off).transpose()?;
    let _place = transfer.asked.and_then(|asked| stream.called_from(asked));
    let on_device = transfer.device.reserved.access(stream)?;
    let _held_off = (way == Way::Down).then(hold_off).transpose()?;
    let (part, kind) = match way {
        Way::Up => (chunk.try_slice(..bytes)?.host(), AccessKind::Read),
        Way::Down => (chunk.as_slice_mut().into_slice(..bytes)?.host(), AccessKind::Write),
    };
    let in_chunk = part.memory.access(stream, kind)?;
    let enqueued = transfer.device.rows.blocks(range.clone(), |block| {
        // SAFETY: the blocks of the range fill the part. The access to the chunk notes the copies.
        // Until they are done nothing touches the bytes that they write, writes those that they
        // read, or reuses the memory.
        unsafe { transfer.device.enqueue(stream, block, part.ptr, way) }
    });
    // With access to the memory, so that copies on two streams leave the tick of the later one.
    *transfer.last.lock() = Some(stream.tick());
    drop((in_chunk, on_device));
    enqueued?;
    covered_tick(stream);
    Ok(())
}

impl Piece {
    /// The length, which is at most a chunk's.
    fn bytes(&self) -> usize {
        usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX)
    }
}
