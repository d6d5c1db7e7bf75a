//! The arenas of a shell by stream number: an append-only table, read without a lock.

use std::sync::OnceLock;

use crate::arena::Arena;

/// The binary logarithm of the first chunk's length.
const FIRST_BITS: u32 = 6;
/// Chunks, each twice as long as the one before, for all numbers of 32 bits.
const CHUNKS: usize = 27;

/// Entries never move and never go.
#[derive(Debug, Default)]
pub(crate) struct Table([OnceLock<Box<[OnceLock<&'static Arena>]>>; CHUNKS]);

/// Chunk of a number, and its place there.
#[inline]
fn place_of(slot: u32) -> (usize, usize) {
    let shifted = u64::from(slot) + (1 << FIRST_BITS);
    let bits = shifted.ilog2();
    ((bits - FIRST_BITS) as usize, usize::try_from(shifted - (1 << bits)).unwrap_or(usize::MAX))
}

impl Table {
    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&'static Arena> {
        let (chunk, at) = place_of(slot);
        self.0.get(chunk)?.get()?.get(at)?.get().copied()
    }

    /// The entry, made if there is none. The caller sees to it that nobody else makes it at the same time.
    pub(crate) fn get_or_insert(&self, slot: u32, make: impl FnOnce() -> &'static Arena) -> &'static Arena {
        let (chunk, at) = place_of(slot);
        let entries =
            self.0[chunk].get_or_init(|| (0..(1_usize << FIRST_BITS) << chunk).map(|_| OnceLock::new()).collect());
        entries[at].get_or_init(make)
    }

    /// Every arena, by ascending number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static Arena> + '_ {
        let chunks = self.0.iter().filter_map(OnceLock::get);
        chunks.flat_map(|chunk| chunk.iter()).filter_map(|entry| entry.get().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_a_place_of_its_own() {
        let mut expected = (0, 0);
        for slot in 0..10_000 {
            assert_eq!(place_of(slot), expected);
            expected =
                if expected.1 + 1 == 64 << expected.0 { (expected.0 + 1, 0) } else { (expected.0, expected.1 + 1) };
        }
        assert_eq!(place_of(u32::MAX), (26, 63));
        assert_eq!(CHUNKS, 27);
    }
}
