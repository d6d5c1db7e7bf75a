//! Many small copies as one: packed into one piece of page-locked memory, and handed to the driver with one call where it has that.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_allocator::{DeviceBuffer, Storage};
use aquifer_device::{AccessKind, CopyEnd, CopyPart, DeviceError, DevicePtr, HostPtr, Stream, Tick};
use bytemuck::Pod;

use crate::copy::direct::check_lengths;
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
/// ends they become one copy. What remains goes to the driver in one call if it has such a call and that pays on this device
/// ([`Transfer::batch_calls_pay_below`]), else in one call each. Uploads come before downloads; otherwise the order is that of adding only
/// where pieces overlap.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_transfer::Transfer;
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
/// let stream = device.create_stream()?;
/// let mut buffers = Vec::new();
/// for _ in 0..100 {
///     buffers.push(transfer.allocator().alloc_buffer::<u32>(16, &stream)?);
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
    uploads: Vec<Piece>,
    downloads: Vec<Piece>,
    downloaded: usize,
}

/// Page-locked memory that uploads are packed into.
#[derive(Debug)]
struct Packed {
    buffer: PinnedBuffer<u8>,
    used: usize,
}

/// One copy: a part of page-locked memory, and device memory.
#[derive(Debug)]
struct Piece {
    storage: Arc<Storage>,
    ptr: DevicePtr,
    /// Which of the page-locked buffers, and where in it.
    buffer: usize,
    offset: usize,
    bytes: usize,
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
        let own = bytes.get(start..end).ok_or(TransferError::OutOfBounds {
            start: start as u64,
            end: end as u64,
            len: bytes.len() as u64,
        })?;
        host_vec::copied(own)
    }
}

impl Transfer {
    /// Begins a batch of small copies.
    pub fn batch(&self) -> TransferBatch {
        TransferBatch {
            transfer: self.clone(),
            number: NEXT_BATCH.fetch_add(1, Ordering::Relaxed),
            packed: Vec::new(),
            uploads: Vec::new(),
            downloads: Vec::new(),
            downloaded: 0,
        }
    }
}

impl TransferBatch {
    /// Adds a copy to the device. The elements are taken now.
    ///
    /// # Errors
    /// Ends of different lengths, a buffer of another device, and when page-locked memory runs out. The batch is as it was then.
    pub fn upload<T: Pod>(&mut self, from: &[T], to: &mut DeviceBuffer<T>) -> Result<(), TransferError> {
        check_lengths(from.len() as u64, to.len())?;
        self.transfer.check_device("buffer", to.storage().device_id())?;
        let bytes = bytes_of(from);
        if bytes.is_empty() {
            return Ok(());
        }
        let (buffer, offset) = self.pack(bytes, to.ptr())?;
        let piece = Piece { storage: to.storage().clone(), ptr: to.ptr(), buffer, offset, bytes: bytes.len() };
        add(&mut self.uploads, piece);
        Ok(())
    }

    /// Adds a copy from the device, to be read from the batch's results.
    ///
    /// # Errors
    /// A buffer of another device, or too long for the host. The batch is as it was then.
    pub fn download<T: Pod>(&mut self, from: &DeviceBuffer<T>) -> Result<Downloaded<T>, TransferError> {
        self.transfer.check_device("buffer", from.storage().device_id())?;
        let len = host_vec::len_of(from.len(), size_of::<T>() as u64)?;
        let bytes = len * size_of::<T>();
        if bytes == 0 {
            return Ok(Downloaded { batch: self.number, offset: 0, len, element: PhantomData });
        }
        let adjacent = self.downloads.last().is_some_and(|last| last.ends_at(from.ptr(), from.storage()));
        let offset = if adjacent { self.downloaded } else { self.downloaded.next_multiple_of(PACKED_ALIGNMENT) };
        let overflow = TransferError::LengthOverflow { len: from.len(), size: size_of::<T>() as u64 };
        let end = offset.checked_add(bytes).ok_or(overflow)?;
        let piece = Piece { storage: from.storage().clone(), ptr: from.ptr(), buffer: 0, offset, bytes };
        add(&mut self.downloads, piece);
        self.downloaded = end;
        Ok(Downloaded { batch: self.number, offset, len, element: PhantomData })
    }

    /// Copies that the driver will be asked for: fewer than were added where pieces lie side by side.
    pub fn pieces(&self) -> usize {
        self.uploads.len() + self.downloads.len()
    }

    /// Enqueues all copies, and returns. The first batch of a runtime measures whether batched calls pay, which takes some milliseconds, but
    /// waits for nobody's work ([`Transfer::batch_calls_pay_below`]).
    ///
    /// # Errors
    /// When page-locked memory runs out, a stream that captures, and errors of the driver. Uploads may have been enqueued then.
    pub fn run(self) -> Result<Pending<BatchResults>, TransferError> {
        let transfer = &self.transfer;
        let crossover = transfer.batched_below()?;
        let mut ticks = Vec::new();
        if !self.uploads.is_empty() {
            let stream = transfer.next_stream(Direction::Upload);
            let host: Vec<&PinnedBuffer<u8>> = self.packed.iter().map(|packed| &packed.buffer).collect();
            let parts: Vec<_> = host.iter().map(|buffer| PinnedSlice::from(*buffer).part()).collect();
            ticks.push(transfer.enqueue_pieces(stream, &self.uploads, &parts, AccessKind::Write, crossover)?);
        }
        let mut results = transfer.pinned().alloc::<u8>(self.downloaded)?;
        if !self.downloads.is_empty() {
            let stream = transfer.next_stream(Direction::Download);
            let part = [PinnedSliceMut::from(&mut results).part()];
            ticks.push(transfer.enqueue_pieces(stream, &self.downloads, &part, AccessKind::Read, crossover)?);
        }
        let results = BatchResults { batch: self.number, bytes: results };
        Ok(Pending::enqueued_all(transfer.shared(), ticks, results))
    }

