//! The kernels, loaded on a device: checks of operands, and launches.
//!
//! Every operation follows the same steps: it checks its operands ([`Check`]), acquires an access
//! guard on their memory, and launches the declared kernels. Each operation has a file, with its
//! declaration and its method.

use std::any::Any;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use aquifer_allocator::AccessGuard;
use aquifer_device::internal::CalledFrom;
use aquifer_device::{
    AccessKind, Attribute, Device, DeviceError, DeviceLabel, DeviceMismatch, KernelArg, RawModule, Stream,
};

use crate::dtype::DType;
use crate::error::{KernelError, OperandError, OperandFault};
use crate::kernel::{Kernel, Variant};
use crate::module::Module;
use crate::operand::{Operand, Target};

/// The target of the device code.
const NEEDS: (u32, u32) = (7, 5);

/// The CUDA version that introduced the PTX ISA of the device code, 8.2.
const NEEDS_CUDA: (u32, u32) = (12, 2);

/// The kernel set, loaded on one device. Cloning gives another handle of it.
///
/// Methods enqueue on a stream and return. They check device, dtype, length, alignment and overlap
/// first, and order the stream after the work of other streams with the same buffers, by the ticks
/// of the buffers. So buffers may move between streams without further calls. Operations on empty
/// buffers are checked and not launched.
///
/// On a virtual device the host implementations run, on real data.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
/// let kernels = memory.kernels()?;
/// let mut x = memory.alloc::<f32>(1000, &one)?;
/// let mut y = memory.alloc::<f32>(1000, &two)?;
/// kernels.fill(&one, &mut x, 2.0_f32)?;
/// kernels.fill(&two, &mut y, 1.0_f32)?;
/// kernels.axpy(&two, 3.0, &x, &mut y)?; // waits for stream `one`
/// assert_eq!(y.to_vec(&two)?, [7.0; 1000]);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone)]
pub struct Kernels(Arc<Inner>);

struct Inner {
    device: Device,
    /// By [`Module`].
    modules: Vec<RawModule>,
    processors: u32,
}

impl Kernels {
    /// Loads the modules. The driver compiles them for the device, which takes a while the first
    /// time on a machine. Not while a stream captures.
    ///
    /// # Errors
    /// A device or a driver that is too old, and errors of the driver.
    pub fn load(device: &Device) -> Result<Kernels, KernelError> {
        let capability = device.info().compute_capability;
        if capability < NEEDS {
            return Err(KernelError::TooOld { device: device.label(), capability, needs: NEEDS });
        }
        if let Some(supported) = device.info().driver_version
            && supported < NEEDS_CUDA
        {
            return Err(KernelError::DriverTooOld { device: device.label(), supported, needs: NEEDS_CUDA });
        }
        let processors = device.driver().attribute(Attribute::MultiprocessorCount)?;
        let processors = u32::try_from(processors).unwrap_or(u32::MAX);
        let mut inner =
            Inner { device: device.for_memory(), modules: Vec::with_capacity(Module::ALL.len()), processors };
        let advice = "allocators may hold all memory: leave some for modules with the option headroom_mb";
        let advise = |error: DeviceError| if error.is_out_of_memory() { error.with_more(advice) } else { error };
        for module in Module::ALL {
            inner.modules.push(device.driver().load_module(module.ptx()).map_err(advise)?);
        }
        Ok(Kernels(Arc::new(inner)))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Checks for a launch of `kernel` on `stream`.
    pub(crate) fn check(&self, kernel: &'static str, stream: &Stream) -> Result<Check, KernelError> {
        let device = self.0.device.id();
        if stream.device_id() != device {
            return Err(KernelError::WrongStream {
                kernel,
                devices: DeviceMismatch::between(stream.device_id(), device),
            });
        }
        Ok(Check { kernel, device })
    }

    /// Acquires an access guard of the stream on the memory of operands. Dropping it records the
    /// stream's work.
    #[track_caller]
    pub(crate) fn access<'a>(
        &'a self,
        stream: &'a Stream,
        kernel: &'static str,
        reads: &[&Named<'a>],
        writes: &[&Named<'a>],
    ) -> Result<Enqueue<'a>, KernelError> {
        let place = stream.called_from(Location::caller());
        let read = reads.iter().map(|named| (named.operand.storage(), AccessKind::Read));
        let written = writes.iter().map(|named| (named.operand.storage(), AccessKind::Write));
        let memory: Vec<_> = read.chain(written).collect();
        let access = AccessGuard::acquire(stream, &memory).map_err(|cause| KernelError::Order { kernel, cause })?;
        Ok(Enqueue { kernels: &self.0, stream, _access: access, _place: place })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for module in self.modules.drain(..) {
            self.device.unload_later(module);
        }
    }
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernels").field("device", &self.0.device).finish_non_exhaustive()
    }
}

/// A stream with an access guard on the operands: launches go through here.
pub(crate) struct Enqueue<'a> {
    kernels: &'a Arc<Inner>,
    stream: &'a Stream,
    _access: AccessGuard<'a>,
    /// The caller's place in the program.
    _place: Option<CalledFrom>,
}

impl Enqueue<'_> {
    /// Launches a kernel with the arguments that it declares.
    pub(crate) fn launch(&self, kernel: &'static Kernel, args: Vec<KernelArg>) -> Result<(), KernelError> {
        self.keep_for_graph();
        let module = self.kernels.modules[kernel.module as usize];
        let mut launch = kernel.launch(Some(module), args, self.kernels.processors)?;
        if !self.kernels.device.info().is_virtual {
            launch.host = None;
        }
        #[allow(unsafe_code, reason = "launching is a promise, and here is where this crate makes it")]
        // SAFETY: the declaration was checked against the device code's parameters by the tests of
        // this crate, and computes the ranges that the code touches from the arguments; the
        // operands of these arguments were checked to contain them.
        unsafe { self.stream.launch(&launch) }?;
        Ok(())
    }

    /// A graph needs the code for every launch.
    fn keep_for_graph(&self) {
        if let Some(launches) = self.stream.launches_of_capture() {
            let kernels: Arc<dyn Any + Send + Sync> = self.kernels.clone();
            launches.keep(&kernels);
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        self.stream
    }
}

