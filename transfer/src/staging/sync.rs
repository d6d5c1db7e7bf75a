//! The lock and the condition that threads of the ring meet at: those of parking_lot, or with `--cfg aquifer_shuttle`, which is for the
//! crate's own tests alone, counterparts that hand every interleaving to a scheduler (`ci/schedules`).

#[cfg(aquifer_shuttle)]
pub(super) use modelled::{Condvar, Mutex, MutexGuard};
#[cfg(not(aquifer_shuttle))]
pub(super) use of_threads::{Condvar, Mutex, MutexGuard};

#[cfg(not(aquifer_shuttle))]
mod of_threads {
    pub(in crate::staging) use parking_lot::{Mutex, MutexGuard};

    /// Where threads sleep.
    #[derive(Debug, Default)]
    pub(in crate::staging) struct Condvar(parking_lot::Condvar);

    impl Condvar {
        pub(in crate::staging) fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(&mut guard);
            guard
        }

        pub(in crate::staging) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(in crate::staging) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

#[cfg(aquifer_shuttle)]
mod modelled {
    use shuttle::sync::PoisonError;

    pub(in crate::staging) use shuttle::sync::MutexGuard;

    /// A scheduled mutex with the interface of parking_lot's.
    #[derive(Debug, Default)]
    pub(in crate::staging) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(in crate::staging) fn new(value: T) -> Self {
            Mutex(shuttle::sync::Mutex::new(value))
        }

        pub(in crate::staging) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// Where scheduled threads sleep.
    #[derive(Debug, Default)]
    pub(in crate::staging) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(in crate::staging) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
            self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
        }

        pub(in crate::staging) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(in crate::staging) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
