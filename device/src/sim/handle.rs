//! Tables of driver handles that reuse values as drivers do: a new object gets the lowest value
//! that is free.
//!
//! Reuse is deliberate: code that takes a handle for a lasting identity goes wrong here at once.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Objects by handle value.
#[derive(Debug)]
pub(super) struct Handles<T> {
    base: u64,
    /// By how much the handle is above the base.
    objects: Vec<Option<T>>,
    freed: BinaryHeap<Reverse<usize>>,
}

impl<T> Handles<T> {
    /// An empty table whose handles start at `base`.
    pub(super) fn new(base: u64) -> Self {
        Handles { base, objects: Vec::new(), freed: BinaryHeap::new() }
    }

    fn place(&self, handle: u64) -> usize {
        usize::try_from(handle.wrapping_sub(self.base)).unwrap_or(usize::MAX)
    }

    /// Adds an object and returns its handle, the lowest value that is free.
    pub(super) fn insert(&mut self, object: T) -> u64 {
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
    pub(super) fn get(&self, handle: u64) -> Option<&T> {
        self.objects.get(self.place(handle))?.as_ref()
    }

    /// The object of a live handle.
    pub(super) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        let place = self.place(handle);
        self.objects.get_mut(place)?.as_mut()
    }

    /// Every object.
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.objects.iter().flatten()
    }

    /// Destroys a live handle and returns its object.
    pub(super) fn remove(&mut self, handle: u64) -> Option<T> {
        let place = self.place(handle);
        let object = self.objects.get_mut(place)?.take()?;
        self.freed.push(Reverse(place));
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_value_comes_back_first() {
        let mut handles = Handles::new(10);
        assert_eq!([handles.insert('a'), handles.insert('b'), handles.insert('c')], [10, 11, 12]);
        assert_eq!((handles.remove(11), handles.remove(10), handles.remove(10)), (Some('b'), Some('a'), None));
        assert_eq!((handles.insert('d'), handles.get(10), handles.get(11)), (10, Some(&'d'), None));
        assert_eq!([9, 13, u64::MAX].map(|handle| handles.get(handle)), [None; 3]);
    }
}
