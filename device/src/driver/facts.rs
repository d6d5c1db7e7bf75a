//! What a driver can tell of its device and its streams, and how a stream is made.

use std::fmt;

/// Which kind of driver is below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverKind {
    /// The simulated device.
    Simulated,
    /// A real GPU through the CUDA driver.
    Cuda,
}

/// As devices are named: `cuda` or `sim`.
impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DriverKind::Simulated => "sim",
            DriverKind::Cuda => "cuda",
        })
    }
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
    /// What its code may be compiled for, major and minor number.
    pub compute_capability: (u32, u32),
    /// The newest CUDA version that the driver knows, major and minor number; `None` for the simulated device.
    pub driver_version: Option<(u32, u32)>,
}

impl DeviceInfo {
    /// Facts of a device that cannot map memory, has one stream priority and compute capability 0.0; set the other fields
    /// as they apply.
    pub fn new(kind: DriverKind, ordinal: u32, name: impl Into<String>, total_bytes: u64) -> Self {
        DeviceInfo {
            kind,
            ordinal,
            name: name.into(),
            total_bytes,
            granularity_bytes: None,
            priorities: (0, 0),
            compute_capability: (0, 0),
            driver_version: None,
        }
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

/// What the driver's stream-ordered pool holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// In use.
    pub used: u64,
    /// Most that was in use at a time.
    pub used_peak: u64,
    /// Held from the device.
    pub reserved: u64,
    /// Most that was held at a time.
    pub reserved_peak: u64,
}

/// Whether a stream's work is recorded into a graph now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CaptureStatus {
    /// It runs.
    None,
    /// It is recorded.
    Active,
    /// It was recorded, until a call broke the capture, which still has to be ended.
    Invalidated,
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
    /// 1 where physical memory can be made fit for RDMA: [`crate::PhysicalOptions::rdma`].
    GpuDirectRdmaWithVmm,
    /// 1 where physical memory can be exported as a file descriptor: [`crate::PhysicalOptions::exportable`].
    PosixFdHandles,
    /// 1 where one call enqueues many copies: [`crate::Driver::copy_batch`].
    BatchedCopies,
}

/// How a new stream behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct StreamFlags {
    /// Does not synchronise with the legacy default stream.
    pub non_blocking: bool,
    /// Numerically lower is more urgent; clamped to the device's range.
    pub priority: i32,
}
