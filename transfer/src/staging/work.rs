//! What a job is made of, and the steps that its pieces go through.
//!
//! Each step is one function, which threads (`crew`) and virtual workers (`virtual_crew`) call alike.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use aquifer_allocator::{Buffer, Claim};
use aquifer_device::fork::Mutex;
use aquifer_device::sim::caller;
use aquifer_device::{
    AccessKind, Copy2d, CopyEnd, DeviceError, DevicePtr, HostPtr, RawStream, RequestError, Stream, Tick,
};

use super::config::PAGE;
use super::ends::{HostSource, HostTarget};
use super::spread::{Rows, Spread};
use super::task::{Flight, Hand, Order, Way};
use crate::capture;
use crate::errands;
use crate::error::TransferError;
use crate::job::Job;
use crate::pinned::PinnedBuffer;

/// What to do instead where a stream began a capture since a transfer was accepted.
const CAPTURES_NOW: &str = "the stream began a capture before all of this transfer was enqueued: wait for a transfer before its stream captures";

/// A chunk of the ring.
pub(super) type Chunk = PinnedBuffer<u8>;
/// A piece of a job, and the chunk that it goes through.
pub(super) type Piece = Hand<Arc<Work>, Chunk>;
/// A chunk that a copy uses.
pub(super) type InFlight = Flight<Chunk, Tick>;

/// The device's end of a staged transfer: a part of memory that is claimed for it.
pub(crate) struct DeviceEnd {
    claim: Claim,
    ptr: DevicePtr,
    spread: Spread,
}

impl DeviceEnd {
    /// All of a buffer, for such a use.
    ///
    /// # Errors
    /// As [`Claim::take`].
    pub(crate) fn claim<T: Copy>(buffer: &Buffer<T>, kind: AccessKind) -> Result<DeviceEnd, TransferError> {
        DeviceEnd::claim_rows(buffer, Spread::dense(buffer.bytes()), kind)
    }

    /// The bytes of a buffer that lie so, which must be within it, for such a use. All of its memory is claimed.
    ///
    /// # Errors
    /// As [`Claim::take`].
    pub(crate) fn claim_rows<T: Copy>(
        buffer: &Buffer<T>,
        spread: Spread,
        kind: AccessKind,
    ) -> Result<DeviceEnd, TransferError> {
        let claim = Claim::take(buffer.storage(), kind)?;
        Ok(DeviceEnd { claim, ptr: buffer.ptr(), spread })
    }

    /// Enqueues a copy of some rows to or from a chunk, in which they have no gaps.
    ///
    /// # Safety
    /// The rows must be memory of the chunk from `packed` on, as [`aquifer_device::Driver::copy_2d`] asks for.
    #[allow(unsafe_code, reason = "passed on from the driver")]
    unsafe fn enqueue(&self, stream: &Stream, rows: Rows, packed: HostPtr, way: Way) -> Result<(), DeviceError> {
        let ptr = self.ptr.offset(rows.at);
        let chunk = HostPtr(packed.0 + usize::try_from(rows.packed).unwrap_or(usize::MAX));
        if rows.height > 1 && rows.pitch < rows.width {
            // Rows that overlap or repeat, of which no driver copies several at once.
            return rows.each().try_for_each(|row| {
                // SAFETY: passed on to the caller.
                unsafe { self.enqueue(stream, row, packed, way) }
            });
        }
        let bytes = usize::try_from(rows.width).unwrap_or(usize::MAX);
        let (on_device, on_host) = ((CopyEnd::Device(ptr), rows.pitch), (CopyEnd::Host(chunk), rows.width));
        let ((dst, dst_pitch), (src, src_pitch)) = match way {
            // SAFETY: passed on to the caller.
            Way::Up if rows.height == 1 => return unsafe { stream.upload(ptr, chunk, bytes) },
            // SAFETY: passed on to the caller.
            Way::Down if rows.height == 1 => return unsafe { stream.download(chunk, ptr, bytes) },
            Way::Up => (on_device, on_host),
            Way::Down => (on_host, on_device),
        };
        let copy = Copy2d { dst, dst_pitch, src, src_pitch, width: rows.width, height: rows.height };
        // SAFETY: passed on to the caller.
        unsafe { stream.copy_2d(&copy) }
    }
}

