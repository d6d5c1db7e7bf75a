//! Children that a process forked.
//!
//! A forked child has one thread and a copy of its parent's memory. CUDA cannot be used in it, its
//! parent's worker threads are gone, and locks that other threads held at that moment are never
//! released. So in a child whose parent had opened a device, no device works: requests fail with
//! [`ErrorKind::Forked`] before they take a lock, handles that are dropped give nothing back, and a
//! lock that would wait for a thread which is gone panics. That holds for virtual devices, too,
//! whose state such a thread may have been changing. A child that executes another program starts
//! afresh.
//!
//! A handler that runs in the child ([`libc::pthread_atfork`]) sets one flag, and the bits that
//! fast paths look at anyway. It only stores to atomics, as is legal in a child of a process with
//! threads.

use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// For crates that have guards of the locks below: one version for all.
#[doc(hidden)]
pub use parking_lot;
use parking_lot::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

use crate::error::{Code, DeviceError, ErrorKind, Operation, Result};
use crate::executor;

/// True in a child that was forked after a device was opened.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// The first of the bits to be set in a child.
static BITS: OnceLock<&'static Bits> = OnceLock::new();

/// Bits to be set in a child. The list only grows, and can be walked without a lock.
#[derive(Debug)]
struct Bits {
    word: &'static AtomicU32,
    bits: u32,
    next: OnceLock<&'static Bits>,
}

/// The text of errors and panics in a child.
pub const ADVICE: &str = "this process was forked from one that had opened a device, and no device can be \
    used in it: fork before a device is opened, or start another program instead (exec)";

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
    let mut next = BITS.get();
    while let Some(bits) = next {
        bits.word.fetch_or(bits.bits, Ordering::Relaxed);
        next = bits.next.get();
    }
}

/// Makes children that are forked from now on refuse to use devices.
pub(crate) fn watch() {
    #[cfg(unix)]
    {
        static WATCHED: std::sync::Once = std::sync::Once::new();
        WATCHED.call_once(|| {
            // SAFETY: the handler only reads and stores atomics, and is never unloaded while the
            // process forks.
            let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            if code != 0 {
                tracing::warn!(code, "forked children of this process will not notice that they cannot use devices");
            }
        });
    }
}

/// Sets these bits of a word in a child: for fast paths, which look at such a word in any case.
pub fn set_in_child(word: &'static AtomicU32, bits: u32) {
    let new: &'static Bits = Box::leak(Box::new(Bits { word, bits, next: OnceLock::new() }));
    let mut end = &BITS;
    while end.set(new).is_err() {
        let Some(taken) = end.get() else { return };
        end = &taken.next;
    }
}

/// True in a child that was forked after a device was opened.
#[inline]
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Refuses a request in such a child.
///
/// # Errors
/// In a child.
#[inline]
pub fn check(operation: Operation) -> Result<()> {
    if is_child() { Err(error(operation)) } else { Ok(()) }
}

/// The error of a request in such a child.
#[cold]
pub fn error(operation: Operation) -> DeviceError {
    // The code that the driver has for that.
    DeviceError::refused(operation, Code(3)).with_kind(ErrorKind::Forked).with_detail(ADVICE)
}

/// A lock is taken: in a child, its holder may be gone.
///
/// # Panics
/// In a child.
#[cold]
pub fn refuse_to_wait() {
    assert!(!is_child(), "{ADVICE}");
}

/// A mutex that panics rather than wait for a thread that is gone.
#[derive(Debug, Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

// As std's locks, but without poisoning: callers' code and violations, which may
// panic, come before or after a change, so no panic leaves what a lock protects half changed.
impl<T> UnwindSafe for Mutex<T> {}
impl<T> RefUnwindSafe for Mutex<T> {}
impl<T> UnwindSafe for RwLock<T> {}
impl<T> RefUnwindSafe for RwLock<T> {}

impl<T> Mutex<T> {
    /// A mutex.
    pub const fn new(value: T) -> Self {
        Mutex(parking_lot::Mutex::new(value))
    }

    /// Waits for the lock.
    ///
    /// # Panics
    /// In a forked child, if the lock is held.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.try_lock().unwrap_or_else(|| {
            refuse_to_wait();
            executor::wait_until(|| self.0.try_lock()).unwrap_or_else(|| self.0.lock())
        })
    }

    /// The lock, if no thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock()
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

/// What threads that hold a [`Mutex`] wait for.
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// A condition variable.
    pub const fn new() -> Condvar {
        Condvar(parking_lot::Condvar::new())
    }

    /// Waits without the lock until notified; may return earlier.
    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.wait_in_place(&mut guard);
        guard
    }

    /// As [`Condvar::wait`], for a guard that stays where it is.
    pub fn wait_in_place<T>(&self, guard: &mut MutexGuard<'_, T>) {
        if executor::is_own() {
            self.wait_in_executor(guard, false);
        } else {
            self.0.wait(guard);
        }
    }

    /// As [`Condvar::wait`], for no longer than `time`. Returns true if that is over.
    pub fn wait_for<'a, T>(&self, mut guard: MutexGuard<'a, T>, time: Duration) -> (MutexGuard<'a, T>, bool) {
        let timed_out = if executor::is_own() {
            self.wait_in_executor(&mut guard, true)
        } else {
            self.0.wait_for(&mut guard, time).timed_out()
        };
        (guard, timed_out)
    }

    #[cold]
    fn wait_in_executor<T>(&self, guard: &mut MutexGuard<'_, T>, timed: bool) -> bool {
        let mutex = MutexGuard::mutex(guard);
        MutexGuard::unlocked(guard, || {
            let timed_out = executor::wait_notified(self.address(), timed).unwrap_or(false);
            // This thread keeps its turn, so the lock stays free until the guard has it again.
            executor::wait_until(|| mutex.try_lock().map(drop));
            timed_out
        })
    }

    /// Wakes a thread that waits.
    pub fn notify_one(&self) {
        executor::notify(self.address(), false);
        self.0.notify_one();
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        executor::notify(self.address(), true);
        self.0.notify_all();
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// A reader-writer lock that panics rather than wait for a thread that is gone.
#[derive(Debug, Default)]
pub struct RwLock<T>(parking_lot::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock.
    pub const fn new(value: T) -> Self {
        RwLock(parking_lot::RwLock::new(value))
    }

    /// Waits until no thread writes.
    ///
    /// # Panics
    /// In a forked child, if the lock is held.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.try_read().unwrap_or_else(|| {
            refuse_to_wait();
            executor::wait_until(|| self.0.try_read()).unwrap_or_else(|| self.0.read())
        })
    }

    /// Waits until no other thread reads or writes.
    ///
    /// # Panics
    /// In a forked child, if the lock is held.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.try_write().unwrap_or_else(|| {
            refuse_to_wait();
            executor::wait_until(|| self.0.try_write()).unwrap_or_else(|| self.0.write())
        })
    }

    /// The lock, if no other thread reads or writes.
    #[inline]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.0.try_write()
    }

    /// The value, without locking.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}
