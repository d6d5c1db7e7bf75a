//! Storage: device memory and the ticks of the work that uses it, which the handles of a buffer
//! share.
//!
//! Invariants:
//! * work that writes comes after all work noted before it; work that reads comes after the last
//!   work that writes (A8);
//! * the first tick of the memory is that of its stream when the memory was handed out, so earlier
//!   uses of the memory come before it. If the memory grows, the same holds for each part that it
//!   gains;
//! * a stream that the memory was made ready for ([`Storage::ready_on`]) may use it without access
//!   guards: guards and reservations taken later come after all work enqueued there until then;
//! * while memory is reserved ([`crate::Reservation`]), no other work uses it in a way that
//!   conflicts;
//! * a stream that uses the memory, other than the memory's own, is recorded with it before the
//!   stream's first use, so that the freed memory waits for that stream.
//!
//! Lock order: storages by address, then the locks of the allocator and of timelines.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::fork::{Condvar, Mutex};
use aquifer_device::internal::Timeline;
use aquifer_device::{AccessKind, DevicePtr, Stream, Tick};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::backing::paged::dedicated::DedicatedMemory;
use crate::error::AllocError;
use crate::pools::private_pool::PrivatePool;
use crate::sleep::wake_lock::WakeLock;
use crate::state::AllocatorState;
use crate::sync::Holder;

pub(crate) mod foreign;
pub(crate) mod graph_uses;
mod guard;
mod pass;
pub(crate) mod record;

pub use graph_uses::GraphUses;
use guard::Failure;
pub use guard::{AccessGuard, Reservation};
pub use pass::{Outlived, Pass};

use crate::types::StreamId;
use foreign::{Foreign, Release};
use record::AccessRecord;

/// Device memory that several handles share. It knows the ticks of the work that uses it, by which
/// an [`crate::AccessGuard`] orders later work.
pub struct Storage {
    memory: Memory,
    allocator: Allocator,
    device_id: u32,
    pub(crate) uses: Mutex<Uses>,
    /// Notified when a reservation ends.
    pub(crate) unreserved: Condvar,
    /// The thread that has locked `uses`.
    pub(crate) holder: Holder,
}

/// The memory of a storage.
#[derive(Debug)]
pub(crate) enum Memory {
    /// A block of a heap, whose allocator stays open as long.
    Block(Allocation),
    /// Memory outside of heaps.
    Dedicated(Arc<DedicatedMemory>),
    /// Memory that another library owns.
    Foreign(Foreign),
}

/// The uses of a storage.
#[derive(Debug)]
pub(crate) struct Uses {
    pub(crate) record: AccessRecord,
    /// Streams that may use the memory without access guards.
    free: Vec<Arc<Timeline>>,
    /// The stream that the memory was handed out for.
    first: u32,
    /// The number of the graph whose capture the memory was handed out in ([`Launches::number`]).
    captured_in: Option<u64>,
    /// Other streams that are recorded with the allocation.
    recorded: Vec<u32>,
    /// The failure of work that was to write the memory.
    pub(crate) failure: Option<Failure>,
}

impl Allocator {
    /// Allocates memory whose handles share it and know the work that uses it, for work of `stream`
    /// and of others. `alignment` is as in [`Allocator::alloc_aligned`].
    ///
    /// # Errors
    /// As [`Allocator::alloc_aligned`].
    #[track_caller]
    pub fn alloc_storage(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        pass::alloc_in_pass(self, (bytes, alignment), stream)
    }

    /// As [`Allocator::alloc_storage`], whatever pass the thread is in.
    #[track_caller]
    fn alloc_plain(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        let memory = Memory::Block(self.alloc_aligned(bytes, alignment, stream)?);
        Ok(Arc::new(Storage::new(memory, self, stream)))
    }

    /// Makes a storage of an allocation of this allocator. The memory counts as written by the work
    /// enqueued on `stream` until now, so earlier work of other streams with it must be ordered
    /// before that.
    ///
    /// # Errors
    /// When the stream belongs to another device, or the allocation to another allocator. The
    /// allocation is then dropped.
    pub fn storage_of(&self, allocation: Allocation, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        self.check_stream(stream)?;
        allocation.record_stream(stream)?;
        if !std::ptr::eq(allocation.state(), self.state()) {
            return Err(AllocError::wrong_allocator("allocation", stream.device_id(), self.device().id()));
        }
        Ok(Arc::new(Storage::new(Memory::Block(allocation), self, stream)))
    }

