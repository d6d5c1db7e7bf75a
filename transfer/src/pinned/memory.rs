//! Host memory that copies use, with the ticks of those copies.
//!
//! Invariants:
//! * a copy into the memory comes after all copies noted before it; a copy out of it after the last one into it;
//! * whoever enqueues a copy holds the memory's turn, which notes the stream's tick when it ends, whether the copy was enqueued
//!   or not: the call may return with an error after the driver took the copy;
//! * the host touches the bytes only after it waited for the copies that conflict, and while it does, borrows keep new ones
//!   away ([`super::PinnedBuffer`]);
//! * the memory goes back to its pool with its ticks, when the last `Arc` is dropped.
//!
//! Lock order: device memory ([`aquifer_allocator::Turn`]), host memory by address, the pool, timelines.

use std::fmt;
use std::sync::Arc;

use aquifer_device::{AccessKind, Code, DeviceError, HostPtr, Operation, Stream, Tick};
use parking_lot::{Mutex, MutexGuard};

use super::class::UNIT;
use super::pool::{Block, Inner, PinnedPool};
use crate::error::TransferError;

/// A piece of host memory.
pub(crate) struct PinnedMemory {
    pool: Arc<Inner>,
    ptr: HostPtr,
    bytes: usize,
    origin: Origin,
    uses: Mutex<Uses>,
}

/// Where the memory goes back to.
#[derive(Debug)]
enum Origin {
    /// There is none: no bytes.
    Nowhere,
    /// A block of the pool.
    Pool(Block),
}

/// What copies use the memory.
#[derive(Debug, Default)]
struct Uses {
    /// The last copy into it; those before it came before it.
    written: Option<Tick>,
    /// The last copy out of it on each stream, since then.
    read: Vec<Tick>,
}

/// A part of host memory, as copies take it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPart<'a> {
    pub(crate) memory: &'a Arc<PinnedMemory>,
    pub(crate) ptr: HostPtr,
    pub(crate) bytes: usize,
}

impl PinnedMemory {
    /// Page-locked memory of the pool for `bytes` bytes, at a multiple of `alignment`.
    pub(crate) fn alloc(pool: &PinnedPool, bytes: usize, alignment: usize) -> Result<Arc<PinnedMemory>, TransferError> {
        let pool = pool.inner();
        if bytes == 0 {
            let nowhere = HostPtr(alignment.max(UNIT));
            return Ok(Self::new(pool, nowhere, 0, Origin::Nowhere));
        }
        // Blocks start at multiples of UNIT; more than that takes room to move.
        let room = alignment.saturating_sub(UNIT);
        let too_long = TransferError::LengthOverflow { len: bytes as u64, size: 1 };
        let block = pool.take(bytes.checked_add(room).ok_or(too_long)?)?;
        let ptr = HostPtr(block.start.next_multiple_of(alignment));
        Ok(Self::new(pool, ptr, bytes, Origin::Pool(block)))
    }

    fn new(pool: &Arc<Inner>, ptr: HostPtr, bytes: usize, origin: Origin) -> Arc<PinnedMemory> {
        Arc::new(PinnedMemory { pool: pool.clone(), ptr, bytes, origin, uses: Mutex::default() })
    }

    /// The first byte.
    pub(crate) fn ptr(&self) -> HostPtr {
        self.ptr
    }

    /// Identity of the device whose copies may use it.
    pub(crate) fn device_id(&self) -> u32 {
        self.pool.device.id()
    }

    /// Whether it is page-locked, so that copies need not be staged.
    pub(crate) fn is_pinned(&self) -> bool {
        true
    }

    /// Whether no copy is in flight. Asks the driver if that is not known.
    pub(crate) fn is_idle(&self) -> Result<bool, TransferError> {
        for tick in self.uses.lock().before(AccessKind::Write) {
            if !tick.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until the host may do this with all of the memory, and says that it does it now with a part.
    ///
    /// The lock is not held meanwhile, so copies that do not conflict can be enqueued.
    pub(crate) fn touch(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<(), TransferError> {
        let ticks: Vec<Tick> = {
            let mut uses = self.uses.lock();
            uses.forget_done();
            uses.before(kind).cloned().collect()
        };
        for tick in &ticks {
            self.pool.wait_for(tick)?;
        }
        self.pool.device.driver().host_access(ptr, bytes, kind)?;
        Ok(())
    }

    /// The memory's turn: orders what `stream` does from now on after the copies that must come before one that does `kind` with
    /// the memory (it reads in an upload, and writes in a download). While the turn is held nobody else gets one.
    ///
    /// # Errors
    /// When the stream is another device's, or captures: a graph could run when the memory is somebody else's; those of the driver.
    pub(crate) fn turn<'a>(&'a self, stream: &'a Stream, kind: AccessKind) -> Result<HostTurn<'a>, TransferError> {
        if stream.device_id() != self.device_id() {
            let (is, needed) = (self.device_id(), stream.device_id());
            return Err(TransferError::WrongDevice { what: "page-locked memory", is, needed });
        }
        if stream.is_capturing() {
            let error = DeviceError::new(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED);
            return Err(error
                .with_detail(
                    "a graph may run when this page-locked memory is somebody else's; copy outside of the capture",
                )
                .into());
        }
        let uses = self.uses.lock();
        for tick in uses.before(kind) {
            stream.wait_for(tick)?;
        }
        Ok(HostTurn { stream, kind, uses })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Origin::Pool(block) = self.origin {
            self.pool.give(block.id, self.uses.get_mut().take());
        }
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory")
            .field("ptr", &self.ptr)
            .field("bytes", &self.bytes)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

impl Uses {
    /// The copies that must be done before one that does this with the memory, or before the host does.
    fn before(&self, kind: AccessKind) -> impl Iterator<Item = &Tick> {
        let readers = if kind == AccessKind::Write { self.read.as_slice() } else { &[] };
        self.written.iter().chain(readers)
    }

    fn note(&mut self, stream: &Stream, kind: AccessKind) {
        if kind == AccessKind::Write {
            self.read.clear();
            self.written = Some(stream.tick());
        } else {
            self.read.retain(|tick| tick.timeline().id() != stream.id() && !is_known_done(tick));
            self.read.push(stream.tick());
        }
    }

    fn forget_done(&mut self) {
        self.written.take_if(|tick| is_known_done(tick));
        self.read.retain(|tick| !is_known_done(tick));
    }

    fn take(&mut self) -> Vec<Tick> {
        let mut ticks = std::mem::take(&mut self.read);
        ticks.extend(self.written.take());
        ticks
    }
}

fn is_known_done(tick: &Tick) -> bool {
    tick.timeline().is_known_done(tick.n())
}

/// A stream's turn with host memory, as [`aquifer_allocator::Turn`] is with device memory. Hold it for the time it takes to enqueue.
#[derive(Debug)]
#[must_use = "the turn ends when it is dropped"]
pub(crate) struct HostTurn<'a> {
    stream: &'a Stream,
    kind: AccessKind,
    uses: MutexGuard<'a, Uses>,
}

impl Drop for HostTurn<'_> {
    fn drop(&mut self) {
        self.uses.note(self.stream, self.kind);
    }
}
