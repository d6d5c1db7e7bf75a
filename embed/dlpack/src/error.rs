//! Why memory was not handed over.

use std::fmt;

/// Why memory was not handed over. What was to be imported has gone back to its producer.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller exports memory of a simulated device, which means nothing to other libraries.
    /// Download it first.
    #[error("memory of {device}, a simulated device, means nothing to other libraries; download it first")]
    Simulated {
        /// The device.
        device: String,
    },
    /// The caller imports memory of another device than the allocator's, which is named. Use the
    /// allocator of its device.
    #[error("the tensor is on DLPack device {is}, and the allocator on {needed}")]
    WrongDevice {
        /// Type and number of the tensor's device, as DLPack counts.
        is: String,
        /// The allocator's device.
        needed: String,
    },
    /// The caller passed elements that Aquifer does not know, or of another type than asked for.
    #[error("elements of type {dtype} cannot be handed over here")]
    DType {
        /// What they are.
        dtype: String,
    },
    /// The caller imports a tensor whose elements are not in row-major order without gaps. Make it
    /// contiguous first.
    #[error("a tensor of shape {shape:?} with strides {strides:?} cannot be imported; make it contiguous first")]
    Strided {
        /// Its extents.
        shape: Vec<i64>,
        /// Its strides, in elements.
        strides: Vec<i64>,
    },
    /// The producer made a tensor that breaks DLPack's rules.
    #[error("the tensor breaks DLPack's rules: {0}")]
    Malformed(#[from] dlpark::tensor::Error),
    /// A shape cannot be told to other libraries.
    #[error("the shape cannot be exported: {0}")]
    Shape(#[from] dlpark::metadata::Error),
    /// Aquifer refused.
    #[error(transparent)]
    Aquifer(#[from] aquifer::Error),
}

/// The text, as `main` and `unwrap` show it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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
from_parts!(aquifer::device::DeviceError, aquifer::device::OpenError, aquifer::memory::AllocError);
