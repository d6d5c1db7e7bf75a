//! The host's borrows of pinned memory.
//!
//! The borrow checker keeps copies away from memory that the host reads or writes, because copies
//! borrow the memory, too. Launches of a graph do not: the graph has kept the memory since its
//! capture. So a borrow by the host is counted with the memory ([`super::uses`]), and a launch
//! looks at the counts.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::slice;
use std::sync::atomic::Ordering;

use aquifer_device::HostPtr;

use crate::sync::AtomicUsize;

/// Values in host memory, for the host to read. Until it is dropped, launches of graphs that write
/// the memory are refused ([`crate::TransferError::UsedByGraph`]); if it is forgotten, for ever.
#[must_use = "the borrow ends when it is dropped"]
pub struct PinnedRead<'a, T = u8> {
    /// `len` values start here, which are valid for 'a, and which nothing writes while this is
    /// alive. An address, because a reference in an argument must stay valid until the call
    /// returns, also if that drops this.
    start: HostPtr,
    len: usize,
    /// `None` if no graph can use the memory.
    borrow: Option<HostBorrow<'a>>,
    values: PhantomData<&'a [T]>,
}

/// Values in host memory, for the host to change: no other code uses them meanwhile. Until it is
/// dropped, launches of graphs that use the memory are refused
/// ([`crate::TransferError::UsedByGraph`]); if it is forgotten, for ever.
#[derive(Debug)]
#[must_use = "the borrow ends when it is dropped"]
pub struct PinnedWrite<'a, T = u8>(PinnedRead<'a, T>, PhantomData<&'a mut [T]>);

/// A borrow by the host, counted until it is dropped.
#[derive(Debug)]
pub(super) struct HostBorrow<'a>(pub(super) &'a AtomicUsize);

impl Drop for HostBorrow<'_> {
    fn drop(&mut self) {
        // What the host did comes before a launch that sees this.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl<'a, T> PinnedRead<'a, T> {
    /// `len` values must start there, which are valid for 'a, and not written while the borrow
    /// lasts.
    pub(super) fn new(start: *const T, len: usize, borrow: Option<HostBorrow<'a>>) -> Self {
        PinnedRead { start: HostPtr(start.expose_provenance()), len, borrow, values: PhantomData }
    }

    /// The values as others in the same memory, for as long.
    pub fn map<U>(self, map: impl FnOnce(&[T]) -> &[U]) -> PinnedRead<'a, U> {
        let values = map(&self);
        PinnedRead::new(values.as_ptr(), values.len(), self.borrow)
    }

    /// The values for as long as the memory is borrowed. This forgets the borrow: launches of
    /// graphs that write the memory are refused for ever.
    #[allow(unsafe_code, reason = "the borrow never ends")]
    pub fn leak(self) -> &'a [T] {
        let values: *const [T] = &**ManuallyDrop::new(self);
        // SAFETY: as in `deref`; the borrow lasts for ever.
        unsafe { &*values }
    }
}

impl<'a, T> PinnedWrite<'a, T> {
    /// As [`PinnedRead::new`]; and no other code uses the values for 'a.
    pub(super) fn new(start: *mut T, len: usize, borrow: Option<HostBorrow<'a>>) -> Self {
        PinnedWrite(PinnedRead::new(start, len, borrow), PhantomData)
    }

    /// The values as others in the same memory, for as long.
    pub fn map<U>(mut self, map: impl FnOnce(&mut [T]) -> &mut [U]) -> PinnedWrite<'a, U> {
        let values = map(&mut self);
        PinnedWrite::new(values.as_mut_ptr(), values.len(), self.0.borrow)
    }
}

/// Ordinary memory, which no graph uses.
impl<'a, T> From<&'a [T]> for PinnedRead<'a, T> {
    fn from(values: &'a [T]) -> Self {
        PinnedRead::new(values.as_ptr(), values.len(), None)
    }
}

impl<T> Deref for PinnedRead<'_, T> {
    type Target = [T];

    #[allow(unsafe_code, reason = "values by their address: see the field")]
    fn deref(&self) -> &[T] {
        // SAFETY: the values are valid for 'a. While the borrow lasts, nothing writes them: copies
        // into them were waited for, new ones need a mutable borrow of the block, and launches are
        // refused.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), self.len) }
    }
}

impl<T> Deref for PinnedWrite<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for PinnedWrite<'_, T> {
    #[allow(unsafe_code, reason = "values by their address: see the field")]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for reading; and all copies were waited for, no other part names the values,
        // and launches that use them are refused.
        unsafe { slice::from_raw_parts_mut(self.0.start.as_ptr().cast(), self.0.len) }
    }
}

impl<T, U: ?Sized> PartialEq<U> for PinnedRead<'_, T>
where
    [T]: PartialEq<U>,
{
    fn eq(&self, other: &U) -> bool {
        **self == *other
    }
}

impl<T: fmt::Debug> fmt::Debug for PinnedRead<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