/// An operand under its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named<'a> {
    pub(crate) name: &'static str,
    pub(crate) operand: Operand<'a>,
}

impl Named<'_> {
    pub(crate) fn arg(&self) -> KernelArg {
        KernelArg::Ptr(self.operand.ptr())
    }

    pub(crate) fn len(&self) -> u64 {
        self.operand.len()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.operand.dtype()
    }
}

/// Checks of the operands of one kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Check {
    pub(crate) kernel: &'static str,
    device: u32,
}

impl Check {
    /// An operand that is read: on the kernels' device, of whole elements, aligned.
    pub(crate) fn reads<'a>(
        &self,
        name: &'static str,
        operand: impl Into<Operand<'a>>,
    ) -> Result<Named<'a>, KernelError> {
        let named = Named { name, operand: operand.into() };
        let (ptr, bytes, size) = (named.operand.ptr(), named.operand.bytes(), named.dtype().bytes());
        let device = named.operand.storage().device_id();
        if device != self.device {
            let devices = DeviceMismatch::between(device, self.device);
            return Err(self.fault(&named, OperandFault::WrongDevice { devices }));
        }
        if bytes % size != 0 {
            return Err(self.fault(&named, OperandFault::Ragged { bytes }));
        }
        if ptr.0 % size != 0 {
            return Err(self.fault(&named, OperandFault::Misaligned { ptr }));
        }
        Ok(named)
    }

    /// An operand that is written.
    pub(crate) fn writes<'a>(
        &self,
        name: &'static str,
        target: impl Into<Target<'a>>,
    ) -> Result<Named<'a>, KernelError> {
        self.reads(name, target.into().operand())
    }

    pub(crate) fn fault(&self, named: &Named<'_>, fault: OperandFault) -> KernelError {
        let operand = named.operand;
        let device = match &fault {
            OperandFault::WrongDevice { devices } => devices.is.clone(),
            _ => DeviceLabel::of(operand.storage().device_id()),
        };
        KernelError::Operand(Box::new(OperandError {
            kernel: self.kernel,
            operand: named.name,
            device,
            dtype: operand.dtype(),
            len: operand.len(),
            fault,
        }))
    }

    pub(crate) fn argument(&self, argument: &'static str, reason: impl Into<String>) -> KernelError {
        KernelError::Argument { kernel: self.kernel, argument, reason: reason.into() }
    }

    pub(crate) fn len(&self, named: &Named<'_>, expected: u64) -> Result<(), KernelError> {
        if named.len() == expected { Ok(()) } else { Err(self.fault(named, OperandFault::Len { expected })) }
    }

    pub(crate) fn dtype(&self, named: &Named<'_>, expected: DType) -> Result<(), KernelError> {
        if named.dtype() == expected {
            return Ok(());
        }
        Err(self.fault(named, OperandFault::DType { expected: vec![expected] }))
    }

    /// The kernel for `dtype`, which stands for this operand's, among those of an operation.
    pub(crate) fn kernel(
        &self,
        kernels: &'static [Kernel],
        named: &Named<'_>,
        dtype: DType,
    ) -> Result<&'static Kernel, KernelError> {
        let found = kernels.iter().find(|kernel| kernel.variant == Variant::Of(dtype));
        found.ok_or_else(|| {
            let dtypes = kernels.iter().filter_map(|kernel| match kernel.variant {
                Variant::Of(dtype) => Some(dtype),
                _ => None,
            });
            self.fault(named, OperandFault::DType { expected: dtypes.collect() })
        })
    }

    /// The kernel for elements of this operand's size among those of an operation.
    pub(crate) fn sized(&self, kernels: &'static [Kernel], named: &Named<'_>) -> Result<&'static Kernel, KernelError> {
        let size = named.dtype().bytes();
        let found = kernels.iter().find(|kernel| kernel.variant == Variant::Bytes(size));
        found.ok_or_else(|| self.fault(named, OperandFault::DType { expected: DType::ALL.to_vec() }))
    }

    pub(crate) fn at_least(&self, named: &Named<'_>, needed: u64) -> Result<(), KernelError> {
        if named.len() >= needed { Ok(()) } else { Err(self.fault(named, OperandFault::TooShort { needed })) }
    }

    /// The product of extents.
    pub(crate) fn product(&self, argument: &'static str, extents: &[u64]) -> Result<u64, KernelError> {
        let product = extents.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent));
        product.ok_or_else(|| self.argument(argument, "have a product beyond 64 bits"))
    }

    /// Written operands overlap no other operand.
    pub(crate) fn apart(&self, written: &Named<'_>, others: &[&Named<'_>]) -> Result<(), KernelError> {
        match others.iter().find(|other| written.operand.overlaps(&other.operand)) {
            Some(other) => Err(self.fault(written, OperandFault::Overlap { other: other.name })),
            None => Ok(()),
        }
    }

    /// Written operands overlap no other operand, or are the same memory.
    pub(crate) fn apart_or_same(&self, written: &Named<'_>, others: &[&Named<'_>]) -> Result<(), KernelError> {
        let others: Vec<_> = others.iter().filter(|other| !written.operand.is_same(&other.operand)).copied().collect();
        self.apart(written, &others)
    }
}
