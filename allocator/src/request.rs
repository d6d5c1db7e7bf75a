//! A request on its way through the allocator.

use crate::tags::Tag;

/// A request on its way through the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Bytes that the caller requested.
    pub(crate) requested: u64,
    /// Bytes after rounding.
    pub(crate) size: u64,
    /// The pool that it is served from.
    pub(crate) pool: u16,
    /// The stream that it is for.
    pub(crate) slot: u32,
    pub(crate) tag: Tag,
    /// True if the size and the pool follow from the requested bytes, so that a free finds both
    /// from the handle alone. Blocks of other requests are *irregular*: the heap marks them, and a
    /// free reads their record.
    pub(crate) is_regular: bool,
}
