//! The error of programs. A message contains its `cause`; [`std::error::Error::source`] returns
//! causes that the message does not contain.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use aquifer_allocator::config::ConfigError;
use aquifer_allocator::snapshot::SaveError;
use aquifer_allocator::{AllocError, OomReport};
use aquifer_device::{DeviceError, RequestError};
use aquifer_kernels::{ConvertError, DType, KernelError, UnknownDType};
use aquifer_transfer::{Returned, TransferError};

use crate::layout::LayoutError;
use crate::open::OpenError;
use crate::params::{Listed, mismatch};

/// Any error of Aquifer. `?` converts the errors of its parts, too. What several parts can fail
/// with has one variant, whichever part was asked.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device could not be named or opened.
    #[error(transparent)]
    Open(Box<OpenError>),
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
    /// A transfer, or a request for pinned memory or for a file, failed.
    #[error(transparent)]
    Transfer(TransferError),
    /// The caller asked for an impossible layout or view.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The caller passed operands that an operation cannot take together: tensors on different
    /// devices, or of dtypes or shapes that do not fit. Nothing was enqueued.
    #[error("{operation}: {reason}; {}", operands.join(", "))]
    Operands {
        /// The operation.
        operation: &'static str,
        /// The problem, and advice.
        reason: String,
        /// All operands: name, dtype, shape and place of each.
        operands: Vec<String>,
    },
    /// The caller asked for elements of another dtype than the tensor has. Convert it first.
    #[error("the tensor is of {is}, not of {needed}")]
    WrongDType {
        /// The dtype of the tensor.
        is: DType,
        /// The dtype asked for.
        needed: DType,
    },
    /// The caller named a dtype that this version does not know.
    #[error(transparent)]
    UnknownDType(#[from] UnknownDType),
    /// The caller asked for device memory of a tensor that is elsewhere. Move it first.
    #[error("the tensor is on {place}, not on a device; move it with `Tensor::to`")]
    NotOnDevice {
        /// Its place.
        place: String,
    },
    /// The caller asked for host memory of a tensor that is on a device. Bring it first.
    #[error("the tensor is on {place}, not on the host; bring it with `Tensor::to_host`")]
    NotOnHost {
        /// Its place.
        place: String,
    },
    /// The caller asked for one piece of memory of a tensor that is not one.
    #[error("a tensor of {shape:?} with strides {strides:?} is not contiguous; make it so with `Tensor::contiguous`")]
    NotContiguous {
        /// Its extents.
        shape: Vec<usize>,
        /// Its strides.
        strides: Vec<usize>,
    },
    /// The caller asked for the only element of a buffer or tensor that does not have exactly one.
    #[error("a buffer or tensor of shape {shape:?} does not have exactly one element; use `to_vec`")]
    NotOneElement {
        /// Its extents.
        shape: Vec<usize>,
    },
    /// Elements could not be converted.
    #[error(transparent)]
    Convert(#[from] ConvertError),
    /// The caller passed an invalid name of a parameter, or one that is missing.
    #[error("parameter {name:?} {problem}")]
    ParamName {
        /// The name.
        name: String,
        /// The problem.
        problem: &'static str,
    },
    /// The caller updates a buffer that the graph does not use, which would have no effect on it.
    /// Update the buffer that its work was given.
    #[error(
        "the graph does not use this buffer, so updating it for the graph has no effect: update the one that its work used"
    )]
    NotOfGraph,
    /// The caller's work for a graph kept memory when it was captured that it had not kept before.
    /// Both calls must allocate the same; allocate what stays before the graph, or have the work
    /// return it.
    #[error(
        "the captured work kept {bytes} bytes that its warm-up did not keep, and other graphs of the pool may write there: \
         both calls must allocate the same; allocate what stays before the graph, or return it from the work"
    )]
    UnevenWork {
        /// Bytes that it kept.
        bytes: u64,
    },
    /// The caller's own work failed: [`Error::other`].
    #[error("{cause}")]
    Other {
        /// The error of the caller's work.
        cause: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// The source of batches that the caller gave failed.
    #[error("the source of batches failed: {cause}")]
    Source {
        /// The error of the source.
        cause: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// Parameters are not where all should be. Move the whole set.
    #[error("some parameters are not on {place}: {}", Listed(strays))]
    LeftBehind {
        /// The place where they should be.
        place: String,
        /// Parameters in other places: name, bytes and place of each.
        strays: Vec<String>,
    },
    /// A file of tensors cannot be loaded. Nothing was loaded.
    #[error("{path}: {problem}")]
    Checkpoint {
        /// The file.
        path: String,
        /// The problem.
        problem: String,
    },
    /// The caller loads files into a set that does not have the same tensors. Either is at fault;
    /// nothing was changed.
    #[error("{}", mismatch(missing, unexpected, different))]
    Mismatch {
        /// Names in the set that are not in the files, in the set's order.
        missing: Vec<String>,
        /// Names in the files that are not in the set, in the files' order. Those that a filter
        /// leaves out are not expected.
        unexpected: Vec<String>,
        /// Tensors that are in both, and are not of one shape, or one kind of dtype: name, and
        /// dtype and shape of each.
        different: Vec<String>,
    },
}

aquifer_device::debug_as_display!(Error);

// A cause is only read.
impl UnwindSafe for Error {}
impl RefUnwindSafe for Error {}

impl Error {
    /// The error of the caller's own work, or of another library, where a closure must return an
    /// error of Aquifer.
    ///
    /// ```
    /// use aquifer::Error;
    /// let error = Error::other("the tokenizer failed");
    /// assert_eq!(error.to_string(), "the tokenizer failed");
    /// ```
    pub fn other(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Other { cause: Arc::from(cause.into()) }
    }

    /// Whether memory ran out, on the host or on the device: freeing some may help.
    pub fn is_out_of_memory(&self) -> bool {
        let on_host =
            matches!(self.transfer(), Some(TransferError::OutOfPinned { .. } | TransferError::OutOfHostMemory { .. }));
        on_host || self.is_out_of_device_memory()
    }

    /// Whether the device, not the host, ran out of memory.
    pub(crate) fn is_out_of_device_memory(&self) -> bool {
        self.alloc().is_some_and(AllocError::is_out_of_memory)
            || self.device().is_some_and(DeviceError::is_out_of_memory)
    }

    /// Whether the device is lost: nothing on it will ever complete.
    /// [`Device::lost`](crate::Device::lost) says why.
    pub fn is_device_lost(&self) -> bool {
        self.device().is_some_and(DeviceError::is_device_lost)
    }

    /// Whether the allocator sleeps, or is about to: retry once it is awake
    /// ([`AllocError::Asleep`]).
    pub fn is_asleep(&self) -> bool {
        matches!(self.alloc(), Some(AllocError::Asleep))
    }

    /// The report of an allocation that found no memory: what is held, and what helps.
    pub fn report(&self) -> Option<&OomReport> {
        self.alloc().and_then(AllocError::report)
    }

    /// What is wrong with the request, where the caller made it wrong, whichever part was asked.
    pub fn request(&self) -> Option<&RequestError> {
        match self {
            Error::Request(error) => Some(error),
            Error::Kernel(error) => error.request(),
            _ => self.alloc().and_then(AllocError::request),
        }
    }

    /// The error of the device's driver that is the cause, if it is one.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            Error::Device(error) => Some(error),
            Error::Kernel(error) => error.device(),
            Error::Transfer(error) => error.device(),
            _ => self.alloc().and_then(AllocError::device),
        }
    }

    /// The allocator's error that is the cause, if it is one.
    pub fn alloc(&self) -> Option<&AllocError> {
        match self {
            Error::Alloc(error) => Some(error),
            Error::Kernel(error) => error.alloc(),
            _ => None,
        }
    }

    /// The error of a transfer or of pinned memory, if it is one.
    pub fn transfer(&self) -> Option<&TransferError> {
        match self {
            Error::Transfer(error) => Some(error),
            _ => None,
        }
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Error {
        match error {
            OpenError::Device(error) => Error::Device(error),
            error => Error::Open(Box::new(error)),
        }
    }
}

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
            // A source of this crate fails with an error of this crate.
            TransferError::Source { cause } => match cause.downcast_ref::<Error>() {
                Some(error) => error.clone(),
                None => Error::Source { cause },
            },
            error => Error::Transfer(error),
        }
    }
}

