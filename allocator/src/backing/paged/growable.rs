//! Growable memory: addresses are reserved once, and as much memory is mapped behind them as is
//! needed at a time.
//!
//! Its granules come from the same places as those of blocks: spare granules, granules in free
//! blocks whose last use is done, and the device. The release of memory that it gives up by
//! shrinking is deferred (`dedicated.rs`). If it grows again before that memory is recycled, it
//! takes the memory back, ordered after its last uses. The rest of a granule of which it keeps a
//! part stays with it, and so do the ticks of that rest's last uses.
//!
//! Invariant: it does not shrink while a buffer shares the memory, so that no buffer reaches
//! addresses without memory.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::{DevicePtr, ErrorKind, Stream};

use crate::allocator::Allocator;
use crate::backing::paged::dedicated::{DedicatedMemory, recycle_deferred_releases};
use crate::backing::paged::fill::{Place, try_fill};
use crate::backing::paged::gate::Gate;
use crate::core::paged::deferred_release::DeferredRelease;
use crate::core::paged::granules::POOL;
use crate::error::AllocError;
use crate::pools::refuse_capture_dedicated;
use crate::recovery::ladder::climb_dedicated;
use crate::recovery::oom::Tried;
use crate::size_class::REQUEST_LIMIT;
use crate::storage::{Memory, Storage};
use crate::tags::Tag;
use crate::types::{Request, StreamId, Use, latest_by_stream};

/// Memory that grows and shrinks at one address, such as a cache of keys and values. It consists of
/// whole granules, of 2 MiB by default ([`crate::Config::granule`]), so it suits few that are large
/// rather than many that are small. Dropping it, and the buffers made of it, makes no driver call
/// and does not wait; its memory is recycled once the streams that used it are done. It keeps the
/// allocator open.
///
/// ```
/// use aquifer::device::AccessKind;
/// use aquifer::memory::AccessGuard;
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let mut cache = memory.growable(40 << 30, &stream)?; // addresses for 40 GiB, and no memory yet
/// cache.grow_to(100 << 20, &stream)?;
/// {
///     let _access = AccessGuard::acquire(&stream, &[(cache.storage(), AccessKind::Write)])?;
///     stream.fill(cache.ptr(), 0, cache.bytes())?;
/// }
/// cache.grow_to(200 << 20, &stream)?; // at the same address, nothing is copied
/// assert_eq!((cache.bytes(), memory.memory_reserved()), (200 << 20, 200 << 20));
/// cache.shrink_to(50 << 20, &stream)?; // what is beyond may serve others once the fill is done
/// assert_eq!(memory.memory_allocated(), 50 << 20);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[must_use = "dropping the handle gives the memory back"]
pub struct Growable {
    memory: Arc<DedicatedMemory>,
    /// The same memory, as buffers share it.
    storage: Arc<Storage>,
    capacity: u64,
    granule: u64,
    /// Uses of what lies behind its end in the last granule.
    rest: Vec<Use>,
}

impl Allocator {
    /// Reserves addresses for `capacity` bytes, without memory yet, for work on `stream`.
    ///
    /// # Errors
    /// [`AllocError::NotMapped`] where memory comes in segments; [`AllocError::TooLarge`] from 2^60
    /// bytes on; when the stream belongs to another device; errors of the driver, among them
    /// [`aquifer_device::ErrorKind::OutOfAddresses`].
    pub fn growable(&self, capacity: u64, stream: &Stream) -> Result<Growable, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Reserve)?;
        self.check_stream(stream)?;
        if capacity >= REQUEST_LIMIT {
            return Err(AllocError::TooLarge { requested: capacity });
        }
        let mut shared = self.state().shared();
        let id = shared.stream(stream);
        let Some(granule) = shared.granule() else {
            return Err(self.not_mapped("memory that grows where it is"));
        };
        drop(shared);
        recycle_deferred_releases(self, true)?;
        self.device().settle_unused();
        let reserved = capacity.max(1).next_multiple_of(granule);
        let ptr = match self.device().driver().reserve(reserved, granule) {
            Err(error) if error.kind == ErrorKind::OutOfAddresses => {
                // This gives unused memory back, and with it the addresses at which nothing is
                // mapped any more.
                self.empty_cache()?;
                self.device().driver().reserve(reserved, granule)
            }
            reserved => reserved,
        }?;
        self.state().tell_witness(|witness| witness.managed(ptr.range(reserved)));
        self.state().shared().add_growable(ptr.0, reserved, id, Tag::current());
        let memory = Arc::new(DedicatedMemory::new(self, ptr, 0, id));
        let storage = Arc::new(Storage::new(Memory::Dedicated(memory.clone()), stream));
        Ok(Growable { memory, storage, capacity, granule, rest: Vec::new() })
    }
}

