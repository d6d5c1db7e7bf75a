//! Allocation: handles, storages, raw pointers, memory that grows or is shared with other
//! processes.

use std::sync::Arc;

use aquifer_device::{DevicePtr, HandleKind, Stream, Tick};

use crate::alloc;
use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::backing::paged::{exportable, growable};
use crate::backing::{Exportable, Growable};
use crate::error::AllocError;
use crate::raw::{self, ready};
use crate::storage::{self, Storage, foreign};

impl Allocator {
    /// Allocates `bytes` for work on `stream`, aligned to [`crate::ALIGNMENT`]. The memory is
    /// uninitialised. A request of zero bytes gives a handle with a null pointer and no memory.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], with a report, after everything was tried;
    /// [`AllocError::TooLarge`] from 2^60 bytes on; a stream of another device, or one that
    /// captures while the thread is not routed to a private pool ([`Allocator::capture`]); a
    /// failing driver.
    #[track_caller]
    #[inline]
    pub fn alloc_bytes(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        alloc::alloc_bytes(self, bytes, stream)
    }

    /// Allocates with a larger alignment: a power of two up to 2 MiB. The block is larger than the
    /// request by the alignment less 512 bytes.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`], and an invalid alignment.
    #[track_caller]
    #[inline]
    pub fn alloc_aligned(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        alloc::alloc_aligned(self, bytes, alignment, stream)
    }

    /// Allocates memory and enqueues a fill with zeros on `stream`.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`]; a failing fill gives the memory back.
    #[track_caller]
    pub fn alloc_bytes_zeroed(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        alloc::alloc_bytes_zeroed(self, bytes, stream)
    }

    /// Allocates memory whose handles share it and know the work that uses it, for work of `stream`
    /// and of others. `alignment` is as in [`Allocator::alloc_aligned`].
    ///
    /// # Errors
    /// As [`Allocator::alloc_aligned`].
    #[track_caller]
    pub fn alloc_storage(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        storage::alloc_storage(self, bytes, alignment, stream)
    }

    /// Makes a storage of an allocation of this allocator. The memory counts as written by the work
    /// enqueued on `stream` until now, so earlier work of other streams with it must be ordered
    /// before that.
    ///
    /// # Errors
    /// When the stream belongs to another device, or the allocation to another allocator. The
    /// allocation is then dropped.
    pub fn storage_of(&self, allocation: Allocation, stream: &Stream) -> Result<Arc<Storage>, AllocError> {
        storage::storage_of(self, allocation, stream)
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
        foreign::import(self, ptr, bytes, stream, release)
    }

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
        raw::alloc_raw(self, bytes, stream)
    }

    /// Frees a pointer from [`Allocator::alloc_raw`]. A null pointer is ignored.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here: foreign, inside a block,
    /// or freed before.
    #[track_caller]
    #[inline]
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<(), AllocError> {
        raw::free_raw(self, ptr)
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
        raw::free_raw_on(self, ptr, stream)
    }

    /// Notes that `stream` uses a raw allocation too, as [`crate::Allocation::record_stream`].
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here; a stream of another
    /// device.
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        raw::record_stream_raw(self, ptr, stream)
    }

    /// The size in bytes of a live raw allocation's block, rounding included.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    pub fn size_of_raw(&self, ptr: DevicePtr) -> Result<u64, AllocError> {
        raw::size_of_raw(self, ptr)
    }

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
        ready::alloc_raw_ready(self, bytes)
    }

    /// Reserves addresses for `capacity` bytes, without memory yet, for work on `stream`.
    ///
    /// # Errors
    /// [`AllocError::NotMapped`] where memory comes in segments; [`AllocError::TooLarge`] from 2^60
    /// bytes on; when the stream belongs to another device; errors of the driver, among them
    /// [`aquifer_device::ErrorKind::OutOfAddresses`].
    pub fn growable(&self, capacity: u64, stream: &Stream) -> Result<Growable, AllocError> {
        growable::growable(self, capacity, stream)
    }

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
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, HandleKind};
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let shared = allocator.alloc_exportable(3 << 20, HandleKind::PosixFd, device.default_stream())?;
    /// let physical = shared.handle().expect("memory is mapped here"); // for `cuMemExportToShareableHandle`
    /// assert_eq!(allocator.memory_reserved(), 4 << 20);
    /// # drop((shared, physical));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`aquifer_device::RequestError::Unsupported`] where the device has no such handles; when the stream
    /// captures; otherwise as [`Allocator::alloc_bytes`].
    #[track_caller]
    pub fn alloc_exportable(&self, bytes: u64, kind: HandleKind, stream: &Stream) -> Result<Exportable, AllocError> {
        exportable::alloc_exportable(self, bytes, kind, stream)
    }
}
