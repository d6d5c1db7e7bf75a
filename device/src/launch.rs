//! Kernel launches: arguments, the memory that a kernel accesses, and its implementation for the
//! virtual device.

use std::fmt;
use std::sync::Arc;

use crate::driver::handles::{DevicePtr, RawModule};
use crate::error::Result;

/// How memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AccessKind {
    /// It is read.
    Read,
    /// It is written, or read and written.
    Write,
}

/// A range of device memory that a kernel touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessRange {
    /// First byte.
    pub ptr: DevicePtr,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether the kernel reads or writes it.
    pub kind: AccessKind,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
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

/// Device memory as a kernel's host implementation sees it, on a virtual device.
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

/// The implementation of a kernel that a virtual device runs.
pub type HostKernel = Arc<dyn Fn(&mut dyn KernelMemory, &[KernelArg]) -> Result<()> + Send + Sync>;

/// One kernel launch: the kernel's name, launch shape and arguments, the memory that it accesses,
/// and its implementation for a virtual device.
///
/// It is completed from its default: `Launch { name, module, args, ..Launch::default() }`.
/// [`crate::Stream::launch`] enqueues it, in order with the rest of that stream only. The
/// documentation of the crate `aquifer-kernels` shows a custom kernel from its PTX text to its
/// result, ordered after work of other streams on the same memory.
#[derive(Clone)]
pub struct Launch {
    /// Name of the kernel, as in its module.
    pub name: &'static str,
    /// The module that holds its device code. `None` where there is none, which only the simulated
    /// device runs.
    pub module: Option<RawModule>,
    /// Blocks of the grid, x y z.
    pub grid: [u32; 3],
    /// Threads of a block, x y z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Arguments in order.
    pub args: Vec<KernelArg>,
    /// Every range of device memory that the kernel reads or writes. The race detector checks the
    /// launch by these.
    pub accesses: Vec<AccessRange>,
    /// Run by a virtual device; `None` for a kernel that only takes time and touches its
    /// ranges.
    pub host: Option<HostKernel>,
    /// Arithmetic operations it performs, for a virtual device's cost model; 0 where memory
    /// bounds it.
    #[doc(hidden)]
    pub operations: u64,
    /// The least time that it takes on a virtual device, in ns, on any card. 0 for most kernels.
    #[doc(hidden)]
    pub busy_ns: u64,
}

/// One thread of a kernel that has no name, no arguments and no code.
impl Default for Launch {
    fn default() -> Launch {
        Launch {
            name: "",
            module: None,
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            args: Vec::new(),
            accesses: Vec::new(),
            host: None,
            operations: 0,
            busy_ns: 0,
        }
    }
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
