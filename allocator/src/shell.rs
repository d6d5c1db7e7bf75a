//! The shell around an allocator's state: the lock, the queue of remote frees, and the counters read without the lock.
//!
//! Shells are never deallocated: they are recycled through a process-wide list. So an [`crate::Allocation`] refers to its
//! allocator by a plain `&'static Shell`: no reference count per allocation, no unsafe code, and nothing can dangle.
//!
//! Invariants:
//! * a shell is recycled only when it is *closed* (no handle of the allocator is left) and no allocation is live, and once
//!   in each life: several threads may find it so, the first empties it, and an empty core is not recycled;
//! * whoever takes the lock first applies the remote frees queued before;
//! * once a shell is closed, frees wait for the lock instead of queueing, so that the last one cannot be left behind.
//!
//! Lock order: the heap's lock is taken with no other lock held, and under it only that of the list of idle shells, a leaf.
//! No timeline is locked under it: of timelines only atomic values are read there. While it is held there is no driver call,
//! no wait, no foreign code. The list of buried devices is a leaf too, and devices are dropped outside it.

#[cfg(all(test, aquifer_shuttle))]
mod schedules;

use aquifer_device::Device;
use crossbeam::queue::SegQueue;

use crate::core::Core;
use crate::heap::BlockId;
use crate::stats::{Counter, Counters};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::sync::{Mutex, MutexGuard};

/// Reasons why an allocation may not take the short way, as bits of [`Shell::special`].
pub(crate) mod special {
    /// Blocks wait for other streams and are polled before each search.
    pub(crate) const WAITING: u32 = 1;
    /// Some thread routes its allocations to a private pool.
    pub(crate) const ROUTED: u32 = 2;
    /// Tags come from the current tracing span.
    pub(crate) const SPANS: u32 = 4;
    /// Nothing is cached: every allocation goes to the driver.
    pub(crate) const NO_CACHE: u32 = 8;
}

/// A free that found the lock taken.
#[derive(Debug)]
pub(crate) struct RemoteFree {
    pub(crate) block: BlockId,
    /// The stream whose later work the memory is handed to, where it is not the one of the allocation.
    pub(crate) on: Option<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Shell {
    core: Mutex<Core>,
    remote: SegQueue<RemoteFree>,
    remote_pending: AtomicBool,
    closed: AtomicBool,
    /// Bits of [`special`].
    pub(crate) special: AtomicU32,
    pub(crate) counters: Counters,
}

#[cfg(not(aquifer_shuttle))]
mod lists {
    use aquifer_device::Device;
    use parking_lot::Mutex;

    use super::Shell;

    /// Shells between two lives.
    pub(super) static IDLE: Mutex<Vec<&'static Shell>> = Mutex::new(Vec::new());

    /// Devices whose last handle was dropped where no driver call may be made. They are closed when the next allocator is
    /// made.
    pub(super) static BURIED: Mutex<Vec<Device>> = Mutex::new(Vec::new());
}

/// The same lists, empty at the start of each modelled execution: what a scheduler hands out is bound to one.
#[cfg(aquifer_shuttle)]
mod lists {
    use aquifer_device::Device;
    use parking_lot::Mutex;

    use super::Shell;

    shuttle::lazy_static! {
        pub(super) static ref IDLE: Mutex<Vec<&'static Shell>> = Mutex::new(Vec::new());
        pub(super) static ref BURIED: Mutex<Vec<Device>> = Mutex::new(Vec::new());
    }
}

use lists::{BURIED, IDLE};

impl Shell {
    /// A shell around `core`.
    pub(crate) fn open(core: Core, special: u32) -> &'static Shell {
        // Taken out first: closing a device calls its driver, which must not happen under a lock.
        let buried = std::mem::take(&mut *BURIED.lock());
        drop(buried);
        let idle = IDLE.lock().pop();
        let shell = idle.unwrap_or_else(|| Box::leak(Box::default()));
        shell.counters.clear();
        shell.special.store(special, Ordering::Relaxed);
        // Before the core is placed: whoever comes late from the shell's last life then finds it either empty or open.
        shell.closed.store(false, Ordering::SeqCst);
        *shell.core.lock() = core;
        shell
    }

