//! An allocator's state: the shared state's lock, the arenas, the queue of frees that need both,
//! and the counters read without a lock.
//!
//! Allocator states are never deallocated: they are recycled through a process-wide list, and their
//! arenas with them. So an [`crate::Allocation`] refers to its arena by a plain `&'static Arena`.
//! This needs no reference count per allocation and no unsafe code, and nothing can dangle.
//!
//! Invariants (A4 is made of them):
//! * an allocator state is recycled only when it is *closed* (no handle of the allocator is left)
//!   and no allocation is live, and only once in each life: if several threads find it so, the
//!   first one empties it, and an empty shared state is not recycled;
//! * a thread that takes the shared state's lock with arenas first applies the frees queued before,
//!   in arenas and here;
//! * once an allocator state is closed, a thread that queued a free waits for all locks, so that
//!   the last free cannot be left behind.
//!
//! Lock order: the shared state's lock, arenas, and then leaf locks: history, publishing, the list
//! of idle allocator states. No timeline is locked under them; only atomic values of timelines are
//! read there. While one of these locks is held there is no driver call, no wait and no foreign
//! code.

pub(crate) mod arena;
pub(crate) mod awake;
pub(crate) mod guard;
pub(crate) mod shared;

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
pub(crate) mod settled;
mod table;

use std::sync::Arc;

use aquifer_device::internal::{Timeline, drop_left};
use aquifer_device::{Device, DevicePtr, Stream, Tick, Witness, fork};
use crossbeam_queue::SegQueue;
use crossbeam_utils::CachePadded;

use crate::accounting::PoolStats;
use crate::accounting::counter::{Counter, Sum};
use crate::accounting::counters::{Counters, Hot};
use crate::heap::BlockId;
use crate::history::History;
use crate::raw::guess::Guesses;
use crate::state::arena::{Arena, ArenaGuard, ArenaInner};
use crate::state::awake::Wakefulness;
use crate::state::guard::StateGuard;
use crate::state::shared::SharedState;
use crate::state::table::Table;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use crate::sync::{Mutex, MutexGuard};

/// Reasons why an allocation may not take the fast path, as bits of [`AllocatorState::special()`].
pub(crate) mod special {
    /// Blocks wait for other streams. Some allocations ask how far these got.
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
    pub(crate) const DEFERRED_FREES: u32 = 32;
    /// The process is a forked child, in which no device can be used.
    #[cfg(not(aquifer_shuttle))]
    pub(crate) const FORKED: u32 = 64;
}

/// The free of a block that other streams use, too. It needs the shared state.
#[derive(Debug)]
pub(crate) struct DeferredFree {
    pub(crate) arena: &'static Arena,
    pub(crate) block: BlockId,
    /// The stream whose later work gets the memory, if it is not the stream of the allocation.
    pub(crate) on: Option<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct AllocatorState {
    /// Fields that every operation reads and few write.
    read: CachePadded<Read>,
    /// All arenas. Those of earlier lives are not open.
    pub(crate) arenas: Table,
    /// The arenas of raw pointers.
    pub(crate) guesses: CachePadded<Guesses>,
    shared: CachePadded<Mutex<SharedState>>,
    deferred_frees: SegQueue<DeferredFree>,
    /// Arenas that were settled, and in which something happened since.
    unsettled: SegQueue<&'static Arena>,
    pub(crate) history: CachePadded<Mutex<History>>,
    /// Held while counters that several arenas write to are written.
    pub(crate) publishing: CachePadded<Mutex<()>>,
    pub(crate) counters: CachePadded<Counters>,
    pub(crate) wakefulness: CachePadded<Wakefulness>,
    /// The device's witness, if it watches blocks. A leaf: under it only the witness's own lock is
    /// taken.
    witness: fork::RwLock<Option<Arc<dyn Witness>>>,
}

#[derive(Debug, Default)]
struct Read {
    closed: AtomicBool,
    /// Bits of [`special`].
    special: AtomicU32,
}

/// Allocator states without an allocator, to be recycled.
#[cfg(not(aquifer_shuttle))]
static IDLE: fork::Mutex<Vec<&'static AllocatorState>> = fork::Mutex::new(Vec::new());

// A scheduler's locks are bound to one execution.
#[cfg(aquifer_shuttle)]
shuttle::lazy_static! {
    static ref IDLE: fork::Mutex<Vec<&'static AllocatorState>> = fork::Mutex::new(Vec::new());
}

impl AllocatorState {
    /// An allocator state around `shared`.
    pub(crate) fn open(shared: SharedState, history: History, special: u32) -> &'static AllocatorState {
        let idle = IDLE.lock().pop();
        let state = idle.unwrap_or_else(|| AllocatorState::create());
        state.counters.clear();
        state.read.special.store(special, Ordering::Relaxed);
        state.end_quiescing();
        state.end_deciding(&shared);
        *state.history.lock() = history;
        let witness = shared.device.as_ref().and_then(Device::witness).filter(|witness| witness.watches_blocks());
        *state.witness.write() = witness.cloned();
        // Before the shared state is placed, so that a thread that comes late from the allocator
        // state's last life finds the allocator state either empty or open.
        state.read.closed.store(false, Ordering::SeqCst);
        *state.shared.lock() = shared;
        state
    }

