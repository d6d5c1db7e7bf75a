//! The `Driver` trait: everything the project asks of one GPU, in the shape of the CUDA driver API.
//!
//! One object drives one device. The trait is object-safe and **handles are checked**: an implementation must answer a
//! handle, pointer or range that is not live with a typed error (`INVALID_HANDLE` or `INVALID_VALUE`), never with
//! undefined behaviour. As with CUDA, the value of a destroyed handle may come back for a new object, so whoever needs a
//! lasting identity must use its own (see [`crate::Timeline::id`]). Only calls that take raw host pointers, take host
//! memory away, or run foreign code, are `unsafe`.
//!
//! All calls may be made from any thread. "Asynchronous" calls enqueue work on a stream and return; errors of the work
//! itself surface at later calls, as with CUDA.
//!
//! What its arguments and answers are made of is in files of its own: addresses and handles (`handles.rs`), what is told of a device
//! and how streams are made (`facts.rs`); beside this folder, what physical memory is created for (`physical.rs`), rows and batches of
//! copies (`copies.rs`), and kernels (`launch.rs`).

mod facts;
mod handles;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

pub use facts::{Attribute, CaptureStatus, DeviceInfo, DriverKind, MemoryInfo, PoolUsage, StreamFlags};
pub use handles::{DevicePtr, HostPtr, RawEvent, RawGraph, RawModule, RawPhysical, RawStream};

use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::error::Result;
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;

/// Everything the project asks of one GPU.
///
/// Handles are checked: one that is not live is answered with a typed error, never with undefined behaviour.
///
/// Each method documents only what differs from the CUDA call of the same purpose ([`crate::Operation::name`]).
/// Every method fails with [`crate::ErrorKind::DeviceLost`] once the device is lost.
#[allow(
    clippy::missing_errors_doc,
    reason = "each error is the driver's own for that call; the contract is in the module documentation"
)]
pub trait Driver: fmt::Debug + Send + Sync {
    /// Facts that never change. Makes no driver call.
    fn info(&self) -> &DeviceInfo;

