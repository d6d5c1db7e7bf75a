//! The lock of an allocator's state, held.

use std::ops::{Deref, DerefMut};

use aquifer_device::Device;

use crate::core::Core;
use crate::core::limits::Holding;
use crate::state::{AllocatorState, Locked, special};
use crate::sync::MutexGuard;
use crate::sync::atomic::Ordering;
#[cfg(debug_assertions)]
use crate::sync::this_thread;

/// The lock, held. Two words, which stay in registers from where the lock is taken to where it is
/// released: copying it, and handles, through memory cost about 40 ns a hot pair.
#[derive(Debug)]
pub(crate) struct StateGuard {
    pub(crate) state: &'static AllocatorState,
    locked: MutexGuard<'static, Locked>,
}

impl Deref for StateGuard {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        &self.locked.core
    }
}

impl DerefMut for StateGuard {
    #[inline]
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.locked.core
    }
}

#[cfg(debug_assertions)]
impl Drop for StateGuard {
    fn drop(&mut self) {
        self.state.holder.store(0, Ordering::Relaxed);
    }
}

impl StateGuard {
    #[inline]
    pub(super) fn new(state: &'static AllocatorState, locked: MutexGuard<'static, Locked>) -> StateGuard {
        #[cfg(debug_assertions)]
        state.holder.store(this_thread(), Ordering::Relaxed);
        StateGuard { state, locked }
    }

    /// The device; `None` while the allocator state is idle.
    pub(crate) fn device(&self) -> Option<&Device> {
        self.locked.device.as_ref()
    }

    /// Takes out all that the allocator knew, and leaves an idle state.
    pub(super) fn take_all(&mut self) -> Locked {
        std::mem::take(&mut *self.locked)
    }

    /// What is held of a device. Nothing, if the state serves an allocator of another one by now.
    pub(crate) fn held_on(&self, device: &Device) -> Holding {
        let is_own = self.device().is_some_and(|own| own.id() == device.id());
        if is_own { self.holding() } else { Holding::default() }
    }

    /// Has allocations ask how far streams got while blocks wait for them, and only then.
    pub(crate) fn show_waiting(&self) {
        if self.locked.core.waiting().is_empty() {
            self.state.special().fetch_and(!special::WAITING, Ordering::Relaxed);
        } else {
            self.state.special().fetch_or(special::WAITING, Ordering::Relaxed);
        }
    }
}
