//! Facts that a driver reports about its device, its pool and its streams, and the flags of new
//! streams.

/// Facts about a device that never change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Short name of the driver, with which the names of its devices begin, such as `cuda`. Devices
    /// of one kind can be each other's peers.
    pub kind: &'static str,
    /// Ordinal among the devices of its kind in this process.
    pub ordinal: u32,
    /// True if the device is a model: its time is virtual, so that clocks of the host do not
    /// measure it, it runs kernels by their host implementations, and no other library uses its
    /// streams.
    pub is_virtual: bool,
    /// Human-readable name, such as `"NVIDIA H100 80GB HBM3"`.
    pub name: String,
    /// Memory of the device in bytes.
    pub total_bytes: u64,
    /// True if that is the host's memory (CUDA calls such a device *integrated*): programs of the
    /// host take from it, too, and the system ends some of them when it runs out.
    pub shares_host_memory: bool,
    /// Granularity of physical memory, reservations and mappings in bytes; `None` if the device
    /// cannot map memory.
    pub granularity_bytes: Option<u64>,
    /// Least and greatest stream priority. As with CUDA, the greatest priority is the lower number.
    pub priorities: (i32, i32),
    /// Compute capability, major and minor number: the architecture that kernels are compiled for.
    pub compute_capability: (u32, u32),
    /// The newest CUDA version that the driver knows, major and minor number; `None` for a driver
    /// that is not CUDA's. There is no version of the CUDA runtime: nothing here calls or needs
    /// one.
    pub driver_version: Option<(u32, u32)>,
}

impl DeviceInfo {
    /// Describes a device that has memory of its own and cannot map it, has one stream priority and
    /// compute capability 0.0, and is not virtual. Set the other fields as they apply.
    pub fn new(kind: &'static str, ordinal: u32, name: impl Into<String>, total_bytes: u64) -> Self {
        DeviceInfo {
            kind,
            ordinal,
            is_virtual: false,
            name: name.into(),
            total_bytes,
            shares_host_memory: false,
            granularity_bytes: None,
            priorities: (0, 0),
            compute_capability: (0, 0),
            driver_version: None,
        }
    }
}

/// Free and total memory of a device in bytes. Memory that other processes use is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process holds. Where the device shares the host's memory, those that the host
    /// can give: its page cache counts as free.
    pub free: u64,
    /// Bytes that the device has.
    pub total: u64,
}

/// The holders of a device's memory, as far as the driver names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUsers {
    /// Bytes that this process holds: memory, and what contexts, modules and libraries take. `None`
    /// where unknown.
    pub own: Option<u64>,
    /// Other processes, by descending bytes. Empty where `own` is unknown: this process may then be
    /// among those that the driver lists, under another id.
    pub others: Vec<ProcessMemory>,
    /// Bytes that the driver and the firmware reserve for themselves; `None` where unknown. CUDA
    /// leaves them out of [`MemoryInfo::total`].
    pub driver: Option<u64>,
}

/// Device memory of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcessMemory {
    /// Id of the process; `None` if it is hidden from this one.
    pub pid: Option<u32>,
    /// Bytes that it holds.
    pub bytes: u64,
}

impl ProcessMemory {
    /// A process that holds `bytes`.
    pub fn new(pid: Option<u32>, bytes: u64) -> Self {
        ProcessMemory { pid, bytes }
    }
}

/// Bytes that the driver's stream-ordered pool holds and uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Bytes in use.
    pub used: u64,
    /// Most bytes that were in use at one time.
    pub used_peak: u64,
    /// Bytes that the pool holds from the device.
    pub reserved: u64,
    /// Most bytes that were held at one time.
    pub reserved_peak: u64,
    /// Bytes that the driver holds for graphs with allocations of their own, beside the pool.
    pub graphs: u64,
}

/// Whether a stream captures: whether its work is recorded into a graph instead of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// The stream does not capture: its work runs.
    None,
    /// The stream captures: its work is recorded.
    Active,
    /// The stream captured until a call broke the capture. The capture still has to be ended.
    Invalidated,
}

/// A numeric property of a device, for [`crate::Driver::attribute`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attribute {
    /// Compute capability, major number.
    ComputeCapabilityMajor,
    /// Compute capability, minor number.
    ComputeCapabilityMinor,
    /// Number of streaming multiprocessors.
    MultiprocessorCount,
    /// Number of copy engines, which run at the same time as kernels.
    AsyncEngineCount,
    /// 1 if the device maps physical memory at reserved addresses, otherwise 0.
    VirtualMemoryManagement,
    /// 1 if the driver has a stream-ordered pool, otherwise 0.
    MemoryPools,
    /// 1 if physical memory can be created for RDMA ([`crate::PhysicalOptions::rdma`]), otherwise
    /// 0.
    GpuDirectRdmaWithVmm,
    /// 1 if physical memory can be exported as a file descriptor
    /// ([`crate::PhysicalOptions::exportable`]), otherwise 0.
    PosixFdHandles,
    /// 1 if one call can enqueue many copies ([`crate::Driver::copy_batch`]), otherwise 0.
    BatchedCopies,
}

/// Flags of a new stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct StreamFlags {
    /// True for a stream that does not synchronise with the legacy default stream.
    pub non_blocking: bool,
    /// Priority: a lower number is more urgent. The driver clamps it to the device's range.
    pub priority: i32,
}
