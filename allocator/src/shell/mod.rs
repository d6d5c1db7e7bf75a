//! The shell around an allocator's state: the core's lock, the arenas, the queue of frees that need both, and the counters
//! read without a lock.
//!
//! Shells are never deallocated: they are recycled through a process-wide list, and their arenas with them. So an
//! [`crate::Allocation`] refers to its arena by a plain `&'static Arena`. This needs no reference count per allocation and no unsafe
//! code, and nothing can dangle.
//!
//! Invariants (A4 is made of them):
//! * a shell is recycled only when it is *closed* (no handle of the allocator is left) and no allocation is live, and only once
//!   in each life: if several threads find it so, the first one empties it, and an empty core is not recycled;
//! * a thread that takes the core's lock with arenas first applies the frees queued before, in arenas and here;
//! * once a shell is closed, a thread that queued a free waits for all locks, so that the last free cannot be left behind.
//!
//! Lock order: the core's lock, arenas, and then leaf locks: history, publishing, the list of idle shells.
//! No timeline is locked under them; only atomic values of timelines are read there. While one of these locks is held there is no driver
//! call, no wait and no foreign code. The lock of the list of buried devices is a leaf, too, and devices are dropped outside of it.

pub(crate) mod arena;
pub(crate) mod awake;
pub(crate) mod core;

/// See [`Allocator::service`].
pub(crate) type Service = Arc<dyn Any + Send + Sync>;

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
pub(crate) mod settled;
mod table;
pub(crate) mod whole;

use std::any::Any;
use std::sync::Arc;

use aquifer_device::sim::Checks;
use aquifer_device::{Device, DevicePtr, Stream, fork};
use crossbeam_queue::SegQueue;
use crossbeam_utils::CachePadded;

use crate::accounting::PoolStats;
use crate::accounting::counter::{Counter, Sum};
use crate::accounting::counters::{Counters, Hot};
use crate::heap::BlockId;
use crate::history::History;
use crate::raw::Guesses;
use crate::shell::arena::{Arena, Desk, Guard};
use crate::shell::awake::Wakefulness;
use crate::shell::core::Core;
use crate::shell::table::Table;
use crate::shell::whole::Whole;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use crate::sync::{Mutex, MutexGuard};

/// Reasons why an allocation may not take the fast path, as bits of [`Shell::special()`].
pub(crate) mod special {
    /// Blocks wait for other streams and are polled before each search.
    pub(crate) const WAITING: u32 = 1;
    /// Some thread routes its allocations to a private pool.
    pub(crate) const ROUTED: u32 = 2;
    /// Tags come from the current tracing span.
    pub(crate) const SPANS: u32 = 4;
    /// Nothing is cached: every allocation goes to the driver.
    pub(crate) const NO_CACHE: u32 = 8;
    /// The allocator sleeps: mapped memory was given back, and nothing is allocated.
    pub(crate) const ASLEEP: u32 = 16;
    /// Frees of blocks that other streams use were left to the next slow path.
    pub(crate) const LEFT: u32 = 32;
    /// The process is a forked child, in which no device can be used.
    #[cfg(not(aquifer_shuttle))]
    pub(crate) const FORKED: u32 = 64;
}

