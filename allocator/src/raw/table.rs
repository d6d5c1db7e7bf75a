//! Which block a raw pointer is: a hash table to which one thread adds at a time, and
//! from which all remove, without a lock.
//!
//! A pointer has four buckets in each *level*, a table twice as long as the one before. Pointers
//! enter the newest level; if all of their buckets there are full, a level is added. Entries never
//! move. A look-up mostly reads one bucket.
//!
//! Adding needs no atomic read-modify-write, as the caller holds the allocator's lock: of the two
//! that a pair of calls would make otherwise, one is 7 to 10 ns.
//!
//! Memory: levels are kept, with their allocator state. One is added when half of the newest one is
//! in use, so the table takes at most some 128 bytes for each pointer of the largest number that
//! were live at one time.
//!
//! Invariants, which `schedules.rs` explores:
//! * the key of an entry is 0 (vacant), a pointer, or a pointer with [`BUSY`]; a vacant entry is
//!   changed under the allocator's lock alone, and a busy one by the thread alone that made it busy;
//! * a pointer has one entry at most, because its block is live while it has one, and only the
//!   block's allocation adds one.

use std::sync::OnceLock;

use crate::size_class::MIN_BLOCK;
use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::types::BlockId;

/// Set in a key while a thread works on the entry. Pointers are aligned, so none has it.
const BUSY: u64 = 1;
/// Entries of a bucket, which fills a cache line.
const ENTRIES: usize = 5;
/// The binary logarithm of the first level's length. Small in models, so that they add levels.
const FIRST_BITS: usize = if cfg!(aquifer_shuttle) { 1 } else { 4 };
/// As many levels as suffice for 2^32 blocks, rounded to a power of two.
const LEVELS: usize = 32;
/// A pointer is aligned to [`MIN_BLOCK`] at least.
const LOW_BITS: u32 = MIN_BLOCK.trailing_zeros();

#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket {
    keys: [AtomicU64; ENTRIES],
    blocks: [AtomicU32; ENTRIES],
}

#[cfg(not(aquifer_shuttle))]
const _: () = assert!(size_of::<Bucket>() == 64, "a bucket fills a cache line");

#[derive(Debug)]
struct Level {
    buckets: Box<[Bucket]>,
    /// How many bits of a hash are no bits of a bucket's index.
    shift: u32,
}

/// An entry that this thread made busy.
struct Busy<'a> {
    bucket: &'a Bucket,
    at: usize,
}

#[derive(Debug, Default)]
pub(crate) struct RawTable {
    newest: AtomicUsize,
    levels: [OnceLock<Level>; LEVELS],
}

impl Busy<'_> {
    #[inline]
    fn block(&self) -> BlockId {
        BlockId(self.bucket.blocks[self.at].load(Ordering::Relaxed))
    }

    /// Ends this thread's work on the entry, which `key` says.
    #[inline]
    fn release(self, key: u64) {
        self.bucket.keys[self.at].store(key, Ordering::Release);
    }
}

impl Bucket {
    /// The first entry with this key. Looks at all of them, because a branch on where it is would
    /// be mispredicted.
    #[inline]
    fn position(&self, key: u64) -> Option<usize> {
        let are_equal = |at: usize| u32::from(self.keys[at].load(Ordering::Acquire) == key) << at;
        let found = (0..ENTRIES).fold(0, |found, at| found | are_equal(at));
        (found != 0).then_some(found.trailing_zeros() as usize % 8)
    }

    /// True if there is an entry of a pointer, busy or not. An entry stays where it is, and each is
    /// read once: other threads may make it busy and release it in between two looks.
    fn has(&self, ptr: u64) -> bool {
        self.keys.iter().any(|key| key.load(Ordering::Acquire) & !BUSY == ptr)
    }

    /// Makes the entry of a pointer busy.
    #[inline]
    fn claim(&self, ptr: u64) -> Option<Busy<'_>> {
        let at = self.position(ptr)?;
        let key = self.keys.get(at)?;
        let claimed = key.compare_exchange(ptr, ptr | BUSY, Ordering::Acquire, Ordering::Relaxed);
        claimed.is_ok().then_some(Busy { bucket: self, at })
    }

    /// Adds an entry, if there is room. What was read of the vacant one comes before what is
    /// written to it now.
    #[inline]
    fn add(&self, ptr: u64, block: BlockId) -> bool {
        let Some(at) = self.position(0).filter(|&at| at < ENTRIES) else { return false };
        self.blocks[at].store(block.0, Ordering::Relaxed);
        self.keys[at].store(ptr, Ordering::Release);
        true
    }
}

impl Level {
    fn new(bits: usize) -> Level {
        let buckets: Box<[_]> = (0..1_usize << bits).map(|_| Bucket::default()).collect();
        let shift = u64::BITS - buckets.len().ilog2();
        Level { buckets, shift }
    }

    /// The bucket that a pointer prefers: the upper bits of its hash.
    #[inline]
    fn first(&self, ptr: u64) -> &Bucket {
        self.bucket(hash(ptr))
    }

    /// All buckets where a pointer may be, the preferred one first.
    fn all(&self, ptr: u64) -> [&Bucket; 4] {
        [0, 16, 32, 48].map(|bits| self.bucket(hash(ptr).rotate_left(bits)))
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "what is left of the hash is less than the number of buckets")]
    fn bucket(&self, hash: u64) -> &Bucket {
        &self.buckets[(hash >> self.shift) as usize]
    }
}

