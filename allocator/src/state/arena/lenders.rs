//! The arenas in which a stream has memory away from home.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Number of arenas that are remembered, so that a miss looks into few.
const COUNT: usize = 8;
/// No stream has this number.
const NONE: u32 = u32::MAX;

/// The streams of these arenas. Only a hint: the arenas are looked into under their locks, and what
/// is forgotten here is found by the ladder.
#[derive(Debug)]
pub(crate) struct Lenders {
    slots: [AtomicU32; COUNT],
    /// For each place and default pool, a bit that is set if the stream may have foreign free
    /// blocks there. A bit may be missing: then the ladder finds them.
    foreign: AtomicU32,
    /// The place that is overwritten next.
    next: AtomicU32,
    /// How often the stream was served away from home.
    served: AtomicU64,
}

impl Default for Lenders {
    fn default() -> Lenders {
        let slots = std::array::from_fn(|_| AtomicU32::new(NONE));
        Lenders { slots, foreign: AtomicU32::default(), next: AtomicU32::default(), served: AtomicU64::default() }
    }
}

impl Lenders {
    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.slots.iter().for_each(|slot| slot.store(NONE, Ordering::Relaxed));
        self.foreign.store(0, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.served.store(0, Ordering::Relaxed);
    }

    /// Counts that the stream was served away from home. Threads that do so at once may count once.
    pub(crate) fn count(&self) {
        self.served.store(self.served() + 1, Ordering::Relaxed);
    }

    /// How often the stream was served away from home.
    pub(crate) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    /// Notes that the stream has a foreign free block in the arena of the stream `slot`.
    pub(crate) fn note(&self, slot: u32, pool: u16) {
        if pool >= 2 {
            return;
        }
        let known = self.slots.iter().position(|known| known.load(Ordering::Relaxed) == slot);
        let place = known.unwrap_or_else(|| self.replace_oldest(slot));
        let bit = bit(place, pool);
        if self.foreign.load(Ordering::Relaxed) & bit == 0 {
            self.foreign.fetch_or(bit, Ordering::Relaxed);
        }
    }

    #[cold]
    fn replace_oldest(&self, slot: u32) -> usize {
        let place = self.next.fetch_add(1, Ordering::Relaxed) as usize % COUNT;
        self.slots[place].store(slot, Ordering::Relaxed);
        self.foreign.fetch_and(!(bit(place, 0) | bit(place, 1)), Ordering::Relaxed);
        place
    }

    /// Notes that there is no such block at a place.
    pub(crate) fn forget(&self, place: usize, pool: u16) {
        self.foreign.fetch_and(!bit(place, pool), Ordering::Relaxed);
    }

    /// The places where the stream may have foreign free blocks of a default pool.
    pub(crate) fn with_foreign(&self, pool: u16) -> Places {
        Places(self.foreign.load(Ordering::Relaxed) >> bit(0, pool).trailing_zeros() & ((1 << COUNT) - 1))
    }

    /// The stream at a place.
    pub(crate) fn at(&self, place: usize) -> u32 {
        self.slots[place].load(Ordering::Relaxed)
    }

    /// All streams that are remembered.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.slots.iter().map(|slot| slot.load(Ordering::Relaxed)).filter(|&slot| slot != NONE)
    }
}

fn bit(place: usize, pool: u16) -> u32 {
    1 << (place + COUNT * usize::from(pool))
}

/// A set of places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places(u32);

impl Places {
    pub(crate) fn is_single(self) -> bool {
        self.0.is_power_of_two()
    }
}

impl Iterator for Places {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = self.0.trailing_zeros() as usize;
        self.0 &= self.0.wrapping_sub(1);
        (place < COUNT).then_some(place)
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten_when_there_are_too_many() {
        let lenders = Lenders::default();
        assert_eq!(lenders.iter().count(), 0);
        [3, 5, 3, 7].into_iter().for_each(|slot| lenders.note(slot, 1));
        assert_eq!(lenders.iter().collect::<Vec<_>>(), [3, 5, 7]);
        (10..16).for_each(|slot| lenders.note(slot, 1));
        assert_eq!(lenders.iter().collect::<Vec<_>>(), [15, 5, 7, 10, 11, 12, 13, 14]);
    }

    #[test]
    fn places_with_foreign_blocks_are_told_apart_by_pool() {
        let lenders = Lenders::default();
        [(3, 0), (5, 1), (7, 1), (9, 2)].into_iter().for_each(|(slot, pool)| lenders.note(slot, pool));
        let with_foreign = |pool| lenders.with_foreign(pool).map(|place| lenders.at(place)).collect::<Vec<_>>();
        assert_eq!((with_foreign(0), with_foreign(1)), (vec![3], vec![5, 7]));
        assert!(lenders.with_foreign(0).is_single() && !lenders.with_foreign(1).is_single());
        lenders.forget(1, 1);
        assert_eq!((with_foreign(0), with_foreign(1)), (vec![3], vec![7]));
    }
}