    /// Makes a storage of memory that another library owns. The allocator does not count it.
    ///
    /// When the last handle is dropped, `release` gets the ticks of work that may still use the
    /// memory. It must see to it that the memory is not reused before: by making the owner's stream
    /// wait for them ([`Stream::wait_for`]), or by waiting on the host ([`Tick::synchronize`]). It
    /// must not panic.
    ///
    /// It is up to the caller that `ptr` has `bytes` bytes, in memory of this allocator's device
    /// that lives until `release` is called; that earlier work on it comes before what is enqueued
    /// on `stream` from now on; and that only the storage's users use it until then.
    ///
    /// # Errors
    /// A stream of another device. `release` is called with no ticks then.
    pub fn import(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        stream: &Stream,
        release: impl FnOnce(&[Tick]) + Send + 'static,
    ) -> Result<Arc<Storage>, AllocError> {
        if let Err(error) = self.check_stream(stream) {
            release(&[]);
            return Err(error);
        }
        let release: Mutex<Option<Release>> = Mutex::new(Some(Box::new(release)));
        let memory = Memory::Foreign(Foreign { ptr, bytes, release });
        Ok(Arc::new(Storage::new(memory, self, stream)))
    }
}

impl PrivatePool {
    /// Allocates memory of this pool; see [`Allocator::alloc_storage`].
    ///
    /// # Errors
    /// As [`Allocator::alloc_storage`].
    #[track_caller]
    pub fn alloc_storage(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc_plain(bytes, alignment, stream)
    }
}

impl Storage {
    /// A storage of memory that work of `stream` may use from now on. The stream must be known to
    /// the memory as a user.
    #[inline]
    pub(crate) fn new(memory: Memory, allocator: &Allocator, stream: &Stream) -> Storage {
        let uses = Uses {
            record: AccessRecord::new(stream.tick()),
            free: Vec::new(),
            first: stream.id(),
            captured_in: stream.launches_of_capture().map(|launches| launches.number()),
            recorded: Vec::new(),
            failure: None,
        };
        let (uses, unreserved, holder) = (Mutex::new(uses), Condvar::new(), Holder::default());
        let allocator = allocator.kept_open();
        Storage { memory, allocator, device_id: stream.device_id(), uses, unreserved, holder }
    }

