//! An arena: the heap of one stream, under a lock of its own. Allocating for a stream takes a free
//! block from its arena, and dropping a handle gives the block back to the arena that it came from;
//! both need that lock alone.
//!
//! Arenas are never deallocated but recycled with their allocator state, so a handle refers to its
//! arena by a plain reference. Each has its own queue of remote frees (`remote.rs`) and its own
//! counters, on cache lines of its own. `take.rs` takes blocks and `release.rs` makes them free
//! again; `free.rs` decides whether the calling thread does that itself or queues the block.
//!
//! Invariants:
//! * an arena is *open* from the stream's first allocation until the allocator state is recycled;
//!   blocks live in open arenas only;
//! * a slow path that looks into the arena first applies the remote frees queued before;
//! * the streams that own blocks here are known by their timelines.
//!
//! Lock order: the shared state's lock, arenas, then leaf locks (history, publishing, lists). Work
//! in one arena alone takes that arena's lock while holding no other.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::internal::Timeline;
use aquifer_device::{DevicePtr, NewBlock};
use crossbeam_utils::CachePadded;
use lenders::Lenders;
use remote::{RemoteFree, RemoteFrees};

use crate::accounting::writer::{ArenaCounters, CounterTarget, CounterWriter};
use crate::backing::paged::milestones::Milestones;
use crate::heap::{Block, BlockId, Heap};
use crate::history::{Actions, Subject};
use crate::raw::table::RawTable;
use crate::state::{AllocatorState, DeferredFree};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use crate::sync::{Mutex, MutexGuard};
use crate::tags::Tag;

mod away;
mod coalesce;
mod free;
mod lenders;
mod milestone;
mod release;
mod remote;
mod take;

/// An unknown number of bytes.
pub(crate) const UNKNOWN: u64 = u64::MAX;

pub(crate) struct Arena {
    pub(crate) state: &'static AllocatorState,
    pub(crate) slot: u32,
    /// True if the arena is settled (`state/settled.rs`). Set to false before the arena enters the
    /// queue of unsettled ones.
    settled: AtomicBool,
    /// Number of live blocks that streams besides their own use. Written under the shared state's
    /// lock.
    pub(crate) blocks_used_elsewhere: AtomicU32,
    /// True once another stream may own blocks here. Set before it does.
    pub(crate) has_lent: AtomicBool,
    /// Where the stream has memory away from home.
    pub(crate) lenders: Lenders,
    inner: CachePadded<Mutex<ArenaInner>>,
    pub(crate) own: CachePadded<ArenaCounters>,
    remote: CachePadded<RemoteFrees>,
    /// Blocks that were given out as raw pointers.
    pub(crate) raw: CachePadded<RawTable>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("slot", &self.slot).finish_non_exhaustive()
    }
}

/// The state that an arena's lock protects.
#[derive(Debug, Default)]
pub(crate) struct ArenaInner {
    /// The thread that writes to the shared counters (`accounting/writer.rs`);
    /// [`CounterWriter::NONE`] while the arena is not open, and [`CounterWriter::SETTLED`] while
    /// it is settled.
    writer: CounterWriter,
    /// What `writer` was before the arena was settled.
    settled_writer: CounterWriter,
    /// Number of live blocks.
    pub(crate) live: u64,
    pub(crate) heap: Heap,
    pub(crate) crosses_streams: bool,
    pub(crate) records_history: bool,
    /// True if memory comes in granules.
    pub(crate) is_paged: bool,
    pub(crate) milestones: Milestones,
    /// True if the stream goes on borrowing though it does so often, because more memory of its own
    /// would cost too much, as the ladder last decided.
    pub(crate) keeps_borrowing: bool,
    pub(crate) device_id: u32,
    timeline: Option<Arc<Timeline>>,
    /// Timelines of other streams that own blocks here.
    borrowers: BTreeMap<u32, Arc<Timeline>>,
    /// Operations since the heap's identities were last checked.
    #[cfg(debug_assertions)]
    unchecked: usize,
}

/// A free that needs the shared state: other streams use the block, or it is freed in another
/// stream's order and blocks do not cross streams.
#[derive(Debug)]
struct UsedElsewhere;

impl Arena {
    pub(crate) fn new(state: &'static AllocatorState, slot: u32) -> Arena {
        Arena {
            state,
            slot,
            settled: AtomicBool::new(false),
            blocks_used_elsewhere: AtomicU32::new(0),
            has_lent: AtomicBool::new(false),
            lenders: Lenders::default(),
            inner: CachePadded::default(),
            own: CachePadded::default(),
            remote: CachePadded::default(),
            raw: CachePadded::default(),
        }
    }

    /// Takes the lock for an allocation, and applies the remote frees that are due. `None` while
    /// the arena is not open, or if the calling thread is not known yet
    /// (`StateGuard::admit_thread`).
    #[inline]
    pub(crate) fn enter(&'static self) -> Option<ArenaGuard> {
        // Before the lock, which all later loads wait for.
        let is_direct = self.remote.is_this_thread_direct();
        let locked = self.admit(self.inner.lock())?;
        // Not by reference: values that are passed on in registers must not be forced into memory.
        if is_direct { Some(locked) } else { locked.drain_for_allocation() }
    }

