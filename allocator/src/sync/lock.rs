//! The lock of a stream's heap, and of the state that is locked together with it. It is held for
//! tens of nanoseconds, and taken twice per pair of an allocation and a free.
//!
//! Unlocking is a plain store. An ordinary mutex has to find out at that point whether a thread
//! sleeps, with a second atomic read-modify-write, and each of those waits until earlier stores are
//! done: together a third of the time of an allocation. So no thread sleeps here. A thread that
//! finds the lock taken retries for some ten microseconds, then yields to other threads again and
//! again. This suits only locks under which no call can wait: those of arenas, of the shared state,
//! of history and of publishing.
//!
//! **The lock is fair** to a thread that retried in vain for a microsecond or so: it draws a
//! ticket. As long as a ticket is not served, no thread takes the lock except by its ticket, in
//! order. So a thread that takes the lock again and again, as slow paths do, does not pass one that
//! waits. A thread that does not wait for the lock (`try_lock`) does not get it while others wait.
//! Threads that take the lock for tens of nanoseconds get it within the first retries, without
//! tickets: in order, each would have to wait until the system runs the one before it.
//!
//! The swap of `held` alone decides which thread has the lock; tickets only decide which threads
//! try (schedules below).

#[cfg(aquifer_shuttle)]
use shuttle::thread::yield_now;
#[cfg(not(aquifer_shuttle))]
use std::thread::yield_now;

use std::cell::UnsafeCell;
use std::fmt::{Debug, Formatter};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};

use crate::sync::atomic::{AtomicBool, AtomicU16, Ordering};

/// How often a thread looks again before it draws a ticket, and how often with a ticket before it
/// yields: for about as long as slow paths hold the lock, because on a busy machine a thread that
/// yields gets its turn milliseconds later.
const SPINS: u32 = if cfg!(aquifer_shuttle) { 1 } else { 64 };
const TICKET_SPINS: u32 = if cfg!(aquifer_shuttle) { 0 } else { 1000 };

/// A mutex over a [`ShortLock`]. A thread that panics while it holds the lock does not poison it.
#[derive(Default)]
pub(crate) struct Mutex<T> {
    lock: ShortLock,
    value: UnsafeCell<T>,
}

#[allow(unsafe_code, reason = "a promise that the compiler cannot check")]
// SAFETY: the value is reached only through a guard, and there is one guard at a time: a shared
// mutex passes the value from thread to thread, which `T: Send` allows.
unsafe impl<T: Send> Sync for Mutex<T> {}

// No foreign code runs under this lock, so no panic leaves the value half changed.
impl<T> UnwindSafe for Mutex<T> {}
impl<T> RefUnwindSafe for Mutex<T> {}

impl<T> Mutex<T> {
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.lock.lock();
        MutexGuard { mutex: self, not_send: PhantomData }
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.lock.try_lock().then(|| MutexGuard { mutex: self, not_send: PhantomData })
    }
}

impl<T> Debug for Mutex<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mutex").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// The guard of a [`Mutex`], which stays on the thread that took the lock.
#[must_use]
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    not_send: PhantomData<*const ()>,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        #[allow(unsafe_code, reason = "the lock is held")]
        // SAFETY: a guard exists only while its thread holds the lock, so there is no other guard.
        unsafe {
            &*self.mutex.value.get()
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        #[allow(unsafe_code, reason = "the lock is held")]
        // SAFETY: as in `deref`, and this guard is borrowed mutably.
        unsafe {
            &mut *self.mutex.value.get()
        }
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.mutex.lock.unlock();
    }
}

impl<T: Debug> Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

#[derive(Debug, Default)]
pub(crate) struct ShortLock {
    held: AtomicBool,
    /// Threads that have a ticket, or are about to draw one.
    waiting: AtomicU16,
    /// The next ticket to be drawn, and the one whose turn it is.
    next: AtomicU16,
    serving: AtomicU16,
}

/// `lock` and `try_lock` succeed only when their swap turned `held` from false to true, and only
/// `unlock`, called by the holder, turns it back. So there is one holder at a time. The acquiring
/// swap sees everything before the releasing store.
impl ShortLock {
    #[inline]
    fn lock(&self) {
        if self.has_waiters() || self.held.swap(true, Ordering::Acquire) {
            self.lock_contended();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        !self.has_waiters() && self.try_take()
    }

    /// Only the thread that holds the lock calls this.
    #[inline]
    fn unlock(&self) {
        self.held.store(false, Ordering::Release);
    }

    /// True if a ticket was drawn and is not served yet.
    #[inline]
    fn has_waiters(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) != 0
    }

    /// Looks first: that keeps the line shared among those who wait.
    #[inline]
    fn try_take(&self) -> bool {
        !self.held.load(Ordering::Relaxed) && !self.held.swap(true, Ordering::Acquire)
    }

    #[cold]
    fn lock_contended(&self) {
        aquifer_device::fork::refuse_to_wait();
        if aquifer_device::executor::wait_until(|| self.try_take().then_some(())).is_some() {
            return;
        }
        for _ in 0..SPINS {
            std::hint::spin_loop();
            if !self.has_waiters() && self.try_take() {
                return;
            }
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let mut spins = 0;
        while self.serving.load(Ordering::Relaxed) != ticket || !self.try_take() {
            if spins < TICKET_SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                yield_now();
            }
        }
        self.serving.store(ticket.wrapping_add(1), Ordering::Relaxed);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        let counter = Arc::new(Mutex::<u64>::default());
        let count = |counter: Arc<Mutex<u64>>| {
            for _ in 0..20_000 {
                *counter.lock() += 1;
            }
        };
        let threads: Vec<_> =
            (0..4).map(|_| counter.clone()).map(|counter| std::thread::spawn(move || count(counter))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*counter.lock(), 80_000);
        let held = counter.lock();
        assert!(counter.try_lock().is_none());
        drop(held);
        assert!(counter.try_lock().is_some());
    }
}

#[cfg(all(test, aquifer_shuttle))]
mod schedules {
    use std::sync::Arc;

    use shuttle::thread;

    use super::*;

    /// Holds the lock several times in a row. Tickets drawn until the end of one hold are served
    /// before the next.
    fn hold_again_and_again(lock: &ShortLock, inside: &AtomicBool) {
        let mut drawn = None;
        for _ in 0..3 {
            lock.lock();
            assert!(!inside.swap(true, Ordering::Relaxed), "two threads hold the lock");
            if let Some(drawn) = drawn {
                let behind = lock.serving.load(Ordering::Relaxed).wrapping_sub(drawn);
                assert!(behind < u16::MAX / 2, "a thread that waited was passed");
            }
            yield_now();
            drawn = Some(lock.next.load(Ordering::Relaxed));
            inside.store(false, Ordering::Relaxed);
            lock.unlock();
        }
    }

    #[test]
    fn one_thread_at_a_time_holds_the_lock_and_none_passes_another() {
        let model = || {
            let shared = Arc::new((ShortLock::default(), AtomicBool::new(false)));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let shared = shared.clone();
                    thread::spawn(move || hold_again_and_again(&shared.0, &shared.1))
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(!shared.0.held.load(Ordering::Relaxed));
            assert_eq!(shared.0.next.load(Ordering::Relaxed), shared.0.serving.load(Ordering::Relaxed));
            assert!(shared.0.try_lock(), "no ticket is left");
        };
        shuttle::check_random(model, 3000);
        shuttle::check_pct(model, 1500, 3);
    }
}