/// A staged transfer.
pub(super) struct Work {
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

impl Work {
    /// A transfer of all bytes of a host end and a device's end, of which there must be as many. The host end, which may be code of the
    /// caller's, is asked this once.
    ///
    /// # Errors
    /// When memory and stream are of different devices, or the ends of different lengths.
    pub(super) fn new(host: HostEnd, device: DeviceEnd, stream: &Stream, priority: i32) -> Result<Work, TransferError> {
        let (is, needed) = (stream.device_id(), device.claim.storage().device_id());
        if is != needed {
            return Err(RequestError::wrong_device("stream", is, needed).into());
        }
        refuse_capture(stream)?;
        if stream.raw() == RawStream::PER_THREAD {
            let what = "a stream that other threads can use, too: staged copies are enqueued by threads of the runtime";
            return Err(TransferError::Request(RequestError::Unsupported { what }));
        }
        check_lengths(&host, device.spread.bytes())?;
        // Threads take the turns later, and by then streams that used the memory may capture.
        device.claim.prepare(stream)?;
        Ok(Work {
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
        self.device.spread.bytes()
    }

    pub(super) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// As the ring takes it.
    pub(super) fn order(self) -> Order<Arc<Work>> {
        let (way, phase) = match &self.host {
            HostEnd::Source(source) => (Way::Up, source.phase() % PAGE as u64),
            HostEnd::Target(_) => (Way::Down, 0),
        };
        let (bytes, lane, priority) = (self.bytes(), self.stream.id(), self.priority);
        Order { way, bytes, phase, lane, priority, work: Arc::new(self) }
    }

    /// Ends the job. The claim and the host end are gone before the job is settled, except for an owner whose drop is foreign code.
    pub(super) fn end(self, result: Result<(), TransferError>) {
        let Work { host, device, stream, job, last, .. } = self;
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
    let Hand { work, range, chunk, .. } = piece;
    work.check_wanted()?;
    let into = chunk.write()?;
    match &work.host {
        HostEnd::Source(source) => {
            guarded("the source of a transfer", || source.read(range.start, part_mut(into, range.end - range.start)?))
        }
        HostEnd::Target(_) => Ok(()),
    }
}

/// Enqueues the copy of a filled chunk to the device, or of the device's bytes into a chunk. The tick after it is covered by an event.
pub(super) fn send(piece: &mut Piece, way: Way) -> Result<Tick, TransferError> {
    let Hand { work, range, chunk, .. } = piece;
    work.check_wanted()?;
    let starved = work.is_storage() && work.is_caught_up()?;
    let tick = enqueue(work, range.clone(), chunk, way)?;
    work.note(&tick);
    if let HostEnd::Source(source) = &work.host {
        source.sent(range.end - range.start, starved);
    }
    Ok(tick)
}

#[allow(unsafe_code, reason = "a copy goes on after the call")]
fn enqueue(work: &Work, range: Range<u64>, chunk: &mut Chunk, way: Way) -> Result<Tick, TransferError> {
    capture::refuse(&work.stream, CAPTURES_NOW)?;
    let _place = work.asked.and_then(|asked| work.stream.called_from(asked));
    let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let on_device = work.device.claim.turn(&work.stream)?;
    let (part, kind) = match way {
        Way::Up => (chunk.try_slice(..bytes)?.part(), AccessKind::Read),
        Way::Down => (chunk.try_slice_mut(..bytes)?.part(), AccessKind::Write),
    };
    let in_chunk = part.memory.turn(&work.stream, kind)?;
    let _held_off = capture::hold_off(&work.stream, CAPTURES_NOW)?;
    let enqueued = work.device.spread.rows(range, |rows| {
        // SAFETY: the rows of the range fill the part. The memory's turn notes the copies, and until those are done nobody touches what
        // they write, nor writes what they read, nor is it given away.
        unsafe { work.device.enqueue(&work.stream, rows, part.ptr, way) }
    });
    drop((in_chunk, on_device));
    enqueued?;
    let tick = work.stream.tick();
    // Without an event the tick is still answerable, at the cost of waiting for later work, too.
    if let Err(error) = tick.cover() {
        tracing::debug!(%error, "no event could be recorded after a staged copy");
    }
    Ok(tick)
}

/// Stores what arrived in a chunk in the target.
pub(super) fn land(piece: &Piece) -> Result<(), TransferError> {
    let Hand { work, range, chunk, .. } = piece;
    work.check_wanted()?;
    let from = chunk.read()?;
    match &work.host {
        HostEnd::Target(target) => {
            guarded("the target of a transfer", || target.write(range.start, part(from, range.end - range.start)?))
        }
        HostEnd::Source(_) => Ok(()),
    }
}

impl Work {
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

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("ptr", &self.device.ptr).field("bytes", &self.bytes()).finish_non_exhaustive()
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

/// Calls code that may panic.
pub(crate) fn guarded<R>(
    what: &'static str,
    call: impl FnOnce() -> Result<R, TransferError>,
) -> Result<R, TransferError> {
    // What the code leaves behind when it panics is not looked at: the job fails, and a chunk's bytes are written before they are used.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let error = TransferError::panicked(what, panic.as_ref());
        errands::run("what a panic carried", move || drop(panic));
        Err(error)
    })
}
