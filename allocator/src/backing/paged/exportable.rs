//! Exportable memory: physical memory for which another process or device driver can be given a
//! handle.
//!
//! It shares nothing with other blocks and never moves, because an importer of the handle sees the
//! physical memory, not the addresses. It is one granule, however large, so that there is one
//! handle to export. When its owner gives it up, it goes back to the device once the streams that
//! used it are done.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::{
    Attribute, DeviceError, DevicePtr, ErrorKind, HandleKind, PhysicalOptions, RawPhysical, RequestError, Reservation,
    Stream,
};

use crate::allocation::{Allocation, WATCHED};
use crate::allocator::Allocator;
use crate::backing::growth::{buyable, room};
use crate::backing::paged::carry_out::release;
use crate::backing::paged::dedicated::DedicatedMemory;
use crate::backing::segments::grow_segment_of;
use crate::core::limits::Refusal;
use crate::core::paged::granules::POOL;
use crate::core::pools::{PoolOptions, Private};
use crate::error::AllocError;
use crate::pools::{refuse_capture_dedicated, refuse_unannounced_capture};
use crate::recovery::ladder::climb_dedicated;
use crate::recovery::oom::Tried;
use crate::size_class::{PoolKind, REQUEST_LIMIT, ROUND_LARGE};
use crate::storage::{Memory, Storage};
use crate::tags::Tag;
use crate::types::Request;

/// Memory whose physical handle can be exported. Dropping it, and the buffers made of it, gives it
/// up without a driver call and without waiting; it goes back to the device at a later operation,
/// once the streams that used it are done. Where memory is mapped, it keeps the allocator open.
///
/// As with [`crate::Allocation`], the memory is for work on the stream that it was allocated for.
/// Other streams take access guards on a [`Exportable::storage`], or are noted with
/// [`Exportable::record_stream`]. The work of other processes is not ordered here; that is up to
/// them.
#[must_use = "dropping the handle gives the memory back"]
pub struct Exportable {
    storage: Arc<Storage>,
    /// `None` where the memory is a segment of its own.
    physical: Option<RawPhysical>,
}

impl Allocator {
    /// Allocates memory that can be exported as a handle of the given kind; see
    /// [`Exportable::handle`]. Its size is rounded up to the device's granularity (2 MiB), it
    /// counts towards the limit, and it always comes from the device, never from cached memory. It
    /// is meant for few and large buffers.
    ///
    /// Where memory comes in segments, it is a segment of its own, of the same size, which other
    /// processes can open by its pointer. Statistics by pool, and snapshots, show it in a private
    /// pool of its own.
    ///
    /// ```
    /// use aquifer::device::HandleKind;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let shared = memory.alloc_exportable(3 << 20, HandleKind::PosixFd, device.default_stream())?;
    /// let physical = shared.handle().expect("memory is mapped here"); // for `cuMemExportToShareableHandle`
    /// assert_eq!(memory.memory_reserved(), 4 << 20);
    /// # drop((shared, physical));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`aquifer_device::RequestError::Unsupported`] where the device has no such handles; when the
    /// stream captures; otherwise as [`Allocator::alloc_bytes`].
    #[track_caller]
    pub fn alloc_exportable(&self, bytes: u64, kind: HandleKind, stream: &Stream) -> Result<Exportable, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Map)?;
        self.check_stream(stream)?;
        if bytes >= REQUEST_LIMIT {
            return Err(AllocError::TooLarge { requested: bytes });
        }
        refuse_capture_dedicated(stream)?;
        let shared = self.state().shared();
        let options = shared.granule().map(|_| shared.paged().options.exportable(kind));
        drop(shared);
        let (Some(options), Some(granularity)) =
            (options.filter(|_| bytes > 0), self.device().info().granularity_bytes)
        else {
            return alloc_dedicated_segment(self, bytes, stream);
        };
        can_export(self, kind)?;
        let size = bytes.next_multiple_of(granularity);
        let id = self.state().shared().stream(stream);
        refuse_unannounced_capture(self, id)?;
        let request =
            Request { requested: bytes, size, pool: POOL, stream: id, tag: Tag::current(), is_regular: false };
        let (ptr, physical) = climb_dedicated(self, &request, Tried::for_dedicated(0), false, || {
            try_exportable(self, &request, options)
        })?;
        let memory = Arc::new(DedicatedMemory::new(self, ptr, bytes, id));
        let at = Location::caller();
        self.state().tell_witness(|witness| memory.report_block(witness, bytes, at));
        Ok(Exportable { storage: Arc::new(Storage::new(Memory::Dedicated(memory), stream)), physical: Some(physical) })
    }
}

/// Allocates a segment for this memory alone, in a private pool that is closed again at once. So
/// the segment, once free, goes back to the device the next time that unused memory does. It has
/// the same size as mapped exportable memory, because opening it by its pointer gives access to the
/// driver's whole allocation.
#[track_caller]
fn alloc_dedicated_segment(allocator: &Allocator, bytes: u64, stream: &Stream) -> Result<Exportable, AllocError> {
    let memory = if bytes == 0 { allocator.alloc_bytes(0, stream)? } else { alloc_segment(allocator, bytes, stream)? };
    Ok(Exportable { storage: Arc::new(Storage::new(Memory::of(memory, allocator), stream)), physical: None })
}

