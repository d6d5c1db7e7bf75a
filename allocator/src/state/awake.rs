//! Keeping an allocator awake: access guards on its memory and reservations do so, and callers of
//! [`Allocator::keep_awake`].
//!
//! Work that is about to be enqueued has no tick yet, so waiting for the device does not wait for
//! it. So an allocator sleeps only if nothing keeps it awake, and from then on nothing may begin to
//! (invariant A9). A caller that waits for that makes the allocator *quiescing* first: nothing new
//! may keep it awake. Threads that keep it awake may go on meanwhile, also with further access
//! guards, because they could not end otherwise; and so may work for which memory was reserved.
//!
//! A newcomer counts itself before it reads the flags; a thread that puts the allocator to sleep
//! sets a flag before it reads the counts. These accesses are sequentially consistent, so at least
//! one of the two sees the other. It reads the counts and decides under the allocator's
//! lock, and a newcomer that sees a flag looks under it, so it learns what was decided.
//!
//! A thread that splits frames (`backing/paged/split.rs`) sets a flag, too, and then reads the counts of
//! access guards and reservations. A newcomer that sees it waits until the split has ended.
//!
//! A thread that waits for the allocator to wake up checks the state under a lock. Waking takes the
//! same lock between the change of the state and the notification, so none is missed.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use aquifer_device::fork::Mutex;
use parking_lot::Condvar;
#[cfg(aquifer_shuttle)]
use shuttle::thread_local;

use crate::core::Core;
use crate::error::AllocError;
use crate::state::AllocatorState;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::pause;

thread_local! {
    /// What this thread keeps awake.
    static KEPT: RefCell<Vec<KeptHere>> = const { RefCell::new(Vec::new()) };
    /// The allocator states whose frames this thread splits.
    static SPLIT: RefCell<Vec<&'static AllocatorState>> = const { RefCell::new(Vec::new()) };
}

/// One hold of a thread on an allocator state.
#[derive(Clone, Copy)]
struct KeptHere {
    state: &'static AllocatorState,
    /// True if it is counted among access guards.
    is_guard: bool,
}

/// Flag: nothing new may keep the allocator awake. It sleeps, or is about to.
const REFUSING: u32 = 1;
/// Flag: a newcomer is to look under the allocator's lock, because a part sleeps, or a
/// thread is about to decide what sleeps.
const LOOKING: u32 = 2;
/// Flag: a newcomer waits until a split of frames has ended.
const SPLITTING: u32 = 4;
/// How often a split looks whether access guards of other threads have ended; they are short.
const SPLIT_LOOKS: u32 = 40;

/// The part of an allocator state that says whether it sleeps or is about to, and what keeps it
/// awake.
#[derive(Debug, Default)]
pub(crate) struct Wakefulness {
    flags: AtomicU32,
    /// By [`Keeper`].
    counts: [AtomicU64; 4],
    /// A leaf: see the module's documentation.
    pub(crate) waking: Mutex<()>,
    pub(crate) woken: Condvar,
}

/// What keeps an allocator awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeper {
    AccessGuard,
    Reservation,
    /// A [`crate::Awake`].
    Awake,
    /// Any of them, beyond [`COUNTED_MAX`].
    Uncounted,
}

/// The low bits of a count are the number of wake locks; the others are the sum of the addresses
/// that they are for, in units of [`UNIT`], which have at most 48 bits. So the address is known of a
/// wake lock that is alone, and counting it costs one atomic operation.
const NUMBER_BITS: u32 = 16;
/// Beyond this number, wake locks are counted without addresses, so that the number keeps to its
/// bits. The sum of addresses may wrap.
const COUNTED_MAX: u64 = 1 << (NUMBER_BITS - 1);
/// Allocations lie at multiples of it.
const UNIT: u64 = 512;

/// What one count says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) number: u64,
    /// The address in use, if it is known.
    pub(crate) addr: Option<u64>,
}

impl Kept {
    fn of(count: u64) -> Kept {
        let number = count % (1 << NUMBER_BITS);
        let addr = (count >> NUMBER_BITS) * UNIT;
        Kept { number, addr: (number == 1 && addr != 0).then_some(addr) }
    }
}

/// A count of one in what keeps an allocator awake. While there is a wake lock, on any thread, the
/// allocator does not give its memory back.
pub(crate) struct WakeLock {
    state: &'static AllocatorState,
    keeper: Keeper,
    /// What it added to the count.
    added: u64,
}

impl WakeLock {
    /// `memory` is what is to be used; empty for any.
    ///
    /// # Errors
    /// When the allocator sleeps, or is about to, and this thread does not keep it awake already.
    pub(crate) fn new(
        state: &'static AllocatorState,
        keeper: Keeper,
        memory: &Range<u64>,
    ) -> Result<WakeLock, AllocError> {
        loop {
            state.wait_for_split()?;
            // Checked before counting, too, so that a thread that is refused and tries again and
            // again does not keep the allocator awake.
            if state.refuses(memory) {
                return Err(AllocError::Asleep);
            }
            let wake_lock = WakeLock::counted(state, keeper, memory.start);
            if state.is_splitting() {
                continue;
            }
            return if state.refuses(memory) { Err(AllocError::Asleep) } else { Ok(wake_lock) };
        }
    }