    #[inline]
    fn admit(&'static self, inner: MutexGuard<'static, ArenaInner>) -> Option<ArenaGuard> {
        if inner.is_known_here() { Some(ArenaGuard { arena: self, inner }) } else { self.admit_unsettled(inner) }
    }

    /// As [`Arena::admit`], where the arena may be settled.
    #[cold]
    #[inline(never)]
    fn admit_unsettled(&'static self, inner: MutexGuard<'static, ArenaInner>) -> Option<ArenaGuard> {
        let mut locked = ArenaGuard { arena: self, inner };
        if locked.inner.writer == CounterWriter::SETTLED {
            locked.inner.writer = locked.inner.settled_writer;
            self.unsettle();
        }
        locked.inner.is_known_here().then_some(locked)
    }

    /// Enters the arena in the queue of those that are not settled any more, if it is settled and
    /// not there yet.
    fn unsettle(&'static self) {
        if self.settled.load(Ordering::SeqCst) && self.settled.swap(false, Ordering::SeqCst) {
            self.state.unsettled.push(self);
        }
    }

    /// Takes the lock for a caller that has the shared state's lock.
    pub(crate) fn lock_with_all(&'static self) -> ArenaGuard {
        self.with_all(self.inner.lock())
    }

    pub(crate) fn try_lock_with_all(&'static self) -> Option<ArenaGuard> {
        Some(self.with_all(self.inner.try_lock()?))
    }

    fn with_all(&'static self, inner: MutexGuard<'static, ArenaInner>) -> ArenaGuard {
        ArenaGuard { arena: self, inner }
    }

    /// Runs `look` under the lock, to read or mark a block. It must neither allocate nor free one.
    pub(crate) fn look<R>(&'static self, look: impl FnOnce(&mut ArenaInner) -> R) -> R {
        look(&mut self.inner.lock())
    }

    /// Adds a block's raw pointer, for a caller that holds the lock.
    #[inline]
    pub(crate) fn add_raw(&self, ptr: u64, block: BlockId) {
        self.raw.insert(ptr, block);
        self.state.guesses.note(ptr, self.slot);
    }

    /// Tells the device's witness of a block that is handed out.
    #[cold]
    #[inline(never)]
    pub(crate) fn report_block(&'static self, id: BlockId, ptr: DevicePtr, bytes: u64, at: &'static Location<'static>) {
        if id == BlockId::NONE || !self.state.watches_blocks() {
            return;
        }
        let (tag, pool) = self.look(|inner| (Tag(inner.heap.blocks[id].tag), inner.heap.blocks[id].pool));
        let block = NewBlock { ptr, bytes, tag: tag.name(), is_for_graphs: pool >= 2, at: Some(at) };
        self.state.tell_witness(|witness| witness.begins(block));
    }

    /// Tells the device's witness that a block is given back, before the memory is reused.
    /// Takes the words of the handle, not the handle, which would have to be copied to where it can
    /// be pointed to.
    #[cold]
    #[inline(never)]
    pub(crate) fn report_end(&'static self, ptr: DevicePtr, at: Option<&'static Location<'static>>) {
        self.state.tell_witness(|witness| witness.ends(ptr, at));
    }

    /// True if frees are queued.
    pub(crate) fn has_remote_frees(&self) -> bool {
        !self.remote.is_empty()
    }

    #[cfg(all(test, aquifer_shuttle))]
    pub(crate) fn is_empty(&self) -> bool {
        self.remote.is_empty() && self.inner.lock().live == 0
    }
}

/// An arena whose lock is held. Two words, which stay in registers from where the lock is taken to
/// where it is released: copying it, and handles, through memory cost about 40 ns a hot pair.
#[derive(Debug)]
pub(crate) struct ArenaGuard {
    pub(crate) arena: &'static Arena,
    inner: MutexGuard<'static, ArenaInner>,
}

impl Deref for ArenaGuard {
    type Target = ArenaInner;

    #[inline]
    fn deref(&self) -> &ArenaInner {
        &self.inner
    }
}

impl DerefMut for ArenaGuard {
    #[inline]
    fn deref_mut(&mut self) -> &mut ArenaInner {
        &mut self.inner
    }
}

impl ArenaGuard {
    /// Applies the remote frees queued so far, has other threads free through the queue until they
    /// next allocate here, and merges blocks whose coalescing was deferred.
    pub(crate) fn tidy(&mut self) {
        self.arena.remote.forget_other_threads();
        self.drain();
        self.coalesce_deferred();
    }

    /// Settles the arena: the next thread that works here unsettles it. Returns false if frees were
    /// queued meanwhile. The caller holds the shared state's lock.
    pub(crate) fn settle(&mut self) -> bool {
        let arena = self.arena;
        arena.settled.store(true, Ordering::SeqCst);
        // A thread that queues a free either sees the store, or its free is seen here.
        fence(Ordering::SeqCst);
        if arena.has_remote_frees() && arena.settled.swap(false, Ordering::SeqCst) {
            return false;
        }
        self.inner.settled_writer = std::mem::replace(&mut self.inner.writer, CounterWriter::SETTLED);
        true
    }

