//! An allocator's state: one lock around all that it knows, a queue of frees that found the lock
//! taken, and the flags that are read without it.
//!
//! Allocator states are never deallocated: they are recycled through a process-wide list. So an
//! [`crate::Allocation`] refers to its state by a plain `&'static AllocatorState`. This needs no
//! reference count per allocation and no unsafe code, and nothing can dangle.
//!
//! Invariants (A4 is made of them):
//! * while blocks that keep the allocator open are live, the state has its *keeper*, a reference of
//!   what all handles refer to. Without a handle, the last such block to be freed drops it;
//! * an allocator state is recycled only when it is *closed* (nothing refers to the allocator) and
//!   no allocation is live, and only once in each life: if several threads find it so, the first
//!   one empties it, and an empty state is not recycled;
//! * a thread that takes the lock to look at the heap first applies the frees queued before;
//! * once the last handle is gone, a thread that queued a free waits for the lock, so that the last
//!   free cannot be left behind.
//!
//! Lock order: the lock, and then leaf locks: the list of idle allocator states, the witness. No
//! timeline is locked under it; only atomic values of timelines are read there. While it is held
//! there is no driver call, no wait and no foreign code.

mod free;

#[cfg(all(test, aquifer_shuttle))]
mod schedules;

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::fork::Mutex as LeafMutex;
use aquifer_device::fork::parking_lot::Condvar;
use aquifer_device::internal::{Timeline, drop_left};
use aquifer_device::{Device, DevicePtr, NewBlock, Tick, Witness, fork};
use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;

use free::MarkedFree;

use crate::core::Core;
use crate::core::heap::{Passed, Walk};
use crate::core::limits::Holding;
use crate::raw::table::RawTable;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::sync::{Mutex, MutexGuard};
use crate::tags::Tag;
use crate::types::BlockId;

/// Reasons why an allocation may not take the fast path, as bits of
/// [`AllocatorState::slow_reasons()`]. Alone, `WAITING` keeps few from it.
pub(crate) mod slow {
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
    /// The device is lost.
    pub(crate) const LOST: u32 = 64;
    /// The process is a forked child, in which no device can be used.
    #[cfg(not(aquifer_shuttle))]
    pub(crate) const FORKED: u32 = 32;
}

#[derive(Default)]
pub(crate) struct AllocatorState {
    /// Fields that every operation reads and few write.
    read: CachePadded<Read>,
    shared: CachePadded<Mutex<Locked>>,
    /// The thread that has the lock, so that one which waits for itself is noticed.
    #[cfg(debug_assertions)]
    holder: crate::sync::atomic::AtomicUsize,
    freed: CachePadded<FreedBlocks>,
    /// Blocks that were given out as raw pointers.
    pub(crate) raw: CachePadded<RawTable>,
    pub(crate) wake_locks: CachePadded<WakeLocks>,
    /// The device's witness, if it watches blocks. A leaf: under it only the witness's own lock is
    /// taken.
    witness: fork::RwLock<Option<Arc<dyn Witness>>>,
}

/// The part of an allocator state that says whether it sleeps or is about to, and what keeps it
/// awake.
#[derive(Debug, Default)]
pub(crate) struct WakeLocks {
    pub(crate) flags: AtomicU32,
    /// By [`crate::sleep::wake_lock::Kind`].
    pub(crate) counts: [AtomicU64; 3],
    /// A leaf: see `sleep/wake_lock.rs`.
    pub(crate) waking: LeafMutex<()>,
    pub(crate) woken: Condvar,
}

/// Blocks that the queue holds. Few in models, so that they meet a full queue.
const CAPACITY: usize = if cfg!(aquifer_shuttle) { 2 } else { 1024 };
/// Blocks that were given back while another thread had the lock.
#[derive(Debug)]
struct FreedBlocks(ArrayQueue<MarkedFree>);

impl Default for FreedBlocks {
    fn default() -> FreedBlocks {
        FreedBlocks(ArrayQueue::new(CAPACITY))
    }
}

