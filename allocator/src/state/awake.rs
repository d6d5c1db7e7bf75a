//! Keeping an allocator awake: access guards on its memory and reservations do so, and callers of
//! [`Allocator::keep_awake`].
//!
//! Work that is about to be enqueued has no tick yet, so waiting for the device does not wait for
//! it. So an allocator that is to sleep first becomes *quiescing*: nothing new may keep it awake,
//! and it waits for what already does. Threads that keep it awake may go on meanwhile, also with
//! further access guards, because they could not end otherwise; and so may work for
//! which memory was reserved (invariant A9).
//!
//! A newcomer counts itself before it checks whether the allocator is quiescing; a thread that puts
//! the allocator to sleep makes it quiescing before it reads the count. Both accesses are
//! sequentially consistent, so at least one of the two sees the other.
//!
//! A thread that waits for the allocator to wake up checks the state under a lock. Waking takes the
//! same lock between the change of the state and the notification, so none is missed.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;

use aquifer_device::fork::Mutex;
use parking_lot::Condvar;

use crate::error::AllocError;
use crate::state::AllocatorState;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::pause;

#[cfg(aquifer_shuttle)]
use shuttle::thread_local;

thread_local! {
    /// The allocator states that this thread keeps awake, each listed as often as the thread does
    /// so.
    static KEPT: RefCell<Vec<&'static AllocatorState>> = const { RefCell::new(Vec::new()) };
}

/// The part of an allocator state that says whether it is quiescing and how much keeps it awake.
#[derive(Debug, Default)]
pub(crate) struct Wakefulness {
    quiescing: AtomicBool,
    wake_locks: AtomicU64,
    /// A leaf: see the module's documentation.
    pub(crate) waking: Mutex<()>,
    pub(crate) woken: Condvar,
}

/// A count of one in what keeps an allocator awake. While there is a wake lock, on any thread, the
/// allocator does not give its memory back.
pub(crate) struct WakeLock(&'static AllocatorState);

impl WakeLock {
    /// # Errors
    /// When the allocator sleeps, or is about to, and this thread does not keep it awake already.
    pub(crate) fn new(state: &'static AllocatorState) -> Result<WakeLock, AllocError> {
        // Checked before counting, too, so that a thread that is refused and tries again and again
        // does not keep the allocator awake.
        if state.refuses_wake_locks() {
            return Err(AllocError::Asleep);
        }
        state.wakefulness.wake_locks.fetch_add(1, Ordering::SeqCst);
        let wake_lock = WakeLock(state);
        if state.refuses_wake_locks() { Err(AllocError::Asleep) } else { Ok(wake_lock) }
    }
}

impl fmt::Debug for WakeLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Drop for WakeLock {
    fn drop(&mut self) {
        self.0.wakefulness.wake_locks.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread's hold on an allocator that keeps it awake; each of the thread's access guards has one.
/// The allocator state has live memory, or a handle, so it is not recycled.
pub(crate) struct KeptAwake {
    state: &'static AllocatorState,
    /// `None` for an access guard of a reservation, where the reservation keeps the allocator
    /// awake.
    _wake_lock: Option<WakeLock>,
    /// Bound to its thread.
    _thread: PhantomData<*const ()>,
}

impl KeptAwake {
    pub(crate) fn new(state: &'static AllocatorState) -> Result<KeptAwake, AllocError> {
        WakeLock::new(state).map(|wake_lock| KeptAwake::note(state, Some(wake_lock)))
    }

    /// Keeps each of these allocator states awake.
    pub(crate) fn of_all(shells: impl Iterator<Item = &'static AllocatorState>) -> Result<Vec<KeptAwake>, AllocError> {
        let mut kept: Vec<KeptAwake> = Vec::new();
        for state in shells {
            if !kept.iter().any(|kept| std::ptr::eq(kept.state, state)) {
                kept.push(KeptAwake::new(state)?);
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
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(state));
        KeptAwake { state, _wake_lock: wake_lock, _thread: PhantomData }
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
            if let Some(at) = kept.iter().rposition(|&other| std::ptr::eq(other, self.state)) {
                kept.swap_remove(at);
            }
        });
    }
}

impl AllocatorState {
    /// True if the allocator sleeps, or is about to.
    pub(crate) fn is_quiescing(&self) -> bool {
        self.wakefulness.quiescing.load(Ordering::SeqCst)
    }

    /// True if the calling thread may not begin to keep the allocator awake.
    pub(crate) fn refuses_wake_locks(&'static self) -> bool {
        self.is_quiescing() && !self.is_kept_awake_here()
    }

    /// True if the calling thread keeps the allocator awake.
    pub(crate) fn is_kept_awake_here(&'static self) -> bool {
        KEPT.try_with(|kept| kept.borrow().iter().any(|&other| std::ptr::eq(other, self))).unwrap_or(false)
    }

    /// Makes the allocator quiescing, so that no thread begins to keep it awake, and
    /// waits until none does. The calling thread must not keep it awake.
    pub(crate) fn quiesce(&self) {
        self.begin_quiescing();
        while self.wakefulness.wake_locks.load(Ordering::SeqCst) > 0 {
            pause();
        }
    }

    /// Makes the allocator quiescing, while others may keep it awake.
    pub(crate) fn begin_quiescing(&self) {
        self.wakefulness.quiescing.store(true, Ordering::SeqCst);
    }

    /// Ends quiescing: others may keep the allocator awake again.
    pub(crate) fn end_quiescing(&self) {
        self.wakefulness.quiescing.store(false, Ordering::SeqCst);
        drop(self.wakefulness.waking.lock());
        self.wakefulness.woken.notify_all();
    }
}