    /// The first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        match &self.memory {
            Memory::Block(allocation) => allocation.ptr(),
            Memory::Dedicated(memory) => memory.ptr(),
            Memory::Foreign(memory) => memory.ptr,
        }
    }

    /// The size in bytes, as requested.
    pub fn bytes(&self) -> u64 {
        match &self.memory {
            Memory::Block(allocation) => allocation.bytes(),
            Memory::Dedicated(memory) => memory.bytes(),
            Memory::Foreign(memory) => memory.bytes,
        }
    }

    /// The allocator of the memory.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The allocator's state that holds the memory, and its addresses.
    pub(crate) fn place(&self) -> (&'static AllocatorState, Range<u64>) {
        (self.allocator.state(), self.ptr().range(self.bytes()))
    }

    /// Identity of the device that the memory is on.
    pub fn device_id(&self) -> u32 {
        self.device_id
    }

    /// Checks that the memory is this allocator's. `what` names it in the error.
    ///
    /// # Errors
    /// [`AllocError::WrongAllocator`] or
    /// [`RequestError::WrongDevice`](aquifer_device::RequestError::WrongDevice) if it is another
    /// one's.
    pub fn check_allocator(&self, what: &'static str, allocator: &Allocator) -> Result<(), AllocError> {
        if std::ptr::eq(self.allocator.state(), allocator.state()) {
            return Ok(());
        }
        Err(AllocError::wrong_allocator(what, self.device_id, allocator.device().id()))
    }

    /// The ticks that must come before work with this kind of access: for reading, those of the
    /// last work that writes; for writing, also those of the work that reads. Waits for conflicting
    /// reservations to end.
    ///
    /// # Errors
    /// [`AllocError::AccessHeld`] while this thread has an access guard on the memory: its work is
    /// not noted yet.
    pub fn ticks_before(&self, kind: AccessKind) -> Result<Vec<Tick>, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        let mut uses = self.lock_unreserved(kind)?;
        uses.note_free(None);
        Ok(uses.record.before(kind).cloned().collect())
    }

    /// Notes that work of `stream` uses the memory, without ordering it; see
    /// [`Allocation::record_stream`].
    ///
    /// # Errors
    /// As [`Allocation::record_stream`].
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        self.memory.record_stream(stream)
    }

    /// Notes that the memory has grown, for work on `stream` from now on.
    ///
    /// # Errors
    /// [`AllocError::AccessHeld`] while this thread has an access guard on it.
    pub(crate) fn note_growth(&self, stream: &Stream) -> Result<(), AllocError> {
        self.hold()?.record.note_also(stream.tick());
        Ok(())
    }

    /// Makes the memory ready for work of `stream` that takes no access guards, such as copies and
    /// launches with the bare address: orders later work of `stream` after all work noted with the
    /// memory. From then on the memory can be dropped at any time, and access guards of other
    /// streams come after all work that is enqueued on `stream` until they are taken.
    ///
    /// Waits on the host only for conflicting reservations to end. Costs at most one event and one
    /// wait for each stream that must be waited for. `stream` itself is not ordered after access
    /// guards that others take later: take an access guard, or make the memory ready again.
    ///
    /// In a capture whose graph notes what it uses ([`crate::GraphUses`]), this notes a write.
    ///
    /// # Errors
    /// As [`crate::AccessGuard::acquire`].
    pub fn ready_on(self: &Arc<Self>, stream: &Stream) -> Result<(), AllocError> {
        if stream.device_id() != self.device_id {
            return Err(AllocError::wrong_device("buffer", self.device_id, stream.device_id()));
        }
        if self.bytes() == 0 {
            return Ok(());
        }
        if GraphUses::are_collected(stream) {
            return AccessGuard::acquire(stream, &[(self, AccessKind::Write)]).map(drop);
        }
        let _awake = WakeLock::of_all(std::iter::once(self.place()))?;
        let mut uses = self.lock_unreserved(AccessKind::Write)?;
        uses.note_free(Some(stream));
        uses.order(&self.memory, stream, AccessKind::Write)?;
        if uses.free.iter().all(|free| free.id() != stream.id()) {
            uses.free.push(stream.timeline().clone());
        }
        Ok(())
    }

    /// Ends the use without access guards on all streams that the memory was made ready for: access
    /// guards come after the work enqueued there by now, and not after later work.
    ///
    /// # Errors
    /// [`AllocError::AccessHeld`] while this thread has an access guard on the memory. Nothing
    /// changes then.
    pub fn end_ready(&self) -> Result<(), AllocError> {
        let mut uses = self.hold()?;
        uses.note_free(None);
        uses.free.clear();
        Ok(())
    }

    /// As [`Storage::end_ready`], and also for the stream that the memory was allocated for: for
    /// code that takes the memory over, and cannot know how it was used.
    ///
    /// # Errors
    /// As [`Storage::end_ready`].
    pub fn take_over(&self) -> Result<(), AllocError> {
        self.end_ready()?;
        let mut uses = self.hold()?;
        let own = self.allocator.state().shared().streams.timeline(StreamId(uses.first)).cloned();
        own.into_iter().for_each(|own| uses.record.note_also(own.tick()));
        Ok(())
    }
}

impl Drop for Storage {
    #[inline]
    fn drop(&mut self) {
        if let Memory::Foreign(memory) = &mut self.memory
            && let Some(release) = memory.release.get_mut().take()
        {
            let uses = self.uses.get_mut();
            uses.note_free(None);
            let ticks: Vec<Tick> = uses.record.before(AccessKind::Write).cloned().collect();
            release(&ticks);
        }
    }
}

impl Memory {
    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        match self {
            Memory::Block(allocation) => allocation.record_stream(stream),
            Memory::Dedicated(memory) => memory.record_stream(stream),
            // Its owner gets the ticks of all uses.
            Memory::Foreign(_) => Ok(()),
        }
    }
}

impl Uses {
    /// Orders later work of `stream` after all work that must come before this kind of access.
    pub(crate) fn order(&mut self, memory: &Memory, stream: &Stream, kind: AccessKind) -> Result<(), AllocError> {
        for tick in self.record.before(kind) {
            stream.wait_for(tick)?;
        }
        self.note_user(memory, stream)
    }

    /// Notes that the freed memory must wait for the stream.
    fn note_user(&mut self, memory: &Memory, stream: &Stream) -> Result<(), AllocError> {
        if stream.id() != self.first && !self.recorded.contains(&stream.id()) {
            memory.record_stream(stream)?;
            self.recorded.push(stream.id());
        }
        Ok(())
    }

    /// Notes what the streams that need no access guards have enqueued by now, except `but`, which
    /// is about to use the memory itself.
    pub(crate) fn note_free(&mut self, but: Option<&Stream>) {
        let but = but.map(Stream::id);
        let ticks: Vec<Tick> = self.free.iter().filter(|free| Some(free.id()) != but).map(Timeline::tick).collect();
        ticks.into_iter().for_each(|tick| self.record.note_also(tick));
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("memory", &self.memory).finish_non_exhaustive()
    }
}
