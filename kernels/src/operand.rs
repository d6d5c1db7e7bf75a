//! Operands of kernels: parts of device memory with a dtype.

use std::sync::Arc;

use aquifer_allocator::Storage;
use aquifer_device::DevicePtr;

use crate::dtype::DType;

/// Device memory that a kernel reads. References to the buffers of the crate `aquifer` convert to
/// it.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    storage: &'a Arc<Storage>,
    ptr: DevicePtr,
    bytes: u64,
    dtype: DType,
}

impl<'a> Operand<'a> {
    /// `bytes` bytes at `ptr`, a part of `storage`, that hold elements of `dtype`. Length and
    /// alignment are checked when a kernel is launched.
    pub fn new(storage: &'a Arc<Storage>, ptr: DevicePtr, bytes: u64, dtype: DType) -> Operand<'a> {
        Operand { storage, ptr, bytes, dtype }
    }

    /// The memory that it is a part of.
    pub fn storage(&self) -> &'a Arc<Storage> {
        self.storage
    }

    /// Its first address.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Its dtype.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its whole elements.
    pub fn len(&self) -> u64 {
        self.bytes / self.dtype.bytes()
    }

    /// Whether it has no whole element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it has bytes in common with another one.
    pub(crate) fn overlaps(&self, other: &Operand<'_>) -> bool {
        let (own, others) = (self.ptr.range(self.bytes), other.ptr.range(other.bytes));
        own.start < others.end && others.start < own.end
    }

    /// Whether it is exactly the other one's memory.
    pub(crate) fn is_same(&self, other: &Operand<'_>) -> bool {
        (self.ptr, self.bytes) == (other.ptr, other.bytes)
    }
}

/// Device memory that a kernel writes. Mutable references to the buffers of the crate `aquifer`
/// convert to it.
///
/// Several handles may share one buffer, so a mutable borrow means that it is written, not that
/// other handles are unused. The ticks of the buffers order their uses
/// ([`aquifer_allocator::AccessGuard`]).
#[derive(Debug)]
pub struct Target<'a>(pub(crate) Operand<'a>);

impl<'a> Target<'a> {
    /// The memory of `operand`, which the kernel may change.
    pub fn new(operand: Operand<'a>) -> Target<'a> {
        Target(operand)
    }

    /// The same memory as an operand that is read.
    pub fn operand(&self) -> Operand<'a> {
        self.0
    }
}
