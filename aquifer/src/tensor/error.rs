//! Errors about several operands.

use std::fmt;

use aquifer_kernels::DType;

/// The facts about an operand in an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperandInfo {
    /// Its name in the operation.
    pub name: &'static str,
    /// Its place: `cpu`, `pinned cpu`, `cuda:0`, `sim:0`.
    pub place: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
}

/// Operands that an operation cannot take together: the caller passed tensors on different devices,
/// or of dtypes or shapes that do not fit. Nothing was enqueued.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}; {}", Listed(operands))]
#[non_exhaustive]
pub struct OperandsError {
    /// The operation.
    pub operation: &'static str,
    /// The problem, and advice.
    pub reason: String,
    /// All operands.
    pub operands: Vec<OperandInfo>,
}

aquifer_device::debug_as_display!(OperandsError);

struct Listed<'a>(&'a [OperandInfo]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, operand) in self.0.iter().enumerate() {
            let between = if position > 0 { ", " } else { "" };
            write!(f, "{between}{}: {} {:?} on {}", operand.name, operand.dtype, operand.shape, operand.place)?;
        }
        Ok(())
    }
}
