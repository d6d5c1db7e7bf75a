//! The `Driver` trait: everything the project asks of one GPU, in the shape of the CUDA driver API.
//!
//! One object drives one device. The trait is object-safe and **handles are checked**: an implementation must answer a
//! handle, pointer or range that is not live with a typed error (`INVALID_HANDLE` or `INVALID_VALUE`), never with
//! undefined behaviour. As with CUDA, the value of a destroyed handle may come back for a new object, so whoever needs a
//! lasting identity must use its own (see [`crate::Timeline::id`]). Only calls that take raw host pointers, or run foreign
//! code, are `unsafe`.
//!
//! All calls may be made from any thread. "Asynchronous" calls enqueue work on a stream and return; errors of the work
//! itself surface at later calls, as with CUDA.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Operation, Result};
use crate::physical::PhysicalOptions;

/// An address in a device's virtual address space, in bytes. Zero is never a valid allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }

    /// The addresses of the `bytes` bytes that start here.
    pub const fn range(self, bytes: u64) -> Range<u64> {
        self.0..self.0 + bytes
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The address of page-locked host memory, as a number so that handles stay `Send`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPtr(pub usize);

impl HostPtr {
    /// The address as a pointer. Dereferencing it follows the usual rules of raw pointers.
    pub const fn as_ptr(self) -> *mut u8 {
        self.0 as *mut u8
    }
}

macro_rules! raw_handles {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        ///
        /// The driver may give the same value to a new object once this one is destroyed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);
    )*};
}

raw_handles! {
    /// A stream, by the driver's handle.
    RawStream,
    /// An event, by the driver's handle.
    RawEvent,
    /// A piece of physical memory, by the driver's handle.
    RawPhysical,
    /// A captured graph, by the driver's handle.
    RawGraph,
}

impl RawStream {
    /// The legacy default stream: it waits for, and is waited for by, every blocking stream of the device.
    /// Handle 0 means the same.
    pub const LEGACY: RawStream = RawStream(1);
    /// The per-thread default stream: a blocking stream of its own for each calling thread.
    pub const PER_THREAD: RawStream = RawStream(2);
}

/// Which kind of driver is below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverKind {
    /// The simulated device.
    Simulated,
    /// A real GPU through the CUDA driver.
    Cuda,
}

/// Facts about a device that never change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Which driver drives it.
    pub kind: DriverKind,
    /// Ordinal among the devices of its kind in this process.
    pub ordinal: u32,
    /// Name for people, such as `"Simulated H100 80GB"`.
    pub name: String,
    /// Memory of the device in bytes.
    pub total_bytes: u64,
    /// Granularity of physical memory and mappings in bytes; `None` where the device cannot map memory.
    pub granularity_bytes: Option<u64>,
    /// Least and greatest stream priority, numerically: greatest priority is the lower number, as with CUDA.
    pub priorities: (i32, i32),
}

impl DeviceInfo {
    /// Facts of a device that cannot map memory and has one stream priority; set the other fields as they apply.
    pub fn new(kind: DriverKind, ordinal: u32, name: impl Into<String>, total_bytes: u64) -> Self {
        DeviceInfo { kind, ordinal, name: name.into(), total_bytes, granularity_bytes: None, priorities: (0, 0) }
    }
}

/// Free and total memory of a device in bytes, other processes' use included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that the driver could still give out.
    pub free: u64,
    /// Bytes of the device.
    pub total: u64,
}

/// A number a device can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Attribute {
    /// Compute capability, major number.
    ComputeCapabilityMajor,
    /// Compute capability, minor number.
    ComputeCapabilityMinor,
    /// Streaming multiprocessors.
    MultiprocessorCount,
    /// Copy engines that run beside kernels.
    AsyncEngineCount,
    /// 1 where the device maps physical memory at reserved addresses.
    VirtualMemoryManagement,
    /// 1 where the driver has a stream-ordered pool.
    MemoryPools,
    /// 1 where physical memory can be made fit for RDMA: [`PhysicalOptions::rdma`].
    GpuDirectRdmaWithVmm,
    /// 1 where physical memory can be exported as a file descriptor: [`PhysicalOptions::exportable`].
    PosixFdHandles,
}

/// How a new stream behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct StreamFlags {
    /// Does not synchronise with the legacy default stream.
    pub non_blocking: bool,
    /// Numerically lower is more urgent; clamped to the device's range.
    pub priority: i32,
}

/// What somebody does to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AccessKind {
    /// Reads it.
    Read,
    /// Writes it, or reads and writes it.
    Write,
}

/// A range of device memory that a kernel touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// First byte.
    pub ptr: DevicePtr,
    /// Length in bytes.
    pub bytes: u64,
    /// What the kernel does to it.
    pub kind: AccessKind,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum KernelArg {
    /// A device address.
    Ptr(DevicePtr),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
}

