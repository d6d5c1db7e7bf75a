//! Handles and sizes as the driver's C interface takes them. The crate's CUDA part is for 64-bit
//! machines only.

/// A handle as a pointer, which only the driver follows.
pub(crate) fn pointer<T>(handle: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(size(handle))
}

/// A pointer that the driver gave as a handle.
pub(crate) fn handle<T>(pointer: *mut T) -> u64 {
    pointer.expose_provenance() as u64
}

/// A number of bytes.
#[expect(
    clippy::cast_possible_truncation,
    reason = "this module is compiled where addresses have 64 bits, and only there"
)]
pub(crate) const fn size(bytes: u64) -> usize {
    bytes as usize
}