/// The free of a block that other streams use, too. It needs the core.
#[derive(Debug)]
pub(crate) struct SharedFree {
    pub(crate) arena: &'static Arena,
    pub(crate) block: BlockId,
    /// The stream whose later work gets the memory, if it is not the stream of the allocation.
    pub(crate) on: Option<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct Shell {
    /// Fields that every operation reads and few write.
    read: CachePadded<Read>,
    /// All arenas. Those of earlier lives are not open.
    pub(crate) arenas: Table,
    /// The arenas of raw pointers.
    pub(crate) guesses: CachePadded<Guesses>,
    core: CachePadded<Mutex<Core>>,
    shared_frees: SegQueue<SharedFree>,
    /// Arenas that were settled, and in which something happened since.
    unsettled: SegQueue<&'static Arena>,
    pub(crate) history: CachePadded<Mutex<History>>,
    /// Held while counters that several arenas write to are written.
    pub(crate) publishing: CachePadded<Mutex<()>>,
    pub(crate) counters: CachePadded<Counters>,
    pub(crate) wakefulness: CachePadded<Wakefulness>,
    /// The checks of a simulated device, which are told of blocks. A leaf: under it only the checks' own lock is taken.
    checks: parking_lot::RwLock<Option<Arc<Checks>>>,
}

#[derive(Debug, Default)]
struct Read {
    closed: AtomicBool,
    /// Bits of [`special`].
    special: AtomicU32,
}

#[cfg(not(aquifer_shuttle))]
mod lists {
    use aquifer_device::Device;
    use aquifer_device::fork::Mutex;

    use super::Shell;
    use crate::shell::Service;

    /// Shells without an allocator, to be recycled.
    pub(super) static IDLE: Mutex<Vec<&'static Shell>> = Mutex::new(Vec::new());

    /// Devices whose memory was given up where no driver call may be made. They are closed when the last handle of any allocator is
    /// dropped, or when the next allocator is made.
    pub(super) static BURIED: Mutex<Vec<Device>> = Mutex::new(Vec::new());

    /// What was kept for allocators that closed where no driver call may be made.
    pub(super) static SERVICES: Mutex<Vec<Service>> = Mutex::new(Vec::new());
}

/// The same lists, empty at the start of each modelled execution, because a scheduler's locks are bound to one execution.
#[cfg(aquifer_shuttle)]
mod lists {
    use aquifer_device::Device;
    use aquifer_device::fork::Mutex;

    use super::Shell;
    use crate::shell::Service;

    shuttle::lazy_static! {
        pub(super) static ref IDLE: Mutex<Vec<&'static Shell>> = Mutex::new(Vec::new());
        pub(super) static ref BURIED: Mutex<Vec<Device>> = Mutex::new(Vec::new());
        pub(super) static ref SERVICES: Mutex<Vec<Service>> = Mutex::new(Vec::new());
    }
}

use lists::{BURIED, IDLE, SERVICES};

impl Shell {
    /// A shell around `core`.
    pub(crate) fn open(core: Core, history: History, special: u32) -> &'static Shell {
        let idle = IDLE.lock().pop();
        let shell = idle.unwrap_or_else(|| Shell::create());
        shell.counters.clear();
        shell.read.special.store(special, Ordering::Relaxed);
        shell.end_drowsiness();
        *shell.history.lock() = history;
        *shell.checks.write() = core.device.as_ref().and_then(Device::checks).cloned();
        // Before the core is placed, so that a thread that comes late from the shell's last life finds the shell either empty or open.
        shell.read.closed.store(false, Ordering::SeqCst);
        *shell.core.lock() = core;
        shell
    }

