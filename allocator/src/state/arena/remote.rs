//! Remote frees: blocks given back by threads that do not allocate from the arena.
//!
//! Freeing a block means writing to the heap, and a heap that two threads write to in turns travels
//! between their caches line by line: 600 ns for each block that one thread allocates and another
//! frees. So only threads that allocate from an arena free there directly. Others put the numbers
//! of their blocks into the arena's queue, and the next thread that allocates takes them out, many
//! at a time. Blocks that other streams use, or that are freed in another stream's order, bypass
//! the queue: a tick taken when a block leaves the queue is later than necessary.
//!
//! Blocks in the queue are live until they are taken out. They are taken out
//! * by the next allocation from the arena, once they are *due*: 16 of them wait, or a large one,
//!   or one whose thread found the lock taken;
//! * when another thread begins to allocate from the arena;
//! * whenever a slow path looks into the arena: before memory is asked of the device, and before
//!   statistics are read.
//!
//! So a queued block never causes a refusal or growth.
//!
//! One word per arena says which threads free directly. Blocks that become due clear it, and an
//! allocation by a thread that it does not name empties the queue before it enters itself. So the
//! fast path compares once.

use crossbeam_queue::ArrayQueue;

use crate::heap::BlockId;
use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// Blocks that an arena's queue holds. Few in models, so that they meet a full queue.
const CAPACITY: usize = if cfg!(aquifer_shuttle) { 3 } else { 256 };
/// Blocks that wait before an allocation takes them out.
const BATCH: usize = if cfg!(aquifer_shuttle) { 2 } else { 16 };
/// Blocks of this many bytes do not wait, so that little memory ever stands in a queue.
const LARGE: u64 = 1 << 20;

/// The bits of threads, given out in turn to those that allocate.
#[cfg(not(aquifer_shuttle))]
mod bit {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU32, Ordering};

    thread_local! {
        static HERE: Cell<u64> = const { Cell::new(0) };
    }

    /// The calling thread's bit; none as long as it has never allocated.
    #[inline]
    pub(super) fn of_this_thread() -> u64 {
        HERE.get()
    }

    pub(super) fn given_to_this_thread() -> u64 {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        if HERE.get() == 0 {
            HERE.set(1 << (NEXT.fetch_add(1, Ordering::Relaxed) % u64::BITS));
        }
        HERE.get()
    }
}

/// The same under a scheduler, whose threads share what is local to one of the system's.
#[cfg(aquifer_shuttle)]
mod bit {
    use shuttle::current::me;

    pub(super) fn of_this_thread() -> u64 {
        1 << (usize::from(me()) % 64)
    }

    pub(super) use of_this_thread as given_to_this_thread;
}

#[derive(Debug)]
pub(crate) struct RemoteFree {
    pub(crate) block: BlockId,
    /// The stream whose later work gets the memory, if it is not the stream of the allocation.
    pub(crate) on: Option<u32>,
    /// Requested bytes; [`super::UNKNOWN`] if unknown.
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct RemoteFrees {
    queue: ArrayQueue<RemoteFree>,
    /// The threads that free directly: a bit for each that allocated since blocks became due, and
    /// since a slow path looked into it. One thread in 64 others may be mistaken for one of them.
    /// Only a hint: what it misses waits for one of the other occasions.
    direct: AtomicU64,
}

impl Default for RemoteFrees {
    fn default() -> RemoteFrees {
        RemoteFrees { queue: ArrayQueue::new(CAPACITY), direct: AtomicU64::new(0) }
    }
}

impl RemoteFrees {
    /// True if the calling thread frees directly, and need not empty the queue before it allocates.
    #[inline]
    pub(crate) fn is_this_thread_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed) & bit::of_this_thread() != 0
    }

    /// Has the calling thread free directly from now on. It is about to empty the queue.
    pub(crate) fn add_direct_thread(&self) {
        self.direct.fetch_or(bit::given_to_this_thread(), Ordering::Relaxed);
    }

    /// Has other threads free through the queue until they next allocate.
    pub(crate) fn forget_other_threads(&self) {
        let this = bit::of_this_thread();
        if self.direct.load(Ordering::Relaxed) & !this != 0 {
            self.direct.fetch_and(this, Ordering::Relaxed);
        }
    }

    /// Queues a block, before anything that the caller reads afterwards; `is_due` if it is due at
    /// once. Gives it back if the queue is full.
    pub(crate) fn push(&self, free: RemoteFree, is_due: bool) -> Result<(), RemoteFree> {
        let is_large = free.bytes >= LARGE;
        self.queue.push(free)?;
        let are_due = is_due || is_large || self.queue.len() >= BATCH;
        if are_due && self.direct.load(Ordering::Relaxed) != 0 {
            self.direct.store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes all of them out, one by one.
    pub(crate) fn drain(&self) -> impl Iterator<Item = RemoteFree> + '_ {
        std::iter::from_fn(|| self.queue.pop())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(frees: &RemoteFrees, bytes: u64) {
        frees.push(RemoteFree { block: BlockId::NONE, on: None, bytes }, false).unwrap();
    }

    #[test]
    fn small_blocks_are_due_by_the_batch_and_large_ones_at_once() {
        let frees = RemoteFrees::default();
        assert!(!frees.is_this_thread_direct());
        frees.add_direct_thread();
        for _ in 1..BATCH {
            push(&frees, 512);
        }
        assert!(frees.is_this_thread_direct() && !frees.is_empty());
        push(&frees, 512);
        assert!(!frees.is_this_thread_direct());
        frees.add_direct_thread();
        assert_eq!(frees.drain().count(), BATCH);
        assert!(frees.is_this_thread_direct() && frees.is_empty());
        push(&frees, LARGE);
        assert!(!frees.is_this_thread_direct());
    }

    #[test]
    fn other_threads_are_not_direct_and_may_be_forgotten() {
        let frees = RemoteFrees::default();
        std::thread::scope(|scope| scope.spawn(|| frees.add_direct_thread()).join().unwrap());
        assert!(!frees.is_this_thread_direct());
        frees.add_direct_thread();
        frees.forget_other_threads();
        assert!(frees.is_this_thread_direct());
        std::thread::scope(|scope| scope.spawn(|| frees.forget_other_threads()).join().unwrap());
        assert!(!frees.is_this_thread_direct());
    }

    #[test]
    fn a_full_queue_gives_the_block_back() {
        let frees = RemoteFrees::default();
        (0..CAPACITY).for_each(|_| push(&frees, 512));
        let back = frees.push(RemoteFree { block: BlockId::NONE, on: Some(7), bytes: 512 }, false).unwrap_err();
        assert_eq!(back.on, Some(7));
        assert_eq!(frees.drain().count(), CAPACITY);
    }
}
