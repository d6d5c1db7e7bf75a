//! Errors of the device layer: the driver call that failed, its raw code, and the kind of
//! failure that is.
//!
//! The raw code is always kept, so no information of the driver is lost; [`ErrorKind`] is our
//! reading of it, on which callers branch. Formatting an error never calls the driver.

mod code;
mod request;

use std::fmt;

pub use code::{Code, ErrorKind};
pub use request::RequestError;

use crate::label::DeviceLabel;

/// Result of the device layer.
pub type Result<T, E = DeviceError> = std::result::Result<T, E>;

macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A driver call, as counted, traced, and named in faults and errors.
        ///
        /// The names are those of the CUDA driver API, without version suffixes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Operation {
            $($(#[$doc])* $variant,)*
        }

        impl Operation {
            /// Every operation, in declaration order; `ALL[op as usize] == op`.
            pub const ALL: &[Operation] = &[$(Operation::$variant),*];

            /// The CUDA driver API's name of the call, such as `cuMemAlloc`.
            pub const fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name,)* }
            }

            /// The operation with the given CUDA name, if there is one.
            pub fn from_name(name: &str) -> Option<Operation> {
                match name { $($name => Some(Operation::$variant),)* _ => None }
            }
        }
    };
}

operations! {
    /// Starting the driver or opening a device.
    Init = "cuInit",
    /// Free and total memory.
    MemoryInfo = "cuMemGetInfo",
    /// Plain allocation.
    Alloc = "cuMemAlloc",
    /// Plain free; waits for the device.
    Free = "cuMemFree",
    /// Allocation from the driver's stream-ordered pool.
    AllocAsync = "cuMemAllocAsync",
    /// Free into the driver's stream-ordered pool.
    FreeAsync = "cuMemFreeAsync",
    /// Reserving a range of addresses.
    Reserve = "cuMemAddressReserve",
    /// Giving a reserved range back.
    Unreserve = "cuMemAddressFree",
    /// Creating physical memory.
    CreatePhysical = "cuMemCreate",
    /// Releasing physical memory.
    ReleasePhysical = "cuMemRelease",
    /// Mapping physical memory at an address.
    Map = "cuMemMap",
    /// Unmapping an address range.
    Unmap = "cuMemUnmap",
    /// Granting access to a mapped range.
    SetAccess = "cuMemSetAccess",
    /// Allocating pinned host memory.
    HostAlloc = "cuMemHostAlloc",
    /// Freeing pinned host memory.
    HostFree = "cuMemFreeHost",
    /// Creating a stream.
    CreateStream = "cuStreamCreate",
    /// Destroying a stream.
    DestroyStream = "cuStreamDestroy",
    /// Waiting on the host for a stream.
    SynchronizeStream = "cuStreamSynchronize",
    /// Asking whether a stream is idle.
    QueryStream = "cuStreamQuery",
    /// Creating an event.
    CreateEvent = "cuEventCreate",
    /// Destroying an event.
    DestroyEvent = "cuEventDestroy",
    /// Recording an event on a stream.
    Record = "cuEventRecord",
    /// Making a stream wait for an event.
    Wait = "cuStreamWaitEvent",
    /// Asking whether an event completed.
    QueryEvent = "cuEventQuery",
    /// Waiting on the host for an event.
    SynchronizeEvent = "cuEventSynchronize",
    /// Time between two events.
    ElapsedTime = "cuEventElapsedTime",
    /// Waiting on the host for the whole device.
    Synchronize = "cuCtxSynchronize",
    /// Asynchronous copy, host to device.
    CopyToDevice = "cuMemcpyHtoDAsync",
    /// Asynchronous copy, device to host.
    CopyToHost = "cuMemcpyDtoHAsync",
    /// Asynchronous copy within the device.
    CopyOnDevice = "cuMemcpyDtoDAsync",
    /// Asynchronous copy from another device's memory.
    CopyPeer = "cuMemcpyPeerAsync",
    /// Asynchronous fill with a byte.
    Memset = "cuMemsetD8Async",
    /// Kernel launch.
    Launch = "cuLaunchKernel",
    /// Starting graph capture on a stream.
    BeginCapture = "cuStreamBeginCapture",
    /// Ending graph capture on a stream.
    EndCapture = "cuStreamEndCapture",
    /// Launching a captured graph.
    LaunchGraph = "cuGraphLaunch",
    /// Destroying a captured graph.
    DestroyGraph = "cuGraphDestroy",
    /// Reading a device attribute.
    Attribute = "cuDeviceGetAttribute",
    /// Loading a module of kernels.
    LoadModule = "cuModuleLoadData",
    /// Unloading a module of kernels.
    UnloadModule = "cuModuleUnload",
    /// Pinning memory that the caller allocated.
    HostRegister = "cuMemHostRegister",
    /// Undoing that.
    HostUnregister = "cuMemHostUnregister",
    /// Asynchronous copy of rows.
    Copy2d = "cuMemcpy2DAsync",
    /// Many asynchronous copies at once.
    CopyBatch = "cuMemcpyBatchAsync",
    /// Asking whether a stream captures.
    CaptureStatus = "cuStreamGetCaptureInfo",
    /// Asking for a stream's identity.
    StreamId = "cuStreamGetId",
    /// What the driver's stream-ordered pool holds.
    PoolUsage = "cuMemPoolGetAttribute",
    /// Making the driver's stream-ordered pool give memory back.
    TrimPool = "cuMemPoolTrimTo",
    /// Making the driver give back unused memory of graphs that allocate.
    TrimGraphMemory = "cuDeviceGraphMemTrim",
    /// Asking whether a device can reach another one's memory.
    CanAccessPeer = "cuDeviceCanAccessPeer",
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How far a request got before it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attempt {
    /// The driver was called, and returned the code.
    Call,
    /// Another function of the driver, which the operation needs, was called and returned the code.
    Function(&'static str),
    /// The driver was not called, because the call could not succeed or would do harm. The code is
    /// the one that fits best.
    Refused,
    /// The request is no driver call, and was not served. The text says so, such as "the stream was
    /// not adopted". The code is the one that fits best.
    Request(&'static str),
}

/// Implements `Debug` of an error as its `Display`. `main` and `unwrap` show an error by its
/// `Debug`, and its text is for people.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_as_display {
    ($error:ty) => {
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    };
}

/// A failed driver call, or a request that was refused before it reached the driver.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceError {
    /// The call that failed, or that the request would have led to.
    pub operation: Operation,
    /// Whether the driver was called, and by which function.
    pub attempt: Attempt,
    /// What the driver returned, unchanged.
    pub code: Code,
    /// Our reading of the code.
    pub kind: ErrorKind,
    /// The device that was asked; `None` for a request that was refused before it reached one, and
    /// for errors of a bare [`crate::Driver`].
    pub device: Option<DeviceLabel>,
    /// The request and advice, where that helps. Boxed: errors travel on fast paths.
    pub detail: Option<Box<str>>,
}

crate::debug_as_display!(DeviceError);

impl DeviceError {
    /// An error of `operation` with the raw `code` that the driver returned, classified by both.
    pub fn new(operation: Operation, code: Code) -> Self {
        let kind = match code.kind() {
            ErrorKind::OutOfMemory if operation == Operation::Reserve => ErrorKind::OutOfAddresses,
            kind => kind,
        };
        DeviceError { operation, attempt: Attempt::Call, code, kind, device: None, detail: None }
    }

    /// An error of `operation`, for which the driver was not called. The code is the one that fits
    /// best.
    ///
    /// ```
    /// use aquifer::device::{Code, DeviceError, Operation};
    /// let error = DeviceError::refused(Operation::Free, Code::INVALID_VALUE).with_detail("it is not an allocation");
    /// assert_eq!(error.to_string(), "cuMemFree was not called: CUDA_ERROR_INVALID_VALUE (1): it is not an allocation");
    /// ```
    pub fn refused(operation: Operation, code: Code) -> Self {
        DeviceError { attempt: Attempt::Refused, ..DeviceError::new(operation, code) }
    }

    /// As [`DeviceError::refused`], of a call that would break a capture or that a capture cannot
    /// take.
    pub fn in_capture(operation: Operation, detail: impl Into<String>) -> Self {
        DeviceError::refused(operation, Code::CAPTURE_UNSUPPORTED).with_detail(detail)
    }

    /// The same error of a request that is no driver call: `not_done` names the effect that is
    /// missing, such as "the stream was not adopted".
    #[must_use]
    pub fn of_request(self, not_done: &'static str) -> Self {
        DeviceError { attempt: Attempt::Request(not_done), ..self }
    }

    /// The same error, returned by another function of the driver, which the operation needs.
    #[must_use]
    pub fn of_function(self, function: &'static str) -> Self {
        DeviceError { attempt: Attempt::Function(function), ..self }
    }

    /// The same error with an explanation of the request, and advice.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into().into_boxed_str());
        self
    }

    /// The same error with another explanation after the one it has.
    #[must_use]
    pub fn with_more(self, more: impl fmt::Display) -> Self {
        let detail = match &self.detail {
            Some(detail) => format!("{detail}; {more}"),
            None => more.to_string(),
        };
        self.with_detail(detail)
    }

    /// The same error, of a call to this device.
    #[must_use]
    pub(crate) fn of_device(mut self, device: &DeviceLabel) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// The same error with another kind than its code implies.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// Whether the device has not enough memory for the request.
    pub fn is_out_of_memory(&self) -> bool {
        self.kind == ErrorKind::OutOfMemory
    }

    /// Whether the device is gone, so that every later call fails too.
    pub fn is_device_lost(&self) -> bool {
        self.kind == ErrorKind::DeviceLost
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code;
        let on = self.device.as_ref().map_or_else(String::new, |device| format!(" on {}", device.spec()));
        match self.attempt {
            Attempt::Call => write!(f, "{} failed{on}: {} ({})", self.operation, code.name(), code.0)?,
            Attempt::Function(function) => write!(f, "{function} failed{on}: {} ({})", code.name(), code.0)?,
            Attempt::Refused => write!(f, "{} was not called{on}: {} ({})", self.operation, code.name(), code.0)?,
            Attempt::Request(not_done) => write!(f, "{not_done}{on}")?,
        }
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for DeviceError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_indexed_by_their_discriminant_and_found_by_name() {
        for (index, &operation) in Operation::ALL.iter().enumerate() {
            assert_eq!(operation as usize, index);
            assert_eq!(Operation::from_name(operation.name()), Some(operation));
        }
        assert_eq!(Operation::from_name("cuMemMagic"), None);
    }

    #[test]
    fn errors_name_the_call_the_code_and_the_detail() {
        let error = DeviceError::new(Operation::Alloc, Code::OUT_OF_MEMORY).with_detail("2 MiB asked for");
        assert_eq!(error.to_string(), "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2): 2 MiB asked for");
        assert!(error.is_out_of_memory() && !error.is_device_lost());
    }
}
