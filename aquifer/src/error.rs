//! The error of programs.

use aquifer_allocator::config::ConfigError;
use aquifer_allocator::snapshot::SaveError;
use aquifer_allocator::{AllocError, OomReport, WithError};
use aquifer_device::{DeviceError, OpenError};
use aquifer_kernels::KernelError;
use aquifer_transfer::TransferError;

/// Any error of Aquifer, for programs that need not tell them apart: `?` makes it of each.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device could not be named or opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A driver call failed, or was refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An allocation, or another request to an allocator, failed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A snapshot could not be saved.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A kernel was not launched.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A copy, a tensor operation or a file failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

impl Error {
    /// Whether memory was lacking, of the device or of the host, so that freeing some may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Open(OpenError::Device(error)) | Error::Device(error) => error.is_out_of_memory(),
            Error::Open(_) | Error::Save(_) => false,
            Error::Alloc(error) => error.is_out_of_memory(),
            Error::Kernel(error) => error.is_out_of_memory(),
            Error::Transfer(error) => error.is_out_of_memory(),
        }
    }

    /// The report of an allocation that found no memory: what is held, and what helps.
    pub fn report(&self) -> Option<&OomReport> {
        match self {
            Error::Alloc(error) | Error::Transfer(TransferError::Alloc(error)) => error.report(),
            Error::Kernel(KernelError::Alloc(error)) => error.report(),
            _ => None,
        }
    }

    /// The error of the device's driver that is the cause, if it is one.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            Error::Open(OpenError::Device(error)) | Error::Device(error) => Some(error),
            Error::Alloc(AllocError::Device(error)) => Some(error),
            Error::Kernel(KernelError::Device(error) | KernelError::Alloc(AllocError::Device(error))) => Some(error),
            Error::Transfer(TransferError::Device(error) | TransferError::Alloc(AllocError::Device(error))) => {
                Some(error)
            }
            _ => None,
        }
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
