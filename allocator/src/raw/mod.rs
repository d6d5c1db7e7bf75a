//! The raw interface: pointers instead of handles, for bindings to code that can only hold
//! pointers.
//!
//! A table says which block a pointer is (`table.rs`), for this interface alone; handles need no
//! look-up. [`owner_of`] finds the allocator of a pointer among all of the process.

use std::any::Any;
use std::panic::Location;

use aquifer_device::internal::Launches;
use aquifer_device::{DevicePtr, ErrorKind, Operation, Stream, fork};

use crate::alloc::{Owner, grant_cached, grant_uncached};
use crate::allocation::acting;
use crate::allocator::{Allocator, all_open};
use crate::error::AllocError;
use crate::state::AllocatorState;
use crate::types::{After, BlockId, Granted, StreamId, UNKNOWN, Use};

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
pub(crate) mod table;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;

impl AllocatorState {
    /// Looks at a live raw allocation, which no thread can free meanwhile.
    fn look_at_raw<R>(&self, ptr: DevicePtr, look: impl FnOnce(BlockId) -> R) -> Result<R, AllocError> {
        self.raw.look(ptr.0, look).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })
    }
}

impl Allocator {
    /// Allocates and returns the bare pointer, to be freed with [`Allocator::free_raw`]. Zero bytes
    /// give a null pointer.
    ///
    /// Free the pointer before the last handle of the allocator is dropped. Afterwards it can no
    /// longer be freed, and its memory and device stay in use until the process ends.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`].
    #[track_caller]
    #[inline]
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
        let at = Location::caller();
        let miss = match grant_cached(self, bytes, stream, at, Owner::Raw) {
            Ok(granted) => return Ok(DevicePtr(granted.addr)),
            Err(miss) => miss,
        };
        let Granted { block, addr } = grant_uncached(self, bytes, stream, miss, at)?;
        if block != BlockId::NONE {
            let guard = self.state().shared();
            guard.state.raw.insert(addr, block);
        }
        Ok(DevicePtr(addr))
    }

    /// Frees a pointer from [`Allocator::alloc_raw`]. A null pointer is ignored.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here: foreign, inside a block,
    /// or freed before.
    #[track_caller]
    #[inline]
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<(), AllocError> {
        self.free_raw_after(ptr, None, Location::caller())
    }

    /// Frees a raw allocation in the order of `stream`, as `cuMemFreeAsync(ptr, stream)`: work
    /// enqueued on `stream` until now may still use the memory. Nothing waits.
    ///
    /// The memory is reused once that work is done, or by streams that are ordered after it; also
    /// once the work is done that the streams noted by [`Allocator::record_stream_raw`] have until
    /// now. The stream of the allocation itself always counts, as of now. So `stream` need not be
    /// ordered after any other one. On the stream of the allocation, this is
    /// [`Allocator::free_raw`].
    ///
    /// # Errors
    /// As [`Allocator::free_raw`]; a stream of another device. The pointer is live afterwards.
    #[track_caller]
    pub fn free_raw_on(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        self.check_stream(stream)?;
        self.free_raw_after(ptr, Some(stream), Location::caller())
    }

    #[inline]
    fn free_raw_after(
        &self,
        ptr: DevicePtr,
        on: Option<&Stream>,
        at: &'static Location<'static>,
    ) -> Result<(), AllocError> {
        fork::check(Operation::Free)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let state = self.state();
        let block = state.raw.remove(ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        on.into_iter().for_each(|stream| note_use(self, block, stream));
        if self.is_watched() {
            state.report_end(ptr, Some(at));
        }
        state.free(block, 0, None, UNKNOWN);
        Ok(())
    }

    /// Returns an owner of a raw allocation whose uses are unknown. Its drop waits for the device
    /// and then frees the memory. While a stream captures, a later call of the device does that.
    /// After an error of the device, the memory stays allocated and a warning is traced.
    #[doc(hidden)]
    pub fn freed_once_idle(&self, ptr: DevicePtr) -> impl Any + Send + Sync + use<> {
        FreedOnceIdle(self.clone(), ptr)
    }

    /// Notes that `stream` uses a raw allocation too, as [`crate::Allocation::record_stream`].
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here; a stream of another
    /// device.
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        self.check_stream(stream)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        self.state().look_at_raw(ptr, |block| note_use(self, block, stream))
    }

    /// True if the memory is of a pool that keeps it for the graph with these launches.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    #[doc(hidden)]
    pub fn is_kept_for(&self, ptr: DevicePtr, launches: &Launches) -> Result<bool, AllocError> {
        let state = self.state();
        state.look_at_raw(ptr, |block| {
            let core = state.shared();
            let number = core.heap().block(block).pool;
            let owner = core.pools.owner_of(number);
            // A graph's pool serves other requests, too, from memory that it does not keep.
            owner.is_some_and(|private| private.keeps_for_graphs(number) && private.graphs.has(launches))
        })
    }

    /// The size in bytes of a live raw allocation's block, rounding included.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    pub fn size_of_raw(&self, ptr: DevicePtr) -> Result<u64, AllocError> {
        fork::check(Operation::MemoryInfo)?;
        let state = self.state();
        state.look_at_raw(ptr, |block| state.shared().heap().block(block).size)
    }
}

/// The result of [`Allocator::freed_once_idle`].
struct FreedOnceIdle(Allocator, DevicePtr);

