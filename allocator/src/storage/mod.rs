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
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::fork::{Condvar, Mutex};
use aquifer_device::internal::Timeline;
use aquifer_device::{AccessKind, DevicePtr, Stream, Tick};

use crate::alloc::{Owner, grant_cached};
use crate::allocation::{Allocation, KEEPS_OPEN, LiveBlock};
use crate::allocator::{ALIGNMENT, Allocator};
use crate::backing::paged::dedicated::DedicatedMemory;
use crate::error::AllocError;
use crate::pools::private_pool::PrivatePool;
use crate::sleep::wake_lock::NotedCount;
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

use crate::types::{Granted, StreamId};
use foreign::{Foreign, Release};
use record::AccessRecord;

/// Device memory that several handles share. It knows the ticks of the work that uses it, by which
/// an [`crate::AccessGuard`] orders later work.
pub struct Storage {
    memory: Memory,
    device_id: u32,
    pub(crate) uses: Mutex<Uses>,
    /// Notified when a reservation ends.
    pub(crate) unreserved: Condvar,
    /// The thread that has locked `uses`.
    pub(crate) holder: Holder,
}

/// The memory of a storage, whose allocator stays open as long.
pub(crate) enum Memory {
    /// A block of a heap.
    Block(LiveBlock),
    /// Memory outside of heaps.
    Dedicated(Arc<DedicatedMemory>),
    /// Memory that another library owns, or zero bytes.
    Foreign(Foreign),
}

/// The uses of a storage.
///
/// Mostly one stream alone uses it, its *home*: that for which the allocator handed out the block.
/// Ticks of that stream are kept as numbers, since the allocator knows the stream, and a [`Tick`]
/// counts a reference.
#[derive(Debug)]
pub(crate) struct Uses {
    /// The last access of the home stream that writes, if it is the last of all; or [`NO_TICK`].
    written: u64,
    /// The last access of the home stream that reads what was written; or [`NO_TICK`].
    read: u64,
    /// The stream that the memory was handed out for.
    first: u32,
    /// The same, if the allocator knows its timeline; or [`NO_STREAM`].
    home: u32,
    others: Option<Box<Others>>,
}

const NO_TICK: u64 = u64::MAX;
const NO_STREAM: u32 = u32::MAX;

/// What is not about the home stream alone.
#[derive(Debug, Default)]
pub(crate) struct Others {
    pub(crate) record: AccessRecord,
    /// Streams that may use the memory without access guards.
    free: Vec<Arc<Timeline>>,
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
    #[inline]
    pub fn alloc_storage(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        if alignment == ALIGNMENT
            && let Ok(Granted { block, addr }) = grant_cached(self, bytes, stream, Location::caller(), Owner::Storage)
        {
            let (state, stream_id) = (self.inner().state, stream.id() | self.inner().mark | KEEPS_OPEN);
            let block = LiveBlock { state, block, stream: stream_id, ptr: DevicePtr(addr), bytes };
            return Ok(Arc::new(Storage::with_uses(Memory::Block(block), stream, Uses::of_home(stream))));
        }
        pass::alloc_in_pass(self, (bytes, alignment), stream)
    }

