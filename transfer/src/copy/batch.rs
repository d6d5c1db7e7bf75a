//! Many small copies as one: those from host memory are packed into pinned memory, and the
//! driver gets them in one call, if it has such a call.

use std::sync::{Arc, OnceLock};

use aquifer_allocator::Storage;
use aquifer_device::{AccessKind, CopyEnd, CopyPart, DevicePtr, HostPtr, RequestError, Stream, Tick};

use super::DevicePart;
use super::on_device::{check_apart, check_lengths};
use crate::completion::Completion;
use crate::counters::Direction;
use crate::enqueue::enqueue_parts;
use crate::error::TransferError;
use crate::host_memory;
use crate::pinned::{HostPart, PinnedBuffer, PinnedRead};
use crate::runtime::Transfer;

/// The least pinned memory for packing, in bytes.
const PACKED_BYTES: usize = 1 << 20;

/// The alignment of packed pieces in bytes: copy engines are fastest then, and it suits every
/// element.
const PACKED_ALIGNMENT: usize = 64;

/// Copies of at most this many bytes go to the driver in one call. A larger one takes 20 µs and
/// more at the 53 GB/s of an H200's link, so that the call saved is a small part of it, and on some
/// devices and drivers large copies take longer in a batch. On that H200, 64 copies of 4 KiB take
/// 2.6 (up) and 5.2 times (down) as long with one call each (`docs/hardware/2026-11-26-h200.md`).
const BATCHED_BYTES: u64 = 1 << 20;

/// Many copies that are made together, in the order in which they were added.
///
/// Bytes to upload are copied when they are added, into one block; downloads return in one. Pieces
/// that are adjacent at both ends become one copy. Copies of one direction and at most 1 MiB that
/// were added one after the other go to the driver in one call, if the driver has such a call, else
/// in one call each. Copies of which one writes what another one uses are made one by one.
#[derive(Debug)]
#[must_use = "nothing is copied before `run`"]
pub struct Batch {
    transfer: Transfer,
    packed: Vec<PackedUploads>,
    groups: Vec<Group>,
    downloaded: usize,
    results: BatchResults,
}

/// Copies of one direction, added one after the other.
#[derive(Debug)]
struct Group {
    direction: Direction,
    pieces: Vec<Piece>,
}

/// Pinned memory for packed uploads.
#[derive(Debug)]
struct PackedUploads {
    block: PinnedBuffer,
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
    /// The index of a pinned buffer, and the offset in it.
    Host {
        buffer: usize,
        offset: usize,
    },
}

/// The downloads of a batch. Clones are handles of the same.
#[derive(Clone, Debug, Default)]
pub struct BatchResults(Arc<OnceLock<PinnedBuffer>>);

impl BatchResults {
    /// The bytes of a download, by the offset that [`Batch::download`] returned. Waits for the
    /// copy.
    ///
    /// # Errors
    /// [`TransferError::NotRun`], and errors of the driver.
    pub fn read(&self, offset: usize, bytes: usize) -> Result<PinnedRead<'_>, TransferError> {
        self.0.get().ok_or(TransferError::NotRun)?.try_slice(offset..offset.saturating_add(bytes))?.read()
    }
}

impl Transfer {
    /// An empty batch of small copies.
    pub fn batch(&self) -> Batch {
        Batch {
            transfer: self.clone(),
            packed: Vec::new(),
            groups: Vec::new(),
            downloaded: 0,
            results: BatchResults::default(),
        }
    }
}

impl Batch {
    /// What its downloads are read from, once it was run.
    pub fn results(&self) -> &BatchResults {
        &self.results
    }

    /// Adds a copy to the device. The bytes are copied now.
    ///
    /// # Errors
    /// Ends of different lengths, memory of another device, and when pinned memory runs out.
    /// The batch is then unchanged.
    pub fn upload(&mut self, from: &[u8], to: DevicePart<'_>) -> Result<(), TransferError> {
        check_lengths(from.len() as u64, to.bytes)?;
        self.transfer.check_part(to)?;
        if from.is_empty() {
            return Ok(());
        }
        let from = self.pack(from, &Endpoint::of(to))?;
        self.add(Direction::Upload, Piece::new(from, Endpoint::of(to), to.bytes));
        Ok(())
    }

    /// Adds a copy within the device.
    ///
    /// # Errors
    /// Ends of different lengths, that overlap, or of another device. The batch is then unchanged.
    pub fn copy(&mut self, from: DevicePart<'_>, to: DevicePart<'_>) -> Result<(), TransferError> {
        check_lengths(from.bytes, to.bytes)?;
        self.transfer.check_part(from)?;
        self.transfer.check_part(to)?;
        if to.bytes == 0 {
            return Ok(());
        }
        check_apart(from, to)?;
        self.add(Direction::OnDevice, Piece::new(Endpoint::of(from), Endpoint::of(to), to.bytes));
        Ok(())
    }

