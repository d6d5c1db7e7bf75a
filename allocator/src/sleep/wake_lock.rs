//! Wake locks: what keeps an allocator awake. Access guards on its memory and reservations have
//! one, and so do callers of [`Allocator::keep_awake`].
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
//! A thread that splits frames (`backing/paged/split.rs`) sets a flag, too, and then reads the
//! counts of access guards and reservations. A newcomer that sees it waits until the split has
//! ended.
//!
//! A thread that waits for the allocator to wake up checks the state under a lock. Waking takes the
//! same lock between the change of the state and the notification, so none is missed.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::{Duration, Instant};

#[cfg(aquifer_shuttle)]
use shuttle::thread_local;

use crate::allocator::Allocator;
use crate::core::Core;
use crate::error::{AllocError, KeptAwakeBy};
use crate::state::{AllocatorState, WakeLocks};
use crate::sync::atomic::Ordering;
use crate::sync::pause;

thread_local! {
    /// The wake locks and splits of this thread.
    static HERE: RefCell<Vec<(&'static AllocatorState, Kind)>> = const { RefCell::new(Vec::new()) };
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

/// The purpose of a wake lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AccessGuard,
    Reservation,
    /// [`Allocator::keep_awake`].
    Caller,
    /// None: a thread splits frames. It is not counted.
    Split,
}

/// A count of one in what keeps an allocator awake. While there is any, on any thread, the
/// allocator does not give its memory back.
pub(crate) struct Count {
    state: &'static AllocatorState,
    kind: Kind,
}

impl Count {
    /// `memory` is what is to be used; empty for any.
    ///
    /// # Errors
    /// When the allocator sleeps, or is about to, and this thread does not keep it awake already.
    pub(crate) fn new(state: &'static AllocatorState, kind: Kind, memory: &Range<u64>) -> Result<Count, AllocError> {
        loop {
            state.wait_for_split()?;
            // Checked before counting, too, so that a thread that is refused and tries again and
            // again does not keep the allocator awake.
            if state.refuses(memory) {
                return Err(AllocError::Asleep);
            }
            let count = Count::unrefused(state, kind);
            if !state.has_flag(SPLITTING) {
                return if state.refuses(memory) { Err(AllocError::Asleep) } else { Ok(count) };
            }
        }
    }

    /// As [`Count::new`], if nothing sleeps or is about to, and no thread splits frames.
    #[inline]
    fn at_once(state: &'static AllocatorState, kind: Kind) -> Option<Count> {
        let is_at_rest = || !state.has_flag(REFUSING | LOOKING | SPLITTING);
        if !is_at_rest() {
            return None;
        }
        let count = Count::unrefused(state, kind);
        is_at_rest().then_some(count)
    }

    /// As [`Count::new`], for a caller by which the allocator is kept awake already.
    #[inline]
    fn unrefused(state: &'static AllocatorState, kind: Kind) -> Count {
        state.wake_locks.counts[kind as usize].fetch_add(1, Ordering::SeqCst);
        Count { state, kind }
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Count").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Drop for Count {
    #[inline]
    fn drop(&mut self) {
        self.state.wake_locks.counts[self.kind as usize].fetch_sub(1, Ordering::SeqCst);
    }
}

/// Keeps an allocator from falling asleep while a thread works in several steps. Made by
/// [`Allocator::keep_awake`].
#[must_use = "it ends when it is dropped"]
pub struct WakeLock {
    count: NotedCount,
    /// Keeps the allocator state in use by this allocator where no memory does.
    _allocator: Allocator,
}

impl fmt::Debug for WakeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WakeLock").field("kind", &self.count.count.kind).finish_non_exhaustive()
    }
}

/// A count that its thread knows of.
pub(crate) struct NotedCount {
    count: Count,
    /// Bound to its thread.
    _thread: PhantomData<*const ()>,
}

