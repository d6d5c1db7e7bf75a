//! The error of transfers. A message contains its `cause`; [`std::error::Error::source`] returns
//! causes that the message does not contain.

use std::any::Any;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use aquifer_allocator::AllocError;
use aquifer_device::{DeviceError, RequestError};

/// Why a transfer, or a request for pinned memory, failed.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
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
    /// Pinned host memory ran out, by the pool's limit or the system's. Free some, raise the
    /// limit. Small copies and staging take from the same pool, so leave them room under a limit.
    #[error(
        "out of pinned host memory: {requested} bytes asked for, {reserved} held{}, {free} of them unused in pieces of at most \
         {largest}, {copying} dropped and still used by copies; {}",
        limit.map_or(String::new(), |limit| format!(" of a limit of {limit}")), pinned_advice(*limit, source.is_some())
    )]
    OutOfPinned {
        /// Bytes asked for, after rounding.
        requested: u64,
        /// Bytes that the pool holds.
        reserved: u64,
        /// Unused bytes of these, in pieces that do not serve the request.
        free: u64,
        /// Bytes of the largest of these pieces.
        largest: u64,
        /// Bytes of dropped buffers that copies still use.
        copying: u64,
        /// The most bytes that the pool may hold.
        limit: Option<u64>,
        /// The refusal of the driver or the system.
        source: Option<Box<TransferError>>,
    },
    /// The system has no memory, pinned or not.
    #[error("{bytes} bytes of host memory could not be allocated: {cause}")]
    OutOfHostMemory {
        /// Bytes asked for.
        bytes: u64,
        /// The error of the system.
        cause: Arc<std::io::Error>,
    },
    /// The caller asked to pin memory of which a page is locked already. Use the buffer that
    /// holds it, or memory that starts and ends at a page.
    #[error("{bytes} bytes at {address:#x} are pinned already, or share a page with memory that is: {cause}")]
    AlreadyPinned {
        /// The start of the memory.
        address: u64,
        /// Its length.
        bytes: u64,
        /// The error of the driver.
        cause: DeviceError,
    },
    /// The caller uses pinned memory in conflict with a graph that uses it: launches the graph
    /// while the host reads memory that the graph writes, or writes memory that it uses
    /// ([`crate::PinnedRead`], [`crate::PinnedWrite`]); takes registered memory back; or gives the
    /// memory to another library.
    #[error("a graph uses these {bytes} bytes of pinned memory at {address:#x}: {advice}")]
    UsedByGraph {
        /// The start of the memory.
        address: u64,
        /// Its length.
        bytes: u64,
        /// What to do.
        advice: &'static str,
    },
    /// The caller asked for bytes as values of another type, but their length or alignment does not
    /// fit.
    #[error("{bytes} bytes at this address are not a whole number of aligned {to} values")]
    BadCast {
        /// Bytes there are.
        bytes: u64,
        /// Name of the type.
        to: &'static str,
    },
    /// The caller passed two ends of different lengths.
    #[error("a copy from {from} elements to {to}: both ends must have the same length")]
    LengthMismatch {
        /// Elements to copy.
        from: u64,
        /// Elements that there is room for.
        to: u64,
    },
    /// The caller passed two ends of a copy that have memory in common.
    #[error("a copy of {bytes} bytes to memory that overlaps what it reads")]
    Overlap {
        /// Bytes to copy.
        bytes: u64,
    },
    /// The caller passed a region that cannot be copied.
    #[error("the region cannot be copied: {reason}")]
    Region {
        /// The problem.
        reason: &'static str,
    },
    /// The transfer was cancelled before it was complete. What it wrote so far is there, the rest
    /// is as it was.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// The caller asked for the result of a transfer again after it was taken.
    #[error("the result of the transfer was taken already")]
    AlreadyTaken,
    /// Code that the caller passed panicked on a thread of the runtime.
    #[error("{what} panicked: {message}")]
    Panicked {
        /// The code that panicked.
        what: &'static str,
        /// The message of the panic.
        message: String,
    },
    /// The system refused to start a thread.
    #[error("a thread for {what} could not be started: {cause}")]
    Thread {
        /// The purpose of the thread.
        what: &'static str,
        /// The error of the system.
        cause: Arc<std::io::Error>,
    },
    /// A file could not be read or written.
    #[error("{path}: {cause}")]
    File {
        /// The file.
        path: String,
        /// The error of the system.
        cause: Arc<std::io::Error>,
    },
    /// The caller asked for a part of a file that reaches beyond its end.
    #[error("{path} has {len} bytes: {bytes} from {offset} on reach beyond its end")]
    FileTooShort {
        /// The file.
        path: String,
        /// Its length in bytes.
        len: u64,
        /// The start of the part.
        offset: u64,
        /// Length of the part.
        bytes: u64,
    },
    /// The caller read a download of a batch that was not run, or whose run failed. Run the batch
    /// first.
    #[error("the batch of copies was not run, or its run failed")]
    NotRun,
    /// A source that the caller gave failed.
    #[error("the source failed: {cause}")]
    Source {
        /// The error of the source.
        cause: Arc<dyn std::error::Error + Send + Sync>,
    },
}

aquifer_device::debug_as_display!(TransferError);

// A cause is only read.
impl UnwindSafe for TransferError {}
impl RefUnwindSafe for TransferError {}

/// Advice about pinned memory that ran out, which copies of the runtime need, too.
fn pinned_advice(limit: Option<u64>, system_refused: bool) -> &'static str {
    match limit {
        Some(_) if !system_refused => {
            "drop pinned buffers or raise the limit (`PinnedPool::set_limit`); copies of ordinary memory need some, too"
        }
        _ => "drop pinned buffers, or keep values in ordinary memory, which copies stage",
    }
}

impl TransferError {
    /// The error of foreign code that panicked.
    #[cold]
    pub(crate) fn panicked(what: &'static str, panic: &(dyn Any + Send)) -> TransferError {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = text.or_else(|| panic.downcast_ref::<String>().cloned());
        TransferError::Panicked { what, message: message.unwrap_or_else(|| "no message".to_owned()) }
    }

    /// As the cause of another error: an error of the driver as itself.
    pub(crate) fn into_cause(self) -> Arc<dyn std::error::Error + Send + Sync> {
        if let TransferError::Device(error) = self { Arc::new(error) } else { Arc::new(self) }
    }

    /// Whether memory ran out, on the host or on the device: freeing some may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            TransferError::OutOfPinned { .. } | TransferError::OutOfHostMemory { .. } => true,
            TransferError::Alloc(error) => error.is_out_of_memory(),
            _ => self.device().is_some_and(DeviceError::is_out_of_memory),
        }
    }

    /// Whether the device is lost: nothing on it will ever complete.
    pub fn is_device_lost(&self) -> bool {
        self.device().is_some_and(DeviceError::is_device_lost)
    }

    /// The error of the device's driver that is the cause, if it is one.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            TransferError::Device(error) => Some(error),
            TransferError::Alloc(error) => error.device(),
            _ => None,
        }
    }
}

impl From<AllocError> for TransferError {
    fn from(error: AllocError) -> TransferError {
        match error {
            AllocError::Request(error) => TransferError::Request(error),
            AllocError::Device(error) => TransferError::Device(error),
            error => TransferError::Alloc(error),
        }
    }
}
