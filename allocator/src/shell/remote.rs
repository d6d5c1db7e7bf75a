//! Remote frees: blocks given back by threads that do not allocate from the arena.
//!
//! Freeing a block means writing to the heap, and a heap that two threads write to in turns travels between their caches line by
//! line: 600 ns for each block that one thread allocates and another frees. So only threads that allocate from an arena free
//! there directly. Others put the numbers of their blocks into the arena's queue, and the next thread that allocates takes them out,
//! many at a time.
//!
//! Blocks in the queue are live until they are taken out. They are taken out
//! * by the next allocation from the arena, once they are *due*: 16 of them wait, or a large one, or one whose thread found the
//!   lock taken;
//! * when another thread begins to allocate from the arena;
//! * whenever all locks are taken: before memory is asked of the device, and before statistics are read.
//!
//! So no request is refused, and nothing grows, for the sake of a block that stands here.

use crossbeam::queue::ArrayQueue;

use crate::accounting::tally::Writer;
use crate::heap::BlockId;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Blocks that an arena's queue holds. Few in models, so that they meet a full queue.
const CAPACITY: usize = if cfg!(aquifer_shuttle) { 3 } else { 256 };
/// Blocks that wait before an allocation takes them out.
const BATCH: usize = if cfg!(aquifer_shuttle) { 2 } else { 16 };
/// Blocks of this many bytes do not wait, so that little memory ever stands in a queue.
const LARGE: u64 = 1 << 20;

/// The threads that allocated from an arena since all locks were last taken; some others may be mistaken for one of them. A bit for each,
/// which is read with every operation and seldom written.
#[derive(Debug, Default)]
pub(crate) struct Threads(AtomicU64);

impl Threads {
    #[inline]
    fn this() -> u64 {
        // Numbers of threads are multiples of large powers of two. This spreads them (Fibonacci hashing).
        let spread = (Writer::this_thread().number() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        1 << (spread >> 58)
    }

    /// True if the calling thread is one of them.
    #[inline]
    pub(crate) fn has_this(&self) -> bool {
        self.0.load(Ordering::Relaxed) & Threads::this() != 0
    }

    pub(crate) fn add_this(&self) {
        self.0.fetch_or(Threads::this(), Ordering::Relaxed);
    }

    /// Forgets all but the calling thread.
    pub(crate) fn forget_others(&self) {
        let this = Threads::this();
        if self.0.load(Ordering::Relaxed) & !this != 0 {
            self.0.fetch_and(this, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
pub(crate) struct RemoteFree {
    pub(crate) block: BlockId,
    /// The stream whose later work gets the memory, if it is not the stream of the allocation.
    pub(crate) on: Option<u32>,
}

#[derive(Debug)]
pub(crate) struct RemoteFrees {
    queue: ArrayQueue<RemoteFree>,
    /// Only a hint: what it misses waits for one of the other occasions.
    due: AtomicBool,
}

impl Default for RemoteFrees {
    fn default() -> RemoteFrees {
        RemoteFrees { queue: ArrayQueue::new(CAPACITY), due: AtomicBool::new(false) }
    }
}

impl RemoteFrees {
    /// Queues a block of `bytes`, before anything that the caller reads afterwards. Gives it back if the queue is full.
    pub(crate) fn push(&self, free: RemoteFree, bytes: u64) -> Result<(), RemoteFree> {
        self.queue.push(free)?;
        if (bytes >= LARGE || self.queue.len() >= BATCH) && !self.are_due() {
            self.due.store(true, Ordering::Release);
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// True if the next allocation is to take them out.
    #[inline]
    pub(crate) fn are_due(&self) -> bool {
        self.due.load(Ordering::Acquire)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes all of them out, one by one.
    pub(crate) fn drain(&self) -> impl Iterator<Item = RemoteFree> + '_ {
        // First, so that what is pushed from here on may be due again.
        self.due.swap(false, Ordering::AcqRel);
        std::iter::from_fn(|| self.queue.pop())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(frees: &RemoteFrees, bytes: u64) {
        frees.push(RemoteFree { block: BlockId::NONE, on: None }, bytes).unwrap();
    }

    #[test]
    fn small_blocks_are_due_by_the_batch_and_large_ones_at_once() {
        let frees = RemoteFrees::default();
        for _ in 1..BATCH {
            push(&frees, 512);
        }
        assert!(!frees.are_due() && !frees.is_empty());
        push(&frees, 512);
        assert!(frees.are_due());
        assert_eq!(frees.drain().count(), BATCH);
        assert!(!frees.are_due() && frees.is_empty());
        push(&frees, LARGE);
        assert!(frees.are_due());
    }

    #[test]
    fn a_full_queue_gives_the_block_back() {
        let frees = RemoteFrees::default();
        (0..CAPACITY).for_each(|_| push(&frees, 512));
        let back = frees.push(RemoteFree { block: BlockId::NONE, on: Some(7) }, 512).unwrap_err();
        assert_eq!(back.on, Some(7));
        assert_eq!(frees.drain().count(), CAPACITY);
    }
}