impl NotedCount {
    /// That of an access guard on some memory; empty for any.
    pub(crate) fn of_guard(state: &'static AllocatorState, memory: &Range<u64>) -> Result<NotedCount, AllocError> {
        Ok(NotedCount::new(Count::new(state, Kind::AccessGuard, memory)?))
    }

    /// As [`NotedCount::of_guard`]; `None` if it takes a closer look.
    #[inline]
    pub(crate) fn of_guard_at_once(state: &'static AllocatorState) -> Option<NotedCount> {
        Count::at_once(state, Kind::AccessGuard).map(NotedCount::new)
    }

    /// That of an access guard of a reservation, which keeps the allocator awake, too. The guard
    /// counts of its own, because its thread has it even if it is forgotten.
    pub(crate) fn of_reservation(state: &'static AllocatorState) -> NotedCount {
        NotedCount::new(Count::unrefused(state, Kind::AccessGuard))
    }

    /// That of access guards on all this memory; `None` if there is none.
    pub(crate) fn of_all(
        state: &'static AllocatorState,
        memory: &[Range<u64>],
    ) -> Result<Option<NotedCount>, AllocError> {
        let Some((first, others)) = memory.split_first() else { return Ok(None) };
        let count = NotedCount::of_guard(state, first)?;
        if others.iter().any(|range| state.refuses(range)) { Err(AllocError::Asleep) } else { Ok(Some(count)) }
    }

    #[inline]
    fn new(count: Count) -> NotedCount {
        note(count.state, count.kind);
        NotedCount { count, _thread: PhantomData }
    }
}

impl Drop for NotedCount {
    #[inline]
    fn drop(&mut self) {
        forget(self.count.state, self.count.kind);
    }
}

/// Notes a wake lock of this thread.
#[inline]
fn note(state: &'static AllocatorState, kind: Kind) {
    // Fails only on a thread that is ending.
    let _ = HERE.try_with(|here| here.borrow_mut().push((state, kind)));
}

/// Forgets a wake lock of this thread.
#[inline]
fn forget(state: &'static AllocatorState, kind: Kind) {
    let _ = HERE.try_with(|here| {
        let mut here = here.borrow_mut();
        if here.pop_if(|&mut (other, of)| std::ptr::eq(other, state) && of == kind).is_some() {
            return;
        }
        let last = here.iter().rposition(|&(other, of)| std::ptr::eq(other, state) && of == kind);
        if let Some(at) = last {
            here.swap_remove(at);
        }
    });
}

/// True if this thread has an access guard, of whatever allocator.
pub(crate) fn has_access() -> bool {
    HERE.try_with(|here| here.borrow().iter().any(|&(_, kind)| kind == Kind::AccessGuard)).unwrap_or(false)
}

