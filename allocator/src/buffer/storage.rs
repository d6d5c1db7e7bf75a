//! What the handles of a typed buffer share: device memory, and the ticks of the work that uses it.
//!
//! Invariants:
//! * work that writes comes after all work noted before it; work that reads comes after the last that writes;
//! * the memory's first tick is that of its stream when it was handed out: what it was used for before came before. Where it
//!   grows, the same holds for each part that it gains;
//! * what is claimed ([`crate::Claim`]) is used by nobody else in a way that conflicts;
//! * every stream but the memory's own that uses it was recorded with it before its first use, so that giving it back waits
//!   for that stream.
//!
//! Lock order: storages by address, then the locks of the allocator and of timelines.

use std::fmt;
use std::sync::Arc;

use aquifer_device::{AccessKind, DevicePtr, Stream, Tick};
use parking_lot::{Condvar, Mutex};

use crate::allocation::Allocation;
use crate::backing::paged::MemoryApart;
use crate::buffer::held::Holder;
use crate::error::AllocError;
use crate::shell::Shell;

/// Device memory that several handles share. It knows the ticks of the work that uses it, by which a [`crate::Turn`] orders later work.
pub struct Storage {
    memory: Memory,
    device_id: u32,
    pub(crate) uses: Mutex<Uses>,
    /// Told when a claim ends.
    pub(crate) unclaimed: Condvar,
    /// Which thread has `uses` locked.
    pub(crate) holder: Holder,
}

/// What a storage is of.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A block of a heap.
    Block(Allocation),
    /// Memory outside of heaps.
    Apart(Arc<MemoryApart>),
}

/// What uses the memory.
#[derive(Debug)]
pub(crate) struct Uses {
    /// The last work that writes; what came before it, came before this.
    written: Tick,
    /// When the memory has grown since: the last work that used the new part before, or is ordered after that.
    grown: Vec<Tick>,
    /// The last work of each stream that reads what was written.
    read: Vec<Tick>,
    /// The stream that the memory was handed out for, and others that are recorded with the allocation.
    first: u32,
    recorded: Vec<u32>,
    /// Claims for reading that hold.
    claimed_to_read: u32,
    /// Whether a claim for writing holds.
    claimed_to_write: bool,
}

impl Storage {
    /// Memory that work of `stream` may use from now on; the stream is known to use it.
    #[inline]
    pub(crate) fn new(memory: Memory, stream: &Stream) -> Storage {
        let uses = Uses {
            written: stream.tick(),
            grown: Vec::new(),
            read: Vec::new(),
            first: stream.id(),
            recorded: Vec::new(),
            claimed_to_read: 0,
            claimed_to_write: false,
        };
        let (uses, unclaimed, holder) = (Mutex::new(uses), Condvar::new(), Holder::default());
        Storage { memory, device_id: stream.device_id(), uses, unclaimed, holder }
    }

    /// Its first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        match &self.memory {
            Memory::Block(allocation) => allocation.ptr(),
            Memory::Apart(memory) => memory.ptr(),
        }
    }

    /// Its size in bytes, as asked for.
    pub fn bytes(&self) -> u64 {
        match &self.memory {
            Memory::Block(allocation) => allocation.bytes(),
            Memory::Apart(memory) => memory.bytes(),
        }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Identity of the device that the memory is on.
    pub fn device_id(&self) -> u32 {
        self.device_id
    }

    /// The ticks that must come before work which accesses the memory so: before reading, that of the last work that writes; before writing,
    /// those of the work that reads, too. Waits for conflicting claims to end.
    ///
    /// # Errors
    /// [`AllocError::TurnHeld`] while this thread has a turn with the memory, whose work is not noted yet.
    pub fn ticks_before(&self, kind: AccessKind) -> Result<Vec<Tick>, AllocError> {
        Ok(self.hold_unclaimed(kind)?.before(kind).cloned().collect())
    }

    /// The memory has grown for work on `stream` from now on.
    ///
    /// # Errors
    /// [`AllocError::TurnHeld`] while this thread has a turn with it.
    pub(crate) fn note_growth(&self, stream: &Stream) -> Result<(), AllocError> {
        let grown = &mut self.hold()?.grown;
        grown.retain(|tick| tick.timeline().id() != stream.id());
        grown.push(stream.tick());
        Ok(())
    }
}

impl Memory {
    /// What holds it.
    pub(crate) fn shell(&self) -> &'static Shell {
        match self {
            Memory::Block(allocation) => allocation.shell(),
            Memory::Apart(memory) => memory.shell(),
        }
    }

    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        match self {
            Memory::Block(allocation) => allocation.record_stream(stream),
            Memory::Apart(memory) => memory.record_stream(stream),
        }
    }
}

impl Uses {
    /// Whether a claim holds that conflicts with such an access.
    pub(crate) fn is_claimed_against(&self, kind: AccessKind) -> bool {
        self.claimed_to_write || (kind == AccessKind::Write && self.claimed_to_read > 0)
    }

    pub(crate) fn claim(&mut self, kind: AccessKind) {
        match kind {
            AccessKind::Read => self.claimed_to_read += 1,
            AccessKind::Write => self.claimed_to_write = true,
        }
    }

    pub(crate) fn unclaim(&mut self, kind: AccessKind) {
        match kind {
            AccessKind::Read => self.claimed_to_read -= 1,
            AccessKind::Write => self.claimed_to_write = false,
        }
    }

    fn before(&self, kind: AccessKind) -> impl Iterator<Item = &Tick> {
        let readers = if kind == AccessKind::Write { self.read.as_slice() } else { &[] };
        std::iter::once(&self.written).chain(&self.grown).chain(readers)
    }

    /// Orders later work of `stream` after what must come before an access.
    pub(crate) fn order(&mut self, memory: &Memory, stream: &Stream, kind: AccessKind) -> Result<(), AllocError> {
        for tick in self.before(kind) {
            stream.wait_for(tick)?;
        }
        if stream.id() != self.first && !self.recorded.contains(&stream.id()) {
            memory.record_stream(stream)?;
            self.recorded.push(stream.id());
        }
        Ok(())
    }

    /// Notes work that was enqueued on `stream` until now.
    pub(crate) fn note(&mut self, stream: &Stream, kind: AccessKind) {
        if kind == AccessKind::Write {
            self.grown.clear();
            self.read.clear();
            self.written = stream.tick();
        } else {
            self.read.retain(|tick| tick.timeline().id() != stream.id());
            self.read.push(stream.tick());
        }
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("memory", &self.memory).finish_non_exhaustive()
    }
}