    /// A new allocator state, whose allocations leave the fast path in forked children.
    fn create() -> &'static AllocatorState {
        let state: &'static AllocatorState = Box::leak(Box::default());
        #[cfg(not(aquifer_shuttle))]
        fork::set_in_child(&state.read.special, special::FORKED);
        state
    }

    /// Bits of [`special`].
    #[inline]
    pub(crate) fn special(&self) -> &AtomicU32 {
        &self.read.special
    }

    /// Whether the device has a witness that watches blocks.
    pub(crate) fn watches_blocks(&self) -> bool {
        !fork::is_child() && self.witness.read().is_some()
    }

    /// Tells the device's witness something, if it watches blocks. A forked child tells nothing:
    /// another thread may have held the witness's lock.
    pub(crate) fn tell_witness(&self, tell: impl FnOnce(&dyn Witness)) {
        if fork::is_child() {
            return;
        }
        self.witness.read().as_deref().inspect(|witness| tell(*witness));
    }

    /// Takes the shared state's lock.
    pub(crate) fn shared(&'static self) -> MutexGuard<'static, SharedState> {
        self.shared.lock()
    }

    /// Takes all locks and applies the frees queued so far.
    pub(crate) fn lock_all(&'static self) -> StateGuard {
        StateGuard::lock(self, self.shared.lock())
    }

    /// Takes the shared state's lock, and that of the arena `own`; applies all frees queued so far.
    /// Other arenas are locked as they are asked for.
    pub(crate) fn lock(&'static self, own: Option<u32>) -> StateGuard {
        StateGuard::lock_part(self, self.shared.lock(), own)
    }

    /// As [`AllocatorState::lock`]; `None` if another thread holds a lock.
    fn try_lock(&'static self) -> Option<StateGuard> {
        StateGuard::try_lock_part(self, self.shared.try_lock()?)
    }

    /// Takes the lock of a stream's arena, which is opened if this is the stream's first
    /// allocation.
    #[inline]
    pub(crate) fn enter(&'static self, stream: &Stream) -> ArenaGuard {
        match self.arenas.get(stream.id()).and_then(Arena::enter) {
            Some(locked) => locked,
            None => self.enter_first(stream),
        }
    }

    #[cold]
    fn enter_first(&'static self, stream: &Stream) -> ArenaGuard {
        loop {
            let mut guard = self.lock(Some(stream.id()));
            guard.open_arena(stream);
            guard.admit_thread();
            drop(guard);
            // Another thread may be admitted here, but only a few times: then there are several
            // writers, and every thread is admitted.
            if let Some(locked) = self.arenas.get(stream.id()).and_then(Arena::enter) {
                return locked;
            }
        }
    }

    /// Makes the calling thread known as being at work here. Returns false if that would have to
    /// wait for a lock.
    pub(crate) fn try_admit_thread(&'static self) -> bool {
        let guard = self.try_lock();
        guard.map(|mut guard| guard.admit_thread()).is_some()
    }

    /// Applies the frees queued so far, so that values read afterwards include them.
    pub(crate) fn apply_queued_frees(&'static self) {
        if !self.deferred_frees.is_empty() || self.arenas.iter().any(Arena::has_remote_frees) {
            drop(self.lock(None));
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
        let _shared = self.shared();
        counter(&self.counters).add(1);
    }

    /// Frees a block that other streams use, too: at once if no other thread holds a lock,
    /// otherwise through the queue.
    #[cold]
    pub(crate) fn free_used_elsewhere(&'static self, free: DeferredFree) {
        if fork::is_child() {
            return;
        }
        self.defer_free(free);
        // Either this sees that the allocator state closed, or `close` sees the entry.
        if self.is_closed() {
            self.recycle_if_unused();
        } else {
            // Taking the locks applies it.
            drop(self.try_lock());
        }
    }

    /// Leaves such a free to the next slow path, which the next allocation takes.
    pub(crate) fn defer_free(&self, free: DeferredFree) {
        self.deferred_frees.push(free);
        // Not `Relaxed`, here and in `take_deferred`: a thread that clears the bit sees every entry
        // whose push had set it.
        self.read.special.fetch_or(special::DEFERRED_FREES, Ordering::SeqCst);
    }

    /// True if there are such frees.
    pub(crate) fn has_deferred_frees(&self) -> bool {
        self.special().load(Ordering::Relaxed) & special::DEFERRED_FREES != 0
    }

    /// Takes those frees, one by one.
    pub(crate) fn take_deferred(&self) -> impl Iterator<Item = DeferredFree> + '_ {
        if self.read.special.load(Ordering::SeqCst) & special::DEFERRED_FREES != 0 {
            self.read.special.fetch_and(!special::DEFERRED_FREES, Ordering::SeqCst);
        }
        std::iter::from_fn(|| self.deferred_frees.pop())
    }

    /// True if the last handle of the allocator is gone.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        self.read.closed.load(Ordering::SeqCst)
    }

    /// Closes the allocator state, as the last handle of the allocator is gone.
    pub(crate) fn close(&'static self) {
        self.read.closed.store(true, Ordering::SeqCst);
        // A thread that queued a free either sees the store, or taking all locks applies its free.
        fence(Ordering::SeqCst);
        self.recycle_locked_if_unused(self.lock_all());
    }

    /// Recycles the allocator state if it is closed and unused, after applying the frees queued so
    /// far. A thread that closed it, or freed its last block, may come here after another thread
    /// recycled it, and even in the allocator state's next life. Then it finds an empty shared
    /// state, or an allocator that is open, or one that is closed and unused as well.
    #[cold]
    pub(crate) fn recycle_if_unused(&'static self) {
        self.recycle_locked_if_unused(self.lock_all());
    }

    fn recycle_locked_if_unused(&'static self, guard: StateGuard) {
        if guard.device.is_some() && guard.live() == 0 && self.is_closed() {
            self.recycle(guard);
        }
    }

    /// Empties the allocator state and makes it available to the next allocator. Makes no driver
    /// call: the segments are freed when driver calls are next made for the device.
    #[cold]
    fn recycle(&'static self, mut guard: StateGuard) {
        let (shared, inners) = guard.empty();
        let history = std::mem::take(&mut *self.history.lock());
        // Pushed under the lock: a thread that saw this allocator state closed and comes late finds
        // an empty shared state and does nothing.
        IDLE.lock().push(self);
        drop(guard);
        drop(history);
        close_later(shared, inners);
    }
}