/// Device memory as a kernel's host implementation sees it, on the simulated device.
///
/// Reading or writing outside the ranges that the launch declared is a fault of the kernel.
pub trait KernelMemory {
    /// Reads `into.len()` bytes at `from`.
    ///
    /// # Errors
    /// When the range was not declared as accessed, or is not mapped.
    fn read(&self, from: DevicePtr, into: &mut [u8]) -> Result<()>;

    /// Writes `bytes` at `to`.
    ///
    /// # Errors
    /// When the range was not declared as written, or is not mapped.
    fn write(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<()>;
}

/// What a kernel computes, as the simulated device runs it.
pub type HostKernel = Arc<dyn Fn(&mut dyn KernelMemory, &[KernelArg]) -> Result<()> + Send + Sync>;

/// One kernel launch: how it is named, shaped and fed, what it touches, and what it computes.
#[derive(Clone)]
pub struct Launch {
    /// Name of the kernel, as in its module.
    pub name: &'static str,
    /// Blocks of the grid, x y z.
    pub grid: [u32; 3],
    /// Threads of a block, x y z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Arguments in order.
    pub args: Vec<KernelArg>,
    /// Every range of device memory that the kernel reads or writes.
    pub accesses: Vec<Access>,
    /// Run by the simulated device; `None` for a kernel that only takes time and touches its ranges.
    pub host: Option<HostKernel>,
    /// Arithmetic operations it performs, for the simulated device's cost model; 0 where memory bounds it.
    pub operations: u64,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("name", &self.name)
            .field("grid", &self.grid)
            .field("block", &self.block)
            .field("args", &self.args)
            .field("accesses", &self.accesses)
            .finish_non_exhaustive()
    }
}

/// Everything the project asks of one GPU.
///
/// Handles are checked: one that is not live is answered with a typed error, never with undefined behaviour.
///
/// Each method documents only what differs from the CUDA call of the same purpose ([`Operation::name`]).
/// Every method fails with [`crate::ErrorKind::DeviceLost`] once the device is lost.
#[allow(
    clippy::missing_errors_doc,
    reason = "each error is the driver's own for that call; the contract is in the module documentation"
)]
pub trait Driver: fmt::Debug + Send + Sync {
    /// Facts that never change. Makes no driver call.
    fn info(&self) -> &DeviceInfo;

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

    /// Reserves `bytes` of addresses, a multiple of the granularity, without memory behind them.
    /// Fails with [`crate::ErrorKind::OutOfAddresses`] when addresses run out.
    fn reserve(&self, bytes: u64) -> Result<DevicePtr>;

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

    /// Allocates page-locked host memory, aligned to 4096 bytes.
    fn host_alloc(&self, bytes: usize) -> Result<HostPtr>;

    /// Frees page-locked host memory. Does not wait for work: the caller must know it is done.
    fn host_free(&self, ptr: HostPtr) -> Result<()>;

    /// Tells that the host touches page-locked memory now. The simulator checks it; nothing on CUDA.
    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()>;

    /// Creates a stream.
    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream>;

    /// Destroys a stream. Its pending work still runs.
    fn destroy_stream(&self, stream: RawStream) -> Result<()>;

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

    /// Whether the event's latest record completed. True for an event never recorded.
    fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Waits on the host for the event's latest record.
    fn synchronize_event(&self, event: RawEvent) -> Result<()>;

    /// Milliseconds between the latest records of two timing events.
    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64>;

    /// Waits on the host until the device is idle.
    fn synchronize(&self) -> Result<()>;

    /// Enqueues a copy from host memory. From pageable memory the bytes are taken before this returns.
    ///
    /// # Safety
    /// `src..src + bytes` must be readable now, and if it is page-locked stay readable and unwritten until the copy is done.
    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a copy to host memory. Into pageable memory this returns only when the bytes are there.
    ///
    /// # Safety
    /// `dst..dst + bytes` must be writable now, and if it is page-locked stay writable and untouched until the copy is done.
    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()>;

    /// Enqueues a copy within the device; the ranges must not overlap.
    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()>;

    /// Enqueues filling a range with a byte.
    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()>;

    /// Enqueues a kernel.
    ///
    /// # Safety
    /// The kernel must touch exactly the declared ranges and be given the arguments it expects.
    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()>;

    /// Starts capturing the stream's work into a graph instead of running it.
    fn begin_capture(&self, stream: RawStream) -> Result<()>;

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

/// How often each driver call was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCounts(pub(crate) Vec<u64>);

impl CallCounts {
    /// Calls of one operation.
    pub fn of(&self, operation: Operation) -> u64 {
        self.0.get(operation as usize).copied().unwrap_or(0)
    }

    /// The operations that were called at all, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, u64)> + '_ {
        Operation::ALL.iter().map(|&operation| (operation, self.of(operation))).filter(|&(_, count)| count > 0)
    }

    /// Calls of all operations.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Calls made since `earlier` was taken from the same device.
    #[must_use]
    pub fn since(&self, earlier: &CallCounts) -> CallCounts {
        CallCounts(self.0.iter().zip(&earlier.0).map(|(now, then)| now - then).collect())
    }
}
