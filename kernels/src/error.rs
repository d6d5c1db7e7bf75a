//! Errors of kernels. Messages are complete: none leaves its cause to
//! [`std::error::Error::source`].

use aquifer_allocator::{AllocError, OomReport};
use aquifer_device::{DeviceError, DeviceLabel, DeviceMismatch, DevicePtr, RequestError};

use crate::dtype::DType;

/// Why a kernel was not launched, or the kernels not loaded. Nothing was enqueued, unless the
/// driver refused a later one of several steps; then only the contents of the destination are
/// undefined.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The caller passed memory that the kernel cannot work on.
    #[error(transparent)]
    Operand(#[from] Box<OperandError>),
    /// The caller passed a number that the kernel cannot work with.
    #[error("kernel {kernel}: {argument} {reason}")]
    Argument {
        /// The kernel.
        kernel: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The fault.
        reason: String,
    },
    /// The caller passed a stream of another device than the kernels were loaded on.
    #[error("kernel {kernel}: the stream belongs to {devices}, where the kernels were loaded")]
    WrongStream {
        /// The kernel.
        kernel: &'static str,
        /// The stream's device, and the kernels'.
        devices: Box<DeviceMismatch>,
    },
    /// The device is older than the target of the device code. Use a newer one.
    #[error(
        "{device} has compute capability {}.{}; the kernels need {}.{} or later",
        capability.0, capability.1, needs.0, needs.1
    )]
    TooOld {
        /// The device.
        device: DeviceLabel,
        /// Its compute capability, major and minor number.
        capability: (u32, u32),
        /// The required one.
        needs: (u32, u32),
    },
    /// The device's driver is older than the PTX of the kernels. Install a newer one.
    #[error(
        "the driver of {device} supports CUDA {}.{}; the kernels need {}.{} or later: install a newer driver",
        supported.0, supported.1, needs.0, needs.1
    )]
    DriverTooOld {
        /// The device.
        device: DeviceLabel,
        /// The newest CUDA version that its driver supports, major and minor number.
        supported: (u32, u32),
        /// The required version.
        needs: (u32, u32),
    },
    /// The streams that used the memory before could not be ordered before this launch.
    #[error("kernel {kernel}: {cause}")]
    Order {
        /// The kernel.
        kernel: &'static str,
        /// The reason.
        cause: AllocError,
    },
    /// The request cannot be served as the caller made it.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// Memory for the result could not be allocated.
    #[error(transparent)]
    Alloc(AllocError),
    /// A driver call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

aquifer_device::debug_as_display!(KernelError);

impl KernelError {
    /// Whether memory was lacking, so that freeing some may help.
    pub fn is_out_of_memory(&self) -> bool {
        self.alloc().is_some_and(AllocError::is_out_of_memory)
            || self.device().is_some_and(DeviceError::is_out_of_memory)
    }

    /// Whether the device is lost, so that every later call fails too.
    pub fn is_device_lost(&self) -> bool {
        self.device().is_some_and(DeviceError::is_device_lost)
    }

    /// The report of an allocation that found no memory.
    pub fn report(&self) -> Option<&OomReport> {
        self.alloc().and_then(AllocError::report)
    }

    /// The fault of the request, if it is an error that other crates share.
    pub fn request(&self) -> Option<&RequestError> {
        match self {
            KernelError::Request(error) => Some(error),
            _ => self.alloc().and_then(AllocError::request),
        }
    }

    /// The error of the device's driver that is the cause, if it is one.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            KernelError::Device(error) => Some(error),
            _ => self.alloc().and_then(AllocError::device),
        }
    }

    /// The allocator's error that is the cause, if it is one.
    pub fn alloc(&self) -> Option<&AllocError> {
        match self {
            KernelError::Alloc(error) | KernelError::Order { cause: error, .. } => Some(error),
            _ => None,
        }
    }
}

/// [`KernelError::Request`] for that error of the allocator.
impl From<AllocError> for KernelError {
    fn from(error: AllocError) -> KernelError {
        match error {
            AllocError::Request(error) => KernelError::Request(error),
            error => KernelError::Alloc(error),
        }
    }
}

/// Memory that a kernel cannot work on, and why.
#[derive(Clone, thiserror::Error)]
#[error("kernel {kernel}: `{operand}`, {len} elements of {dtype} on {device}, {fault}")]
#[non_exhaustive]
pub struct OperandError {
    /// The kernel.
    pub kernel: &'static str,
    /// The operand's name.
    pub operand: &'static str,
    /// The device that it is on.
    pub device: DeviceLabel,
    /// Its dtype.
    pub dtype: DType,
    /// Its elements.
    pub len: u64,
    /// The fault.
    pub fault: OperandFault,
}

aquifer_device::debug_as_display!(OperandError);

/// The fault of an operand.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandFault {
    /// It is on another device than the kernels were loaded on. Copy it there first.
    #[error("is needed on {}, where the kernels were loaded", devices.needed)]
    WrongDevice {
        /// Its device, and the kernels'.
        devices: Box<DeviceMismatch>,
    },
    /// The kernel does not take its dtype with these other operands. Cast it first.
    #[error("must be of {}", either(expected))]
    DType {
        /// The possible dtypes.
        expected: Vec<DType>,
    },
    /// Its length does not fit the other operands.
    #[error("must have {expected} elements")]
    Len {
        /// Elements it should have.
        expected: u64,
    },
    /// It has fewer elements than the layout reaches.
    #[error("must have {needed} elements at least")]
    TooShort {
        /// Elements it should have at least.
        needed: u64,
    },
    /// Its first address is not a multiple of an element's size.
    #[error("starts at {ptr}, which is not a multiple of an element's size")]
    Misaligned {
        /// The address.
        ptr: DevicePtr,
    },
    /// Its bytes are not a whole number of elements.
    #[error("has {bytes} bytes, which is not a whole number of elements")]
    Ragged {
        /// Its bytes.
        bytes: u64,
    },
    /// It is written, and shares memory with an operand that it must not share any with.
    #[error("is written and shares memory with `{other}`")]
    Overlap {
        /// The other operand.
        other: &'static str,
    },
}

/// Alternatives in a message.
fn either(dtypes: &[DType]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ")
}
