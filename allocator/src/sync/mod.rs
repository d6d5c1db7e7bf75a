//! The locks and atomics whose interleavings matter: the allocator's lock and those of `std`. With
//! `--cfg aquifer_shuttle`, which is for the crate's own tests alone, they are replaced by
//! counterparts that hand every interleaving to a scheduler (`ci/schedules`).
//!
//! Leaf locks, under which nothing here waits or calls foreign code, need no counterpart and are
//! parking_lot's.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(not(aquifer_shuttle))]
pub(crate) use aquifer_device::fork::{Mutex, parking_lot::MutexGuard};
#[cfg(not(aquifer_shuttle))]
pub(crate) use std::sync::atomic;

#[cfg(aquifer_shuttle)]
pub(crate) use modelled::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(aquifer_shuttle)]
pub(crate) use shuttle::sync::atomic;

/// A lock of nothing but time.
#[cfg(not(aquifer_shuttle))]
pub(crate) type RwLock = aquifer_device::fork::RwLock<()>;
#[cfg(not(aquifer_shuttle))]
pub(crate) type RwLockReadGuard<'a> = aquifer_device::fork::parking_lot::RwLockReadGuard<'a, ()>;
#[cfg(not(aquifer_shuttle))]
pub(crate) type RwLockWriteGuard<'a> = aquifer_device::fork::parking_lot::RwLockWriteGuard<'a, ()>;

/// A number, not 0, that no two running threads share.
pub(crate) fn this_thread() -> usize {
    #[cfg(not(aquifer_shuttle))]
    {
        thread_local! {
            static HERE: u8 = const { 0 };
        }
        HERE.with(|here| std::ptr::from_ref(here).addr())
    }
    #[cfg(aquifer_shuttle)]
    {
        1 + usize::from(shuttle::current::me())
    }
}

/// The thread that holds the lock, and the reservations to be ended when it releases the lock.
///
/// Only the thread that holds the lock writes these values, and it removes its mark before it
/// releases the lock. So a thread that finds its own mark holds the lock, and the accesses need no
/// order among threads.
#[derive(Debug, Default)]
pub(crate) struct Holder {
    /// The mark of the thread that holds the lock, or 0.
    thread: AtomicUsize,
    /// Number of reservations that the thread ended while it held the lock.
    pub(crate) ended: AtomicU32,
}

impl Holder {
    pub(crate) fn mark(&self) {
        self.thread.store(this_thread(), Ordering::Relaxed);
    }

    pub(crate) fn unmark(&self) {
        self.thread.store(0, Ordering::Relaxed);
    }

    pub(crate) fn is_this_thread(&self) -> bool {
        self.thread.load(Ordering::Relaxed) == this_thread()
    }
}

/// Lets other threads run: for a wait that may take long and is rare.
pub(crate) fn pause() {
    pause_for(Duration::from_micros(50));
}

/// As [`pause`], for about this long.
pub(crate) fn pause_for(time: Duration) {
    #[cfg(not(aquifer_shuttle))]
    aquifer_device::executor::pause(time);
    #[cfg(aquifer_shuttle)]
    {
        let _ = time;
        shuttle::thread::yield_now();
    }
}

/// Lets another thread go on that is about to finish what the caller waits for.
pub(crate) fn relax() {
    #[cfg(not(aquifer_shuttle))]
    aquifer_device::executor::pause(Duration::ZERO);
    #[cfg(aquifer_shuttle)]
    shuttle::thread::yield_now();
}

#[cfg(aquifer_shuttle)]
mod modelled {
    pub(crate) use shuttle::sync::MutexGuard;
    pub(crate) type RwLockReadGuard<'a> = shuttle::sync::RwLockReadGuard<'a, ()>;
    pub(crate) type RwLockWriteGuard<'a> = shuttle::sync::RwLockWriteGuard<'a, ()>;
    use shuttle::sync::{PoisonError, TryLockError};

    /// A scheduled mutex with the interface of parking_lot's.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            match self.0.try_lock() {
                Ok(locked) => Some(locked),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            }
        }
    }

    /// A scheduled lock of nothing but time.
    #[derive(Debug, Default)]
    pub(crate) struct RwLock(shuttle::sync::RwLock<()>);

    impl RwLock {
        pub(crate) fn read(&self) -> RwLockReadGuard<'_> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_>> {
            self.0.try_write().ok()
        }
    }
}