/// What is under the lock.
#[derive(Debug, Default)]
pub(crate) struct Locked {
    /// `None` while the allocator state is idle.
    device: Option<Device>,
    core: Core,
    /// Live blocks that keep the allocator open.
    keeping_open: u64,
    /// Refers to the allocator while there are any.
    keeper: Option<Keeper>,
    /// True once nothing refers to the allocator.
    is_closed: bool,
}

/// A reference of what the handles of an allocator refer to.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

#[derive(Debug, Default)]
struct Read {
    /// Number of the allocator's handles; none is needed to keep it open.
    handles: AtomicU32,
    /// Bits of [`slow`].
    slow: AtomicU32,
}

/// Allocator states without an allocator, to be recycled.
#[cfg(not(aquifer_shuttle))]
static IDLE: Mutex<Vec<&'static AllocatorState>> = Mutex::new(Vec::new());

// A scheduler's locks are bound to one execution.
#[cfg(aquifer_shuttle)]
shuttle::lazy_static! {
    static ref IDLE: fork::Mutex<Vec<&'static AllocatorState>> = fork::Mutex::new(Vec::new());
}

impl fmt::Debug for AllocatorState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AllocatorState")
    }
}

impl AllocatorState {
    /// An allocator state for a device, with a core that nothing was allocated from so far.
    pub(crate) fn open(device: Device, core: Core, slow: u32) -> &'static AllocatorState {
        let idle = IDLE.lock().pop();
        let state = idle.unwrap_or_else(|| AllocatorState::create());
        state.read.slow.store(slow, Ordering::Relaxed);
        state.end_quiescing();
        state.end_deciding(&core);
        let witness = device.witness().filter(|witness| witness.watches_blocks());
        *state.witness.write() = witness.cloned();
        *state.shared.lock() = Locked { device: Some(device), core, ..Locked::default() };
        state
    }

    /// A new allocator state, whose allocations leave the fast path in forked children.
    fn create() -> &'static AllocatorState {
        let state: &'static AllocatorState = Box::leak(Box::default());
        #[cfg(not(aquifer_shuttle))]
        fork::set_in_child(&state.read.slow, slow::FORKED);
        state
    }

    /// Bits of [`slow`].
    #[inline]
    pub(crate) fn slow_reasons(&self) -> &AtomicU32 {
        &self.read.slow
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

    /// Tells the device's witness of a block that is handed out.
    #[cold]
    #[inline(never)]
    pub(crate) fn report_block(&'static self, id: BlockId, ptr: DevicePtr, bytes: u64, at: &'static Location<'static>) {
        if id == BlockId::NONE || !self.watches_blocks() {
            return;
        }
        let shared = self.shared();
        let (tag, pool) = (Tag(shared.heap().block(id).tag), shared.heap().block(id).pool);
        drop(shared);
        let block = NewBlock { ptr, bytes, tag: tag.name(), is_for_graphs: pool.is_private(), at: Some(at) };
        self.tell_witness(|witness| witness.begins(block));
    }

    /// Tells the device's witness that a block is given back, before the memory is reused. Takes
    /// the words of the handle, not the handle, which would have to be copied to where it can be
    /// pointed to.
    #[cold]
    #[inline(never)]
    pub(crate) fn report_end(&'static self, ptr: DevicePtr, at: Option<&'static Location<'static>>) {
        self.tell_witness(|witness| witness.ends(ptr, at));
    }

    /// Takes the lock, applies the frees queued so far, and merges all deferred blocks: for slow
    /// paths.
    pub(crate) fn lock(&'static self) -> StateGuard {
        let mut guard = self.shared();
        guard.apply_queued_frees();
        guard.coalesce_all();
        guard
    }

    /// Takes the lock for an allocation, or to read counters, and applies the frees queued so far.
    /// It leaves deferred blocks alone, so that reading statistics changes no later decision.
    #[inline]
    pub(crate) fn enter(&'static self) -> StateGuard {
        let mut guard = self.shared();
        if !self.freed.0.is_empty() {
            guard.apply_queued_frees();
        }
        guard
    }

    /// Reads what does not depend on which blocks are deferred, with the frees queued so far. In a
    /// forked child, in which the thread that has the lock may be gone, the default.
    pub(crate) fn read<R: Default>(&'static self, read: impl FnOnce(&Core) -> R) -> R {
        if fork::is_child() {
            return self.try_shared().map(|guard| read(&guard)).unwrap_or_default();
        }
        read(&self.enter())
    }

    /// Takes the lock alone: for what does not depend on which blocks are free.
    #[inline]
    pub(crate) fn shared(&'static self) -> StateGuard {
        #[cfg(debug_assertions)]
        assert_ne!(self.holder.load(Ordering::Relaxed), crate::sync::this_thread(), "this thread has the lock already");
        StateGuard::new(self, self.shared.lock())
    }

    /// As [`AllocatorState::shared`]; `None` if another thread has the lock.
    #[inline]
    fn try_shared(&'static self) -> Option<StateGuard> {
        Some(StateGuard::new(self, self.shared.try_lock()?))
    }

    /// Passes all blocks on, a few at a time under the lock. Frees that were queued before are
    /// applied.
    pub(crate) fn walk(&'static self, mut pass: impl FnMut(&Core, &Passed)) {
        let mut walk = Walk::default();
        loop {
            let guard = self.lock();
            if !guard.heap().step(&mut walk, |passed| pass(&guard, passed)) {
                return;
            }
        }
    }

    /// True unless the last handle of the allocator is gone.
    #[inline]
    pub(crate) fn has_handles(&self) -> bool {
        self.read.handles.load(Ordering::SeqCst) > 0
    }

    /// A handle is made. Its maker refers to the allocator, so the state is not recycled.
    pub(crate) fn begin_handle(&self) {
        self.read.handles.fetch_add(1, Ordering::SeqCst);
    }

    /// A handle is gone. Blocks may keep the allocator open.
    pub(crate) fn end_handle(&'static self) {
        if self.read.handles.fetch_sub(1, Ordering::SeqCst) == 1 {
            // A thread that queued a free either sees that, or taking the lock applies its free.
            fence(Ordering::SeqCst);
            self.release_if_unused();
        }
    }

    /// Closes the allocator state, as nothing refers to the allocator any more.
    pub(crate) fn close(&'static self) {
        self.shared().locked.is_closed = true;
        self.release_if_unused();
    }

    /// What keeps the allocator open while a block lives that does.
    pub(crate) fn keeper(&'static self) -> Option<Keeper> {
        self.shared().locked.keeper.clone()
    }

    /// Drops the keeper if neither handles nor blocks need it, and recycles the allocator state if
    /// it is closed and unused, after applying the frees queued so far. A thread that dropped the
    /// last handle, or freed the last block, may come here after another thread recycled the state,
    /// and even in its next life. Then it finds an empty shared state, or an allocator that is
    /// open, or one that is closed and unused as well.
    #[cold]
    pub(crate) fn release_if_unused(&'static self) {
        let mut guard = self.lock();
        if guard.device().is_some() && guard.live() == 0 && guard.locked.is_closed {
            return self.recycle(guard);
        }
        let is_unneeded = guard.locked.keeping_open == 0 && !self.has_handles();
        let keeper = if is_unneeded { guard.locked.keeper.take() } else { None };
        drop(guard);
        // This may close the allocator.
        drop(keeper);
    }

    /// Empties the allocator state and makes it available to the next allocator, which an access
    /// guard that was forgotten would keep awake. Makes no driver call: the segments are freed when
    /// driver calls are next made for the device.
    #[cold]
    fn recycle(&'static self, mut guard: StateGuard) {
        let locked = guard.take_all();
        // Pushed under the lock: a thread that saw this allocator state closed and comes late finds
        // an empty shared state and does nothing.
        if self.wake_counts().is_none() {
            IDLE.lock().push(self);
        }
        drop(guard);
        close_later(locked);
    }
}

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
    fn new(state: &'static AllocatorState, locked: MutexGuard<'static, Locked>) -> StateGuard {
        #[cfg(debug_assertions)]
        state.holder.store(crate::sync::this_thread(), Ordering::Relaxed);
        StateGuard { state, locked }
    }

    /// The device; `None` while the allocator state is idle.
    pub(crate) fn device(&self) -> Option<&Device> {
        self.locked.device.as_ref()
    }

    /// Takes out all that the allocator knew, and leaves an idle state.
    fn take_all(&mut self) -> Locked {
        std::mem::take(&mut *self.locked)
    }

    /// Counts a live block that keeps the allocator open.
    #[inline]
    pub(crate) fn count_keeping_open(&mut self, keeper: &Arc<impl Any + Send + Sync>) {
        if self.locked.keeper.is_none() {
            self.locked.keeper = Some(keeper.clone());
        }
        self.locked.keeping_open += 1;
    }

    /// What is held of a device. Nothing, if the state serves an allocator of another one by now.
    pub(crate) fn held_on(&self, device: &Device) -> Holding {
        let is_own = self.device().is_some_and(|own| own.id() == device.id());
        if is_own { self.holding() } else { Holding::default() }
    }

    /// Has allocations ask how far streams got while blocks wait for them, and only then.
    pub(crate) fn show_waiting(&self) {
        if self.locked.core.waiting().is_empty() {
            self.state.slow_reasons().fetch_and(!slow::WAITING, Ordering::Relaxed);
        } else {
            self.state.slow_reasons().fetch_or(slow::WAITING, Ordering::Relaxed);
        }
    }
}