impl fmt::Debug for Growable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Growable").field("ptr", &self.ptr()).field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl Growable {
    /// The first address, which never changes.
    pub fn ptr(&self) -> DevicePtr {
        self.memory.ptr()
    }

    /// Bytes that have memory behind them.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// The most bytes that it can grow to.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The addresses that have memory behind them.
    pub fn range(&self) -> Range<u64> {
        self.ptr().range(self.bytes())
    }

    /// The memory, for buffers, kernels, transfers and [`crate::AccessGuard`]s. A handle of it
    /// keeps the memory alive and stays valid when this grows; while it lives this cannot shrink.
    /// Its first use is ordered after the growth, but not after work on bare addresses: enqueue
    /// such work under an [`crate::AccessGuard`] on it.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Notes that `stream` uses the memory, too, as [`crate::Allocation::record_stream`] does.
    /// Streams that take access guards on a buffer do not need it.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        self.memory.record_stream(stream)
    }

    /// Grows to `bytes`, for work on `stream` from now on; does nothing if it is that large
    /// already. Memory is taken in whole granules, and is uninitialised. `stream` is noted as by
    /// [`Growable::record_stream`]. Later access guards of other streams come after the work
    /// enqueued on `stream` until now.
    ///
    /// # Errors
    /// [`AllocError::BeyondCapacity`]; [`AllocError::Asleep`] while the allocator sleeps, even if
    /// it is that large already, because its memory is away; when the stream captures; otherwise as
    /// [`Allocator::alloc_bytes`]. The size is then as before.
    #[track_caller]
    pub fn grow_to(&mut self, bytes: u64, stream: &Stream) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Map)?;
        self.allocator().device().refuse_if_lost(aquifer_device::Operation::Map)?;
        self.record_stream(stream)?;
        if bytes > self.capacity {
            return Err(AllocError::BeyondCapacity { requested: bytes, capacity: self.capacity });
        }
        // Looked at once, before anything changes. If the allocator falls asleep after this, that
        // is as if it did so after the growth: the new size is noted without touching memory, and
        // memory is mapped only after another look (`fill_step`).
        if self.allocator().state().shared().sleeps(&self.ptr().range(self.capacity)) {
            return Err(AllocError::Asleep);
        }
        if bytes <= self.bytes() {
            return Ok(());
        }
        refuse_capture_dedicated(stream)?;
        let size = bytes.next_multiple_of(self.granule);
        // This may be refused here. The same call after the growth is not.
        self.storage.note_growth(stream)?;
        self.order_after(stream, self.rest.iter().copied())?;
        if size > self.size() {
            let (base, end) = (self.ptr().0, self.ptr().0 + size);
            let taken_back = self.allocator().state().shared().take_retired(base, end);
            if let Err(error) = self.fill(size, bytes, stream, &taken_back) {
                self.put_back(taken_back, size);
                return Err(error);
            }
        }
        self.storage.note_growth(stream)?;
        let mut guard = self.allocator().state().lock();
        // The stream's later work comes after all uses of the last granule.
        let rest = if bytes < size { vec![guard.streams.use_so_far(StreamId::of(stream))] } else { Vec::new() };
        guard.set_owned(self.ptr().0, size, bytes);
        drop(guard);
        self.memory.resize(bytes, Location::caller());
        self.rest = rest;
        Ok(())
    }

    /// Shrinks to `bytes`; does nothing if it is that small already. Makes no driver call. The
    /// memory beyond serves others once all work enqueued until now is done, on `stream` and on the
    /// streams noted before. Work that uses this memory must be enqueued on one of these streams,
    /// before this call. It may shrink while the allocator sleeps: what it gives up then comes back
    /// with [`Allocator::wake`], and serves others from then on.
    ///
    /// # Errors
    /// [`AllocError::Shared`] while buffers made of it live, which might reach beyond; when the
    /// stream belongs to another device. The size is then as before.
    #[track_caller]
    pub fn shrink_to(&mut self, bytes: u64, stream: &Stream) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Unmap)?;
        self.record_stream(stream)?;
        if bytes >= self.bytes() {
            return Ok(());
        }
        if Arc::get_mut(&mut self.storage).is_none() {
            return Err(AllocError::Shared { what: "memory that is to shrink" });
        }
        let (size, before, users) = (bytes.next_multiple_of(self.granule), self.size(), self.memory.users());
        let mut guard = self.allocator().state().lock();
        self.memory.resize(bytes, Location::caller());
        guard.set_owned(self.ptr().0, size, bytes);
        guard.retire(self.ptr().0, self.ptr().0 + size..self.ptr().0 + before, &users);
        let uses = if bytes < size { users } else { Vec::new() };
        let rest = uses.into_iter().map(|stream| guard.streams.use_so_far(stream)).collect();
        drop(guard);
        self.rest = rest;
        Ok(())
    }

    fn allocator(&self) -> &Allocator {
        self.memory.allocator()
    }

    /// Its bytes rounded up to whole granules, all of which have memory.
    fn size(&self) -> u64 {
        self.bytes().next_multiple_of(self.granule)
    }

    /// Maps memory at all addresses up to `size`, usable by work on `stream`.
    fn fill(&self, size: u64, bytes: u64, stream: &Stream, taken_back: &[DeferredRelease]) -> Result<(), AllocError> {
        self.order_after(stream, taken_back.iter().flat_map(|piece| piece.uses.iter().copied()))?;
        let allocator = self.allocator();
        let (base, stream, grown) = (self.ptr().0, StreamId::of(stream), size - self.size());
        let requested = bytes - self.bytes();
        let request = Request { requested, size: grown, pool: POOL, stream, tag: Tag::default(), is_regular: false };
        let range = base + self.size()..base + size;
        let place = Place::Dedicated { base, range };
        climb_dedicated(allocator, &request, Tried::for_dedicated(self.size()), true, || {
            try_fill(allocator, &request, &place)
        })
    }

    /// Makes a stream's later work come after uses of memory.
    fn order_after(&self, stream: &Stream, uses: impl IntoIterator<Item = Use>) -> Result<(), AllocError> {
        for last_use in latest_by_stream(uses.into_iter()) {
            let tick = self.allocator().state().shared().streams.tick(last_use);
            tick.map_or(Ok(()), |tick| stream.timeline().wait_for(tick.timeline(), tick.n()))?;
        }
        Ok(())
    }

    /// Retires the memory that a failed growth to `size` has got so far.
    fn put_back(&self, taken_back: Vec<DeferredRelease>, size: u64) {
        // Falling asleep and waking up take memory off the table for a while. A thread that may not
        // pass the gate has got nothing.
        let _gate = self.allocator().gate().map(Gate::shared);
        let base = self.ptr().0;
        self.allocator().state().shared().put_back_retired(base, base + self.size(), base + size, taken_back);
    }
}