#[track_caller]
fn alloc_segment(allocator: &Allocator, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
    let private = allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() })?;
    let stream = allocator.state().shared().stream(stream);
    refuse_unannounced_capture(allocator, stream)?;
    let shared = allocator.state().shared();
    let mut numbers = shared.pools.find(private.key()).into_iter().flat_map(Private::numbers);
    let pool = numbers.find(|&number| number.kind() == PoolKind::Large).unwrap_or(POOL);
    drop(shared);
    let size = bytes.next_multiple_of(allocator.device().info().granularity_bytes.unwrap_or(ROUND_LARGE));
    let request = Request { requested: bytes, size, pool, stream, tag: Tag::current(), is_regular: false };
    let granted = climb_dedicated(allocator, &request, Tried::for_dedicated(0), false, || {
        grow_segment_of(allocator, &request, size)
    })?;
    let ptr = DevicePtr(granted.addr);
    let state = allocator.state();
    state.report_block(granted.block, ptr, bytes, Location::caller());
    let mark = if allocator.is_watched() { WATCHED } else { 0 };
    Ok(Allocation::new(state, granted.block, stream.0 | mark, ptr, bytes))
}

fn can_export(allocator: &Allocator, kind: HandleKind) -> Result<(), AllocError> {
    let (attribute, what) = match kind {
        HandleKind::PosixFd => {
            (Attribute::PosixFdHandles, "physical memory that can be exported as POSIX file descriptors")
        }
    };
    let supports = match allocator.device().driver().attribute(attribute) {
        Err(error) if error.kind == ErrorKind::Unsupported => 0,
        supports => supports?,
    };
    if supports == 0 { Err(AllocError::Request(RequestError::Unsupported { what })) } else { Ok(()) }
}

fn try_exportable(
    allocator: &Allocator,
    request: &Request,
    options: PhysicalOptions,
) -> Result<Result<(DevicePtr, RawPhysical), Refusal>, AllocError> {
    let room = room(allocator)?;
    let _gate = allocator.gate()?.shared();
    let mut shared = allocator.state().shared();
    if shared.is_asleep() {
        return Err(AllocError::Asleep);
    }
    let (buyable, refusal) = buyable(allocator, &shared, &room);
    if request.size > buyable {
        return Ok(Err(refusal));
    }
    shared.begin_growing(request.size);
    let access = shared.paged().access.clone();
    drop(shared);
    let mapped = map_exportable(allocator, request.size, options, &access);
    let mut guard = allocator.state().lock();
    guard.end_growing(request.size);
    let (ptr, physical) = match mapped {
        Ok(mapped) => mapped,
        Err(error) if error.is_out_of_memory() => return Ok(Err(Refusal::Device)),
        Err(error) if error.kind == ErrorKind::OutOfAddresses => return Ok(Err(Refusal::Addresses)),
        Err(error) => return Err(error.into()),
    };
    guard.add_exportable(request, ptr.0, physical);
    Ok(Ok((ptr, physical)))
}

/// Makes the driver calls. If one fails, the earlier ones are undone; what cannot be undone now,
/// the device object undoes later.
fn map_exportable(
    allocator: &Allocator,
    size: u64,
    options: PhysicalOptions,
    access: &[u32],
) -> Result<(DevicePtr, RawPhysical), DeviceError> {
    let (device, driver) = (allocator.device(), allocator.device().driver());
    device.settle_unused();
    let physical = driver.create_physical(size, options)?;
    let ptr = match driver.reserve(size, 0) {
        Ok(ptr) => ptr,
        Err(error) => {
            release(device, physical);
            return Err(error);
        }
    };
    let mapped = driver.map(ptr, size, physical);
    let accessible = mapped.clone().and_then(|()| driver.set_access(ptr, size, access));
    match accessible {
        Ok(()) => {
            allocator.state().tell_witness(|witness| witness.managed(ptr.range(size)));
            allocator.hooks().mapped(ptr.0, size);
            Ok((ptr, physical))
        }
        Err(error) => {
            let mapped = if mapped.is_ok() { vec![(ptr, size, Some(physical))] } else { Vec::new() };
            if mapped.is_empty() {
                release(device, physical);
            }
            device.unreserve_later(Reservation { ptr, bytes: size, mapped });
            Err(error)
        }
    }
}

impl Exportable {
    /// The first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        self.storage.ptr()
    }

    /// Requested bytes.
    pub fn bytes(&self) -> u64 {
        self.storage.bytes()
    }

    /// The addresses of the requested bytes.
    pub fn range(&self) -> Range<u64> {
        self.ptr().range(self.bytes())
    }

    /// The driver's handle of the physical memory, which may be exported while this lives. `None`
    /// where memory comes in segments, which are shared by their pointer.
    pub fn handle(&self) -> Option<RawPhysical> {
        self.physical
    }

    /// The memory, for buffers, kernels, transfers and [`crate::AccessGuard`]s. A handle of it
    /// keeps the memory alive. Work on bare addresses is ordered with other uses of the memory only
    /// under an [`crate::AccessGuard`].
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Notes that `stream` uses the memory, too, as [`crate::Allocation::record_stream`] does.
    /// Streams that take access guards on a buffer do not need it.
    ///
    /// # Errors
    /// When the stream belongs to another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        self.storage.memory().record_stream(stream)
    }
}

impl fmt::Debug for Exportable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exportable")
            .field("ptr", &self.ptr())
            .field("bytes", &self.bytes())
            .field("handle", &self.handle())
            .finish_non_exhaustive()
    }
}
