//! The arenas of an allocator state by stream number: an append-only table, read without a lock.

use std::sync::OnceLock;

use crate::state::arena::Arena;

/// The binary logarithm of the first chunk's length.
const FIRST_BITS: u32 = 6;
const FIRST: usize = 1 << FIRST_BITS;
/// Number of further chunks, each as long as all before it together: enough for all numbers of 32
/// bits.
const CHUNKS: usize = 26;

type Entry = OnceLock<&'static Arena>;

/// Entries never move and are never removed. Most programs need no more than the first chunk, which
/// stands in the table itself.
#[derive(Debug)]
pub(crate) struct Table {
    first: [Entry; FIRST],
    more: [OnceLock<Box<[Entry]>>; CHUNKS],
}

impl Default for Table {
    fn default() -> Table {
        Table { first: std::array::from_fn(|_| OnceLock::new()), more: std::array::from_fn(|_| OnceLock::new()) }
    }
}

/// The further chunk that holds a number from [`FIRST`] on, and the index there.
fn place_of(slot: u32) -> (usize, usize) {
    let bits = slot.ilog2();
    ((bits - FIRST_BITS) as usize, (slot - (1 << bits)) as usize)
}

impl Table {
    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&'static Arena> {
        match self.first.get(slot as usize) {
            Some(entry) => entry.get().copied(),
            None => self.get_far(slot),
        }
    }

    fn get_far(&self, slot: u32) -> Option<&'static Arena> {
        let (chunk, at) = place_of(slot);
        self.more.get(chunk)?.get()?.get(at)?.get().copied()
    }

    /// The entry, which is made if there is none. The caller must ensure that no other thread makes
    /// it at the same time.
    pub(crate) fn get_or_insert(&self, slot: u32, make: impl FnOnce() -> &'static Arena) -> &'static Arena {
        if let Some(entry) = self.first.get(slot as usize) {
            return entry.get_or_init(make);
        }
        let (chunk, at) = place_of(slot);
        let entries = self.more[chunk].get_or_init(|| (0..FIRST << chunk).map(|_| OnceLock::new()).collect());
        entries[at].get_or_init(make)
    }

    /// Every arena, by ascending number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static Arena> + '_ {
        let more = self.more.iter().filter_map(OnceLock::get).flat_map(|chunk| chunk.iter());
        self.first.iter().chain(more).filter_map(|entry| entry.get().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for slot in 64..10_000 {
            assert_eq!(place_of(slot), expected);
            expected =
                if expected.1 + 1 == 64 << expected.0 { (expected.0 + 1, 0) } else { (expected.0, expected.1 + 1) };
        }
        assert_eq!(place_of(u32::MAX), (25, (1 << 31) - 1));
        assert_eq!(CHUNKS, 26);
    }
}