impl AllocatorState {
    /// The number of wake locks of this thread of some kinds. `None` where that is not known,
    /// because the thread is ending.
    fn wake_locks_here(&'static self, is_wanted: impl Fn(Kind) -> bool) -> Option<usize> {
        let is_own = |&&(state, kind): &&(&'static AllocatorState, Kind)| std::ptr::eq(state, self) && is_wanted(kind);
        HERE.try_with(|here| here.borrow().iter().filter(is_own).count()).ok()
    }

    #[inline]
    fn has_flag(&self, flags: u32) -> bool {
        self.wake_locks.flags.load(Ordering::SeqCst) & flags != 0
    }

    /// True if the allocator sleeps, or is about to.
    pub(crate) fn is_quiescing(&self) -> bool {
        self.has_flag(REFUSING)
    }

    /// True if the calling thread may not begin to keep the allocator awake.
    pub(crate) fn refuses_wake_locks(&'static self) -> bool {
        self.is_quiescing() && self.wake_locks_here(|kind| kind != Kind::Split).is_none_or(|count| count == 0)
    }

    /// True if the calling thread may not begin to keep the allocator awake for the use of some
    /// memory.
    #[inline]
    pub(crate) fn refuses(&'static self, memory: &Range<u64>) -> bool {
        self.has_flag(REFUSING | LOOKING) && self.refuses_now(memory)
    }

    #[cold]
    fn refuses_now(&'static self, memory: &Range<u64>) -> bool {
        // A thread that decides what sleeps has this lock.
        let shared = self.shared();
        self.refuses_wake_locks() || shared.paged().sleep.has(memory)
    }

    /// Makes the allocator quiescing, for a caller that waits until it may sleep.
    pub(crate) fn refuse_wake_locks(&self) {
        self.wake_locks.flags.fetch_or(REFUSING, Ordering::SeqCst);
    }

    /// Has newcomers look under the allocator's lock, for a caller that takes that lock
    /// next, and decides with [`AllocatorState::wake_counts`] what sleeps.
    pub(crate) fn begin_deciding(&self) {
        self.wake_locks.flags.fetch_or(LOOKING, Ordering::SeqCst);
    }

    /// Ends [`AllocatorState::begin_deciding`], under that lock. Newcomers go on looking while a
    /// part sleeps.
    pub(crate) fn end_deciding(&self, core: &Core) {
        if core.paged().sleep.addresses().is_empty() {
            self.wake_locks.flags.fetch_and(!LOOKING, Ordering::SeqCst);
        }
    }

    /// The counts of wake locks by [`Kind`], if there are any.
    pub(crate) fn wake_counts(&self) -> Option<[u64; 3]> {
        let counts = self.wake_locks.counts.each_ref().map(|count| count.load(Ordering::SeqCst));
        counts.iter().any(|&count| count > 0).then_some(counts)
    }

    /// Makes the allocator quiescing if nothing keeps it awake; otherwise the error says what does.
    pub(crate) fn quiesce(&'static self) -> Result<(), AllocError> {
        self.begin_deciding();
        let shared = self.shared();
        let counts = self.wake_counts();
        if counts.is_none() {
            self.refuse_wake_locks();
        }
        self.end_deciding(&shared);
        drop(shared);
        counts.map_or(Ok(()), |counts| Err(self.kept_awake(counts)))
    }

    /// Ends quiescing: others may keep the allocator awake again.
    pub(crate) fn end_quiescing(&self) {
        self.lower_flag(REFUSING);
    }

    fn lower_flag(&self, flag: u32) {
        self.wake_locks.flags.fetch_and(!flag, Ordering::SeqCst);
        drop(self.wake_locks.waking.lock());
        self.wake_locks.woken.notify_all();
    }

    /// Has newcomers wait until the result is dropped. `None` if another thread has an access
    /// guard, or if memory is reserved for work, and that does not end at once: such work may be
    /// enqueued at any time.
    pub(crate) fn begin_split(&'static self) -> Option<Splitting> {
        note(self, Kind::Split);
        self.wake_locks.flags.fetch_or(SPLITTING, Ordering::SeqCst);
        let splitting = Splitting(self);
        let own = self.wake_locks_here(|kind| kind == Kind::AccessGuard)? as u64;
        let count = |kind| self.wake_locks.counts[kind as usize].load(Ordering::SeqCst);
        for _ in 0..SPLIT_LOOKS {
            if count(Kind::AccessGuard) == own && count(Kind::Reservation) == 0 {
                return Some(splitting);
            }
            pause();
        }
        None
    }

    /// # Errors
    /// When the split is this thread's own, in an observer of mappings.
    #[inline]
    fn wait_for_split(&'static self) -> Result<(), AllocError> {
        if self.has_flag(SPLITTING) { self.wait_for_end_of_split() } else { Ok(()) }
    }

    #[cold]
    fn wait_for_end_of_split(&'static self) -> Result<(), AllocError> {
        if self.wake_locks_here(|kind| kind == Kind::Split).is_some_and(|count| count > 0) {
            return Err(AllocError::Observing);
        }
        let mut waking = self.wake_locks.waking.lock();
        while self.has_flag(SPLITTING) {
            self.wake_locks.woken.wait(&mut waking);
        }
        Ok(())
    }

    /// The error for a caller that asked the allocator to sleep.
    #[cold]
    pub(crate) fn kept_awake(&'static self, counts: [u64; 3]) -> AllocError {
        let [access_guards, reservations, wake_locks] = counts;
        // A thread must not wait for itself.
        let is_this_thread = self.wake_locks_here(|kind| kind != Kind::Split).is_none_or(|count| count > 0);
        let by = KeptAwakeBy { access_guards, reservations, wake_locks, is_this_thread };
        AllocError::KeptAwake(by)
    }
}

/// A split of frames under way: see [`AllocatorState::begin_split`].
#[derive(Debug)]
pub(crate) struct Splitting(&'static AllocatorState);

impl Drop for Splitting {
    fn drop(&mut self) {
        forget(self.0, Kind::Split);
        self.0.lower_flag(SPLITTING);
    }
}

impl Allocator {
    /// Keeps the allocator awake until the result is dropped: [`Allocator::sleep`] fails or waits
    /// until then.
    /// It is for work in several steps that would be in vain if the allocator slept in between,
    /// such as allocating memory and then using it. Work that bypasses access guards may use the
    /// memory meanwhile, too.
    ///
    /// ```
    /// use std::time::Duration;
    /// use aquifer::memory::{AllocError, Contents, SleepOptions};
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let awake = memory.keep_awake()?;
    /// let control = std::thread::spawn({
    ///     let memory = memory.clone();
    ///     let options = SleepOptions::all(Contents::SaveToHost).waiting(Duration::from_secs(60));
    ///     move || memory.sleep(options) // waits for the request to be served
    /// });
    /// let request = memory.alloc_bytes(4 << 20, &stream)?;
    /// stream.fill(request.ptr(), 7, 4 << 20)?;
    /// drop(awake);
    /// assert_eq!(control.join().unwrap()?, 4 << 20);
    /// assert!(matches!(memory.keep_awake(), Err(AllocError::Asleep)));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::Asleep`] when the allocator sleeps, or is about to and this thread does not
    /// keep it awake already.
    pub fn keep_awake(&self) -> Result<WakeLock, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Map)?;
        let count = Count::new(self.state(), Kind::Caller, &(0..0))?;
        Ok(WakeLock { count: NotedCount::new(count), _allocator: self.kept_open() })
    }

