//! Views: borrowed parts of buffers.
//!
//! A view to read borrows the handle of its buffer. A view to write has a handle of its own, so that
//! functions that take a buffer to write take it: they get a `&mut Buffer`, which callers may swap
//! with another one's, so it must not refer to a borrow.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::UnwindSafe;
use std::sync::Arc;

use aquifer_allocator::Storage;
use aquifer_kernels::{Element, Target};

use super::Buffer;

/// A borrowed part of a [`Buffer`], made by [`Buffer::slice`]. It has the methods of a buffer that
/// do not write, and costs nothing to make or copy.
///
/// ```compile_fail,E0505
/// # fn main() -> Result<(), aquifer::Error> {
/// # use aquifer::prelude::*;
/// # let device = aquifer::open("sim:24GiB")?;
/// # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let buffer = memory.alloc_zeros::<f32>(1000, &stream)?;
/// let head = buffer.slice(..500);
/// drop(buffer); // error: `head` borrows it
/// head.to_vec(&stream)?;
/// # Ok(()) }
/// ```
pub type View<'a, T> = Buffer<T, &'a Arc<Storage>>;

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

/// A part of a [`Buffer`], borrowed for writing by [`Buffer::slice_mut`]. It has the methods of a
/// buffer.
///
/// ```compile_fail,E0502
/// # fn main() -> Result<(), aquifer::Error> {
/// # use aquifer::prelude::*;
/// # let device = aquifer::open("sim:24GiB")?;
/// # let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let mut buffer = memory.alloc::<f32>(1000, &stream)?;
/// let mut head = buffer.slice_mut(..500);
/// let len = buffer.len(); // error: `buffer` is borrowed
/// head.zero(&stream)?;
/// # Ok(()) }
/// ```
#[must_use]
pub struct ViewMut<'a, T> {
    buffer: Buffer<T>,
    borrow: PhantomData<&'a mut Buffer<T>>,
}

// A panic changes no element: only work on the device does.
impl<T> UnwindSafe for ViewMut<'_, T> {}

impl<T> ViewMut<'_, T> {
    pub(super) fn new(buffer: Buffer<T>) -> Self {
        ViewMut { buffer, borrow: PhantomData }
    }
}

impl<T> Deref for ViewMut<'_, T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        &self.buffer
    }
}

impl<T> DerefMut for ViewMut<'_, T> {
    fn deref_mut(&mut self) -> &mut Buffer<T> {
        &mut self.buffer
    }
}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ViewMut").field(&self.buffer).finish()
    }
}

impl<'a, T: Element> From<&'a mut ViewMut<'_, T>> for Target<'a> {
    fn from(view: &'a mut ViewMut<'_, T>) -> Self {
        Target::from(&mut **view)
    }
}
