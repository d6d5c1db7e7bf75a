//! Operands of kernels: parts of device memory with a dtype.

use aquifer_allocator::{Buffer, Storage, View, ViewMut};
use aquifer_device::DevicePtr;

use crate::dtype::{DType, Element};

/// Device memory that a kernel reads. Any typed buffer is one.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    storage: &'a Storage,
    ptr: DevicePtr,
    bytes: u64,
    dtype: DType,
}

impl<'a> Operand<'a> {
    /// Bytes that hold elements of `dtype`, for programs that know their dtypes when they run.
    /// Length and alignment are checked when a kernel is launched.
    pub fn of_bytes(bytes: &'a Buffer<u8>, dtype: DType) -> Operand<'a> {
        Operand { storage: bytes.storage(), ptr: bytes.ptr(), bytes: bytes.bytes(), dtype }
    }

    /// The memory that it is a part of.
    pub fn storage(&self) -> &'a Storage {
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

impl<'a, T: Element> From<&'a Buffer<T>> for Operand<'a> {
    fn from(buffer: &'a Buffer<T>) -> Self {
        Operand { storage: buffer.storage(), ptr: buffer.ptr(), bytes: buffer.bytes(), dtype: T::DTYPE }
    }
}

impl<'a, T: Element> From<&'a View<'_, T>> for Operand<'a> {
    fn from(view: &'a View<'_, T>) -> Self {
        Operand::from(&**view)
    }
}

impl<'a, T: Element> From<&'a mut Buffer<T>> for Operand<'a> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Operand::from(&*buffer)
    }
}

/// Device memory that a kernel writes. Any typed buffer is one.
///
/// Several handles may share one buffer, so a mutable borrow means that it is written, not that
/// other handles are unused. The ticks of the buffers order their uses
/// ([`aquifer_allocator::AccessGuard`]).
#[derive(Debug)]
pub struct Target<'a>(pub(crate) Operand<'a>);

impl<'a> Target<'a> {
    /// Bytes that will hold elements of `dtype`; see [`Operand::of_bytes`].
    pub fn of_bytes(bytes: &'a mut Buffer<u8>, dtype: DType) -> Target<'a> {
        Target(Operand::of_bytes(bytes, dtype))
    }

    /// The same memory as an operand that is read.
    pub fn operand(&self) -> Operand<'a> {
        self.0
    }
}

impl<'a, T: Element> From<&'a mut Buffer<T>> for Target<'a> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Target(Operand::from(buffer))
    }
}

impl<'a, T: Element> From<&'a mut ViewMut<'_, T>> for Target<'a> {
    fn from(view: &'a mut ViewMut<'_, T>) -> Self {
        Target(Operand::from(&**view))
    }
}
