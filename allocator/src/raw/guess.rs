//! Guesses which arena an address belongs to, by the last raw pointer that was given out near it.
//!
//! Neighbouring addresses mostly belong to one region, and so to one arena. Where they do not, or
//! where memory far apart shares a guess, the tables of the other arenas are searched.

use std::sync::OnceLock;

use crate::sync::atomic::{AtomicU32, Ordering};

/// The binary logarithm of the bytes that share a guess.
const SHIFT: u32 = 25;
/// Guesses, one each 32 MiB: 128 GiB in a row have guesses of their own, in 16 KiB.
const GUESSES: usize = if cfg!(aquifer_shuttle) { 1 } else { 1 << 12 };

#[derive(Debug, Default)]
pub(crate) struct Guesses(OnceLock<Box<[AtomicU32]>>);

impl Guesses {
    /// The slot of the arena that this address may belong to.
    #[inline]
    pub(crate) fn slot_of(&self, addr: u64) -> u32 {
        self.0.get().map_or(0, |guesses| guesses[index(addr)].load(Ordering::Relaxed))
    }

    /// Notes the arena of an address. Writes only what changes, so that threads which agree do not
    /// share a line that is written.
    #[inline]
    pub(crate) fn note(&self, addr: u64, slot: u32) {
        let guesses = self.0.get_or_init(|| (0..GUESSES).map(|_| AtomicU32::default()).collect());
        let guess = &guesses[index(addr)];
        if guess.load(Ordering::Relaxed) != slot {
            guess.store(slot, Ordering::Relaxed);
        }
    }
}

#[inline]
fn index(addr: u64) -> usize {
    (addr >> SHIFT) as usize % GUESSES
}
