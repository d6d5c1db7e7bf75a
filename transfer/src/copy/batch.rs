//! Many small copies as one: those of host memory packed into one piece of it that is page-locked, and handed to the driver with one call
//! where it has that.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_allocator::{Buffer, Storage};
use aquifer_device::{AccessKind, CopyEnd, CopyPart, DeviceError, DevicePtr, HostPtr, RequestError, Stream, Tick};
use bytemuck::Pod;

use crate::copy::on_device::{check_apart, check_lengths};
use crate::copy::touched::Touched;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::pending::Pending;
use crate::pinned::{HostPart, PinnedBuffer, PinnedSlice, PinnedSliceMut};
use crate::runtime::Transfer;

/// Page-locked memory for packing comes in pieces of at least this many bytes.
const PACKED_BYTES: usize = 1 << 20;

/// Packed pieces start at multiples of this many bytes: what engines copy at best speed, and enough for every element.
const PACKED_ALIGNMENT: usize = 64;

/// Many copies that are made together.
///
/// What is uploaded is taken when it is added, into one buffer; what is downloaded comes back in one. Where pieces lie side by side at both
/// ends they become one copy. What remains goes to the driver in one call for each direction, if it has such a call and that pays on this
/// device ([`Transfer::batch_calls_pay_below`]), else in one call each.
///
/// The outcome is that of making the copies one after the other, in the order in which they were added. Where none of them writes what another
/// one uses, uploads come first, then copies within the device, then downloads. A copy that writes what an earlier one of a later kind uses
/// begins this anew, and those of one kind of which one writes what another uses are made one by one.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, Buffer};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_transfer::Transfer;
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
/// let stream = device.stream()?;
/// let mut buffers = Vec::new();
/// for _ in 0..100 {
///     buffers.push(transfer.allocator().alloc::<u32>(16, &stream)?);
/// }
/// let mut batch = transfer.batch();
/// for (number, buffer) in buffers.iter_mut().enumerate() {
///     batch.upload(&[number as u32; 16], buffer)?;
/// }
/// let last = batch.download(&buffers[99])?;
/// let results = batch.run()?.wait()?;
/// assert_eq!(results.read(&last)?, [99; 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is copied before `run`"]
pub struct TransferBatch {
    transfer: Transfer,
    number: u64,
    packed: Vec<Packed>,
    /// Made one after the other; there is always one.
    stages: Vec<Stage>,
    downloaded: usize,
}

/// Copies of which uploads may come first, then those within the device, then downloads, whatever order they were added in.
#[derive(Debug, Default)]
struct Stage {
    uploads: Vec<Piece>,
    copies: Vec<Piece>,
    downloads: Vec<Piece>,
    /// What downloads read.
    downloaded: Touched,
    /// The same, and what copies within the device read and write.
    used: Touched,
}

/// Page-locked memory that uploads are packed into.
#[derive(Debug)]
struct Packed {
    buffer: PinnedBuffer<u8>,
    used: usize,
}

/// What the driver copies as one: one copy that was added, or several that lie side by side.
#[derive(Debug)]
struct Piece {
    from: End,
    to: End,
    bytes: u64,
    /// How many.
    copies: u64,
}

/// One end of a copy.
#[derive(Clone, Debug)]
enum End {
    Device(Arc<Storage>, DevicePtr),
    /// Which of the page-locked buffers, and where in it.
    Host {
        buffer: usize,
        offset: usize,
    },
}

