//! The `Driver` trait: all the calls that this project makes on one GPU, in the shape of the CUDA
//! driver API.
//!
//! One object drives one device. The trait is object-safe and **handles are checked**: given a
//! handle, pointer or range that is not live, an implementation must return a typed error
//! (`INVALID_HANDLE` or `INVALID_VALUE`), and never cause undefined behaviour. As with CUDA, a new
//! object may get the handle of a destroyed one, so code that needs a lasting identity must keep
//! its own (see [`crate::Stream::id`]). Only calls that take raw host pointers, take host memory
//! away, or run foreign code, are `unsafe`.
//!
//! All calls may be made from any thread.
//!
//! The types of its arguments and results have files of their own: addresses and handles
//! (`handles.rs`), facts about a device and flags of streams (`facts.rs`); and, next to this
//! folder, options of physical memory (`physical.rs`), rows and batches of copies (`copies.rs`),
//! and kernels (`launch.rs`).

mod facts;
mod forward;
pub(crate) mod handles;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

pub use facts::{Attribute, CaptureStatus, DeviceInfo, MemoryInfo, MemoryUsers, PoolUsage, ProcessMemory, StreamFlags};
pub use handles::{DevicePtr, HostPtr, RawEvent, RawGraph, RawModule, RawPhysical, RawStream};

use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;
use crate::witness::Witness;

/// Something that is kept alive for a graph.
pub(crate) type KeptAlive = Arc<dyn Any + Send + Sync>;

/// All the calls that this project makes on one GPU, in the shape of the CUDA driver API.
///
/// Handles are checked: given a handle, pointer or range that is not live, a method returns a typed
/// error (`INVALID_HANDLE` or `INVALID_VALUE`), and never causes undefined behaviour. All methods
/// may be called on any thread.
///
/// Methods that *enqueue* put work on a stream and return before it is done. Errors of the work
/// itself surface at later calls, as with CUDA. Sizes and pitches are in bytes. A copy or fill of 0
/// bytes checks the stream and enqueues nothing.
///
/// A method behaves as the CUDA call of the same purpose ([`crate::Operation::name`]), except where
/// its documentation differs. Once the device is lost, every method that makes a driver call fails
/// with [`crate::ErrorKind::DeviceLost`].
#[allow(
    clippy::missing_errors_doc,
    reason = "each error is the driver's own for that call; the contract is in the trait's documentation"
)]
pub trait Driver: fmt::Debug + Send + Sync {
    /// Facts about the device that never change. Makes no driver call.
    fn info(&self) -> &DeviceInfo;

