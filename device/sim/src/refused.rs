//! Why a call is refused, before it is known as an error of one driver call.

use aquifer_device::{Code, DeviceError, Operation};

/// Result of a driver call inside the simulator.
pub(crate) type Answer<T> = Result<T, Refused>;

/// A refusal: the code and the explanation that the caller will see.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) code: Code,
    pub(crate) detail: String,
}

impl Refused {
    pub(crate) fn new(code: Code, detail: impl Into<String>) -> Self {
        Refused { code, detail: detail.into() }
    }

    /// A bad argument.
    pub(crate) fn value(detail: impl Into<String>) -> Self {
        Refused::new(Code::INVALID_VALUE, detail)
    }

    /// A handle that is not live.
    pub(crate) fn handle(what: &str, value: u64) -> Self {
        Refused::new(Code::INVALID_HANDLE, format!("{what} {value:#x} is not live: never created, or destroyed"))
    }

    pub(crate) fn into_error(self, operation: Operation) -> DeviceError {
        DeviceError::new(operation, self.code).with_detail(self.detail)
    }
}
