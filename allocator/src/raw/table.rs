//! Which block a raw pointer is: a hash table that is shared by all threads and has no lock.
//!
//! A pointer has two buckets in each *level*, a table twice as long as the one before. Pointers enter the newest level; if both of their
//! buckets there are full, a level is added. Entries never move. So a look-up reads one bucket, mostly, and two threads write to the same
//! cache line only if their pointers share a bucket.
//!
//! Memory: levels are kept, with their shell. Until one is added, about half of the newest one is in use, so the table takes at
//! most some 200 bytes for each pointer of the largest number that were live at one time.
//!
//! Invariants, which `schedules.rs` explores:
//! * the key of an entry is 0 (vacant), a pointer, or a pointer with [`BUSY`]; only the thread that made it busy touches the rest of the entry
//!   and changes the key again;
//! * a pointer has one entry at most, because its block is live while it has one, and only the block's allocation adds one.

use std::sync::OnceLock;

use crate::heap::BlockId;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

/// Set in a key while a thread works on the entry. Pointers are aligned, so none has it.
const BUSY: u64 = 1;
/// Entries of a bucket, which fills two cache lines: processors fetch these together.
const ENTRIES: usize = 5;
/// The binary logarithm of the first level's length. Small in models, so that they add levels.
const FIRST_BITS: u32 = if cfg!(aquifer_shuttle) { 0 } else { 4 };
/// Levels suffice for 2^32 blocks.
const LEVELS: usize = 30;

/// A live raw allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The stream in whose arena the block is.
    pub(crate) slot: u32,
    pub(crate) block: BlockId,
    /// Requested bytes.
    pub(crate) bytes: u64,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Bucket {
    keys: [AtomicU64; ENTRIES],
    /// Block and slot.
    places: [AtomicU64; ENTRIES],
    bytes: [AtomicU64; ENTRIES],
}

const _: () = assert!(size_of::<Bucket>() == 128, "a bucket fills two cache lines");

#[derive(Debug)]
struct Level {
    buckets: Box<[Bucket]>,
    bits: u32,
}

/// An entry that this thread made busy.
struct Busy<'a> {
    bucket: &'a Bucket,
    at: usize,
    ptr: u64,
}

#[derive(Debug, Default)]
pub(crate) struct RawTable {
    newest: AtomicUsize,
    levels: [OnceLock<Level>; LEVELS],
}

impl Busy<'_> {
    #[inline]
    fn entry(&self) -> Entry {
        let place = self.bucket.places[self.at].load(Ordering::Relaxed);
        let bytes = self.bucket.bytes[self.at].load(Ordering::Relaxed);
        Entry { slot: place as u32, block: BlockId((place >> 32) as u32), bytes }
    }

    /// Publishes what was written, or read, before.
    #[inline]
    fn release(self, key: u64) {
        self.bucket.keys[self.at].store(key, Ordering::Release);
    }
}

impl Bucket {
    /// Makes the entry with this key busy, for `ptr`.
    #[inline]
    fn claim(&self, at: usize, key: u64, ptr: u64) -> Option<Busy<'_>> {
        let claimed = self.keys[at].compare_exchange(key, ptr | BUSY, Ordering::Acquire, Ordering::Relaxed);
        claimed.is_ok().then_some(Busy { bucket: self, at, ptr })
    }
}

impl Level {
    fn new(bits: u32) -> Level {
        Level { buckets: (0..1_usize << bits).map(|_| Bucket::default()).collect(), bits }
    }

    /// The buckets where a pointer may be.
    #[inline]
    fn buckets_of(&self, ptr: u64) -> impl Iterator<Item = &Bucket> {
        let hash = (ptr >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // The upper bits, of which the second bucket takes those below the first one's.
        let [first, second] = [hash, hash.rotate_left(self.bits)].map(|hash| hash.unbounded_shr(u64::BITS - self.bits));
        [first, second].into_iter().filter_map(|at| self.buckets.get(at as usize))
    }
}

impl RawTable {
    /// Adds the pointer of a live block.
    #[inline]
    pub(crate) fn insert(&self, ptr: u64, entry: Entry) {
        let mut newest = self.newest.load(Ordering::Acquire);
        let busy = loop {
            let level = self.levels[newest].get_or_init(|| Level::new(FIRST_BITS + newest as u32));
            match Self::vacant(level, ptr) {
                Some(busy) => break busy,
                None => newest = self.grow(newest),
            }
        };
        busy.bucket.places[busy.at].store(u64::from(entry.block.0) << 32 | u64::from(entry.slot), Ordering::Relaxed);
        busy.bucket.bytes[busy.at].store(entry.bytes, Ordering::Relaxed);
        busy.release(ptr);
    }

    /// A vacant entry, made busy.
    #[inline]
    fn vacant(level: &Level, ptr: u64) -> Option<Busy<'_>> {
        level.buckets_of(ptr).find_map(|bucket| {
            (0..ENTRIES).find_map(|at| {
                let is_vacant = bucket.keys[at].load(Ordering::Relaxed) == 0;
                if is_vacant { bucket.claim(at, 0, ptr) } else { None }
            })
        })
    }

