//! An arena: the heap of one stream, under a lock of its own. Allocating for a stream takes a free block from its arena, and
//! dropping a handle gives the block back to the arena that it came from; both need that lock alone.
//!
//! Arenas are never deallocated but recycled with their shell, so a handle refers to its arena by a plain reference. Each has
//! its own queue of remote frees (`remote.rs`, filled by `free.rs`) and its own counters,
//! on cache lines of its own.
//!
//! Invariants:
//! * an arena is *open* from the stream's first allocation until the shell is recycled; blocks live in open arenas only;
//! * a slow path that looks into the arena first applies the remote frees queued before;
//! * the streams that own blocks here are known by their timelines.
//!
//! Lock order: the core's lock, arenas, then leaf locks (history, publishing, lists). Work in one
//! arena alone takes that arena's lock while holding no other.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::DevicePtr;
use aquifer_device::internal::Timeline;
use aquifer_device::sim::NewBlock;
use crossbeam_utils::CachePadded;
use remote::{RemoteFree, RemoteFrees};

use crate::accounting::tally::{OwnCounters, Tally, Writer};
use crate::backing::paged::Milestones;
use crate::heap::{Block, BlockId, Heap, IndexKind, SplitChange, State, kind_of};
use crate::history::{Action, Actions, Subject};
use crate::raw::RawTable;
use crate::request::Request;
use crate::shell::{SharedFree, Shell};
use crate::size_class::{PoolKind, SizeClasses};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use crate::sync::{Mutex, MutexGuard};
use crate::tags::Tag;

mod free;
mod milestone;
mod remote;
mod rest;

/// A number of bytes that nobody knows.
pub(crate) const UNKNOWN: u64 = u64::MAX;

pub(crate) struct Arena {
    pub(crate) shell: &'static Shell,
    pub(crate) slot: u32,
    /// True if the arena is settled (`shell/settled.rs`). Set to false before the arena enters the queue of unsettled ones.
    settled: AtomicBool,
    /// Number of live blocks that streams besides their own use. Written under the core's lock.
    pub(crate) shared_blocks: AtomicU32,
    /// True once another stream may own blocks here. Set before it does.
    pub(crate) has_lent: AtomicBool,
    desk: CachePadded<Mutex<Desk>>,
    pub(crate) own: CachePadded<OwnCounters>,
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
pub(crate) struct Desk {
    /// The thread that writes to the shared counters (`accounting/tally.rs`); [`Writer::NOBODY`] while the arena is not
    /// open, and [`Writer::SETTLED`] while it is settled.
    writer: Writer,
    /// What `writer` was before the arena was settled.
    settled_writer: Writer,
    /// Number of live blocks.
    pub(crate) live: u64,
    pub(crate) heap: Heap,
    pub(crate) classes: SizeClasses,
    pub(crate) crosses_streams: bool,
    pub(crate) records_history: bool,
    /// True if memory comes in granules.
    pub(crate) is_paged: bool,
    pub(crate) milestones: Milestones,
    /// How often the stream was served with blocks away from home.
    pub(crate) borrows: u64,
    pub(crate) device_id: u32,
    timeline: Option<Arc<Timeline>>,
    /// Timelines of other streams that own blocks here.
    borrowers: BTreeMap<u32, Arc<Timeline>>,
    /// Operations since the heap's identities were last checked.
    #[cfg(debug_assertions)]
    unchecked: usize,
}

/// The reason why a free needs more than the arena: other streams use the block.
#[derive(Debug)]
struct Shared;

impl Arena {
    pub(crate) fn new(shell: &'static Shell, slot: u32) -> Arena {
        Arena {
            shell,
            slot,
            settled: AtomicBool::new(false),
            shared_blocks: AtomicU32::new(0),
            has_lent: AtomicBool::new(false),
            desk: CachePadded::default(),
            own: CachePadded::default(),
            remote: CachePadded::default(),
            raw: CachePadded::default(),
        }
    }