/// Which part of a batch's results a download is.
#[derive(Clone, Copy, Debug)]
pub struct Downloaded<T> {
    batch: u64,
    offset: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// What a batch downloaded.
#[derive(Debug)]
pub struct BatchResults {
    batch: u64,
    bytes: PinnedBuffer<u8>,
}

/// Numbers of batches, never reused in a process.
static NEXT_BATCH: AtomicU64 = AtomicU64::new(0);

impl BatchResults {
    /// The elements of one download of the same batch.
    ///
    /// # Errors
    /// [`TransferError::OtherBatch`], [`TransferError::OutOfHostMemory`], and errors of the driver.
    pub fn read<T: Pod>(&self, download: &Downloaded<T>) -> Result<Vec<T>, TransferError> {
        if download.batch != self.batch {
            return Err(TransferError::OtherBatch);
        }
        let bytes = self.bytes.read()?;
        let (start, end) = (download.offset, download.offset + download.len * size_of::<T>());
        let own = bytes.get(start..end).ok_or(RequestError::OutOfBounds {
            start: start as u64,
            end: end as u64,
            len: bytes.len() as u64,
        })?;
        host_vec::copied(own, download.len)
    }
}

impl Transfer {
    /// Begins a batch of small copies.
    pub fn batch(&self) -> TransferBatch {
        TransferBatch {
            transfer: self.clone(),
            number: NEXT_BATCH.fetch_add(1, Ordering::Relaxed),
            packed: Vec::new(),
            stages: vec![Stage::default()],
            downloaded: 0,
        }
    }
}

impl TransferBatch {
    /// Adds a copy to the device. The elements are taken now.
    ///
    /// # Errors
    /// Ends of different lengths, a buffer of another device, and when page-locked memory runs out. The batch is as it was then.
    pub fn upload<T: Pod>(&mut self, from: &[T], to: &mut Buffer<T>) -> Result<(), TransferError> {
        check_lengths(from.len(), to.len())?;
        self.transfer.check_device("buffer", to.storage().device_id())?;
        let bytes = bytes_of(from);
        if bytes.is_empty() {
            return Ok(());
        }
        let from = self.pack(bytes, &End::of(to))?;
        self.stage(|stage| stage.used.overlaps(to.ptr(), to.bytes())).add_upload(from, to);
        Ok(())
    }

    /// Adds a copy within the device.
    ///
    /// # Errors
    /// Ends of different lengths, that overlap, or of another device. The batch is as it was then.
    pub fn copy<T: Copy>(&mut self, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<(), TransferError> {
        check_lengths(from.len(), to.len())?;
        self.transfer.check_device("buffer", from.storage().device_id())?;
        self.transfer.check_device("buffer", to.storage().device_id())?;
        if to.bytes() == 0 {
            return Ok(());
        }
        check_apart(from, to)?;
        self.stage(|stage| stage.downloaded.overlaps(to.ptr(), to.bytes())).add_copy(from, to);
        Ok(())
    }

    /// Adds a copy from the device, to be read from the batch's results.
    ///
    /// # Errors
    /// A buffer of another device, or too long for the host. The batch is as it was then.
    pub fn download<T: Pod>(&mut self, from: &Buffer<T>) -> Result<Downloaded<T>, TransferError> {
        self.transfer.check_device("buffer", from.storage().device_id())?;
        let len = from.len();
        let bytes = len * size_of::<T>();
        if bytes == 0 {
            return Ok(Downloaded { batch: self.number, offset: 0, len, element: PhantomData });
        }
        let adjacent =
            self.stages.last().is_some_and(|stage| goes_on(&stage.downloads, |last| &last.from, &End::of(from)));
        let offset = if adjacent { self.downloaded } else { self.downloaded.next_multiple_of(PACKED_ALIGNMENT) };
        let overflow = TransferError::Request(RequestError::LengthOverflow {
            len: from.len() as u64,
            size: size_of::<T>() as u64,
        });
        let end = offset.checked_add(bytes).ok_or(overflow)?;
        self.stage(|_| false).add_download(from, End::Host { buffer: 0, offset });
        self.downloaded = end;
        Ok(Downloaded { batch: self.number, offset, len, element: PhantomData })
    }

    /// Copies that the driver will be asked for: fewer than were added where pieces lie side by side. [`Transfer::counters`] counts those
    /// that were added, once they are enqueued.
    pub fn pieces(&self) -> usize {
        let pieces = |stage: &Stage| stage.uploads.len() + stage.copies.len() + stage.downloads.len();
        self.stages.iter().map(pieces).sum()
    }

    /// Enqueues all copies, and returns. The first batch in a direction measures whether batched calls pay, which takes some milliseconds,
    /// but waits for nobody's work ([`Transfer::batch_calls_pay_below`]).
    ///
    /// # Errors
    /// When page-locked memory runs out, a stream that captures, and errors of the driver. Some copies may have been enqueued then.
    #[track_caller]
    pub fn run(self) -> Result<Pending<BatchResults>, TransferError> {
        let _place = self.transfer.called_here();
        let transfer = &self.transfer;
        let packed: Vec<_> = self.packed.iter().map(|packed| PinnedSlice::from(&packed.buffer).part()).collect();
        let mut results = transfer.pinned().alloc::<u8>(self.downloaded)?;
        let part = [PinnedSliceMut::from(&mut results).part()];
        let mut ticks = Vec::new();
        for stage in &self.stages {
            ticks.extend(transfer.enqueue_pieces(Direction::Upload, &stage.uploads, &packed)?);
            ticks.extend(transfer.enqueue_pieces(Direction::OnDevice, &stage.copies, &[])?);
            ticks.extend(transfer.enqueue_pieces(Direction::Download, &stage.downloads, &part)?);
        }
        let results = BatchResults { batch: self.number, bytes: results };
        Ok(Pending::enqueued_all(transfer.shared(), ticks, results))
    }

    /// The stage that a copy belongs to: the last one, or a new one if the copy must come after what that one makes later.
    fn stage(&mut self, comes_after: impl FnOnce(&Stage) -> bool) -> &mut Stage {
        if self.stages.last().is_none_or(comes_after) {
            self.stages.push(Stage::default());
        }
        let last = self.stages.len() - 1;
        &mut self.stages[last]
    }

    /// Packs bytes, and says where.
    fn pack(&mut self, bytes: &[u8], to: &End) -> Result<End, TransferError> {
        let goes_on = self.stages.last().is_some_and(|stage| goes_on(&stage.uploads, |last| &last.to, to));
        let alignment = if goes_on { 1 } else { PACKED_ALIGNMENT };
        let room = self.packed.last().map(|packed| (packed.used.next_multiple_of(alignment), packed.buffer.len()));
        if room.is_none_or(|(start, len)| len < start + bytes.len()) {
            let buffer = self.transfer.pinned().alloc(bytes.len().max(PACKED_BYTES))?;
            self.packed.push(Packed { buffer, used: 0 });
        }
        let buffer = self.packed.len() - 1;
        let packed = &mut self.packed[buffer];
        let start = packed.used.next_multiple_of(alignment);
        packed.buffer.write()?[start..start + bytes.len()].copy_from_slice(bytes);
        packed.used = start + bytes.len();
        Ok(End::Host { buffer, offset: start })
    }
}

impl Stage {
    fn add_upload<T: Copy>(&mut self, from: End, to: &Buffer<T>) {
        add(&mut self.uploads, Piece::new(from, End::of(to), to.bytes()));
    }