impl Drop for FreedOnceIdle {
    fn drop(&mut self) {
        let FreedOnceIdle(allocator, ptr) = self;
        let device = allocator.device();
        // Asked before: a wait that is refused first drops what else was left.
        let waited = (!device.is_capturing()).then(|| device.synchronize_enqueued());
        let freed = match waited {
            Some(Ok(())) => allocator.free_raw(*ptr),
            Some(Err(error)) if error.kind != ErrorKind::Capture => Err(error.into()),
            _ => return device.drop_later(Box::new(FreedOnceIdle(allocator.clone(), *ptr))),
        };
        if let Err(error) = freed {
            tracing::warn!(target: "aquifer::reclaim", ptr = ptr.0, %error, "memory in use stays allocated");
        }
    }
}

/// Notes that a stream uses a live block, which no other thread can free meanwhile.
fn note_use(allocator: &Allocator, block: BlockId, stream: &Stream) {
    let stream = acting(stream);
    let mut shared = allocator.state().shared();
    let stream = shared.stream(&stream);
    shared.note_use(block, stream);
}

impl Allocator {
    /// Allocates raw memory that may be used at once on every stream, and by the host's blocking
    /// copies, as that of the synchronous `cuMemAlloc`: all earlier uses of the memory are done.
    /// Memory of which that is known is taken first, then memory of the device; the host waits only
    /// before it would run out. (With `cross_stream:wait` memory of other streams comes before that
    /// of the device, and is waited for.)
    ///
    /// [`Allocator::free_raw`] gives it back for use at once, so before that **the caller must wait
    /// for all work that uses it**, as `cuMemFree` does, such as with
    /// [`aquifer_device::Device::synchronize`]. [`Allocator::free_raw_on`] gives it back in the
    /// order of a stream, without waiting, if no other stream uses it or those that do are
    /// recorded.
    ///
    /// # Errors
    /// As [`Allocator::alloc_raw`]; a driver that refuses a stream, or to wait for one.
    #[track_caller]
    pub fn alloc_raw_ready(&self, bytes: u64) -> Result<DevicePtr, AllocError> {
        fork::check(Operation::Alloc)?;
        let stream = self.ready_stream()?;
        let ptr = self.alloc_raw(bytes, stream)?;
        if let Err(error) = wait_for_all_before(self, stream) {
            self.free_raw(ptr)?;
            return Err(error);
        }
        Ok(ptr)
    }
}

/// Waits on the host until all is done that the later work of a stream is ordered after. Mostly all
/// is known done.
fn wait_for_all_before(allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
    let clock = stream.timeline().clock();
    let shared = allocator.state().shared();
    let others = shared.streams.ids().filter(|&other| other != StreamId::of(stream));
    let pending =
        shared.streams.not_done(others.map(|other| Use { stream: other, after: After::ordered(&clock, other) }));
    drop(shared);
    Ok(pending.iter().try_for_each(|tick| tick.timeline().synchronize(tick.n()))?)
}

/// The owner of a live raw allocation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RawOwner {
    /// A handle of the allocator, of which [`Allocator::device`] is the device.
    pub allocator: Allocator,
    /// The pointer that the allocation is freed with.
    pub ptr: DevicePtr,
    /// Bytes requested.
    pub bytes: u64,
}

/// Finds the live raw allocation that contains an address, among those of all allocators of the
/// process: for `free(ptr)` without a device, `cuMemGetAddressRange` and the like. `None` for other
/// memory, and in a forked child.
///
/// The first address of an allocation is found at once. For another one, all raw pointers of the
/// process are looked at, without a lock. Virtual devices may use the same addresses; the
/// allocator that was made first is found.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer_allocator::owner_of;
/// let device = aquifer::open("sim:24GiB")?;
/// let memory = Allocator::of(&device)?;
/// let ptr = memory.alloc_raw(1000, device.default_stream())?;
/// let owner = owner_of(ptr.offset(999)).expect("it is a raw allocation");
/// assert_eq!((owner.ptr, owner.bytes), (ptr, 1000));
/// owner.allocator.free_raw(owner.ptr)?;
/// assert!(owner_of(ptr).is_none());
/// # Ok::<(), aquifer::Error>(())
/// ```
pub fn owner_of(ptr: DevicePtr) -> Option<RawOwner> {
    if ptr.0 == 0 || fork::is_child() {
        return None;
    }
    all_open(None).into_iter().find_map(|allocator| {
        let (ptr, bytes) = find(allocator.state(), ptr)?;
        Some(RawOwner { allocator, ptr, bytes })
    })
}

/// The raw allocation of an allocator state that contains an address: its pointer, and its
/// requested bytes.
fn find(state: &'static AllocatorState, addr: DevicePtr) -> Option<(DevicePtr, u64)> {
    let bytes_of =
        |ptr: u64| state.look_at_raw(DevicePtr(ptr), |block| state.shared().heap().block(block).requested).ok();
    if let Some(bytes) = bytes_of(addr.0) {
        return Some((addr, bytes));
    }
    // Allocations do not overlap, so only the last one that begins before may contain the address.
    let ptr = state.raw.last_until(addr.0)?;
    let bytes = bytes_of(ptr)?;
    (addr.0 - ptr < bytes).then_some((DevicePtr(ptr), bytes))
}