    /// Takes the lock for an allocation, and applies the remote frees that are due. `None` while the arena is not open, or if the calling
    /// thread is not known yet (`Whole::admit_thread`).
    #[inline]
    pub(crate) fn enter(&'static self) -> Option<Guard> {
        // Before the lock, which all later loads wait for.
        let is_direct = self.remote.has_direct_thread();
        let guard = self.admit(self.desk.lock())?;
        // Not by reference: values that are passed on in registers must not be forced into memory.
        if is_direct { Some(guard) } else { guard.drained() }
    }

    #[inline]
    fn admit(&'static self, desk: MutexGuard<'static, Desk>) -> Option<Guard> {
        if desk.is_known_here() { Some(Guard { arena: self, desk }) } else { self.admit_unsettled(desk) }
    }

    /// As [`Arena::admit`], where the arena may be settled.
    #[cold]
    #[inline(never)]
    fn admit_unsettled(&'static self, desk: MutexGuard<'static, Desk>) -> Option<Guard> {
        let mut guard = Guard { arena: self, desk };
        if guard.desk.writer == Writer::SETTLED {
            guard.desk.writer = guard.desk.settled_writer;
            self.unsettle();
        }
        guard.desk.is_known_here().then_some(guard)
    }

    /// Enters the arena in the queue of those that are not settled any more, if it is settled and not there yet.
    fn unsettle(&'static self) {
        if self.settled.load(Ordering::SeqCst) && self.settled.swap(false, Ordering::SeqCst) {
            self.shell.unsettled.push(self);
        }
    }

    /// Takes the lock for a caller that has the core's lock.
    pub(crate) fn lock_with_all(&'static self) -> Guard {
        self.with_all(self.desk.lock())
    }

    pub(crate) fn try_lock_with_all(&'static self) -> Option<Guard> {
        Some(self.with_all(self.desk.try_lock()?))
    }

    fn with_all(&'static self, desk: MutexGuard<'static, Desk>) -> Guard {
        Guard { arena: self, desk }
    }

    /// Runs `look` under the lock, to read or mark a block. It must neither allocate nor free one.
    pub(crate) fn look<R>(&'static self, look: impl FnOnce(&mut Desk) -> R) -> R {
        look(&mut self.desk.lock())
    }

    /// Adds a block's raw pointer, for a caller that holds the lock.
    #[inline]
    pub(crate) fn add_raw(&self, ptr: u64, block: BlockId) {
        self.raw.insert(ptr, block);
        self.shell.guesses.note(ptr, self.slot);
    }

    /// Tells a simulated device of a block that is handed out.
    #[cold]
    #[inline(never)]
    pub(crate) fn tell_of_block(
        &'static self,
        id: BlockId,
        ptr: DevicePtr,
        bytes: u64,
        at: &'static Location<'static>,
    ) {
        if id == BlockId::NONE || !self.shell.has_checks() {
            return;
        }
        let (tag, pool) = self.look(|desk| (Tag(desk.heap.blocks[id].tag), desk.heap.blocks[id].pool));
        let block = NewBlock { ptr, bytes, tag: tag.name(), is_for_graphs: pool >= 2, at: Some(at) };
        self.shell.tell_checks(|checks| checks.allocated(block));
    }

    /// Tells a simulated device that a block is given back, before anybody else can get the memory. Takes the words of
    /// the handle, not the handle, which would have to be copied to where it can be pointed to.
    #[cold]
    #[inline(never)]
    pub(crate) fn tell_of_end(&'static self, ptr: DevicePtr, at: Option<&'static Location<'static>>) {
        self.shell.tell_checks(|checks| checks.dropped(ptr, at));
    }

    /// True if frees are queued.
    pub(crate) fn has_remote_frees(&self) -> bool {
        !self.remote.is_empty()
    }