    /// A new shell, whose allocations leave the fast path in forked children.
    fn create() -> &'static Shell {
        let shell: &'static Shell = Box::leak(Box::default());
        #[cfg(not(aquifer_shuttle))]
        fork::set_in_child(&shell.read.special, special::FORKED);
        shell
    }

    /// Bits of [`special`].
    #[inline]
    pub(crate) fn special(&self) -> &AtomicU32 {
        &self.read.special
    }

    /// Whether the device is a simulated one that checks how work uses memory.
    pub(crate) fn has_checks(&self) -> bool {
        !fork::is_child() && self.checks.read().is_some()
    }

    /// Tells the checks of a simulated device something, where there are any. A forked child tells nothing: another
    /// thread may have held their locks.
    pub(crate) fn tell_checks(&self, tell: impl FnOnce(&Checks)) {
        if fork::is_child() {
            return;
        }
        self.checks.read().as_deref().inspect(|checks| tell(checks));
    }

    /// Takes the core's lock.
    pub(crate) fn core(&'static self) -> MutexGuard<'static, Core> {
        self.core.lock()
    }

    /// Takes all locks and applies the frees queued so far.
    pub(crate) fn whole(&'static self) -> Whole {
        Whole::lock(self, self.core.lock())
    }

    /// Takes the core's lock, and that of the arena `own`; applies all frees queued so far. Other arenas are locked as
    /// they are asked for.
    pub(crate) fn part(&'static self, own: Option<u32>) -> Whole {
        Whole::lock_part(self, self.core.lock(), own)
    }

    /// As [`Shell::part`]; `None` if another thread holds a lock.
    fn try_part(&'static self) -> Option<Whole> {
        Whole::try_lock_part(self, self.core.try_lock()?)
    }

    /// Takes the lock of a stream's arena, which is opened if this is the stream's first allocation.
    #[inline]
    pub(crate) fn enter(&'static self, stream: &Stream) -> Guard {
        match self.arenas.get(stream.id()).and_then(Arena::enter) {
            Some(guard) => guard,
            None => self.enter_first(stream),
        }
    }

    #[cold]
    fn enter_first(&'static self, stream: &Stream) -> Guard {
        loop {
            let mut whole = self.part(Some(stream.id()));
            whole.open_arena(stream);
            whole.admit_thread();
            drop(whole);
            // Another thread may be admitted here, but only a few times before there are several for good.
            if let Some(guard) = self.arenas.get(stream.id()).and_then(Arena::enter) {
                return guard;
            }
        }
    }

    /// Makes the calling thread known as being at work here. Returns false if that would have to wait for a lock.
    pub(crate) fn try_admit_thread(&'static self) -> bool {
        let whole = self.try_part();
        whole.map(|mut whole| whole.admit_thread()).is_some()
    }

    /// Applies the frees queued so far, so that values read afterwards include them.
    pub(crate) fn apply_queued_frees(&'static self) {
        if !self.shared_frees.is_empty() || self.arenas.iter().any(Arena::has_remote_frees) {
            drop(self.part(None));
        }
    }

    /// The sum of the arenas' own counts of a quantity, by pool.
    pub(crate) fn sums(&self, quantity: Hot) -> [Sum; 2] {
        let mut sums = [Sum::default(); 2];
        for arena in self.arenas.iter() {
            for (sum, own) in sums.iter_mut().zip(arena.own.sums(quantity)) {
                sum.current = sum.current.wrapping_add(own.current);
                sum.increases = sum.increases.wrapping_add(own.increases);
            }
        }
        sums
    }

    /// The present values of a quantity.
    pub(crate) fn read(&self, quantity: Hot) -> PoolStats {
        self.counters.hot(quantity).read_with(self.sums(quantity))
    }

    /// Adds one to a counter, on a slow path.
    pub(crate) fn count(&'static self, counter: impl FnOnce(&Counters) -> &Counter) {
        let _core = self.core();
        counter(&self.counters).add(1);
    }

    /// Frees a block that other streams use, too: at once if no other thread holds a lock, otherwise through the queue.
    #[cold]
    pub(crate) fn free_shared(&'static self, free: SharedFree) {
        if fork::is_child() {
            return;
        }
        self.leave_shared(free);
        // Either this sees that the shell closed, or `close` sees the entry.
        if self.is_closed() {
            self.recycle_if_unused();
        } else {
            // Taking the locks applies it.
            drop(self.try_part());
        }
    }

    /// Leaves such a free to the next slow path, which the next allocation takes.
    pub(crate) fn leave_shared(&self, free: SharedFree) {
        self.shared_frees.push(free);
        // Not `Relaxed`, here and in `take_shared`: a thread that clears the bit sees every entry whose push had set it.
        self.read.special.fetch_or(special::LEFT, Ordering::SeqCst);
    }

    /// True if there are such frees.
    pub(crate) fn has_left(&self) -> bool {
        self.special().load(Ordering::Relaxed) & special::LEFT != 0
    }

    /// Takes those frees, one by one.
    pub(crate) fn take_shared(&self) -> impl Iterator<Item = SharedFree> + '_ {
        if self.read.special.load(Ordering::SeqCst) & special::LEFT != 0 {
            self.read.special.fetch_and(!special::LEFT, Ordering::SeqCst);
        }
        std::iter::from_fn(|| self.shared_frees.pop())
    }

    /// True if the last handle of the allocator is gone.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.read.closed.load(Ordering::SeqCst)
    }

    /// Closes the shell, as the last handle of the allocator is gone.
    pub(crate) fn close(&'static self) {
        self.read.closed.store(true, Ordering::SeqCst);
        // A thread that queued a free either sees the store, or taking all locks applies its free.
        fence(Ordering::SeqCst);
        self.recycle_whole_if_unused(self.whole());
    }

    /// Recycles the shell if it is closed and unused, after applying the frees queued so far. A thread that closed it, or freed its last
    /// block, may come here after another thread recycled it, and even in the shell's next life. Then it finds an empty core, or an
    /// allocator that is open, or one that is closed and unused as well.
    #[cold]
    pub(crate) fn recycle_if_unused(&'static self) {
        self.recycle_whole_if_unused(self.whole());
    }

    fn recycle_whole_if_unused(&'static self, whole: Whole) {
        if whole.device.is_some() && whole.live() == 0 && self.is_closed() {
            self.recycle(whole);
        }
    }

    /// Empties the shell and makes it available to the next allocator. Makes no driver call: the segments are freed when driver calls are
    /// next made for the device.
    #[cold]
    fn recycle(&'static self, mut whole: Whole) {
        let (core, desks) = whole.empty();
        let history = std::mem::take(&mut *self.history.lock());
        // Pushed under the lock: a thread that saw this shell closed and comes late finds an empty core and does nothing.
        IDLE.lock().push(self);
        drop(whole);
        drop(history);
        bury(core, desks);
    }
}

