//! A kernel's declaration, the single source of its properties.
//!
//! The name and the parameters are those of its device code. From arguments alone a declaration
//! gives the ranges that are read and written, the launch shape, and the cost (invariant K1); and
//! it computes the same as the device code, on [`KernelMemory`] (invariant K2). So a name and
//! arguments give a driver the same information as the program has.

use std::fmt;
use std::sync::Arc;

use aquifer_device::{AccessRange, HostKernel, KernelArg, KernelMemory, Launch, RawModule, Result};

use crate::args::{Args, KernelParam, Ranges};
use crate::dtype::DType;
use crate::module::Module;

/// Threads of a block by default.
pub(crate) const THREADS: u32 = 256;

/// Blocks that a grid-stride kernel starts for each multiprocessor: enough for 2048 threads.
const BLOCKS_PER_PROCESSOR: u64 = 2048 / THREADS as u64;

/// The grid and the blocks of a launch, in blocks and threads along x, y and z.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
}

impl Shape {
    pub(crate) const fn new(grid: [u32; 3], block: [u32; 3]) -> Shape {
        Shape { grid, block }
    }

    /// Threads that take one of `pieces` each and continue by the size of the grid, which keeps
    /// `processors` busy.
    pub(crate) fn strided(pieces: u64, processors: u32) -> Shape {
        let most = u64::from(processors.max(1)).saturating_mul(BLOCKS_PER_PROCESSOR);
        let blocks = pieces.div_ceil(u64::from(THREADS)).clamp(1, most);
        Shape::new([u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1], [THREADS, 1, 1])
    }
}

/// A family of kernels; a value has the arguments of one launch.
pub(crate) trait Work: Sized {
    const PARAMS: &'static [KernelParam];

    fn parse(args: &mut Args<'_>) -> Result<Self>;

    /// The ranges that it accesses, computed with checked arithmetic.
    fn accesses(&self, ranges: Ranges<'_>) -> Result<Vec<AccessRange>>;

    fn shape(&self, processors: u32) -> Shape;

    /// Arithmetic operations, if those and not memory bound it.
    fn operations(&self) -> u64 {
        0
    }

    /// Its time on every device, in ns.
    fn busy_ns(&self) -> u64 {
        0
    }

    /// Its computation. Its ranges were computed before, so their arithmetic does not overflow.
    fn run(&self, memory: &mut dyn KernelMemory) -> Result<()>;
}

/// The variant of an operation, by its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// The only one.
    Any,
    /// For operands of this dtype.
    Of(DType),
    /// From the first dtype to the second.
    FromTo(DType, DType),
    /// For elements of this size in bytes.
    Bytes(u64),
}

type LaunchOf = fn(&'static str, Vec<KernelArg>, u32) -> Result<Launch>;
type RunOf = fn(&str, &mut dyn KernelMemory, &[KernelArg]) -> Result<()>;

/// One kernel of the set.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Its name in the module.
    pub name: &'static str,
    /// The module that holds its device code.
    pub module: Module,
    /// Its parameters, in order.
    pub params: &'static [KernelParam],
    pub(crate) variant: Variant,
    launch: LaunchOf,
    run: RunOf,
}

impl Kernel {
    pub(crate) const fn of<W: Work>(name: &'static str, module: Module, variant: Variant) -> Kernel {
        Kernel { name, module, variant, params: W::PARAMS, launch: launch::<W>, run: run::<W> }
    }

    /// Computes the results of the device code on the host: the same bits, except that a NaN from
    /// arithmetic may be another NaN.
    ///
    /// # Errors
    /// As [`Kernel::launch`], and those of the memory.
    pub fn run(&self, memory: &mut dyn KernelMemory, args: &[KernelArg]) -> Result<()> {
        (self.run)(self.name, memory, args)
    }

    /// The host implementation for a launch.
    pub fn host(&'static self) -> HostKernel {
        Arc::new(|memory, args| self.run(memory, args))
    }

    /// A launch with these arguments and number of multiprocessors, with the host implementation.
    /// `module` is the kernel's module, loaded by the device's driver; only a virtual device
    /// needs none. Every range that it reads or writes is listed; empty ones are left out.
    ///
    /// # Errors
    /// When the arguments are not those that the kernel declares, or contradict each other.
    pub fn launch(&'static self, module: Option<RawModule>, args: Vec<KernelArg>, processors: u32) -> Result<Launch> {
        Ok(Launch { module, host: Some(self.host()), ..(self.launch)(self.name, args, processors)? })
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kernel { name, module, params, .. } = self;
        f.debug_struct("Kernel")
            .field("name", name)
            .field("module", module)
            .field("params", params)
            .finish_non_exhaustive()
    }
}

fn launch<W: Work>(name: &'static str, args: Vec<KernelArg>, processors: u32) -> Result<Launch> {
    let work = W::parse(&mut Args::checked(name, W::PARAMS, &args)?)?;
    let (accesses, Shape { grid, block }) = (work.accesses(Ranges::of(name))?, work.shape(processors));
    let (operations, busy_ns) = (work.operations(), work.busy_ns());
    Ok(Launch { name, grid, block, args, accesses, operations, busy_ns, ..Launch::default() })
}

fn run<W: Work>(name: &str, memory: &mut dyn KernelMemory, args: &[KernelArg]) -> Result<()> {
    let work = W::parse(&mut Args::checked(name, W::PARAMS, args)?)?;
    work.accesses(Ranges::of(name))?;
    work.run(memory)
}