    #[cfg(all(test, aquifer_shuttle))]
    pub(crate) fn is_empty(&self) -> bool {
        self.remote.is_empty() && self.desk.lock().live == 0
    }
}

/// An arena whose lock is held. Two words, which stay in registers from where the lock is taken to where it is released: copying
/// it, and handles, through memory cost about 40 ns a hot pair.
#[derive(Debug)]
pub(crate) struct Guard {
    pub(crate) arena: &'static Arena,
    desk: MutexGuard<'static, Desk>,
}

impl Deref for Guard {
    type Target = Desk;

    #[inline]
    fn deref(&self) -> &Desk {
        &self.desk
    }
}

impl DerefMut for Guard {
    #[inline]
    fn deref_mut(&mut self) -> &mut Desk {
        &mut self.desk
    }
}

impl Guard {
    /// Applies the remote frees queued so far, has other threads free through the queue until they next allocate here,
    /// and merges what rests.
    pub(crate) fn tidy(&mut self) {
        self.arena.remote.forget_other_threads();
        self.drain();
        self.merge_resting();
    }

    /// Settles the arena: the next thread that works here unsettles it. Returns false if frees were queued meanwhile.
    /// The caller holds the core's lock.
    pub(crate) fn settle(&mut self) -> bool {
        let arena = self.arena;
        arena.settled.store(true, Ordering::SeqCst);
        // A thread that queues a free either sees the store, or its free is seen here.
        fence(Ordering::SeqCst);
        if arena.has_remote_frees() && arena.settled.swap(false, Ordering::SeqCst) {
            return false;
        }
        self.desk.settled_writer = std::mem::replace(&mut self.desk.writer, Writer::SETTLED);
        true
    }

    /// Makes the arena an unsettled one, for a caller that has the core's lock.
    pub(crate) fn unsettle_held(&mut self) {
        if self.desk.writer == Writer::SETTLED {
            self.desk.writer = self.desk.settled_writer;
            self.arena.settled.store(false, Ordering::SeqCst);
        }
    }

    /// Changes the thread that writes to the shared counters. The caller holds all locks.
    pub(crate) fn set_writer(&mut self, writer: Writer) {
        self.desk.writer = writer;
    }

    /// The counters that operations write to now.
    #[inline]
    pub(crate) fn tally(&self) -> Tally {
        let (shell, own) = (self.arena.shell, &*self.arena.own);
        if self.desk.writer == Writer::SEVERAL { Tally::Own(shell, own) } else { Tally::Shared(shell) }
    }

    /// Applies the remote frees before an allocation by the calling thread, which frees directly from now on. `None` as for
    /// [`Arena::enter`].
    #[cold]
    fn drained(mut self) -> Option<Guard> {
        self.arena.remote.add_direct_thread();
        self.drain();
        let arena = self.arena;
        if !arena.shell.has_left() {
            return Some(self);
        }
        drop(self);
        // Blocks that other streams used, too, need the core's lock. They are not to count as live, and their wait
        // begins now.
        drop(arena.shell.part(None));
        arena.admit(arena.desk.lock())
    }

    /// Applies the remote frees queued so far.
    pub(crate) fn drain(&mut self) {
        let arena = self.arena;
        for RemoteFree { block, on, bytes } in arena.remote.drain() {
            if let Err(Shared) = self.free(block, on, bytes) {
                arena.shell.leave_shared(SharedFree { arena, block, on });
            }
        }
    }

    /// Serves a request of the arena's stream from the free blocks that it may reuse at once, those in the queue included.
    pub(crate) fn take_own(&mut self, request: &Request) -> Option<Granted> {
        self.drain();
        self.take_own_hot(request)
    }