/// Gives memory back that outlived its allocator, on devices of which nobody has a handle any more. Dropping the last buffer of such an
/// allocator makes no driver call, so its memory stays until this is called. Making or dropping any allocator calls it, too. Call it on a
/// thread that drops others' last buffers and may make driver calls.
///
/// ```
/// use aquifer_allocator::{Allocator, Config};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let driver = SimDriver::new(SimConfig::default());
/// let device = Device::new(driver.clone());
/// let stream = device.stream()?;
/// let last = Allocator::new(&device, Config::default())?.alloc_bytes(1 << 20, &stream)?;
/// drop((stream, device));
/// drop(last); // by whoever comes last
/// aquifer_allocator::internal::close_abandoned();
/// assert_eq!(driver.held_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn close_abandoned() {
    if fork::is_child() {
        return;
    }
    // Devices in use stay as they are: their users give abandoned memory back when they next need memory, and would miss memory that
    // another thread is just giving back. The devices are taken out first, because closing them calls drivers, which must not happen under
    // a lock.
    let services = std::mem::take(&mut *SERVICES.lock());
    drop(services);
    let buried = std::mem::take(&mut *BURIED.lock());
    drop(buried);
}

/// Keeps the services of an allocator that is closed until driver calls are allowed.
pub(crate) fn leave_services(services: Vec<Service>) {
    if !services.is_empty() {
        SERVICES.lock().extend(services);
    }
}

/// Hands every segment to the device object, to be freed at its next driver calls, and drops the handle of the device. The device stays
/// open until driver calls are allowed again.
fn bury(mut core: Core, desks: Vec<Desk>) {
    let Some(device) = core.device.take() else { return };
    for region in desks.iter().flat_map(|desk| desk.heap.regions()).filter(|region| !region.is_paged()) {
        device.free_later(DevicePtr(region.addr));
    }
    if let Some(paged) = core.paged.take() {
        paged.bury(&device);
    }
    // The device goes last: its driver must not end with the timelines that this thread drops.
    drop((core, desks));
    BURIED.lock().push(device);
}