    #[inline]
    fn counted(state: &'static AllocatorState, keeper: Keeper, addr: u64) -> WakeLock {
        let added = ((addr / UNIT) << NUMBER_BITS) + 1;
        let count = &state.wakefulness.counts[keeper as usize];
        if Kept::of(count.fetch_add(added, Ordering::SeqCst)).number < COUNTED_MAX {
            return WakeLock { state, keeper, added };
        }
        state.wakefulness.counts[Keeper::Uncounted as usize].fetch_add(1, Ordering::SeqCst);
        count.fetch_sub(added, Ordering::SeqCst);
        WakeLock { state, keeper: Keeper::Uncounted, added: 1 }
    }
}

impl fmt::Debug for WakeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WakeLock").field("keeper", &self.keeper).finish_non_exhaustive()
    }
}

impl Drop for WakeLock {
    fn drop(&mut self) {
        self.state.wakefulness.counts[self.keeper as usize].fetch_sub(self.added, Ordering::SeqCst);
    }
}

/// A thread's hold on an allocator that keeps it awake; each of the thread's access guards has one.
/// The allocator state has live memory, or a handle, so it is not recycled.
pub(crate) struct KeptAwake {
    state: &'static AllocatorState,
    is_guard: bool,
    /// `None` for an access guard of a reservation, where the reservation keeps the allocator
    /// awake.
    _wake_lock: Option<WakeLock>,
    /// Bound to its thread.
    _thread: PhantomData<*const ()>,
}

impl KeptAwake {
    pub(crate) fn new(
        state: &'static AllocatorState,
        keeper: Keeper,
        memory: &Range<u64>,
    ) -> Result<KeptAwake, AllocError> {
        WakeLock::new(state, keeper, memory).map(|wake_lock| KeptAwake::note(state, Some(wake_lock)))
    }

    /// Keeps the allocators of all this memory awake, for access guards on it.
    pub(crate) fn of_all(
        memory: impl Iterator<Item = (&'static AllocatorState, Range<u64>)>,
    ) -> Result<Vec<KeptAwake>, AllocError> {
        let mut kept: Vec<KeptAwake> = Vec::new();
        for (state, range) in memory {
            if !kept.iter().any(|kept| std::ptr::eq(kept.state, state)) {
                kept.push(KeptAwake::new(state, Keeper::AccessGuard, &range)?);
            } else if state.refuses(&range) {
                return Err(AllocError::Asleep);
            }
        }
        Ok(kept)
    }

    /// The hold of an access guard of a reservation.
    pub(crate) fn of_reservation(state: &'static AllocatorState) -> KeptAwake {
        KeptAwake::note(state, None)
    }

    fn note(state: &'static AllocatorState, wake_lock: Option<WakeLock>) -> KeptAwake {
        // Fails only on a thread that is ending, which puts nothing to sleep any more.
        let is_guard = wake_lock.as_ref().is_some_and(|wake_lock| wake_lock.keeper != Keeper::Awake);
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(KeptHere { state, is_guard }));
        KeptAwake { state, is_guard, _wake_lock: wake_lock, _thread: PhantomData }
    }
}

impl fmt::Debug for KeptAwake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptAwake").finish_non_exhaustive()
    }
}

impl Drop for KeptAwake {
    fn drop(&mut self) {
        let _ = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            let is_this = |other: &KeptHere| std::ptr::eq(other.state, self.state) && other.is_guard == self.is_guard;
            if let Some(at) = kept.iter().rposition(is_this) {
                kept.swap_remove(at);
            }
        });
    }
}

impl AllocatorState {
    /// True if the allocator sleeps, or is about to.
    pub(crate) fn is_quiescing(&self) -> bool {
        self.wakefulness.flags.load(Ordering::SeqCst) & REFUSING != 0
    }

    /// True if the calling thread may not begin to keep the allocator awake.
    pub(crate) fn refuses_wake_locks(&'static self) -> bool {
        self.is_quiescing() && !self.is_kept_awake_here()
    }

    /// True if the calling thread may not begin to keep the allocator awake for the use of some
    /// memory.
    #[inline]
    fn refuses(&'static self, memory: &Range<u64>) -> bool {
        self.wakefulness.flags.load(Ordering::SeqCst) & (REFUSING | LOOKING) != 0 && self.refuses_now(memory)
    }

    #[cold]
    fn refuses_now(&'static self, memory: &Range<u64>) -> bool {
        // A thread that decides what sleeps has this lock.
        let shared = self.shared();
        self.refuses_wake_locks() || shared.paged().is_some_and(|paged| paged.sleeps(memory))
    }

    /// True if the calling thread keeps the allocator awake.
    pub(crate) fn is_kept_awake_here(&'static self) -> bool {
        KEPT.try_with(|kept| kept.borrow().iter().any(|kept| std::ptr::eq(kept.state, self))).unwrap_or(false)
    }

