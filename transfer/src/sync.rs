//! The locks and counts whose interleavings matter: those of parking_lot and the standard library,
//! or with `--cfg aquifer_shuttle`, which is for the crate's own tests alone, counterparts that
//! pass every interleaving to a scheduler (`ci/schedules`).
//!
//! Leaf locks need no counterpart and are parking_lot's.

#[cfg(not(aquifer_shuttle))]
pub(crate) use std::sync::atomic::AtomicUsize;

#[cfg(not(aquifer_shuttle))]
pub(crate) use aquifer_device::fork::{Condvar, Mutex, parking_lot::MutexGuard};

#[cfg(aquifer_shuttle)]
pub(crate) use modelled::{AtomicUsize, Condvar, Mutex, MutexGuard};

#[cfg(aquifer_shuttle)]
mod modelled {
    use shuttle::sync::PoisonError;
    pub(crate) use shuttle::sync::{MutexGuard, atomic::AtomicUsize};

    /// A scheduled mutex with the interface of parking_lot's.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// A scheduled condition variable.
    #[derive(Debug, Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
