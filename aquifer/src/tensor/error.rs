//! Errors about several operands.

/// Operands that an operation cannot take together: the caller passed tensors on different devices,
/// or of dtypes or shapes that do not fit. Nothing was enqueued.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}; {}", operands.join(", "))]
#[non_exhaustive]
pub struct OperandsError {
    /// The operation.
    pub operation: &'static str,
    /// The problem, and advice.
    pub reason: String,
    /// All operands: name, dtype, shape and place of each.
    pub operands: Vec<String>,
}

aquifer_device::debug_as_display!(OperandsError);