/// For sources of this crate that threads of transfers read.
impl From<Error> for TransferError {
    fn from(error: Error) -> TransferError {
        match error {
            Error::Transfer(error) => error,
            Error::Request(error) => TransferError::Request(error),
            Error::Device(error) => TransferError::Device(error),
            error => TransferError::Source { cause: Arc::new(error) },
        }
    }
}

impl<M> From<Box<Returned<M>>> for Error {
    fn from(returned: Box<Returned<M>>) -> Error {
        returned.error.into()
    }
}

impl From<ConfigError> for Error {
    fn from(error: ConfigError) -> Error {
        Error::Alloc(error.into())
    }
}

#[cfg(feature = "sim")]
impl From<aquifer_sim::SimConfigError> for Error {
    fn from(cause: aquifer_sim::SimConfigError) -> Error {
        OpenError::Sim { text: "the settings of a simulated device".to_owned(), cause }.into()
    }
}

/// For arguments that always name a place.
impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Error {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::{Code, Operation};

    use super::*;

    #[test]
    fn errors_have_the_kind_of_their_cause() {
        let of = |code: Code| DeviceError::new(Operation::CreateEvent, code);
        let ways: [fn(DeviceError) -> Error; 4] = [
            Error::Device,
            |error| Error::Alloc(AllocError::Device(error)),
            |error| Error::Kernel(KernelError::Device(error)),
            |error| Error::Kernel(KernelError::Order { kernel: "cast", cause: AllocError::Device(error) }),
        ];
        for way in ways {
            let (lost, full, wrong) =
                (way(of(Code::ILLEGAL_ADDRESS)), way(of(Code::OUT_OF_MEMORY)), way(of(Code::INVALID_VALUE)));
            assert!(lost.is_device_lost() && !lost.is_out_of_memory(), "{lost}");
            assert!(!full.is_device_lost() && full.is_out_of_memory(), "{full}");
            assert!(!wrong.is_device_lost() && !wrong.is_out_of_memory(), "{wrong}");
        }
    }

    #[test]
    fn no_message_is_repeated_in_a_chain() {
        let refused = DeviceError::new(Operation::HostRegister, Code::INVALID_VALUE);
        let io = || Arc::new(std::io::Error::other("the disk is gone"));
        let errors = [
            Error::Kernel(KernelError::Order { kernel: "cast", cause: AllocError::Device(refused.clone()) }),
            TransferError::AlreadyPinned { address: 4096, bytes: 1, cause: refused.clone() }.into(),
            TransferError::OutOfHostMemory { bytes: 1, cause: io() }.into(),
            TransferError::Thread { what: "a test", cause: io() }.into(),
            TransferError::File { path: "model".to_owned(), cause: io() }.into(),
            Error::Source { cause: Arc::from(Box::from("the disk is gone")) },
            Error::Alloc(AllocError::Device(refused)),
        ];
        for error in errors {
            let text = error.to_string();
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                assert!(!text.contains(&error.to_string()), "{text}");
                cause = error.source();
            }
        }
    }
}