    /// Waits until the allocator is awake, for at most `timeout`. Returns true if it is awake, and
    /// false if it sleeps still, or is about to sleep. A thread that keeps it awake itself does not
    /// wait. It may fall asleep again before this returns, so requests after it are still to be
    /// tried again, unless [`Allocator::keep_awake`] succeeds first.
    ///
    /// ```
    /// use std::time::Duration;
    /// use aquifer::memory::{AllocError, Contents};
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// memory.sleep(Contents::SaveToHost)?;
    /// assert!(!memory.wait_awake(Duration::from_millis(1)));
    /// let control = std::thread::spawn({
    ///     let memory = memory.clone();
    ///     move || memory.wake()
    /// });
    /// let request = loop {
    ///     match memory.alloc_bytes(4 << 20, &stream) {
    ///         Err(AllocError::Asleep) if memory.wait_awake(Duration::from_secs(60)) => {}
    ///         done => break done?,
    ///     }
    /// };
    /// # drop(request);
    /// # control.join().unwrap()?;
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn wait_awake(&self, timeout: Duration) -> bool {
        let state = self.state();
        let WakeLocks { waking, woken, .. } = &*state.wake_locks;
        // `None` is later than any clock tells.
        let until = Instant::now().checked_add(timeout);
        let mut waking = waking.lock();
        while state.refuses_wake_locks() {
            match until {
                None => woken.wait(&mut waking),
                Some(until) if woken.wait_until(&mut waking, until).timed_out() => return !state.refuses_wake_locks(),
                Some(_) => {}
            }
        }
        true
    }
}
