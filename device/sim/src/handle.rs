//! Tables of driver handles that reuse values as drivers do: a new object gets the lowest value
//! that is free.
//!
//! Reuse is deliberate: code that takes a handle for a lasting identity goes wrong here at once.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Objects by handle value.
#[derive(Debug)]
pub(crate) struct HandleTable<T> {
    base: u64,
    /// By how much the handle is above the base.
    objects: Vec<Option<T>>,
    freed: BinaryHeap<Reverse<usize>>,
}

impl<T> HandleTable<T> {
    /// An empty table whose handles start at `base`.
    pub(crate) fn new(base: u64) -> Self {
        HandleTable { base, objects: Vec::new(), freed: BinaryHeap::new() }
    }

    fn place(&self, handle: u64) -> usize {
        usize::try_from(handle.wrapping_sub(self.base)).unwrap_or(usize::MAX)
    }

    /// Adds an object and returns its handle, the lowest value that is free.
    pub(crate) fn insert(&mut self, object: T) -> u64 {
        let place = match self.freed.pop() {
            Some(Reverse(place)) => place,
            None => {
                self.objects.push(None);
                self.objects.len() - 1
            }
        };
        self.objects[place] = Some(object);
        self.base + place as u64
    }

    /// The object of a live handle.
    pub(crate) fn get(&self, handle: u64) -> Option<&T> {
        self.objects.get(self.place(handle))?.as_ref()
    }

    /// The object of a live handle.
    pub(crate) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let place = self.place(handle);
        self.objects.get_mut(place)?.as_mut()
    }

    /// Every object.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.objects.iter().flatten()
    }

    /// Destroys a live handle and returns its object.
    pub(crate) fn remove(&mut self, handle: u64) -> Option<T> {
        let place = self.place(handle);
        let object = self.objects.get_mut(place)?.take()?;
        self.freed.push(Reverse(place));
        Some(object)
    }
}
