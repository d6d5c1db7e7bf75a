//! The error of programs.

use aquifer_allocator::config::ConfigError;
use aquifer_allocator::snapshot::SaveError;
use aquifer_allocator::{AllocError, OomReport, WithError};
use aquifer_device::{DeviceError, RequestError};
use aquifer_kernels::KernelError;
use aquifer_transfer::TransferError;

use crate::open::OpenError;

/// Any error of Aquifer, for programs that need not tell them apart: `?` makes it of each.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device could not be named or opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A request cannot be served as the caller made it: a wrong device, a range out of bounds,
    /// something unsupported.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A driver call failed, or was refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An allocation, or another request to an allocator, failed.
    #[error(transparent)]
    Alloc(AllocError),
    /// A snapshot could not be saved.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A kernel was not launched.
    #[error(transparent)]
    Kernel(KernelError),
    /// A copy, a tensor operation or a file failed.
    #[error(transparent)]
    Transfer(TransferError),
}

aquifer_device::debug_as_display!(Error);

impl Error {
    /// Whether memory was lacking, of the device or of the host, so that freeing some may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Alloc(error) => error.is_out_of_memory(),
            Error::Kernel(error) => error.is_out_of_memory(),
            Error::Transfer(error) => error.is_out_of_memory(),
            _ => self.device().is_some_and(DeviceError::is_out_of_memory),
        }
    }

    /// Whether the device is gone, so that every later call fails too.
    /// [`Device::lost`](crate::Device::lost) says why.
    pub fn is_device_lost(&self) -> bool {
        self.device().is_some_and(DeviceError::is_device_lost)
    }

    /// The report of an allocation that found no memory: what is held, and what helps.
    pub fn report(&self) -> Option<&OomReport> {
        match self {
            Error::Alloc(error) => error.report(),
            Error::Kernel(error) => error.report(),
            Error::Transfer(error) => error.report(),
            _ => None,
        }
    }

    /// What is wrong with the request, where the caller made it wrong, whichever part was asked.
    pub fn request(&self) -> Option<&RequestError> {
        match self {
            Error::Request(error) => Some(error),
            Error::Alloc(error) => error.request(),
            Error::Kernel(error) => error.request(),
            Error::Transfer(error) => error.request(),
            _ => None,
        }
    }

    /// The error of the device's driver that is the cause, if it is one.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            Error::Open(OpenError::Device(error)) | Error::Device(error) => Some(error),
            Error::Alloc(error) => error.device(),
            Error::Kernel(error) => error.device(),
            Error::Transfer(error) => error.device(),
            _ => None,
        }
    }
}

// What several parts can fail with has one variant, whichever part was asked.

impl From<AllocError> for Error {
    fn from(error: AllocError) -> Error {
        match error {
            AllocError::Request(error) => Error::Request(error),
            AllocError::Device(error) => Error::Device(error),
            error => Error::Alloc(error),
        }
    }
}

impl From<KernelError> for Error {
    fn from(error: KernelError) -> Error {
        match error {
            KernelError::Request(error) => Error::Request(error),
            KernelError::Device(error) => Error::Device(error),
            KernelError::Alloc(error) => error.into(),
            error => Error::Kernel(error),
        }
    }
}

impl From<TransferError> for Error {
    fn from(error: TransferError) -> Error {
        match error {
            TransferError::Request(error) => Error::Request(error),
            TransferError::Device(error) => Error::Device(error),
            TransferError::Alloc(error) => error.into(),
            TransferError::Kernel(error) => error.into(),
            error => Error::Transfer(error),
        }
    }
}

#[cfg(feature = "sim")]
impl From<aquifer_sim::SimConfigError> for Error {
    fn from(cause: aquifer_sim::SimConfigError) -> Error {
        Error::Open(OpenError::Sim { text: "the settings of a simulated device".to_owned(), cause })
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Error {
        Error::Alloc(error.into())
    }
}

impl<E: Into<Error>> From<WithError<E>> for Error {
    fn from(error: WithError<E>) -> Error {
        match error {
            WithError::Work(error) => error.into(),
            WithError::Order(error) => error.into(),
        }
    }
}
