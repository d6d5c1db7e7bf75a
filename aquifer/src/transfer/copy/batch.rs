//! Many small copies as one: those from host memory are packed into page-locked memory, and the
//! driver gets them in one call, if it has such a call.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_allocator::Storage;
use aquifer_device::{AccessKind, CopyEnd, CopyPart, DevicePtr, HostPtr, RequestError, Tick};
use bytemuck::Pod;

use super::crossover;
use super::on_device::{check_apart, check_lengths};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::transfer::counters::Direction;
use crate::transfer::enqueue::enqueue_parts;
use crate::transfer::host_memory;
use crate::transfer::pending::Pending;
use crate::transfer::pinned::{HostPart, PinnedBuffer, PinnedSlice, PinnedSliceMut};
use crate::transfer::runtime::Transfer;

/// The least page-locked memory for packing, in bytes.
const PACKED_BYTES: usize = 1 << 20;

/// The alignment of packed pieces in bytes: copy engines are fastest then, and it suits every
/// element.
const PACKED_ALIGNMENT: usize = 64;

/// Many copies that are made together, in the order in which they were added.
///
/// Elements to upload are copied when they are added, into one buffer; downloads return in one.
/// Pieces that are adjacent at both ends become one copy. Copies of one direction that were added
/// one after the other go to the driver in one call, if the driver has such a call and it pays on
/// this device ([`Transfer::batch_calls_pay_below`]), else in one call each. So add copies of one
/// direction together. Copies of which one writes what another one uses are made one by one.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Transfer;
/// let device = aquifer::open("sim:24GiB")?;
/// let transfer = Transfer::new(&Allocator::of(&device)?)?;
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
    packed: Vec<PackedUploads>,
    groups: Vec<Group>,
    downloaded: usize,
}

/// Copies of one direction, added one after the other.
#[derive(Debug)]
struct Group {
    direction: Direction,
    pieces: Vec<Piece>,
}

/// Page-locked memory for packed uploads.
#[derive(Debug)]
struct PackedUploads {
    buffer: PinnedBuffer<u8>,
    used: usize,
}

/// One copy for the driver: one copy that was added, or several adjacent ones.
#[derive(Debug)]
struct Piece {
    from: Endpoint,
    to: Endpoint,
    bytes: u64,
    /// The number of copies that were added.
    copies: u64,
}

/// One end of a copy.
#[derive(Clone, Debug)]
enum Endpoint {
    Device(Arc<Storage>, DevicePtr),
    /// The index of a page-locked buffer, and the offset in it.
    Host {
        buffer: usize,
        offset: usize,
    },
}

/// The part of a batch's results that belongs to a download.
#[derive(Clone, Copy, Debug)]
pub struct Downloaded<T> {
    batch: u64,
    offset: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

/// The downloads of a batch.
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
    /// [`Error::OtherBatch`], [`Error::OutOfHostMemory`], and errors of the driver.
    pub fn read<T: Pod>(&self, download: &Downloaded<T>) -> Result<Vec<T>, Error> {
        if download.batch != self.batch {
            return Err(Error::OtherBatch);
        }
        let bytes = self.bytes.read()?;
        let (start, end) = (download.offset, download.offset + download.len * size_of::<T>());
        let own = bytes.get(start..end).ok_or(RequestError::OutOfBounds {
            start: start as u64,
            end: end as u64,
            len: bytes.len() as u64,
        })?;
        host_memory::copied(own, download.len)
    }
}

/// An empty batch.
pub(super) fn new(transfer: &Transfer) -> TransferBatch {
    TransferBatch {
        transfer: transfer.clone(),
        number: NEXT_BATCH.fetch_add(1, Ordering::Relaxed),
        packed: Vec::new(),
        groups: Vec::new(),
        downloaded: 0,
    }
}

impl TransferBatch {
    /// Adds a copy to the device. The elements are copied now.
    ///
    /// # Errors
    /// Ends of different lengths, a buffer of another device, and when page-locked memory runs out.
    /// The batch is then unchanged.
    pub fn upload<T: Pod>(&mut self, from: &[T], to: &mut Buffer<T>) -> Result<(), Error> {
        check_lengths(from.len(), to.len())?;
        self.transfer.check_device("buffer", to.storage().device_id())?;
        let bytes = bytes_of(from);
        if bytes.is_empty() {
            return Ok(());
        }
        let from = self.pack(bytes, &Endpoint::of(to))?;
        self.add(Direction::Upload, Piece::new(from, Endpoint::of(to), to.bytes()));
        Ok(())
    }