    fn add_copy<T: Copy>(&mut self, from: &Buffer<T>, to: &Buffer<T>) {
        self.used.add(from.ptr(), from.bytes());
        self.used.add(to.ptr(), to.bytes());
        add(&mut self.copies, Piece::new(End::of(from), End::of(to), to.bytes()));
    }

    fn add_download<T: Copy>(&mut self, from: &Buffer<T>, to: End) {
        self.used.add(from.ptr(), from.bytes());
        self.downloaded.add(from.ptr(), from.bytes());
        add(&mut self.downloads, Piece::new(End::of(from), to, from.bytes()));
    }
}

impl End {
    fn of<T: Copy>(buffer: &Buffer<T>) -> End {
        End::Device(buffer.storage().clone(), buffer.ptr())
    }

    /// Whether another end begins so many bytes further on, in the same memory.
    fn goes_on(&self, bytes: u64, next: &End) -> bool {
        match (self, next) {
            (End::Device(storage, ptr), End::Device(next, at)) => {
                Arc::ptr_eq(storage, next) && ptr.offset(bytes) == *at
            }
            (End::Host { buffer, offset }, End::Host { buffer: next, offset: at }) => {
                buffer == next && *offset as u64 + bytes == *at as u64
            }
            _ => false,
        }
    }

    fn place(&self, host: &[HostPart<'_>]) -> CopyEnd {
        match self {
            End::Device(_, ptr) => CopyEnd::Device(*ptr),
            End::Host { buffer, offset } => CopyEnd::Host(HostPtr(host[*buffer].ptr.0 + offset)),
        }
    }

    /// Its memory, if that is on the device.
    fn storage(&self) -> Option<&Storage> {
        match self {
            End::Device(storage, _) => Some(storage),
            End::Host { .. } => None,
        }
    }
}

/// Whether an end begins where that of the last piece ends.
fn goes_on(pieces: &[Piece], end: impl Fn(&Piece) -> &End, next: &End) -> bool {
    pieces.last().is_some_and(|last| end(last).goes_on(last.bytes, next))
}

/// Adds a piece, to the last one if it goes on there at both ends, and the two together do not write what they read.
fn add(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last)
            if last.from.goes_on(last.bytes, &piece.from)
                && last.to.goes_on(last.bytes, &piece.to)
                && last.stays_apart(last.bytes + piece.bytes) =>
        {
            last.bytes += piece.bytes;
            last.copies += piece.copies;
        }
        _ => pieces.push(piece),
    }
}

impl Piece {
    fn new(from: End, to: End, bytes: u64) -> Piece {
        Piece { from, to, bytes, copies: 1 }
    }

