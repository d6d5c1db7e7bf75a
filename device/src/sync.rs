//! The locks and atomics whose interleavings matter: those of parking_lot and `std`. With
//! `--cfg aquifer_shuttle`, which is for the crate's own tests alone, they are replaced by
//! counterparts that hand every interleaving to a scheduler (`ci/schedules`).
//!
//! Leaf locks, under which nothing here waits or calls foreign code, need no counterpart and are
//! always parking_lot's.

#[cfg(not(aquifer_shuttle))]
pub(crate) use crate::fork::{Condvar, Mutex};
#[cfg(not(aquifer_shuttle))]
pub(crate) use parking_lot::MutexGuard;
#[cfg(not(aquifer_shuttle))]
pub(crate) use std::sync::atomic;

#[cfg(aquifer_shuttle)]
pub(crate) use modelled::{Condvar, Mutex, MutexGuard};
#[cfg(aquifer_shuttle)]
pub(crate) use shuttle::sync::atomic;

#[cfg(aquifer_shuttle)]
mod modelled {
    pub(crate) use shuttle::sync::MutexGuard;
    use shuttle::sync::PoisonError;

    /// A scheduled mutex with the interface of parking_lot's.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) const fn new(value: T) -> Self {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// A scheduled condition variable.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