    /// The object that makes the driver calls, if its type is public. A driver that wraps another
    /// one returns what the inner one returns, so that two devices recognise each other's drivers
    /// in [`Driver::copy_peer`] and [`Driver::wait_peer`].
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// The streams that are known to capture in the context of this driver. Drivers of one context
    /// return the same object, and a driver that wraps another one returns the inner one's. Makes
    /// no driver call.
    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        Arc::default()
    }

    /// Free and total memory of the device in bytes.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// The holders of the device's memory. Unknown parts are `None`.
    fn memory_users(&self) -> MemoryUsers {
        MemoryUsers::default()
    }

    /// A numeric attribute; 0 for a capability that is absent.
    fn attribute(&self, attribute: Attribute) -> Result<u64>;

    /// Allocates `bytes` (not 0) of device memory, aligned to at least 512 bytes.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr>;

    /// Frees an allocation of [`Driver::alloc`] or [`Driver::alloc_async`] by its first address.
    /// Waits until the device has finished all its work, as `cuMemFree` may; so it is refused while
    /// a stream captures.
    fn free(&self, ptr: DevicePtr) -> Result<()>;

    /// Allocates `bytes` from the driver's stream-ordered pool, usable by work enqueued on `stream`
    /// from now on. Refused where [`Attribute::MemoryPools`] is 0 and, unlike CUDA, while the
    /// stream captures.
    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr>;

    /// Frees an allocation of [`Driver::alloc_async`] once the work enqueued on `stream` until now
    /// is done. Other memory is refused, and so is a stream that captures.
    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()>;

    /// Reserves `bytes` of addresses, a multiple of the granularity
    /// ([`DeviceInfo::granularity_bytes`]), without memory behind them. The first address is a
    /// multiple of the granularity and of `alignment`, which is a power of two, or 0. Fails with
    /// [`crate::ErrorKind::OutOfAddresses`] when addresses run out.
    fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr>;

    /// Gives the reservation of `bytes` bytes at `ptr` back. Refuses a part of a reservation, and
    /// one in which memory is mapped.
    fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Creates `bytes` of physical memory, a multiple of the granularity, with the given
    /// properties. Refuses properties that the device lacks, where CUDA may ignore them.
    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical>;

    /// Releases the handle of physical memory. The memory goes back to the device once it is mapped
    /// nowhere.
    fn release_physical(&self, physical: RawPhysical) -> Result<()>;

    /// Maps all of `physical` at `ptr`, inside one reservation, where nothing is mapped yet.
    /// `bytes` must be its whole size. Does not wait for work. No device has access before
    /// [`Driver::set_access`]. Physical memory may be mapped at several addresses at once, unless
    /// the driver refuses that; work on one of them is then ordered against work on the others as
    /// if it used the same address.
    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()>;

    /// Unmaps `bytes` bytes at `ptr`, which whole mappings must tile. Does not wait for work: the
    /// caller must know that work which uses them is done.
    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Lets `devices`, given by ordinal, read and write the `bytes` bytes at `ptr`, which whole
    /// mappings must tile. Devices that had access keep it. Each mapping has its own list of
    /// devices: a peer must be given access to every new mapping.
    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()>;

    /// Allocates pinned host memory, aligned to 4096 bytes. Its bytes are unspecified, but
    /// initialised: the system never hands out pages without contents.
    fn host_alloc(&self, bytes: usize) -> Result<HostPtr>;

    /// Frees pinned host memory. Does not wait for work: the caller must know it is done.
    ///
    /// A [`HostPtr`] can be made of any address, even that of a live buffer. So only the owner may
    /// free:
    ///
    /// ```compile_fail,E0133
    /// use aquifer_device::{Driver, HostPtr};
    /// fn free(driver: &dyn Driver, lent: &[u8]) {
    ///     driver.host_free(HostPtr(lent.as_ptr().addr())).unwrap();
    /// }
    /// ```
    ///
    /// # Safety
    /// If pinned memory starts at `ptr`, the caller owns it: there is no reference to it,
    /// nothing reads or writes it any more, on the host or the device, and nothing else frees it.
    /// Graphs that copy from or to it are not launched again. Any other address is refused.
    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()>;

    /// Announces that the host reads or writes pinned memory now. A driver that checks programs
    /// looks for work of the device that may conflict; others do nothing. Touches no memory itself
    /// at any address, makes no driver call, and works on a lost device too.
    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()>;

    /// Pins `bytes` bytes at `ptr` that the caller allocated. From then on, copies may name
    /// any part of them.
    ///
    /// # Safety
    /// `ptr..ptr + bytes` must stay readable and writable until it is unregistered.
    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr>;

    /// Undoes [`Driver::host_register`]. The caller must know that work which uses the memory is
    /// done. This still waits for all work of the device, so that no work ever meets memory
    /// which its owner has freed. It is therefore refused while a stream captures; the capture goes
    /// on.
    ///
    /// # Safety
    /// If registered memory starts at `ptr`, the caller registered it, and nothing else relies on
    /// its being pinned. Graphs that copy from or to it are not launched again. Any other
    /// address is refused.
    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()>;

    /// Creates a stream.
    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream>;

    /// Destroys a stream that was created here. Its pending work still runs. Default and adopted
    /// streams are refused.
    fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Makes a stream of another owner known, so that calls may name it until
    /// [`Driver::release_stream`]. Checks nothing: an unusable stream fails when it is used.
    ///
    /// # Safety
    /// The stream must stay alive until it is released.
    unsafe fn adopt_stream(&self, _stream: RawStream) {}

    /// Forgets a stream adopted with [`Driver::adopt_stream`], without destroying it. Does nothing
    /// for other streams.
    fn release_stream(&self, _stream: RawStream) {}

    /// Waits on the host until all work enqueued on the stream is done. Refused while the stream
    /// captures.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// True if all work enqueued on the stream is done. Refused while the stream captures.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Creates an event. [`Driver::elapsed_ms`] needs events created with `timing`.
    fn create_event(&self, timing: bool) -> Result<RawEvent>;

    /// Destroys an event.
    fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Records the event behind the work enqueued on the stream until now. An earlier record of it
    /// no longer counts.
    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Makes work enqueued on `stream` from now on wait for the event's latest record. An event
    /// never recorded orders nothing.
    fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Makes work enqueued on `stream` from now on wait for the latest record of an event of
    /// another device, `peer`, which must be of the same kind. An event never recorded orders
    /// nothing. An event that was recorded in a capture must not be passed.
    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()>;

    /// True if the work before the event's latest record is done, or if the event was never
    /// recorded.
    fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Waits on the host until the work before the event's latest record is done. The thread sleeps
    /// meanwhile; it does not spin.
    fn synchronize_event(&self, event: RawEvent) -> Result<()>;

    /// Milliseconds between the latest records of two events created with timing. Fails unless both
    /// records are complete.
    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64>;

    /// Waits on the host until all work of the device is done. Refused while a stream captures.
    fn synchronize(&self) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes from host memory. Pageable memory, which this driver
    /// neither allocated nor registered, is read before this returns, and cannot be copied in a
    /// capture.
    ///
    /// # Safety
    /// `src..src + bytes` must be readable now and, if pinned, stay readable and unwritten
    /// until the copy is done. A copy in a capture is done when its graph was destroyed and all
    /// launches of it are done. After an error, part of the copy may be under way, from memory of
    /// either kind, until the stream was waited for.
    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes to host memory. Pageable memory, which this driver neither
    /// allocated nor registered, holds the bytes when this returns, and cannot be copied to in a
    /// capture.
    ///
    /// # Safety
    /// `dst..dst + bytes` must be writable now and, if pinned, stay writable and untouched
    /// until the copy is done. A copy in a capture is done when its graph was destroyed and all
    /// launches of it are done. After an error, part of the copy may be under way, into memory of
    /// either kind, until the stream was waited for.
    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes within the device. Refuses ranges that overlap.
    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes from the memory of another device, `peer`, into this one's.
    /// Both must be of the same kind. They need no access to each other's memory; where they have
    /// none, the driver goes through the host. Refused in captures.
    ///
    /// Nothing on the peer waits for the copy, not even freeing the source: order such calls after
    /// the copy with [`Driver::wait_peer`].
    fn copy_peer(&self, dst: DevicePtr, peer: &dyn Driver, src: DevicePtr, bytes: u64, stream: RawStream)
    -> Result<()>;

    /// Enqueues a copy of `height` rows of `width` bytes. Refuses a pitch below `width` or beyond
    /// the device's limit (on GPUs about 2 GiB), host memory that is not pinned, copies within
    /// the host, and rows written where others are read or written.
    ///
    /// # Safety
    /// Host memory that the copy reads must stay unwritten, and host memory that it writes
    /// untouched, until the copy is done. A copy in a capture is done when its graph was destroyed
    /// and all launches of it are done.
    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()>;

    /// Enqueues many copies with one call. Nothing orders them among themselves, so none may write
    /// bytes that another one reads or writes. Not supported where [`Attribute::BatchedCopies`] is
    /// 0, in captures, for registered memory ([`Driver::host_register`]) that the device knows by
    /// another address than the host, and on the legacy default stream; then nothing is enqueued.
    ///
    /// # Safety
    /// Host memory that the copies read must stay unwritten, and host memory that they write
    /// untouched, until the copies are done.
    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()>;

    /// Enqueues a fill: sets each of `bytes` bytes at `ptr` to `value`.
    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()>;

    /// Loads a module of kernels from PTX text, which the driver compiles for the device.
    fn load_module(&self, ptx: &str) -> Result<RawModule>;

    /// Unloads a module. Does not wait for work: the caller must know that its kernels are done.
    fn unload_module(&self, module: RawModule) -> Result<()>;

    /// Enqueues a kernel. A kernel without a module has no device code, and only the simulated
    /// device runs it.
    ///
    /// # Safety
    /// The kernel must touch exactly the declared ranges, and the launch must give it the arguments
    /// that it expects.
    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()>;

    /// Starts to capture: work enqueued on the stream from now on is recorded into a graph instead
    /// of run. Refused on the legacy default stream, and while the stream captures.
    fn begin_capture(&self, stream: RawStream) -> Result<()>;

    /// Whether work of the stream is captured now. Legal at any time; breaks no capture.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// The driver's number of the capture that the stream is part of, which no other capture of the
    /// process has; `None` if it captures nothing. Fails if an earlier call broke the capture.
    /// Legal at any time; breaks no capture.
    fn capture_number(&self, _stream: RawStream) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Keeps `what` until the graph that the stream captures is gone, with its clones, the
    /// executables made of them, and all launches. Fails if the stream does not capture.
    fn keep_for_graph(&self, _stream: RawStream, _what: KeptAlive) -> Result<()> {
        Err(DeviceError::refused(Operation::CaptureStatus, Code::NOT_SUPPORTED)
            .with_detail("this device does not tell when a graph is gone"))
    }

    /// Takes what was kept for graphs that are gone by now. Makes no driver call. What is kept
    /// should keep the device, as nothing is taken after its end.
    fn take_kept(&self) -> Vec<KeptAlive> {
        Vec::new()
    }

    /// A number by which the driver identifies the stream, never used again, unlike the handle;
    /// `None` where the driver has none. On CUDA refused while the stream captures.
    fn stream_id(&self, stream: RawStream) -> Result<Option<u64>>;

    /// Bytes that the driver's stream-ordered pool holds and uses, and that graphs hold.
    fn pool_usage(&self) -> Result<PoolUsage>;

    /// Makes the driver's stream-ordered pool give unused memory back to the device, until it holds
    /// at most `keep` bytes or all that is left is in use.
    fn trim_pool(&self, keep: u64) -> Result<()>;

    /// Makes the driver give back memory that it keeps for graphs with allocations of their own,
    /// and that none of them uses now. Does nothing where there is no such memory.
    fn trim_graph_memory(&self) -> Result<()> {
        Ok(())
    }

    /// True if this device can access the memory of the device with the ordinal `peer`, once that
    /// one's driver allows it with [`Driver::set_access`]. False for this device itself.
    fn can_access_peer(&self, peer: u32) -> Result<bool>;

    /// Ends the stream's capture and returns the graph, ready to launch. Fails if the stream does
    /// not capture, or if an earlier call broke the capture, which is gone then.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph>;

    /// Enqueues one run of a captured graph. It comes after earlier runs of the same graph, on
    /// whichever streams they were enqueued.
    fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()>;

    /// Destroys a graph.
    fn destroy_graph(&self, graph: RawGraph) -> Result<()>;

    /// The witness of a driver that checks how programs use the device. `None` on real hardware.
    fn witness(&self) -> Option<Arc<dyn Witness>> {
        None
    }

    /// Takes the oldest error of the program that the driver found and that was not taken yet.
    /// Always `None` without a [`Driver::witness`].
    fn take_violation(&self) -> Option<String> {
        None
    }
}