    /// Packs bytes: which buffer they are in, and where.
    fn pack(&mut self, bytes: &[u8], to: DevicePtr) -> Result<(usize, usize), TransferError> {
        let goes_on = self.uploads.last().is_some_and(|last| last.ptr.0 + last.bytes as u64 == to.0);
        let alignment = if goes_on { 1 } else { PACKED_ALIGNMENT };
        let room = self.packed.last().map(|packed| (packed.used.next_multiple_of(alignment), packed.buffer.len()));
        if room.is_none_or(|(start, len)| len < start + bytes.len()) {
            let buffer = self.transfer.pinned().alloc(bytes.len().max(PACKED_BYTES))?;
            self.packed.push(Packed { buffer, used: 0 });
        }
        let number = self.packed.len() - 1;
        let packed = &mut self.packed[number];
        let start = packed.used.next_multiple_of(alignment);
        packed.buffer.write()?[start..start + bytes.len()].copy_from_slice(bytes);
        packed.used = start + bytes.len();
        Ok((number, start))
    }
}

impl Piece {
    /// Whether it ends where device memory begins.
    fn ends_at(&self, ptr: DevicePtr, storage: &Arc<Storage>) -> bool {
        Arc::ptr_eq(&self.storage, storage) && self.ptr.0 + self.bytes as u64 == ptr.0
    }
}

/// Adds a piece, to the last one if it goes on there at both ends.
fn add(pieces: &mut Vec<Piece>, piece: Piece) {
    match pieces.last_mut() {
        Some(last)
            if last.ends_at(piece.ptr, &piece.storage)
                && last.buffer == piece.buffer
                && last.offset + last.bytes == piece.offset =>
        {
            last.bytes += piece.bytes;
        }
        _ => pieces.push(piece),
    }
}

impl Transfer {
    /// Enqueues copies between page-locked buffers and the device, which are `kind` on the device's side.
    fn enqueue_pieces(
        &self,
        stream: &Stream,
        pieces: &[Piece],
        host: &[HostPart<'_>],
        kind: AccessKind,
        crossover: Option<u64>,
    ) -> Result<Tick, TransferError> {
        let mut memory: Vec<(&Storage, AccessKind)> = pieces.iter().map(|piece| (&*piece.storage, kind)).collect();
        memory.dedup_by_key(|(storage, _)| std::ptr::from_ref(*storage));
        let on_host = if kind == AccessKind::Write { AccessKind::Read } else { AccessKind::Write };
        let parts: Vec<_> = host.iter().map(|part| (*part, on_host)).collect();
        let copies: Vec<CopyPart> = pieces.iter().map(|piece| piece.copy(host, kind)).collect();
        let (batched, single) = split(copies, crossover);
        let tick = self.enqueue(stream, &memory, &parts, || {
            // SAFETY: the pieces lie in buffers of the pool, which the caller borrows now and the pool keeps until the tick is done that
            // their turns leave; the host does not touch them before (N1, N2).
            #[allow(unsafe_code, reason = "the driver gets addresses; what keeps them good is above")]
            unsafe {
                enqueue_parts(stream, &batched, &single)
            }
        })?;
        let direction = if kind == AccessKind::Write { Direction::Upload } else { Direction::Download };
        pieces.iter().for_each(|piece| self.shared().tally.count(direction, piece.bytes as u64));
        Ok(tick)
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

impl Piece {
    fn copy(&self, host: &[HostPart<'_>], kind: AccessKind) -> CopyPart {
        let host = CopyEnd::Host(HostPtr(host[self.buffer].ptr.0 + self.offset));
        let (dst, src) = if kind == AccessKind::Write {
            (CopyEnd::Device(self.ptr), host)
        } else {
            (host, CopyEnd::Device(self.ptr))
        };
        CopyPart { dst, src, bytes: self.bytes as u64 }
    }
}

/// What one call is to copy, and what goes one by one: all of it where pieces overlap, since nothing orders a batch's copies.
fn split(copies: Vec<CopyPart>, crossover: Option<u64>) -> (Vec<CopyPart>, Vec<CopyPart>) {
    let Some(crossover) = crossover.filter(|_| !overlap(&copies)) else { return (Vec::new(), copies) };
    let (batched, single): (Vec<_>, Vec<_>) = copies.into_iter().partition(|copy| copy.bytes < crossover);
    if batched.len() > 1 { (batched, single) } else { (Vec::new(), [batched, single].concat()) }
}

/// Whether two copies have device memory in common.
fn overlap(copies: &[CopyPart]) -> bool {
    let on_device = |copy: &CopyPart| match (copy.dst, copy.src) {
        (CopyEnd::Device(ptr), _) | (_, CopyEnd::Device(ptr)) => ptr.0..ptr.0 + copy.bytes,
        _ => 0..0,
    };
    let mut ranges: Vec<_> = copies.iter().map(on_device).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.windows(2).any(|pair| pair[1].start < pair[0].end)
}

/// The bytes of elements; also of those that have none.
pub(crate) fn bytes_of<T: Pod>(elements: &[T]) -> &[u8] {
    if size_of_val(elements) == 0 { &[] } else { bytemuck::cast_slice(elements) }
}