    /// Adds a copy within the device.
    ///
    /// # Errors
    /// Ends of different lengths, that overlap, or of another device. The batch is then unchanged.
    pub fn copy<T: Copy>(&mut self, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<(), Error> {
        check_lengths(from.len(), to.len())?;
        self.transfer.check_device("buffer", from.storage().device_id())?;
        self.transfer.check_device("buffer", to.storage().device_id())?;
        if to.bytes() == 0 {
            return Ok(());
        }
        check_apart(from, to)?;
        self.add(Direction::OnDevice, Piece::new(Endpoint::of(from), Endpoint::of(to), to.bytes()));
        Ok(())
    }

    /// Adds a copy from the device, to be read from the batch's results.
    ///
    /// # Errors
    /// A buffer of another device, or too long for the host. The batch is then unchanged.
    pub fn download<T: Pod>(&mut self, from: &Buffer<T>) -> Result<Downloaded<T>, Error> {
        self.transfer.check_device("buffer", from.storage().device_id())?;
        let len = from.len();
        let bytes = host_memory::bytes_of(len, size_of::<T>() as u64)?;
        if bytes == 0 {
            return Ok(Downloaded { batch: self.number, offset: 0, len, element: PhantomData });
        }
        let adjacent = self.continues(Direction::Download, |last| &last.from, &Endpoint::of(from));
        let offset = if adjacent { self.downloaded } else { self.downloaded.next_multiple_of(PACKED_ALIGNMENT) };
        let overflow = RequestError::LengthOverflow { len: len as u64, size: size_of::<T>() as u64 };
        let end = offset.checked_add(bytes).ok_or(overflow)?;
        self.add(
            Direction::Download,
            Piece::new(Endpoint::of(from), Endpoint::Host { buffer: 0, offset }, from.bytes()),
        );
        self.downloaded = end;
        Ok(Downloaded { batch: self.number, offset, len, element: PhantomData })
    }

    /// The number of copies for the driver: fewer than were added where pieces are adjacent.
    /// [`Transfer::counters`] counts the added ones, once they are enqueued.
    pub fn pieces(&self) -> usize {
        self.groups.iter().map(|group| group.pieces.len()).sum()
    }

    /// Enqueues all copies. The first batch in a direction measures whether batched calls pay,
    /// which takes some milliseconds, but waits for no other work
    /// ([`Transfer::batch_calls_pay_below`]).
    ///
    /// # Errors
    /// When page-locked memory runs out, a stream that captures, and errors of the driver. Some
    /// copies may have been enqueued then.
    #[track_caller]
    pub fn run(self) -> Result<Pending<BatchResults>, Error> {
        let _place = self.transfer.called_here();
        let transfer = &self.transfer;
        let packed: Vec<_> = self.packed.iter().map(|packed| PinnedSlice::from(&packed.buffer).part()).collect();
        let mut results = transfer.pinned().alloc::<u8>(self.downloaded)?;
        let part = [PinnedSliceMut::from(&mut results).part()];
        let mut ticks = Vec::new();
        for group in &self.groups {
            let host = match group.direction {
                Direction::Upload => packed.as_slice(),
                Direction::Download => &part,
                Direction::OnDevice => &[],
            };
            ticks.push(enqueue_pieces(transfer, group.direction, &group.pieces, host)?);
        }
        let results = BatchResults { batch: self.number, bytes: results };
        Ok(Pending::enqueued_all(transfer.shared(), ticks, results))
    }

    /// Adds a piece: to the last one if both are adjacent at both ends and the two together do not
    /// write what they read, else to the last group if it has the same direction.
    fn add(&mut self, direction: Direction, piece: Piece) {
        match self.groups.last_mut().filter(|group| group.direction == direction) {
            Some(group) => group.add(piece),
            None => self.groups.push(Group { direction, pieces: vec![piece] }),
        }
    }

    /// Whether an end begins where that of the last piece of the same direction ends.
    fn continues(&self, direction: Direction, end: impl Fn(&Piece) -> &Endpoint, next: &Endpoint) -> bool {
        let last = self.groups.last().filter(|group| group.direction == direction);
        last.and_then(|group| group.pieces.last()).is_some_and(|last| end(last).continues(last.bytes, next))
    }

    /// Packs bytes, and returns their place.
    fn pack(&mut self, bytes: &[u8], to: &Endpoint) -> Result<Endpoint, Error> {
        let adjacent = self.continues(Direction::Upload, |last| &last.to, to);
        let alignment = if adjacent { 1 } else { PACKED_ALIGNMENT };
        let room = self.packed.last().map(|packed| (packed.used.next_multiple_of(alignment), packed.buffer.len()));
        if room.is_none_or(|(start, len)| len < start + bytes.len()) {
            let buffer = self.transfer.pinned().alloc(bytes.len().max(PACKED_BYTES))?;
            self.packed.push(PackedUploads { buffer, used: 0 });
        }
        let buffer = self.packed.len() - 1;
        let packed = &mut self.packed[buffer];
        let start = packed.used.next_multiple_of(alignment);
        packed.buffer.write()?[start..start + bytes.len()].copy_from_slice(bytes);
        packed.used = start + bytes.len();
        Ok(Endpoint::Host { buffer, offset: start })
    }
}

impl Group {
    fn add(&mut self, piece: Piece) {
        match self.pieces.last_mut() {
            Some(last)
                if last.from.continues(last.bytes, &piece.from)
                    && last.to.continues(last.bytes, &piece.to)
                    && last.stays_apart(last.bytes + piece.bytes) =>
            {
                last.bytes += piece.bytes;
                last.copies += piece.copies;
            }
            _ => self.pieces.push(piece),
        }
    }
}

impl Endpoint {
    fn of<T: Copy>(buffer: &Buffer<T>) -> Endpoint {
        Endpoint::Device(buffer.storage().clone(), buffer.ptr())
    }