    /// As [`Allocator::alloc_storage`], whatever pass the thread is in.
    #[track_caller]
    fn alloc_plain(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        let memory = Memory::of(self.alloc_aligned(bytes, alignment, stream)?, self);
        Ok(Arc::new(Storage::new(memory, stream)))
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
        Ok(Arc::new(Storage::new(Memory::of(allocation, self), stream)))
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
        let memory = Memory::Foreign(Foreign { allocator: self.kept_open(), ptr, bytes, release });
        Ok(Arc::new(Storage::new(memory, stream)))
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
    pub(crate) fn new(memory: Memory, stream: &Stream) -> Storage {
        let is_home = stream.timeline().device_id_unless_capturing() == stream.device_id();
        let uses = match &memory {
            Memory::Block(block) if is_home => {
                block.state.shared().stream(stream);
                Uses::of_home(stream)
            }
            _ => Uses::of_unknown(stream),
        };
        Storage::with_uses(memory, stream, uses)
    }

    #[inline]
    fn with_uses(memory: Memory, stream: &Stream, uses: Uses) -> Storage {
        let (uses, unreserved, holder) = (Mutex::new(uses), Condvar::new(), Holder::default());
        Storage { memory, device_id: stream.device_id(), uses, unreserved, holder }
    }

    /// The first address; null for zero bytes.
    #[inline]
    pub fn ptr(&self) -> DevicePtr {
        match &self.memory {
            Memory::Block(block) => block.ptr,
            Memory::Dedicated(memory) => memory.ptr(),
            Memory::Foreign(memory) => memory.ptr,
        }
    }

    /// The size in bytes, as requested.
    #[inline]
    pub fn bytes(&self) -> u64 {
        match &self.memory {
            Memory::Block(block) => block.bytes,
            Memory::Dedicated(memory) => memory.bytes(),
            Memory::Foreign(memory) => memory.bytes,
        }
    }

    /// The allocator of the memory.
    ///
    /// # Panics
    /// In a forked child of a process that has opened a device, if another thread was allocating.
    pub fn allocator(&self) -> Allocator {
        match &self.memory {
            Memory::Block(block) => Allocator::of_keeper(block.state),
            Memory::Dedicated(memory) => memory.allocator().clone(),
            Memory::Foreign(memory) => memory.allocator.clone(),
        }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    #[inline]
    pub(crate) fn state(&self) -> &'static AllocatorState {
        match &self.memory {
            Memory::Block(block) => block.state,
            Memory::Dedicated(memory) => memory.state(),
            Memory::Foreign(memory) => memory.allocator.state(),
        }
    }

    /// The allocator's state that holds the memory, and its addresses.
    #[inline]
    pub(crate) fn place(&self) -> (&'static AllocatorState, Range<u64>) {
        (self.state(), self.ptr().range(self.bytes()))
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
        if std::ptr::eq(self.state(), allocator.state()) {
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
        Ok(uses.record(self.state()).before(kind).cloned().collect())
    }

    /// Enqueues the first write of new memory on the stream that it was handed out for, and notes it
    /// without an access guard: no other thread may know the memory, which is then to be written
    /// there. In a capture it takes one.
    ///
    /// # Errors
    /// As [`AccessGuard::acquire`], and those of `write`.
    #[doc(hidden)]
    pub fn write_first<E: From<AllocError>>(
        self: &Arc<Self>,
        stream: &Stream,
        write: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let (state, range) = self.place();
        if range.is_empty() || stream.timeline().device_id_unless_capturing() != self.device_id {
            let _access = AccessGuard::acquire(stream, &[(self, AccessKind::Write)])?;
            return write();
        }
        let _awake = NotedCount::of_guard(state, &range)?;
        let written = write();
        // After the write was enqueued (T1).
        self.hold()?.note_now(stream, AccessKind::Write);
        written
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
        self.hold()?.others_mut().record.note_also(stream.tick());
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
        let (state, range) = self.place();
        let _awake = NotedCount::of_guard(state, &range)?;
        let mut uses = self.lock_unreserved(AccessKind::Write)?;
        uses.note_free(Some(stream));
        uses.order(self, stream, AccessKind::Write)?;
        let free = &mut uses.others_mut().free;
        if free.iter().all(|free| free.id() != stream.id()) {
            free.push(stream.timeline().clone());
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
        uses.others.iter_mut().for_each(|others| others.free.clear());
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
        let own = self.state().shared().streams.timeline(StreamId(uses.first)).cloned();
        own.into_iter().for_each(|own| uses.others_mut().record.note_also(own.tick()));
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
            let record = uses.record(memory.allocator.state());
            let ticks: Vec<Tick> = record.before(AccessKind::Write).cloned().collect();
            release(&ticks);
        }
    }
}

impl Memory {
    /// The memory of an allocation of this allocator.
    pub(crate) fn of(allocation: Allocation, allocator: &Allocator) -> Memory {
        let block = allocation.into_keeping_open(allocator.inner());
        block.map_or_else(|| Memory::Foreign(Foreign::nothing(allocator)), Memory::Block)
    }

    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        match self {
            Memory::Block(block) => block.record_stream(stream),
            Memory::Dedicated(memory) => memory.record_stream(stream),
            // Its owner gets the ticks of all uses.
            Memory::Foreign(_) => Ok(()),
        }
    }
}

impl Others {
    /// True if nothing is to be waited for, reported or noted before such an access is ordered.
    fn are_plain_for(&self, kind: AccessKind) -> bool {
        !self.record.is_reserved_against(kind) && self.failure.is_none() && self.free.is_empty()
    }

    fn are_none(&self) -> bool {
        let Others { record, free, captured_in, recorded, failure } = self;
        record.is_empty() && free.is_empty() && captured_in.is_none() && recorded.is_empty() && failure.is_none()
    }
}

impl Uses {
    /// Uses that begin now, of a block for a stream that does not capture, and that the allocator
    /// knows.
    #[inline]
    fn of_home(stream: &Stream) -> Uses {
        let (first, written) = (stream.id(), stream.timeline().now());
        Uses { written, read: NO_TICK, first, home: first, others: None }
    }