    /// As [`Guard::take_own`], less what is in the queue, compiled into its caller, so that request and result stay in registers.
    #[inline(always)]
    pub(crate) fn take_own_hot(&mut self, request: &Request) -> Option<Granted> {
        let desk = &mut *self.desk;
        desk.milestones.searches += 1;
        let retaken = desk.heap.retake(&desk.classes, request.pool, request.size, request.requested);
        let (block, change) = match retaken {
            Some((block, given)) => {
                self.split_touched(kind_of(request.pool), given);
                (block, SplitChange::default())
            }
            None => {
                self.make_room();
                let desk = &mut *self.desk;
                match desk.heap.take_best(&desk.classes, request.pool, request.size, request.requested) {
                    Some(taken) => taken,
                    None => self.take_what_rests(request.pool, request.size, request.requested)?,
                }
            }
        };
        if !request.is_regular {
            self.desk.heap.make_irregular(block);
        }
        Some(self.taken(request, block, change))
    }

    /// Takes the request's bytes from a free block that its stream may use.
    pub(crate) fn take(&mut self, request: &Request, free: BlockId) -> Granted {
        let desk = &mut *self.desk;
        let (block, change) = desk.heap.take(&desk.classes, free, request.slot, request.size, request.requested);
        if !request.is_regular || request.slot != desk.heap.home {
            desk.heap.make_irregular(block);
        }
        self.taken(request, block, change)
    }

    /// Accounts for a block that became live.
    #[inline(always)]
    fn taken(&mut self, request: &Request, id: BlockId, change: SplitChange) -> Granted {
        let block = &mut self.desk.heap.blocks[id];
        block.tag = request.tag.0;
        let (addr, size, kind) = (block.addr, block.size, kind_of(block.pool));
        self.desk.live += 1;
        self.tally().allocated(kind, size, request.requested);
        self.split_changed(kind, change);
        if self.desk.classes.is_oversize(size) {
            self.tally().oversize(true);
        }
        self.note(Action::Alloc, id);
        self.debug_check();
        Granted { arena: self.arena, block: id, addr }
    }

    /// Frees a live block of `bytes` requested bytes ([`UNKNOWN`] if the caller does not know). `on` is the stream that gets its memory, if
    /// that is not its own.
    #[inline(always)]
    fn free(&mut self, id: BlockId, on: Option<u32>, bytes: u64) -> Result<(), Shared> {
        if self.desk.is_paged && bytes != UNKNOWN && on.is_none() && self.desk.heap.is_regular(id) {
            let size = self.desk.classes.round(bytes);
            let kind = self.desk.classes.pool(size);
            debug_assert!(self.desk.is_as_requested(id, kind, size, bytes), "{:?}", self.desk.heap.blocks[id]);
            self.free_at_home(id, kind, size, bytes);
            return Ok(());
        }
        let block = &self.desk.heap.blocks[id];
        debug_assert_eq!(block.state, State::Live);
        let (size, requested, owner, shared) = (block.size, block.requested, block.owner, block.shared);
        let kind = kind_of(block.pool);
        self.desk.heap.forget_irregular(id);
        let heir = match on.filter(|&on| on != owner) {
            None if !shared => owner,
            Some(on) if !shared && self.desk.crosses_streams => on,
            _ => return Err(Shared),
        };
        if heir == self.desk.heap.home && owner == heir {
            self.free_at_home(id, kind, size, requested);
        } else {
            self.note(Actions::FREE, id);
            self.given_back(size);
            self.tally().freed(kind, size, requested);
            let after = self.desk.tick_of(heir);
            self.complete(id, heir, after, after);
        }
        Ok(())
    }

    /// Frees a live block of the home stream that no other stream uses.
    #[inline(always)]
    fn free_at_home(&mut self, id: BlockId, kind: PoolKind, size: u64, requested: u64) {
        self.note(Actions::FREE, id);
        self.given_back(size);
        self.tally().freed(kind, size, requested);
        let after = self.desk.tick_of(self.desk.heap.home);
        self.make_room();
        self.desk.heap.give_to_rest(id, size, after);
        self.debug_check();
    }

    /// Accounts for a live block of `size` bytes that was freed.
    #[inline]
    pub(crate) fn given_back(&mut self, size: u64) {
        self.desk.live -= 1;
        self.desk.milestones.freed += size;
        if self.desk.classes.is_oversize(size) {
            self.tally().oversize(false);
        }
    }

