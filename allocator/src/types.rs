//! The types that the parts of the allocator have in common.

use crate::size_class::PoolKind;
use crate::tags::Tag;

/// A pool of the heap. There are a small and a large default pool; private pools have several each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolId(u16);

impl PoolId {
    pub(crate) const SMALL: PoolId = PoolId(0);
    pub(crate) const LARGE: PoolId = PoolId(1);

    /// A pool by its number: even for small pools, odd for large ones.
    #[inline]
    pub(crate) const fn numbered(number: u16) -> PoolId {
        PoolId(number)
    }

    #[inline]
    pub(crate) const fn number(self) -> u16 {
        self.0
    }

    /// The default pool of a kind.
    #[inline]
    pub(crate) fn default_of(kind: PoolKind) -> PoolId {
        PoolId(kind as u16)
    }

    /// True if it belongs to a private pool.
    #[inline]
    pub(crate) fn is_private(self) -> bool {
        self > PoolId::LARGE
    }

    #[inline]
    pub(crate) fn kind(self) -> PoolKind {
        if self.0.is_multiple_of(2) { PoolKind::Small } else { PoolKind::Large }
    }
}

/// A request on its way through the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// Bytes that the caller requested.
    pub(crate) requested: u64,
    /// Bytes after rounding.
    pub(crate) size: u64,
    /// The pool that it is served from.
    pub(crate) pool: PoolId,
    /// The stream that it is for.
    pub(crate) slot: u32,
    pub(crate) tag: Tag,
    /// True if the size and the pool follow from the requested bytes, so that a free finds both
    /// from the handle alone. Blocks of other requests are *irregular*: the heap marks them, and a
    /// free reads their record.
    pub(crate) is_regular: bool,
}