    /// Uses that begin in a capture, or of memory whose streams the allocator need not know.
    fn of_unknown(stream: &Stream) -> Uses {
        let others = Others {
            record: AccessRecord::new(stream.tick()),
            captured_in: stream.launches_of_capture().map(|launches| launches.number()),
            ..Others::default()
        };
        let others = Some(Box::new(others));
        Uses { written: NO_TICK, read: NO_TICK, first: stream.id(), home: NO_STREAM, others }
    }

    /// The number of the graph whose capture the memory was handed out in.
    fn captured_in(&self) -> Option<u64> {
        self.others.as_ref()?.captured_in
    }

    pub(crate) fn others_mut(&mut self) -> &mut Others {
        self.others.get_or_insert_default()
    }

    /// The record with all ticks in it.
    pub(crate) fn record(&mut self, state: &'static AllocatorState) -> &mut AccessRecord {
        let (written, read) = (self.written, self.read);
        (self.written, self.read) = (NO_TICK, NO_TICK);
        let home = StreamId(self.home);
        let record = &mut self.others_mut().record;
        if written != NO_TICK || read != NO_TICK {
            let timeline = state.shared().streams.timeline(home).cloned();
            let timeline = timeline.expect("the allocator knows the stream of a live block");
            // What is in the record came later than the write.
            let tick = |n: u64| (n != NO_TICK).then(|| timeline.tick_at(n));
            record.note_home(tick(written), tick(read));
        }
        record
    }

    #[inline]
    pub(crate) fn is_reserved_against(&self, kind: AccessKind) -> bool {
        self.others.as_ref().is_some_and(|others| others.record.is_reserved_against(kind))
    }

    /// Orders later work of `stream` after all work that must come before this kind of access.
    #[inline]
    pub(crate) fn order(&mut self, storage: &Storage, stream: &Stream, kind: AccessKind) -> Result<(), AllocError> {
        // Its own ticks come before without a wait.
        if stream.id() == self.home && self.others.is_none() {
            return Ok(());
        }
        self.order_after_others(storage, stream, kind)
    }

    #[inline(never)]
    fn order_after_others(&mut self, storage: &Storage, stream: &Stream, kind: AccessKind) -> Result<(), AllocError> {
        let is_home = stream.id() == self.home;
        let record = if is_home { &self.others_mut().record } else { &*self.record(storage.state()) };
        for tick in record.before(kind) {
            stream.wait_for(tick)?;
        }
        self.note_user(storage.memory(), stream)
    }

    /// Notes that the freed memory must wait for the stream.
    fn note_user(&mut self, memory: &Memory, stream: &Stream) -> Result<(), AllocError> {
        if stream.id() != self.first && !self.others_mut().recorded.contains(&stream.id()) {
            memory.record_stream(stream)?;
            self.others_mut().recorded.push(stream.id());
        }
        Ok(())
    }

    /// Notes an access that was ordered by [`Uses::order`], and is done with what is enqueued on
    /// the stream by now.
    #[inline]
    pub(crate) fn note_now(&mut self, stream: &Stream, kind: AccessKind) {
        if stream.id() != self.home || self.others.is_some() {
            return self.note_with_others(stream, kind);
        }
        let now = stream.timeline().now();
        match kind {
            AccessKind::Read => self.read = now,
            AccessKind::Write => (self.written, self.read) = (now, NO_TICK),
        }
    }

    #[inline(never)]
    fn note_with_others(&mut self, stream: &Stream, kind: AccessKind) {
        let (now, is_home) = (stream.timeline().now(), stream.id() == self.home);
        if kind == AccessKind::Write {
            (self.written, self.read) = (NO_TICK, NO_TICK);
            self.others_mut().record.forget();
        }
        match kind {
            AccessKind::Write if is_home => {
                self.written = now;
                self.others.take_if(|others| others.are_none());
            }
            AccessKind::Read if is_home => self.read = now,
            _ => self.others_mut().record.note(stream.tick(), kind),
        }
    }

    /// Notes what the streams that need no access guards have enqueued by now, except `but`, which
    /// is about to use the memory itself.
    #[inline]
    pub(crate) fn note_free(&mut self, but: Option<&Stream>) {
        if let Some(others) = &mut self.others {
            let Others { record, free, .. } = &mut **others;
            let but = but.map(Stream::id);
            free.iter().filter(|free| Some(free.id()) != but).for_each(|free| record.note_also(free.tick()));
        }
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("ptr", &self.ptr()).field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
