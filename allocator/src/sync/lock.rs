//! The lock of a stream's heap, and of the state that is locked together with it. It is held for tens of nanoseconds, and taken twice per
//! pair of an allocation and a free.
//!
//! Unlocking is a plain store. An ordinary mutex has to find out at that point whether a thread sleeps, with a second atomic
//! read-modify-write, and each of those waits until earlier stores are done: together a third of the time of an allocation. So
//! no thread sleeps here in the usual sense. A thread that finds the lock taken retries for a microsecond or so, then yields to other
//! threads. If that does not help, because the holder was preempted or is on a slow path that looks at all blocks, it naps. This suits only
//! locks under which no call can wait: those of arenas, of the core, of history and of publishing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lock_api::GuardNoSend;

/// How often a thread looks again at once, and how often in all before it naps; in between it lets others run.
const SPINS: u32 = 64;
const PATIENCE: u32 = 96;
const NAP: Duration = Duration::from_micros(50);

/// A mutex over a [`ShortLock`].
pub(crate) type Mutex<T> = lock_api::Mutex<ShortLock, T>;
/// The guard of a [`Mutex`].
pub(crate) type MutexGuard<'a, T> = lock_api::MutexGuard<'a, ShortLock, T>;

#[derive(Debug)]
pub(crate) struct ShortLock(AtomicBool);

#[allow(unsafe_code, reason = "a promise that the compiler cannot check")]
// SAFETY: `lock` and `try_lock` succeed only when their swap turned the flag from false to true, and only `unlock`, called by
// the holder, turns it back. So there is one holder at a time. The acquiring swap sees everything before the releasing store.
unsafe impl lock_api::RawMutex for ShortLock {
    const INIT: ShortLock = ShortLock(AtomicBool::new(false));

    type Guard = GuardNoSend;

    #[inline]
    fn lock(&self) -> GuardNoSend {
        if self.0.swap(true, Ordering::Acquire) {
            self.lock_contended();
        }
        GuardNoSend::new()
    }

    #[inline]
    fn try_lock(&self) -> Option<GuardNoSend> {
        self.try_take().then(GuardNoSend::new)
    }

    #[inline]
    unsafe fn unlock(&self, _: GuardNoSend) {
        self.0.store(false, Ordering::Release);
    }

    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl ShortLock {
    /// Looks first: that keeps the line shared among those who wait.
    #[inline]
    fn try_take(&self) -> bool {
        !self.0.load(Ordering::Relaxed) && !self.0.swap(true, Ordering::Acquire)
    }

    #[cold]
    fn lock_contended(&self) {
        let mut round = 0;
        aquifer_device::fork::refuse_to_wait();
        while !self.try_take() {
            match round {
                0..SPINS => std::hint::spin_loop(),
                SPINS..PATIENCE => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
            round = (round + 1).min(PATIENCE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_thread_at_a_time() {
        let counter = Arc::new(Mutex::new(0_u64));
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