    /// Makes the arena an unsettled one, for a caller that has the shared state's lock.
    pub(crate) fn unsettle_held(&mut self) {
        if self.inner.writer == CounterWriter::SETTLED {
            self.inner.writer = self.inner.settled_writer;
            self.arena.settled.store(false, Ordering::SeqCst);
        }
    }

    /// Changes the thread that writes to the shared counters. The caller holds all locks.
    pub(crate) fn set_writer(&mut self, writer: CounterWriter) {
        self.inner.writer = writer;
    }

    /// The counters that operations write to now.
    #[inline]
    pub(crate) fn counter_target(&self) -> CounterTarget {
        let (state, own) = (self.arena.state, &*self.arena.own);
        if self.inner.writer == CounterWriter::SEVERAL {
            CounterTarget::Own(state, own)
        } else {
            CounterTarget::Shared(state)
        }
    }

    /// Applies the remote frees before an allocation by the calling thread, which frees directly
    /// from now on. `None` as for [`Arena::enter`].
    #[cold]
    fn drain_for_allocation(mut self) -> Option<ArenaGuard> {
        self.arena.remote.add_direct_thread();
        self.drain();
        let arena = self.arena;
        if !arena.state.has_deferred_frees() {
            return Some(self);
        }
        drop(self);
        // Blocks that other streams used, too, need the shared state's lock. They are not to count
        // as live, and their wait begins now.
        drop(arena.state.lock(None));
        arena.admit(arena.inner.lock())
    }

    /// Applies the remote frees queued so far.
    pub(crate) fn drain(&mut self) {
        let arena = self.arena;
        for RemoteFree { block, on, bytes } in arena.remote.drain() {
            if let Err(UsedElsewhere) = self.free(block, on, bytes) {
                arena.state.defer_free(DeferredFree { arena, block, on });
            }
        }
    }

    /// Notes in the history, if that is on, what happened to a live or waiting block.
    #[inline]
    pub(crate) fn note(&self, actions: impl Into<Actions>, id: BlockId) {
        if self.inner.records_history {
            self.note_always(actions.into(), id);
        }
    }

    #[inline(never)]
    fn note_always(&self, actions: Actions, id: BlockId) {
        let &Block { addr, requested: size, owner: slot, tag, pool, .. } = &self.inner.heap.blocks[id];
        let pool = self.inner.heap.pools[pool].options.history_id;
        self.arena.state.history.lock().note(actions, Subject { addr, size, slot, tag: Tag(tag), pool });
    }

    /// Notes the last uses of granules in the log that are not known done (`heap/recent.rs`).
    pub(crate) fn note_recent_uses(&mut self) {
        let done = self.done();
        self.inner.heap.note_recent_uses(done);
    }

    /// The tick that the stream's timeline is known to have reached.
    fn done(&self) -> u64 {
        self.inner.timeline.as_ref().map_or(0, |timeline| timeline.frontier())
    }

    /// Checks the heap's identities now and then, in debug builds. The cost of a check grows with
    /// the number of blocks, so as many operations pass between two checks.
    #[inline]
    fn debug_check(&mut self) {
        #[cfg(debug_assertions)]
        {
            let inner = &mut *self.inner;
            inner.unchecked += 1;
            if inner.unchecked > 64 + inner.heap.blocks.records_count() {
                inner.unchecked = 0;
                debug_assert_eq!(inner.heap.check(), Ok(()));
            }
        }
    }
}

impl ArenaInner {
    /// True if the calling thread may work here.
    #[inline]
    fn is_known_here(&self) -> bool {
        self.writer == CounterWriter::this_thread() || self.writer == CounterWriter::SEVERAL
    }

    /// Opens the arena of the stream with this timeline.
    pub(crate) fn open(&mut self, timeline: &Arc<Timeline>, is_paged: bool) {
        self.heap = Heap::new(timeline.id());
        self.is_paged = is_paged;
        if is_paged {
            self.milestones.start();
        }
        self.device_id = timeline.device_id();
        self.timeline = Some(timeline.clone());
    }

    /// The tick that the stream's timeline must reach for all work enqueued so far to be done.
    #[inline]
    fn tick_of(&self, slot: u32) -> u64 {
        let timeline = if slot == self.heap.home { self.timeline.as_ref() } else { self.borrowers.get(&slot) };
        debug_assert!(timeline.is_some(), "the owner of a block is known");
        timeline.map_or(0, |timeline| timeline.now() + 1)
    }

    /// True if the stream may own blocks here.
    pub(crate) fn knows(&self, slot: u32) -> bool {
        slot == self.heap.home || self.borrowers.contains_key(&slot)
    }

    /// Lets a stream own blocks here.
    pub(crate) fn know(&mut self, timeline: &Arc<Timeline>) {
        if !self.knows(timeline.id()) {
            self.borrowers.insert(timeline.id(), timeline.clone());
        }
    }
}

/// The data of a block that an allocation needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) arena: &'static Arena,
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
}