    #[cold]
    fn grow(&self, full: usize) -> usize {
        // A level of 2^33 buckets does not fit into memory, so there is always a next one.
        let next = (full + 1).min(LEVELS - 1);
        self.newest.fetch_max(next, Ordering::AcqRel);
        next
    }

    /// Removes a pointer. Of several threads that remove it, one gets the entry.
    #[inline]
    pub(crate) fn remove(&self, ptr: u64) -> Option<Entry> {
        let busy = self.find(ptr)?;
        let entry = busy.entry();
        busy.release(0);
        Some(entry)
    }

    /// Runs `look` with the entry of a pointer, which other threads wait for meanwhile.
    pub(crate) fn look<R>(&self, ptr: u64, look: impl FnOnce(Entry) -> R) -> Option<R> {
        let busy = self.find(ptr)?;
        let looked = look(busy.entry());
        let key = busy.ptr;
        busy.release(key);
        Some(looked)
    }

    /// The entry of a pointer, made busy.
    #[inline]
    fn find(&self, ptr: u64) -> Option<Busy<'_>> {
        if ptr & BUSY != 0 || ptr == 0 {
            return None;
        }
        loop {
            let mut is_busy = false;
            for level in self.levels[..=self.newest.load(Ordering::Acquire)].iter().rev().filter_map(OnceLock::get) {
                for bucket in level.buckets_of(ptr) {
                    for at in 0..ENTRIES {
                        let key = bucket.keys[at].load(Ordering::Relaxed);
                        if key == ptr
                            && let Some(busy) = bucket.claim(at, key, ptr)
                        {
                            return Some(busy);
                        }
                        // Also if another thread was faster.
                        is_busy |= key & !BUSY == ptr;
                    }
                }
            }
            if !is_busy {
                return None;
            }
            crate::sync::relax();
        }
    }

    /// The pointer of the block that contains an address, with its requested bytes. Reads the whole table, without making
    /// another thread wait; a pointer that is added or removed meanwhile may be missed.
    pub(crate) fn containing(&self, addr: u64) -> Option<(u64, u64)> {
        let buckets = self.levels.iter().filter_map(OnceLock::get).flat_map(|level| level.buckets.iter());
        let entries = buckets.flat_map(|bucket| bucket.keys.iter().zip(&bucket.bytes));
        entries.filter_map(|(key, bytes)| {
            let ptr = key.load(Ordering::Acquire) & !BUSY;
            let bytes = bytes.load(Ordering::Relaxed);
            fence(Ordering::Acquire);
            let is_in = ptr != 0 && ptr <= addr && addr - ptr < bytes;
            (is_in && key.load(Ordering::Relaxed) & !BUSY == ptr).then_some((ptr, bytes))
        }).next()
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn entry(number: u32) -> Entry {
        Entry { slot: number % 7, block: BlockId(number), bytes: u64::from(number) + 1 }
    }

    #[test]
    fn pointers_come_and_go() {
        let table = RawTable::default();
        let mut live: HashMap<u64, Entry> = HashMap::new();
        let mut random = 1_u64;
        for number in 1..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let ptr = (random >> 48) << 9 | 1 << 40;
            match live.remove(&ptr) {
                Some(entry) => {
                    assert_eq!(table.look(ptr, |entry| entry), Some(entry));
                    assert_eq!(table.remove(ptr), Some(entry));
                }
                None => {
                    table.insert(ptr, entry(number));
                    live.insert(ptr, entry(number));
                }
            }
            assert_eq!(table.remove(ptr + 512 * 0x1_0000), None);
        }
        for (ptr, entry) in live {
            assert_eq!(table.remove(ptr), Some(entry));
            assert_eq!(table.remove(ptr), None);
        }
    }

    #[test]
    fn memory_is_bounded_by_the_pointers_that_were_live_at_one_time() {
        // Neighbours, as small blocks are; far apart, as large ones are; and all in between.
        for stride in [512, 4096, 2 << 20, (2 << 20) + 512, 33 * 512] {
            let table = RawTable::default();
            for round in 0..10_u64 {
                let ptrs = (0..100_000).map(|at| (round * 1_000_000 + at) * stride + (1 << 40));
                ptrs.clone().for_each(|ptr| table.insert(ptr, entry(1)));
                ptrs.for_each(|ptr| assert!(table.remove(ptr).is_some()));
            }
            let buckets: usize = table.levels.iter().filter_map(OnceLock::get).map(|level| level.buckets.len()).sum();
            assert!(buckets * size_of::<Bucket>() <= 200 * 100_000, "{stride}: {buckets}");
        }
    }

    #[test]
    fn what_is_no_pointer_is_not_found() {
        let table = RawTable::default();
        assert_eq!(table.remove(512), None);
        table.insert(1024, entry(2047));
        for ptr in [0, 1, 512, 1023, 1025, 1536, u64::MAX] {
            assert_eq!(table.remove(ptr), None, "{ptr}");
        }
        assert_eq!(table.containing(1023), None);
        assert_eq!(table.containing(1024), Some((1024, 2048)));
        assert_eq!(table.containing(3071), Some((1024, 2048)));
        assert_eq!(table.containing(3072), None);
    }
}