    /// Adds a copy from the device, and returns its offset in the results.
    ///
    /// # Errors
    /// Memory of another device, or too long for the host. The batch is then unchanged.
    pub fn download(&mut self, from: DevicePart<'_>) -> Result<usize, TransferError> {
        self.transfer.check_part(from)?;
        let bytes = host_memory::len_of(from.bytes, 1)?;
        if bytes == 0 {
            return Ok(0);
        }
        let adjacent = self.continues(Direction::Download, |last| &last.from, &Endpoint::of(from));
        let offset = if adjacent { self.downloaded } else { self.downloaded.next_multiple_of(PACKED_ALIGNMENT) };
        let overflow = RequestError::LengthOverflow { len: from.bytes, size: 1 };
        let end = offset.checked_add(bytes).ok_or(overflow)?;
        self.add(Direction::Download, Piece::new(Endpoint::of(from), Endpoint::Host { buffer: 0, offset }, from.bytes));
        self.downloaded = end;
        Ok(offset)
    }

    /// The number of copies for the driver: fewer than were added where pieces are adjacent.
    /// [`Transfer::counters`] counts the added ones, once they are enqueued.
    pub fn pieces(&self) -> usize {
        self.groups.iter().map(|group| group.pieces.len()).sum()
    }

    /// Enqueues all copies.
    ///
    /// # Errors
    /// When pinned memory runs out, a stream that captures, and errors of the driver. Some
    /// copies may have been enqueued then.
    #[track_caller]
    pub fn run(self) -> Result<Completion, TransferError> {
        let _place = self.transfer.called_here();
        let transfer = &self.transfer;
        let packed: Vec<_> = self.packed.iter().map(|packed| packed.block.as_slice().host()).collect();
        let mut results = transfer.pinned().alloc(self.downloaded)?;
        let part = [results.as_slice_mut().host()];
        let mut ticks = Vec::new();
        for group in &self.groups {
            let host = match group.direction {
                Direction::Upload => packed.as_slice(),
                Direction::Download => &part,
                Direction::OnDevice => &[],
            };
            ticks.push(enqueue_pieces(transfer, group.direction, &group.pieces, host)?);
        }
        // Nothing else sets it.
        let _ = self.results.0.set(results);
        Ok(Completion::enqueued(transfer.shared(), ticks))
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
    fn pack(&mut self, bytes: &[u8], to: &Endpoint) -> Result<Endpoint, TransferError> {
        let adjacent = self.continues(Direction::Upload, |last| &last.to, to);
        let alignment = if adjacent { 1 } else { PACKED_ALIGNMENT };
        let room = self.packed.last().map(|packed| (packed.used.next_multiple_of(alignment), packed.block.bytes()));
        if room.is_none_or(|(start, len)| len < start + bytes.len()) {
            let block = self.transfer.pinned().alloc(bytes.len().max(PACKED_BYTES))?;
            self.packed.push(PackedUploads { block, used: 0 });
        }
        let buffer = self.packed.len() - 1;
        let packed = &mut self.packed[buffer];
        let start = packed.used.next_multiple_of(alignment);
        packed.block.write()?[start..start + bytes.len()].copy_from_slice(bytes);
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
    fn of(part: DevicePart<'_>) -> Endpoint {
        Endpoint::Device(part.storage.clone(), part.ptr)
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

/// Enqueues copies in one direction, between the device and pinned buffers or within the
/// device.
fn enqueue_pieces(
    transfer: &Transfer,
    direction: Direction,
    pieces: &[Piece],
    host: &[HostPart<'_>],
) -> Result<Tick, TransferError> {
    let stream = transfer.next_stream(direction);
    let ends = pieces.iter().flat_map(|piece| [(&piece.from, AccessKind::Read), (&piece.to, AccessKind::Write)]);
    let memory: Vec<_> = ends.filter_map(|(end, kind)| Some((end.storage()?, kind))).collect();
    let on_host = if direction == Direction::Upload { AccessKind::Read } else { AccessKind::Write };
    let parts: Vec<_> = host.iter().map(|part| (*part, on_host)).collect();
    let (batched, single) = split(stream, pieces.iter().map(|piece| piece.part(host)).collect());
    let tick = transfer.enqueue(stream, &memory, &parts, || {
        #[allow(unsafe_code, reason = "the driver gets addresses; what keeps them good is above")]
        // SAFETY: the host ends lie in buffers of the pool, which the caller borrows now. The pool
        // keeps them until the tick of this access is done; the host does not touch them before
        // (N1, N2).
        unsafe {
            enqueue_parts(stream, &batched, &single)
        }
    })?;
    pieces.iter().for_each(|piece| transfer.shared().counters.count_all(direction, piece.copies, piece.bytes));
    Ok(tick)
}

/// The copies for one call, and those that go one by one. If a copy writes what another one uses,
/// all go one by one, because no order holds within a call.
fn split(stream: &Stream, copies: Vec<CopyPart>) -> (Vec<CopyPart>, Vec<CopyPart>) {
    let may_batch = copies.len() > 1 && stream.takes_batches() && CopyPart::are_independent(&copies);
    copies.into_iter().partition(|copy| may_batch && copy.bytes <= BATCHED_BYTES)
}