/// Gives memory back that outlived its allocator, on devices without handles.
/// Dropping the last buffer of such an allocator makes no driver call, so its memory stays until
/// this is called, or a device of the process is opened or called. Making or dropping any allocator
/// calls it, too. Call it on a thread that drops others' last buffers and may make driver calls.
///
/// ```
/// use aquifer_allocator::{Allocator, Config};
/// use aquifer_device::Device;
/// use aquifer_sim::{SimConfig, SimDriver};
/// let driver = SimDriver::new(SimConfig::default());
/// let device = Device::new(driver.clone());
/// let stream = device.stream()?;
/// let last = Allocator::new(&device, Config::default())?.alloc_bytes(1 << 20, &stream)?;
/// drop((stream, device));
/// drop(last); // by the last thread
/// aquifer_allocator::close_abandoned();
/// assert_eq!(driver.held_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn close_abandoned() {
    // Devices in use stay as they are: their next call gives abandoned memory back.
    drop_left();
}

/// Hands all memory to the device object, which gives it back at a later call of the device, once
/// the work that may use it is done. Drops the handle of the device where driver calls are allowed.
fn close_later(mut shared: SharedState, inners: Vec<ArenaInner>) {
    let Some(device) = shared.device.take() else { return };
    let uses = last_uses(&shared, &device).map(Arc::new);
    for region in inners.iter().flat_map(|inner| inner.heap.regions()).filter(|region| !region.is_paged()) {
        device.free_after(DevicePtr(region.addr), uses.as_ref());
    }
    if let Some(paged) = shared.paged.take() {
        paged.release_later(&device, uses.as_ref());
    }
    drop(uses);
    // The device goes last: its driver must not end with the timelines that this thread drops.
    drop((shared, inners));
    device.drop_later(Box::new(device.for_memory()));
}

/// All work so far that may use the memory. `None` if it is not known: graphs that other libraries
/// launch, and copies of contents where waking up failed.
fn last_uses(shared: &SharedState, device: &Device) -> Option<Vec<Tick>> {
    if shared.paged.as_ref().is_some_and(|paged| !paged.absent.is_empty()) {
        return None;
    }
    let launched = shared.pools.awaited_launches(&device.wait_mark(), None);
    let streams = shared.timelines.iter().flatten().chain(launched.ticks.iter().map(|(timeline, _)| timeline));
    (!launched.is_device_pending()).then(|| streams.map(Timeline::tick).collect())
}
