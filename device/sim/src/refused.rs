//! Why a call is refused, before it is known as an error of one driver call.

use crate::error::{Code, DeviceError, ErrorKind, Operation};

/// Result of a driver call inside the simulator.
pub(super) type Answer<T> = Result<T, Refused>;

/// A refusal: the code and the explanation that the caller will see.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) code: Code,
    pub(super) kind: ErrorKind,
    pub(super) detail: String,
}

impl Refused {
    pub(super) fn new(code: Code, detail: impl Into<String>) -> Self {
        Refused { code, kind: code.kind(), detail: detail.into() }
    }

    /// A bad argument.
    pub(super) fn value(detail: impl Into<String>) -> Self {
        Refused::new(Code::INVALID_VALUE, detail)
    }

    /// A handle that is not live.
    pub(super) fn handle(what: &str, value: u64) -> Self {
        Refused::new(Code::INVALID_HANDLE, format!("{what} {value:#x} is not live: never created, or destroyed"))
    }

    pub(super) fn into_error(self, operation: Operation) -> DeviceError {
        DeviceError::new(operation, self.code).with_kind(self.kind).with_detail(self.detail)
    }
}