    /// Makes the allocator quiescing, for a caller that waits until it may sleep.
    pub(crate) fn refuse_wake_locks(&self) {
        self.wakefulness.flags.fetch_or(REFUSING, Ordering::SeqCst);
    }

    /// Has newcomers look under the allocator's lock, for a caller that takes that lock
    /// next, and decides with [`AllocatorState::kept`] what sleeps.
    pub(crate) fn begin_deciding(&self) {
        self.wakefulness.flags.fetch_or(LOOKING, Ordering::SeqCst);
    }

    /// Ends [`AllocatorState::begin_deciding`], under that lock. Newcomers go on looking while a
    /// part sleeps.
    pub(crate) fn end_deciding(&self, core: &Core) {
        if core.paged().is_none_or(|paged| paged.sleeping.is_empty()) {
            self.wakefulness.flags.fetch_and(!LOOKING, Ordering::SeqCst);
        }
    }

    /// What keeps the allocator awake, by [`Keeper`], if anything does.
    pub(crate) fn kept(&self) -> Option<[Kept; 4]> {
        let [guards, reservations, awake, uncounted] = &self.wakefulness.counts;
        let kept = |count: &AtomicU64| Kept::of(count.load(Ordering::SeqCst));
        let uncounted = Kept { number: uncounted.load(Ordering::SeqCst), addr: None };
        let all = [kept(guards), kept(reservations), kept(awake), uncounted];
        all.iter().any(|kept| kept.number > 0).then_some(all)
    }

    /// Makes the allocator quiescing if nothing keeps it awake; otherwise returns what does.
    pub(crate) fn quiesce(&'static self) -> Result<(), [Kept; 4]> {
        self.begin_deciding();
        let shared = self.shared();
        let kept = self.kept();
        if kept.is_none() {
            self.refuse_wake_locks();
        }
        self.end_deciding(&shared);
        kept.map_or(Ok(()), Err)
    }

    /// Ends quiescing: others may keep the allocator awake again.
    pub(crate) fn end_quiescing(&self) {
        self.wakefulness.flags.fetch_and(!REFUSING, Ordering::SeqCst);
        drop(self.wakefulness.waking.lock());
        self.wakefulness.woken.notify_all();
    }

    /// Has newcomers wait until the result is dropped. `None` if another thread has an access guard,
    /// or if memory is reserved for work, and that does not end at once: such work may be enqueued
    /// at any time.
    pub(crate) fn begin_split(&'static self) -> Option<Splitting> {
        SPLIT.with(|split| split.borrow_mut().push(self));
        self.wakefulness.flags.fetch_or(SPLITTING, Ordering::SeqCst);
        let splitting = Splitting(self);
        let mut looks = 0;
        while self.is_in_use_elsewhere() {
            if looks == SPLIT_LOOKS {
                return None;
            }
            looks += 1;
            pause();
        }
        Some(splitting)
    }

    /// True if there is an access guard of another thread, or a reservation.
    fn is_in_use_elsewhere(&'static self) -> bool {
        let is_own = |kept: &&KeptHere| kept.is_guard && std::ptr::eq(kept.state, self);
        let own = KEPT.try_with(|kept| kept.borrow().iter().filter(is_own).count()).unwrap_or(0) as u64;
        let [guards, reservations, _, uncounted] = &self.wakefulness.counts;
        let number = |count: &AtomicU64| Kept::of(count.load(Ordering::SeqCst)).number;
        number(guards) != own || number(reservations) != 0 || uncounted.load(Ordering::SeqCst) != 0
    }

    #[inline]
    fn is_splitting(&self) -> bool {
        self.wakefulness.flags.load(Ordering::SeqCst) & SPLITTING != 0
    }

    /// # Errors
    /// When the split is this thread's own, in an observer of mappings.
    #[inline]
    fn wait_for_split(&self) -> Result<(), AllocError> {
        if self.is_splitting() { self.wait_for_end_of_split() } else { Ok(()) }
    }

    #[cold]
    fn wait_for_end_of_split(&self) -> Result<(), AllocError> {
        if SPLIT.with(|split| split.borrow().iter().any(|&state| std::ptr::eq(state, self))) {
            return Err(AllocError::Observing);
        }
        let mut waking = self.wakefulness.waking.lock();
        while self.is_splitting() {
            self.wakefulness.woken.wait(&mut waking);
        }
        Ok(())
    }
}

/// A split of frames under way: see [`AllocatorState::begin_split`].
#[derive(Debug)]
pub(crate) struct Splitting(&'static AllocatorState);

impl Drop for Splitting {
    fn drop(&mut self) {
        SPLIT.with(|split| split.borrow_mut().retain(|&state| !std::ptr::eq(state, self.0)));
        let wakefulness = &self.0.wakefulness;
        wakefulness.flags.fetch_and(!SPLITTING, Ordering::SeqCst);
        drop(wakefulness.waking.lock());
        wakefulness.woken.notify_all();
    }
}
