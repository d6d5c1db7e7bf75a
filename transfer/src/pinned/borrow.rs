//! The host's borrows of pinned memory.
//!
//! The borrow checker keeps copies away from memory that the host reads or writes, because copies
//! borrow the memory, too. Launches of a graph do not: the graph has kept the memory since its
//! capture. So a borrow by the host is counted with the memory, and a launch looks at the counts.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::slice;

use aquifer_device::{AccessKind, HostPtr};

use super::uses::Uses;

/// Values in host memory, for the host to read. Until it is dropped, launches of graphs that write
/// the memory are refused ([`crate::TransferError::BorrowedByHost`]); if it is forgotten, for ever.
///
/// It keeps an address, not a reference: a reference would have to be valid until the call returns
/// that drops this, and the memory may be written before.
#[must_use = "the borrow ends when it is dropped"]
pub struct PinnedRead<'a, T = u8> {
    /// `len` values start here, which are valid for 'a, and which nothing writes meanwhile.
    start: HostPtr,
    len: usize,
    /// `None` if no graph can use the memory.
    _borrow: Option<HostBorrow<'a>>,
    values: PhantomData<&'a [T]>,
}

/// Values in host memory, for the host to change. Until it is dropped, launches of graphs that use
/// the memory are refused ([`crate::TransferError::BorrowedByHost`]); if it is forgotten, for ever.
#[must_use = "the borrow ends when it is dropped"]
pub struct PinnedWrite<'a, T = u8> {
    /// No other code uses these values for 'a.
    values: PinnedRead<'a, T>,
    exclusive: PhantomData<&'a mut [T]>,
}

/// A borrow by the host, counted until it is dropped.
#[derive(Debug)]
pub(super) struct HostBorrow<'a> {
    uses: &'a Uses,
    kind: AccessKind,
}

impl<'a> HostBorrow<'a> {
    pub(super) fn new(uses: &'a Uses, kind: AccessKind) -> HostBorrow<'a> {
        uses.begin_borrow(kind);
        HostBorrow { uses, kind }
    }
}

impl Drop for HostBorrow<'_> {
    fn drop(&mut self) {
        self.uses.end_borrow(self.kind);
    }
}

impl<'a> PinnedRead<'a> {
    /// The bytes must be initialised, valid for 'a, and not written while the borrow lasts.
    pub(super) fn new(start: HostPtr, len: usize, borrow: HostBorrow<'a>) -> Self {
        PinnedRead { start, len, _borrow: Some(borrow), values: PhantomData }
    }
}

impl<'a, T> PinnedRead<'a, T> {
    /// The values as others in the same memory, for as long.
    pub fn map<U>(self, map: impl FnOnce(&[T]) -> &[U]) -> PinnedRead<'a, U> {
        let values = map(&self);
        let (start, len) = (HostPtr(values.as_ptr().expose_provenance()), values.len());
        PinnedRead { start, len, _borrow: self._borrow, values: PhantomData }
    }

    /// The values for as long as the memory is borrowed. This forgets the borrow: launches of
    /// graphs that write the memory are refused for ever.
    pub fn leak(self) -> &'a [T] {
        let values = std::mem::ManuallyDrop::new(self);
        #[allow(unsafe_code, reason = "the borrow is never given back")]
        // SAFETY: as in `deref`; the borrow lasts for ever.
        unsafe {
            slice::from_raw_parts(values.start.as_ptr().cast(), values.len)
        }
    }
}

impl<'a> PinnedWrite<'a> {
    /// As [`PinnedRead::new`]; and no other code uses the bytes for 'a.
    pub(super) fn new(start: HostPtr, len: usize, borrow: HostBorrow<'a>) -> Self {
        PinnedWrite { values: PinnedRead::new(start, len, borrow), exclusive: PhantomData }
    }
}

impl<'a, T> PinnedWrite<'a, T> {
    /// The values as others in the same memory, for as long.
    pub fn map<U>(mut self, map: impl FnOnce(&mut [T]) -> &mut [U]) -> PinnedWrite<'a, U> {
        let values = map(&mut self);
        let (start, len) = (HostPtr(values.as_mut_ptr().expose_provenance()), values.len());
        let values = PinnedRead { start, len, _borrow: self.values._borrow, values: PhantomData };
        PinnedWrite { values, exclusive: PhantomData }
    }
}

/// Ordinary memory, which no graph uses.
impl<'a, T> From<&'a [T]> for PinnedRead<'a, T> {
    fn from(values: &'a [T]) -> Self {
        let start = HostPtr(values.as_ptr().expose_provenance());
        PinnedRead { start, len: values.len(), _borrow: None, values: PhantomData }
    }
}

impl<T> Deref for PinnedRead<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        #[allow(unsafe_code, reason = "values by their address: see the type")]
        // SAFETY: the address came from valid values, or from initialised bytes that are kept for
        // 'a. While the borrow lasts, nothing writes them: copies that do were waited for, new
        // ones need a mutable borrow of the block, and launches are refused.
        unsafe {
            slice::from_raw_parts(self.start.as_ptr().cast(), self.len)
        }
    }
}

impl<T> Deref for PinnedWrite<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T> DerefMut for PinnedWrite<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let PinnedRead { start, len, .. } = self.values;
        #[allow(unsafe_code, reason = "values by their address: see the type")]
        // SAFETY: as for reading; and all copies were waited for, while no other part names these
        // bytes, and launches that use them are refused.
        unsafe {
            slice::from_raw_parts_mut(start.as_ptr().cast(), len)
        }
    }
}

macro_rules! as_slices {
    ($($borrow:ident)*) => { $(
        impl<T, U: ?Sized> PartialEq<U> for $borrow<'_, T>
        where
            [T]: PartialEq<U>,
        {
            fn eq(&self, other: &U) -> bool {
                **self == *other
            }
        }

        impl<T: fmt::Debug> fmt::Debug for $borrow<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                (**self).fmt(f)
            }
        }
    )* };
}

as_slices! { PinnedRead PinnedWrite }