/// Gives memory back that outlived its allocator, on devices without handles.
/// Dropping the last buffer of such an allocator makes no driver call, so its memory stays until
/// this is called, or a device of the process is opened or called. Making or dropping any allocator
/// calls it, too. Call it on a thread that drops others' last buffers and may make driver calls.
///
/// ```
/// use aquifer::device::sim::{SimConfig, SimDriver};
/// use aquifer::prelude::*;
/// let driver = SimDriver::new(SimConfig::default());
/// let device = Device::new(driver.clone());
/// let stream = device.stream()?;
/// let last = Allocator::of(&device)?.alloc_bytes(1 << 20, &stream)?;
/// drop((stream, device));
/// drop(last); // by the last thread
/// aquifer_allocator::close_abandoned();
/// assert_eq!(driver.held_bytes(), 0);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub fn close_abandoned() {
    // Devices in use stay as they are: their next call gives abandoned memory back.
    drop_left();
}

/// Hands all memory to the device object, which gives it back at a later call of the device, once
/// the work that may use it is done. Drops the handle of the device where driver calls are allowed.
fn close_later(locked: Locked) {
    let Locked { device: Some(device), mut core, .. } = locked else { return };
    let uses = last_uses(&core, &device).map(Arc::new);
    for region in core.heap().regions().filter(|region| !region.is_paged()) {
        device.free_after(DevicePtr(region.addr), uses.as_ref());
    }
    let (reservations, loose) = core.take_paged().into_memory();
    reservations.into_iter().for_each(|reservation| device.unreserve_after(reservation, uses.as_ref()));
    loose.into_iter().for_each(|physical| device.release_later(physical));
    drop(uses);
    // The device goes last: its driver must not end with the timelines that this thread drops.
    drop(core);
    device.drop_later(Box::new(device.for_memory()));
}

/// All work so far that may use the memory. `None` if it is not known: graphs that other libraries
/// launch, and copies of contents where waking up failed.
fn last_uses(core: &Core, device: &Device) -> Option<Vec<Tick>> {
    if core.paged().sleep.is_any() {
        return None;
    }
    let launched = core.pools.awaited_launches(&device.wait_mark(), None);
    let streams = core.streams.timelines().map(Timeline::tick);
    (!launched.is_device_pending()).then(|| streams.chain(launched.ticks).collect())
}