    /// Whether another end begins `bytes` bytes further on in the same memory.
    fn continues(&self, bytes: u64, next: &Endpoint) -> bool {
        match (self, next) {
            (Endpoint::Device(storage, ptr), Endpoint::Device(next, at)) => {
                Arc::ptr_eq(storage, next) && ptr.offset(bytes) == *at
            }
            (Endpoint::Host { buffer, offset }, Endpoint::Host { buffer: next, offset: at }) => {
                buffer == next && *offset as u64 + bytes == *at as u64
            }
            _ => false,
        }
    }

    fn place(&self, host: &[HostPart<'_>]) -> CopyEnd {
        match self {
            Endpoint::Device(_, ptr) => CopyEnd::Device(*ptr),
            Endpoint::Host { buffer, offset } => CopyEnd::Host(HostPtr(host[*buffer].ptr.0 + offset)),
        }
    }

    /// Its device memory.
    fn storage(&self) -> Option<&Arc<Storage>> {
        match self {
            Endpoint::Device(storage, _) => Some(storage),
            Endpoint::Host { .. } => None,
        }
    }
}

impl Piece {
    fn new(from: Endpoint, to: Endpoint, bytes: u64) -> Piece {
        Piece { from, to, bytes, copies: 1 }
    }

    /// Whether its ends have no memory in common if it has this length.
    fn stays_apart(&self, bytes: u64) -> bool {
        match (&self.from, &self.to) {
            (Endpoint::Device(_, from), Endpoint::Device(_, to)) => from.0.abs_diff(to.0) >= bytes,
            _ => true,
        }
    }

    fn part(&self, host: &[HostPart<'_>]) -> CopyPart {
        CopyPart { dst: self.to.place(host), src: self.from.place(host), bytes: self.bytes }
    }
}

/// Enqueues copies in one direction, between the device and page-locked buffers or within the
/// device.
fn enqueue_pieces(
    transfer: &Transfer,
    direction: Direction,
    pieces: &[Piece],
    host: &[HostPart<'_>],
) -> Result<Tick, Error> {
    let stream = transfer.next_stream(direction);
    let may_pay = pieces.len() > 1 && stream.takes_batches();
    let crossover = if may_pay { crossover::batched_below(transfer, direction)? } else { None };
    let ends = pieces.iter().flat_map(|piece| [(&piece.from, AccessKind::Read), (&piece.to, AccessKind::Write)]);
    let memory: Vec<_> = ends.filter_map(|(end, kind)| Some((end.storage()?, kind))).collect();
    let on_host = if direction == Direction::Upload { AccessKind::Read } else { AccessKind::Write };
    let parts: Vec<_> = host.iter().map(|part| (*part, on_host)).collect();
    let (batched, single) = split(pieces.iter().map(|piece| piece.part(host)).collect(), crossover);
    let tick = transfer.enqueue(stream, &memory, &parts, || {
        #[allow(unsafe_code, reason = "the driver gets addresses; what keeps them good is above")]
        // SAFETY: the host ends lie in buffers of the pool, which the caller borrows now. The pool
        // keeps them until the tick of this access is done; the host does not touch them before
        // (N1, N2).
        unsafe {
            enqueue_parts(stream, &batched, &single)
        }
    })?;
    pieces.iter().for_each(|piece| transfer.shared().counters.count_all(direction as usize, piece.copies, piece.bytes));
    Ok(tick)
}

/// The copies for one call, and those that go one by one. If a copy writes what another one uses,
/// all go one by one, because no order holds within a call.
fn split(copies: Vec<CopyPart>, crossover: Option<u64>) -> (Vec<CopyPart>, Vec<CopyPart>) {
    let Some(crossover) = crossover.filter(|_| CopyPart::are_independent(&copies)) else { return (Vec::new(), copies) };
    let (batched, single): (Vec<_>, Vec<_>) = copies.into_iter().partition(|copy| copy.bytes < crossover);
    if batched.len() > 1 { (batched, single) } else { (Vec::new(), [batched, single].concat()) }
}

/// The bytes of elements, which may have none.
fn bytes_of<T: Pod>(elements: &[T]) -> &[u8] {
    if size_of_val(elements) == 0 { &[] } else { bytemuck::cast_slice(elements) }
}