    /// Whether its ends have no memory in common if it is so long.
    fn stays_apart(&self, bytes: u64) -> bool {
        match (&self.from, &self.to) {
            (End::Device(_, from), End::Device(_, to)) => from.0.abs_diff(to.0) >= bytes,
            _ => true,
        }
    }

    fn part(&self, host: &[HostPart<'_>]) -> CopyPart {
        CopyPart { dst: self.to.place(host), src: self.from.place(host), bytes: self.bytes }
    }
}

impl Transfer {
    /// Enqueues copies in one direction, between the device and page-locked buffers or within the device. Gives their tick, if there are any.
    fn enqueue_pieces(
        &self,
        direction: Direction,
        pieces: &[Piece],
        host: &[HostPart<'_>],
    ) -> Result<Option<Tick>, TransferError> {
        if pieces.is_empty() {
            return Ok(None);
        }
        let stream = self.next_stream(direction);
        let may_pay = pieces.len() > 1 && stream.takes_batches();
        let crossover = if may_pay { self.batched_below(direction)? } else { None };
        let ends = pieces.iter().flat_map(|piece| [(&piece.from, AccessKind::Read), (&piece.to, AccessKind::Write)]);
        let memory: Vec<_> = ends.filter_map(|(end, kind)| Some((end.storage()?, kind))).collect();
        let on_host = if direction == Direction::Upload { AccessKind::Read } else { AccessKind::Write };
        let parts: Vec<_> = host.iter().map(|part| (*part, on_host)).collect();
        let (batched, single) = split(pieces.iter().map(|piece| piece.part(host)).collect(), crossover);
        let tick = self.enqueue(stream, &memory, &parts, || {
            #[allow(unsafe_code, reason = "the driver gets addresses; what keeps them good is above")]
            // SAFETY: what is on the host lies in buffers of the pool, which the caller borrows now and the pool keeps until the tick is
            // done that their turns leave; the host does not touch them before (N1, N2).
            unsafe {
                enqueue_parts(stream, &batched, &single)
            }
        })?;
        pieces.iter().for_each(|piece| self.shared().tally.count_all(direction, piece.copies, piece.bytes));
        Ok(Some(tick))
    }
}

/// Enqueues some copies with one call, and the others with one each.
///
/// # Safety
/// As [`aquifer_device::Driver::copy_batch`], for all of them.
#[allow(unsafe_code, reason = "passed on from the driver")]
pub(crate) unsafe fn enqueue_parts(
    stream: &Stream,
    batched: &[CopyPart],
    single: &[CopyPart],
) -> Result<(), DeviceError> {
    if !batched.is_empty() {
        // SAFETY: passed on to the caller.
        unsafe { stream.copy_batch(batched) }?;
    }
    for copy in single {
        let bytes = usize::try_from(copy.bytes).unwrap_or(usize::MAX);
        match (copy.dst, copy.src) {
            // SAFETY: passed on to the caller.
            (CopyEnd::Device(to), CopyEnd::Host(from)) => unsafe { stream.upload(to, from, bytes) }?,
            // SAFETY: passed on to the caller.
            (CopyEnd::Host(to), CopyEnd::Device(from)) => unsafe { stream.download(to, from, bytes) }?,
            (CopyEnd::Device(to), CopyEnd::Device(from)) => stream.copy(to, from, copy.bytes)?,
            (CopyEnd::Host(_), CopyEnd::Host(_)) => {}
        }
    }
    Ok(())
}

/// What one call is to copy, and what goes one by one: all of it where a copy writes what another uses, since nothing orders a batch's copies.
fn split(copies: Vec<CopyPart>, crossover: Option<u64>) -> (Vec<CopyPart>, Vec<CopyPart>) {
    let Some(crossover) = crossover.filter(|_| CopyPart::are_independent(&copies)) else { return (Vec::new(), copies) };
    let (batched, single): (Vec<_>, Vec<_>) = copies.into_iter().partition(|copy| copy.bytes < crossover);
    if batched.len() > 1 { (batched, single) } else { (Vec::new(), [batched, single].concat()) }
}

/// The bytes of elements; also of those that have none.
pub(crate) fn bytes_of<T: Pod>(elements: &[T]) -> &[u8] {
    if size_of_val(elements) == 0 { &[] } else { bytemuck::cast_slice(elements) }
}