    /// The driver that makes the calls, where its own methods are for everybody. One that passes calls on answers for the one
    /// below, so that devices find each other through it: [`Driver::copy_peer`].
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// The streams that are known to capture in the context in which calls are made. Drivers of one context give the same, and one that
    /// passes calls on gives that of the one below. Makes no driver call.
    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        Arc::default()
    }

    /// Free and total memory.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// A numeric attribute; 0 for a capability that is absent.
    fn attribute(&self, attribute: Attribute) -> Result<u64>;

    /// Allocates `bytes` (not 0) of device memory, aligned to at least 512 bytes.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr>;

    /// Frees a plain allocation. Waits until the device has finished all its work, as `cuMemFree` may.
    fn free(&self, ptr: DevicePtr) -> Result<()>;

    /// Allocates from the driver's stream-ordered pool: usable by work enqueued on `stream` from now on.
    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr>;

    /// Frees to the driver's stream-ordered pool, once `stream` gets there.
    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()>;

    /// Reserves `bytes` of addresses, a multiple of the granularity, without memory behind them. The first is a multiple of
    /// the granularity, and of `alignment` where that is more: a power of two, or 0.
    /// Fails with [`crate::ErrorKind::OutOfAddresses`] when addresses run out.
    fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr>;

    /// Gives a whole reservation back; nothing may be mapped in it.
    fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Creates `bytes` of physical memory, a multiple of the granularity, with the given properties. Refuses properties
    /// that the device does not have.
    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical>;

    /// Releases physical memory; it goes back to the device when it is not mapped any more.
    fn release_physical(&self, physical: RawPhysical) -> Result<()>;

    /// Maps all of `physical` at `ptr`, inside a reservation. Does not wait for work; gives no access yet.
    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()>;

    /// Unmaps whole mappings that tile the range. Does not wait for work: the caller must know it is done.
    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()>;

    /// Lets `devices` (ordinals) read and write the whole mappings that tile the range. Devices that had access keep it.
    /// Each mapping has its own list: a peer needs access to every new one.
    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()>;

    /// Allocates page-locked host memory, aligned to 4096 bytes. Its bytes are unspecified, but initialised: the system never hands out
    /// pages without contents.
    fn host_alloc(&self, bytes: usize) -> Result<HostPtr>;

    /// Frees page-locked host memory. Does not wait for work: the caller must know it is done.
    ///
    /// Anybody can make a [`HostPtr`] of any address, that of a live buffer too, so freeing is for the owner alone:
    ///
    /// ```compile_fail,E0133
    /// use aquifer_device::{Driver, HostPtr};
    /// fn free(driver: &dyn Driver, lent: &[u8]) {
    ///     driver.host_free(HostPtr(lent.as_ptr().addr())).unwrap();
    /// }
    /// ```
    ///
    /// # Safety
    /// If page-locked memory starts at `ptr`, the caller owns it: nobody has a reference to it or reads or writes it any more, on the
    /// host or the device, and nobody else frees it. Graphs that copy from or to it are not launched again. An address that no
    /// such memory starts at is refused.
    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()>;

    /// Tells that the host touches page-locked memory now. The simulator looks whether work of the device may conflict; nothing on
    /// CUDA. Reads and writes no memory, whatever the address.
    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()>;

    /// Page-locks memory that the caller allocated, any part of which copies may name from then on.
    ///
    /// # Safety
    /// `ptr..ptr + bytes` must stay readable and writable until it is unregistered.
    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr>;

    /// Undoes [`Driver::host_register`]; the memory is its owner's again. The caller must know that the work which uses it is
    /// done; this waits for such work all the same, so that it never meets memory which is gone.
    ///
    /// # Safety
    /// If registered memory starts at `ptr`, the caller registered it: nobody else counts on its being page-locked. Graphs that copy
    /// from or to it are not launched again. An address that no such memory starts at is refused.
    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()>;

    /// Creates a stream.
    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream>;

    /// Destroys a stream. Its pending work still runs.
    fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Lets calls name a stream that somebody else owns, until [`Driver::release_stream`]. Fails at nothing: what is wrong with the
    /// stream shows when it is used.
    ///
    /// # Safety
    /// The stream must stay alive until it is released.
    unsafe fn adopt_stream(&self, _stream: RawStream) {}

    /// Ends what [`Driver::adopt_stream`] began. A stream that was not adopted is left as it is.
    fn release_stream(&self, _stream: RawStream) {}

    /// Waits on the host until the stream is idle.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// Whether the stream is idle.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Creates an event; `timing` makes [`Driver::elapsed_ms`] possible.
    fn create_event(&self, timing: bool) -> Result<RawEvent>;

    /// Destroys an event.
    fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Records the event at the end of the stream's present work.
    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Makes later work of `stream` wait for the event's latest record. An event never recorded orders nothing.
    fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Makes later work of `stream` wait for the latest record of an event of another device, which must be of the same kind. An
    /// event never recorded orders nothing. One that was recorded in a capture must not be passed.
    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()>;

    /// Whether the event's latest record completed. True for an event never recorded.
    fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Waits on the host for the event's latest record. The thread sleeps meanwhile; it does not spin.
    fn synchronize_event(&self, event: RawEvent) -> Result<()>;

    /// Milliseconds between the latest records of two timing events.
    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64>;

    /// Waits on the host until the device is idle.
    fn synchronize(&self) -> Result<()>;

    /// Enqueues a copy from host memory. From pageable memory the bytes are taken before this returns.
    ///
    /// # Safety
    /// `src..src + bytes` must be readable now, and if it is page-locked stay readable and unwritten until the copy is done. In a
    /// capture that is when its graph was destroyed and all launches of it are done. After an error part of the copy may be under way, from
    /// memory of either kind, until the stream was waited for.
    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a copy to host memory. Into pageable memory this returns only when the bytes are there.
    ///
    /// # Safety
    /// `dst..dst + bytes` must be writable now, and if it is page-locked stay writable and untouched until the copy is done. In a
    /// capture that is when its graph was destroyed and all launches of it are done. After an error part of the copy may be under way, into
    /// memory of either kind, until the stream was waited for.
    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a copy within the device; the ranges must not overlap.
    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()>;

    /// Enqueues a copy from the memory of another device, which must be of the same kind, into this one's. Works whether or not
    /// the devices can access each other's memory; where they cannot, the driver goes through the host. Not supported in
    /// captures.
    ///
    /// Nothing on the peer waits for the copy, freeing the source neither: order that after it with [`Driver::wait_peer`].
    fn copy_peer(&self, dst: DevicePtr, peer: &dyn Driver, src: DevicePtr, bytes: u64, stream: RawStream)
    -> Result<()>;

    /// Enqueues copying `height` rows; neither side's rows may overlap the other's.
    ///
    /// # Safety
    /// Host memory that the copy reads must stay unwritten, and that which it writes untouched, until it is done. In a capture that is
    /// when its graph was destroyed and all launches of it are done.
    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()>;

    /// Enqueues many copies with one call. Nothing orders them among themselves: none may write what another touches.
    /// Not supported where [`Attribute::BatchedCopies`] is 0, in captures, and of registered memory ([`Driver::host_register`]) that the
    /// device knows by another address; then nothing is enqueued.
    ///
    /// # Safety
    /// Host memory that the copies read must stay unwritten, and that which they write untouched, until they are done.
    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()>;

    /// Enqueues filling a range with a byte.
    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()>;

    /// Loads kernels from PTX text, compiled for the device by the driver.
    fn load_module(&self, ptx: &str) -> Result<RawModule>;

    /// Unloads a module. Does not wait for work: the caller must know that its kernels are done.
    fn unload_module(&self, module: RawModule) -> Result<()>;

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The kernel must touch exactly the declared ranges and be given the arguments it expects.
    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()>;

    /// Starts capturing the stream's work into a graph instead of running it.
    fn begin_capture(&self, stream: RawStream) -> Result<()>;

    /// Whether the stream captures. Legal at any time; breaks no capture.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// What the driver calls the stream, unique for its whole life unlike the handle; `None` where it does not tell.
    fn stream_id(&self, stream: RawStream) -> Result<Option<u64>>;

    /// What the driver's stream-ordered pool holds.
    fn pool_usage(&self) -> Result<PoolUsage>;

    /// Makes the driver's stream-ordered pool give unused memory back to the device, down to `keep` bytes.
    fn trim_pool(&self, keep: u64) -> Result<()>;

    /// Whether [`Driver::set_access`] may let the device with the ordinal `peer` touch this one's memory.
    fn can_access_peer(&self, peer: u32) -> Result<bool>;

    /// Ends the capture and returns the graph, ready to launch.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph>;

    /// Enqueues a captured graph.
    fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()>;

    /// Destroys a graph.
    fn destroy_graph(&self, graph: RawGraph) -> Result<()>;

    /// Takes a pending violation found by the simulator's race detector, oldest first. Always `None` on real hardware.
    fn take_violation(&self) -> Option<String> {
        None
    }
}