    /// Takes the lock and applies the remote frees queued so far.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, Core> {
        let mut core = self.core.lock();
        if self.remote_pending.load(Ordering::Acquire) {
            self.drain(&mut core);
        }
        core
    }

    /// Applies remote frees queued before, if any: so that what is read afterwards includes them.
    pub(crate) fn apply_remote_frees(&self) {
        if self.remote_pending.load(Ordering::Acquire) {
            drop(self.lock());
        }
    }

    /// Updates counters from a slow path, under the lock.
    pub(crate) fn counters_locked(&self, update: impl FnOnce(&Counters)) {
        let _core = self.lock();
        update(&self.counters);
    }

    /// Counts one more of something, from a slow path.
    pub(crate) fn count(&self, counter: impl FnOnce(&Counters) -> &Counter) {
        self.counters_locked(|counters| {
            counter(counters).add(1);
        });
    }

    /// Gives a block back: at once if the lock is free, else through the queue. Never blocks while the allocator is open.
    #[inline]
    pub(crate) fn free(&'static self, block: BlockId, on: Option<u32>) {
        match self.core.try_lock() {
            Some(mut core) => {
                if self.remote_pending.load(Ordering::Acquire) {
                    self.drain(&mut core);
                }
                core.free(self, block, on);
                if core.live == 0 {
                    self.recycle_if_closed(core);
                }
            }
            None => self.free_remotely(RemoteFree { block, on }),
        }
    }

    #[cold]
    fn free_remotely(&'static self, free: RemoteFree) {
        self.remote.push(free);
        // A swap, not a store, here and in `drain`: whoever clears the flag thereby sees every entry whose push had set it.
        self.remote_pending.swap(true, Ordering::SeqCst);
        // Either this sees that the shell closed, or `close`, which sets the flag and then drains, sees the entry.
        if self.closed.load(Ordering::SeqCst) {
            let core = self.lock();
            self.recycle_if_closed(core);
        }
    }

    #[cold]
    fn drain(&self, core: &mut Core) {
        // Cleared first: an entry pushed from here on sets it again.
        self.remote_pending.swap(false, Ordering::SeqCst);
        while let Some(free) = self.remote.pop() {
            core.free(self, free.block, free.on);
        }
    }

    /// The last handle of the allocator is gone.
    pub(crate) fn close(&'static self) {
        self.closed.store(true, Ordering::SeqCst);
        let mut core = self.core.lock();
        // Whatever the flag seems to be: an entry pushed before the store above must not be left behind.
        self.drain(&mut core);
        self.recycle_if_closed(core);
    }

    /// Recycles the shell if it is closed and unused. A thread that closed it, or gave back its last block, may come here
    /// after another one recycled it, and even in its next life; then it finds an empty core, or an allocator that is open
    /// or is as done for as its own was.
    #[inline]
    fn recycle_if_closed(&'static self, core: MutexGuard<'_, Core>) {
        if core.live == 0 && core.device.is_some() && self.closed.load(Ordering::SeqCst) {
            self.recycle(core);
        }
    }

    /// Empties the shell and makes it available to the next allocator. Makes no driver call: the segments are freed when
    /// somebody next talks to the device.
    #[cold]
    fn recycle(&'static self, mut core: MutexGuard<'_, Core>) {
        let emptied = std::mem::take(&mut *core);
        // Pushed under the lock: whoever saw this shell closed and comes late finds an empty core and does nothing.
        IDLE.lock().push(self);
        drop(core);
        emptied.bury();
    }
}

/// Keeps a device open until driver calls are allowed again.
pub(crate) fn bury(device: Device) {
    BURIED.lock().push(device);
}
