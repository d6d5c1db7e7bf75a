//! Errors of Aquifer and of cudarc in one.

use std::fmt;

use aquifer::device::{DeviceError, RequestError};
use aquifer::memory::AllocError;
use aquifer::transfer::TransferError;
use aquifer_device::Code;
use cudarc::driver::{DriverError, sys};

/// Why a call failed that involves Aquifer and cudarc.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Aquifer refused, or a driver call that it made failed.
    #[error(transparent)]
    Aquifer(#[from] aquifer::Error),
    /// A driver call that cudarc made failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A library that the caller's work called failed: see [`Error::library`].
    #[error("a library call failed: {0}")]
    Library(String),
    /// The caller asked for a [`PoolSlice`](crate::PoolSlice) although nothing would order its
    /// uses: cudarc's event tracking is off, and the context has several streams. Turn it on, or
    /// use a [`Buffer`](aquifer::Buffer) with [`StreamExt::with`](crate::StreamExt::with).
    #[error(
        "cudarc's event tracking is off and the context has several streams, so nothing orders what they do with a PoolSlice: turn it on, or \
         use a Buffer with StreamExt::with"
    )]
    Untracked,
    /// The caller asked for a slice of cudarc's on a stream that captures, whose events cannot be
    /// captured: turn cudarc's event tracking off before the capture, or use a
    /// [`Buffer`](aquifer::Buffer) with [`StreamExt::with`](crate::StreamExt::with), and its
    /// address.
    #[error(
        "the stream captures, and cudarc's event tracking is on, whose events cannot be captured: turn it off before the capture, or use \
         a Buffer's address with StreamExt::with"
    )]
    TrackedCapture,
    /// The caller asked for bytes as another type, of which they are no whole number of aligned
    /// values.
    #[error("{bytes} bytes at {ptr:#x} are not a whole number of aligned {to} values")]
    BadCast {
        /// The address.
        ptr: u64,
        /// Bytes there are.
        bytes: u64,
        /// Name of the type.
        to: &'static str,
    },
}

/// The text, as `main` and `unwrap` show it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The error of a library, such as cuBLAS or NCCL, for work that calls some. Its `Debug` form
    /// is kept, as not all of them have another one.
    pub fn library(error: impl fmt::Debug) -> Error {
        Error::Library(format!("{error:?}"))
    }

    /// Whether device memory was lacking, so that freeing some may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Error::Aquifer(error) => error.is_out_of_memory(),
            Error::Driver(error) => error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            _ => false,
        }
    }
}

/// Errors of Aquifer's parts.
macro_rules! from_parts {
    ($($part:ty),*) => {
        $(impl From<$part> for Error {
            fn from(error: $part) -> Error {
                Error::Aquifer(error.into())
            }
        })*
    };
}
from_parts!(DeviceError, RequestError, AllocError, TransferError);

/// For functions that return cudarc's error. It has room for a code alone: out of memory stays
/// that, and so does what the driver does not support; another failed driver call keeps
/// `CUDA_ERROR_UNKNOWN`, and what the caller did wrong becomes `CUDA_ERROR_INVALID_VALUE`. Log the
/// error before, if its text matters.
impl From<Error> for DriverError {
    fn from(error: Error) -> DriverError {
        let is_out_of_memory = error.is_out_of_memory();
        DriverError(match error {
            Error::Driver(error) => return error,
            _ if is_out_of_memory => sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            Error::Aquifer(error) if error.device().is_some_and(|of| of.code == Code::NOT_SUPPORTED) => {
                sys::CUresult::CUDA_ERROR_NOT_SUPPORTED
            }
            Error::Aquifer(error) if error.device().is_some() => sys::CUresult::CUDA_ERROR_UNKNOWN,
            _ => sys::CUresult::CUDA_ERROR_INVALID_VALUE,
        })
    }
}
