//! Views: borrowed parts of buffers.
//!
//! A view holds a handle of the memory, so that functions that take a buffer take a view. Its
//! lifetime is the borrow's: while a view for writing lives, its buffer cannot be named.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::UnwindSafe;

use aquifer_kernels::{Element, Operand, Target};

use super::Buffer;

/// A borrowed part of a [`Buffer`], made by [`Buffer::slice`]. It has the methods of a buffer.
pub struct View<'a, T> {
    buffer: Buffer<T>,
    borrow: PhantomData<&'a Buffer<T>>,
}

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
pub struct ViewMut<'a, T> {
    buffer: Buffer<T>,
    borrow: PhantomData<&'a mut Buffer<T>>,
}

// A panic changes no element: only work on the device does.
impl<T> UnwindSafe for ViewMut<'_, T> {}

impl<T> View<'_, T> {
    pub(super) fn new(buffer: Buffer<T>) -> Self {
        View { buffer, borrow: PhantomData }
    }
}

impl<T> ViewMut<'_, T> {
    pub(super) fn new(buffer: Buffer<T>) -> Self {
        ViewMut { buffer, borrow: PhantomData }
    }
}

impl<T> Deref for View<'_, T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        &self.buffer
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

impl<T> fmt::Debug for View<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("View").field(&self.buffer).finish()
    }
}

impl<T> fmt::Debug for ViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ViewMut").field(&self.buffer).finish()
    }
}

impl<'a, T: Element> From<&'a View<'_, T>> for Operand<'a> {
    fn from(view: &'a View<'_, T>) -> Self {
        Operand::from(&**view)
    }
}

impl<'a, T: Element> From<&'a mut ViewMut<'_, T>> for Target<'a> {
    fn from(view: &'a mut ViewMut<'_, T>) -> Self {
        Target::from(&mut **view)
    }
}
