//! Tables of driver handles that reuse values as drivers do: a new object gets the lowest value that is free.
//!
//! Reuse is deliberate: code that takes a handle for a lasting identity goes wrong here at once.

use std::collections::{BTreeMap, BTreeSet};

/// Objects by handle value.
#[derive(Debug)]
pub(super) struct Handles<T> {
    live: BTreeMap<u64, T>,
    freed: BTreeSet<u64>,
    next: u64,
}

impl<T> Handles<T> {
    /// An empty table whose handles start at `base`.
    pub(super) fn new(base: u64) -> Self {
        Handles { live: BTreeMap::new(), freed: BTreeSet::new(), next: base }
    }

    /// Adds an object and returns its handle, the lowest value that is free.
    pub(super) fn insert(&mut self, object: T) -> u64 {
        let handle = self.freed.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.live.insert(handle, object);
        handle
    }

    /// The object of a live handle.
    pub(super) fn get(&self, handle: u64) -> Option<&T> {
        self.live.get(&handle)
    }

    /// The object of a live handle.
    pub(super) fn get_mut(&mut self, handle: u64) -> Option<&mut T> {
        self.live.get_mut(&handle)
    }

    /// Destroys a live handle and returns its object.
    pub(super) fn remove(&mut self, handle: u64) -> Option<T> {
        let object = self.live.remove(&handle)?;
        self.freed.insert(handle);
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
    }
}