    /// Notes in the history, if that is on, what happened to a live or waiting block.
    #[inline]
    pub(crate) fn note(&self, actions: impl Into<Actions>, id: BlockId) {
        if self.desk.records_history {
            self.note_always(actions.into(), id);
        }
    }

    #[inline(never)]
    fn note_always(&self, actions: Actions, id: BlockId) {
        let &Block { addr, requested: size, owner: slot, tag, pool, .. } = &self.desk.heap.blocks[id];
        let pool = self.desk.heap.pools[pool].options.history_id;
        self.arena.shell.history.lock().note(actions, Subject { addr, size, slot, tag: Tag(tag), pool });
    }

    /// Makes a block free that was given back and is accounted for: reusable by `owner` at once, and by others after the tick `after`. Its
    /// memory itself was used until `last_use`.
    #[inline]
    pub(crate) fn complete(&mut self, id: BlockId, owner: u32, after: u64, last_use: u64) {
        self.merge_resting();
        let kind = kind_of(self.desk.heap.blocks[id].pool);
        if self.desk.is_paged {
            self.desk.heap.note_last_use(id, owner, last_use);
        }
        let (_, change) = self.desk.heap.give(id, owner, after);
        self.split_changed(kind, change);
        self.debug_check();
    }

    /// Notes the last uses of granules in the log that are not known done (`heap/recent.rs`).
    pub(crate) fn note_recent_uses(&mut self) {
        let done = self.done();
        self.desk.heap.note_recent_uses(done);
    }

    /// The tick that the stream's timeline is known to have reached.
    fn done(&self) -> u64 {
        self.desk.timeline.as_ref().map_or(0, |timeline| timeline.frontier())
    }

    /// Counts pieces of segments. Mapped memory has none, as in PyTorch: its free memory can go back to the device.
    #[inline(always)]
    pub(crate) fn split_changed(&self, kind: PoolKind, change: SplitChange) {
        if change != SplitChange::default() && !self.desk.is_paged {
            self.tally().pieces(kind, change.count, change.bytes);
        }
    }

    /// Notes that the count of pieces changed and changed back, which may raise a peak.
    #[inline(always)]
    fn split_touched(&self, kind: PoolKind, change: SplitChange) {
        if change != SplitChange::default() && !self.desk.is_paged {
            self.tally().touch_pieces(kind, change.count, change.bytes);
        }
    }

    /// Checks the heap's identities now and then, in debug builds. The cost of a check grows with the number of blocks, so as many
    /// operations pass between two checks.
    #[inline]
    fn debug_check(&mut self) {
        #[cfg(debug_assertions)]
        {
            let desk = &mut *self.desk;
            desk.unchecked += 1;
            if desk.unchecked > 64 + desk.heap.blocks.records_count() {
                desk.unchecked = 0;
                debug_assert_eq!(desk.heap.check(), Ok(()));
            }
        }
    }
}

impl Desk {
    /// True if the calling thread may work here.
    #[inline]
    fn is_known_here(&self) -> bool {
        self.writer == Writer::this_thread() || self.writer == Writer::SEVERAL
    }

    /// Opens the arena of the stream with this timeline.
    pub(crate) fn open(&mut self, timeline: &Arc<Timeline>, is_paged: bool) {
        self.heap = Heap::new(timeline.id(), if is_paged { IndexKind::Bins } else { IndexKind::Exact });
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

    /// True if the record of a live block says what its handle does: what [`Heap::is_regular`] promises.
    fn is_as_requested(&self, id: BlockId, kind: PoolKind, size: u64, requested: u64) -> bool {
        let block = &self.heap.blocks[id];
        let is_own = block.state == State::Live && block.owner == self.heap.home && !block.shared;
        is_own && (kind_of(block.pool), block.size, block.requested) == (kind, size, requested)
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