/// Mixed twice: with one multiplication, pointers at regular distances fill some buckets and leave
/// others empty.
#[inline]
fn hash(ptr: u64) -> u64 {
    let mixed = (ptr >> LOW_BITS).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

impl RawTable {
    #[inline]
    fn newest(&self) -> Option<&Level> {
        self.levels[self.newest.load(Ordering::Acquire) % LEVELS].get()
    }

    /// Adds the pointer of a live block. The caller holds the allocator's lock.
    #[inline]
    pub(crate) fn insert(&self, ptr: u64, block: BlockId) {
        let is_added = self.newest().is_some_and(|level| level.first(ptr).add(ptr, block));
        if !is_added {
            self.insert_elsewhere(ptr, block);
        }
    }

    #[cold]
    #[inline(never)]
    fn insert_elsewhere(&self, ptr: u64, block: BlockId) {
        let mut newest = self.newest.load(Ordering::Relaxed);
        loop {
            let level = self.levels[newest].get_or_init(|| Level::new(FIRST_BITS + newest));
            if level.all(ptr).into_iter().any(|bucket| bucket.add(ptr, block)) {
                break;
            }
            // A level of 2^35 buckets does not fit into memory, so there is always a next one.
            newest = (newest + 1) % LEVELS;
        }
        self.newest.store(newest, Ordering::Release);
    }

    /// Removes a pointer. Of several threads that remove it, one gets the block.
    #[inline]
    pub(crate) fn remove(&self, ptr: u64) -> Option<BlockId> {
        let busy = self.find(ptr)?;
        let block = busy.block();
        busy.release(0);
        Some(block)
    }

    /// Runs `look` with the block of a pointer. Other threads that need the pointer wait meanwhile.
    pub(crate) fn look<R>(&self, ptr: u64, look: impl FnOnce(BlockId) -> R) -> Option<R> {
        let busy = self.find(ptr)?;
        let looked = look(busy.block());
        busy.release(ptr);
        Some(looked)
    }

    /// The entry of a pointer, made busy.
    #[inline]
    fn find(&self, ptr: u64) -> Option<Busy<'_>> {
        if !ptr.is_multiple_of(MIN_BLOCK) || ptr == 0 {
            return None;
        }
        let hot = self.newest().and_then(|level| level.first(ptr).claim(ptr));
        if hot.is_some() { hot } else { self.find_elsewhere(ptr) }
    }

    #[cold]
    #[inline(never)]
    fn find_elsewhere(&self, ptr: u64) -> Option<Busy<'_>> {
        loop {
            let mut is_busy = false;
            for level in self.levels[..=self.newest.load(Ordering::Acquire)].iter().rev().filter_map(OnceLock::get) {
                for bucket in level.all(ptr) {
                    if let Some(busy) = bucket.claim(ptr) {
                        return Some(busy);
                    }
                    is_busy |= bucket.has(ptr);
                }
            }
            if !is_busy {
                return None;
            }
            crate::sync::relax();
        }
    }

    /// The last pointer up to an address. Reads the whole table, without making another thread
    /// wait; a pointer that is added or removed meanwhile may be missed.
    pub(crate) fn last_until(&self, addr: u64) -> Option<u64> {
        let buckets = self.levels.iter().filter_map(OnceLock::get).flat_map(|level| level.buckets.iter());
        let keys = buckets.flat_map(|bucket| &bucket.keys).map(|key| key.load(Ordering::Acquire) & !BUSY);
        keys.filter(|&ptr| ptr != 0 && ptr <= addr).max()
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn pointers_come_and_go() {
        let table = RawTable::default();
        let mut live: HashMap<u64, BlockId> = HashMap::new();
        let mut random = 1_u64;
        for number in 1..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let ptr = (random >> 48) << 9 | 1 << 40;
            match live.remove(&ptr) {
                Some(block) => {
                    assert_eq!(table.look(ptr, |block| block), Some(block));
                    assert_eq!(table.remove(ptr), Some(block));
                }
                None => {
                    table.insert(ptr, BlockId(number));
                    live.insert(ptr, BlockId(number));
                }
            }
            assert_eq!(table.remove(ptr + 512 * 0x1_0000), None);
        }
        for (ptr, block) in live {
            assert_eq!(table.remove(ptr), Some(block));
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
                ptrs.clone().for_each(|ptr| table.insert(ptr, BlockId(1)));
                ptrs.for_each(|ptr| assert!(table.remove(ptr).is_some()));
            }
            let buckets: usize = table.levels.iter().filter_map(OnceLock::get).map(|level| level.buckets.len()).sum();
            assert!(buckets * size_of::<Bucket>() <= 128 * 100_000, "{stride}: {buckets}");
        }
    }

    #[test]
    fn what_is_no_pointer_is_not_found() {
        let table = RawTable::default();
        assert_eq!(table.remove(512), None);
        table.insert(1024, BlockId(7));
        for ptr in [0, 1, 512, 1023, 1025, 1536, u64::MAX] {
            assert_eq!(table.remove(ptr), None, "{ptr}");
        }
        let last = |addr| table.last_until(addr);
        assert_eq!((last(1023), last(1024), last(u64::MAX)), (None, Some(1024), Some(1024)));
        table.insert(4096, BlockId(8));
        assert_eq!((last(4095), last(4096), last(u64::MAX)), (Some(1024), Some(4096), Some(4096)));
    }
}
