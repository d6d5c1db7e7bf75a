//! The ladder that serves a request: unused memory, else growth, else further rungs.
//!
//! The rungs, each of which may serve the request: an unused block; blocks that the device is done
//! with; a new slab; a part of a large unused slab; a new slab after unused ones went back; a part
//! of a slab for larger requests; memory of the cache; a block that the host waits for. Where
//! little is left of a limit, a new slab after unused ones went back comes before a part of a large
//! one. If the last rung fails, the result is [`TransferError::OutOfPinned`].
//!
//! Invariants:
//! * a block is handed out only when all its ticks are known to be done on the host, so never after
//!   the device is lost;
//! * the pool's lock is a leaf: it is never held across a driver call, a wait for the device, or a
//!   timeline's lock;
//! * a request fails only if nothing became available since it last looked, no block waits, and no
//!   slab is on its way;
//! * a failed call puts back all memory that it took.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use aquifer_device::{Device, DeviceError, Operation, RequestError, Tick, fork};

use super::class;
use super::source::SlabMemory;
use super::state::{PoolBlock, PoolState, TakePlan};
use crate::error::TransferError;
use crate::sync::{Condvar, Mutex};

/// Gives back all memory that a user of a pool holds for later and does not use now, including
/// memory that copies still use. Returns whether there was any. It is called without a lock, and
/// must not ask the pool for memory.
pub(super) type Reclaim = Arc<dyn Fn() -> bool + Send + Sync>;

/// The shared state of all handles of a pool.
pub(super) struct SharedPool {
    pub(super) device: Device,
    /// The staging ring's memory, if a ring takes its chunks from the pool.
    pub(super) cache: Mutex<Option<Reclaim>>,
    pub(super) state: Mutex<PoolState>,
    /// Notified when a slab came or went.
    moved: Condvar,
}

impl SharedPool {
    pub(super) fn new(device: &Device) -> SharedPool {
        let (cache, state) = (Mutex::new(None), Mutex::new(PoolState::new()));
        SharedPool { device: device.for_memory(), cache, state, moved: Condvar::default() }
    }

    /// An unused block of at least `bytes` bytes, not 0.
    #[inline]
    pub(super) fn take(&self, bytes: u64) -> Result<PoolBlock, TransferError> {
        fork::check(Operation::HostAlloc)?;
        self.device.refuse_if_lost(Operation::HostAlloc)?;
        let too_long = || TransferError::Request(RequestError::LengthOverflow { len: bytes, size: 1 });
        let class = class::round_up(bytes).ok_or_else(too_long)?;
        if let Some(block) = self.state.lock().take(class, false) {
            return Ok(block);
        }
        self.take_slowly(class)
    }

    #[cold]
    fn take_slowly(&self, class: u64) -> Result<PoolBlock, TransferError> {
        // An error of a query says nothing: the blocks stay deferred.
        self.poll().or_else(unless_lost)?;
        let plan = self.state.lock().plan(class);
        let sizes = match plan {
            TakePlan::Taken(block) => return Ok(block),
            TakePlan::Grow(sizes) => sizes,
        };
        let mut refusal = match self.grow(class, &sizes)? {
            Ok(block) => return Ok(block),
            Err(refusal) => refusal,
        };
        loop {
            let seen = {
                let mut state = self.state.lock();
                let any = !state.is_scarce(class);
                if let Some(block) = state.take(class, any) {
                    return Ok(block);
                }
                state.available
            };
            if self.make_room(class, refusal.is_some())? {
                refusal = match self.grow(class, &sizes[1..])? {
                    Ok(block) => return Ok(block),
                    Err(refusal) => refusal,
                };
            }
            // A part of a large slab, also of one for larger requests than a small one.
            let mut state = self.state.lock();
            for class in [class, class.max(class::PAGED)] {
                if let Some(block) = state.take(class, true) {
                    return Ok(block);
                }
            }
            drop(state);
            if self.reclaim() {
                self.poll().or_else(unless_lost)?;
            } else if !self.wait_for_more(seen)? {
                return Err(self.out_of_pinned(class, refusal));
            }
        }
    }

    /// Gets a slab of the first of these lengths that the limit and the system allow. If none is,
    /// the inner error is that of the system, or `None` if the limit refused it.
    fn grow(&self, class: u64, sizes: &[u64]) -> Result<Result<PoolBlock, Option<TransferError>>, TransferError> {
        let mut refusal = None;
        for &bytes in sizes {
            match self.obtain(bytes, class) {
                None => {}
                Some(Ok(block)) => return Ok(Ok(block)),
                Some(Err(error)) if error.is_out_of_memory() => refusal = Some(error),
                Some(Err(error)) => return Err(error),
            }
        }
        Ok(Err(refusal))
    }

    /// Gets a slab from the system and a block out of it; `None` if the limit is reached.
    fn obtain(&self, bytes: u64, class: u64) -> Option<Result<PoolBlock, TransferError>> {
        if !self.state.lock().begin_growth(bytes) {
            return None;
        }
        let begun = Instant::now();
        let memory = SlabMemory::obtain(&self.device, bytes);
        let mut state = self.state.lock();
        let added = memory.map(|memory| state.add(memory, class, begun.elapsed()));
        state.end_growth(bytes);
        drop(state);
        self.moved.notify_all();
        Some(added)
    }

    /// Releases unused slabs to make room for one for `class`; all of them if the system refused
    /// it. Returns whether there is room.
    fn make_room(&self, class: u64, system: bool) -> Result<bool, TransferError> {
        let excess = if system { u64::MAX } else { self.state.lock().excess(class) };
        let released =
            self.release(excess).map(|released| released > 0).or_else(|error| unless_lost(error).map(|()| true))?;
        Ok(released || !system && self.state.lock().has_room_for(class))
    }

    /// Releases unused slabs of `bytes` bytes or a little more, as far as there are any. Returns
    /// the bytes released.
    pub(super) fn release(&self, bytes: u64) -> Result<u64, TransferError> {
        let removed = self.state.lock().begin_release(bytes);
        let (mut released, mut failure) = (0, None);
        for slab in removed {
            let begun = Instant::now();
            // After a failure the rest stays.
            let gone = failure.is_none() && give_back(&slab.memory, &self.device, &mut failure);
            released += if gone { slab.memory.bytes() } else { 0 };
            self.state.lock().end_release(slab, gone, begun.elapsed());
            self.moved.notify_all();
        }
        failure.map_or(Ok(released), |error| Err(error.into()))
    }

    /// Queries the streams that deferred blocks wait for, and makes finished blocks available. One
    /// query for each stream, and another one where a block then waits for another stream.
    pub(super) fn poll(&self) -> Result<(), TransferError> {
        let (mut outcome, mut asked) = (Ok(()), BTreeSet::new());
        let mut fronts = self.state.lock().fronts();
        while !fronts.is_empty() {
            for tick in &fronts {
                // A tick that no event covers would never be known to be done.
                outcome = outcome.and(tick.cover().and_then(|()| tick.is_done()).map(drop));
                asked.insert((tick.timeline().id(), tick.n()));
            }
            fronts = self.state.lock().fronts();
            fronts.retain(|tick| !asked.contains(&(tick.timeline().id(), tick.n())));
        }
        outcome.map_err(TransferError::from)
    }

    /// Waits until more may be available than when [`PoolState::available`] was `seen`: until the
    /// first tick of a deferred block is done, or a slab that another thread moves came or went.
    /// Returns whether there was anything to wait for.
    fn wait_for_more(&self, seen: u64) -> Result<bool, TransferError> {
        let mut state = self.state.lock();
        let fronts = state.fronts();
        if state.available != seen {
            return Ok(true);
        }
        if fronts.is_empty() {
            let moves = state.is_moving();
            if moves {
                drop(self.moved.wait(state));
            }
            return Ok(moves);
        }
        drop(state);
        let mut failure = None;
        for tick in &fronts {
            match self.wait_for(tick) {
                Ok(()) => {
                    self.state.lock().reap();
                    return Ok(true);
                }
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(false), Err)
    }

    /// Waits on the host until the tick is done; counted if it was not.
    pub(super) fn wait_for(&self, tick: &Tick) -> Result<(), TransferError> {
        if tick.is_done()? {
            return Ok(());
        }
        let begun = Instant::now();
        let waited = tick.synchronize();
        self.state.lock().stats.waited(begun.elapsed());
        Ok(waited?)
    }

    /// Asks the cache for its memory; returns whether any came back.
    pub(super) fn reclaim(&self) -> bool {
        let cache = self.cache.lock().clone();
        cache.is_some_and(|reclaim| reclaim())
    }

    fn out_of_pinned(&self, class: u64, source: Option<TransferError>) -> TransferError {
        self.state.lock().stats.num_ooms += 1;
        self.refusal(class, source)
    }

    /// The error of a request for `bytes` bytes.
    pub(super) fn refusal(&self, bytes: u64, source: Option<TransferError>) -> TransferError {
        let mut state = self.state.lock();
        let [free, largest, copying] = state.unused();
        TransferError::OutOfPinned {
            requested: bytes,
            reserved: state.reserved(),
            free,
            largest,
            copying,
            limit: state.limit,
            source: source.map(Box::new),
        }
    }
}

/// Ignores an error about cached memory: the request may still be served.
fn unless_lost(error: TransferError) -> Result<(), TransferError> {
    if error.is_device_lost() {
        return Err(error);
    }
    tracing::warn!(%error, "cached pinned memory could not be asked for or given back");
    Ok(())
}

/// Releases an unused slab, or notes the error. Returns whether it is released.
#[allow(unsafe_code, reason = "the driver takes memory back by its address")]
fn give_back(memory: &SlabMemory, device: &Device, failure: &mut Option<DeviceError>) -> bool {
    // SAFETY: the slab left the pool unused: no buffer holds a part of it, and the ticks of former
    // buffers are done.
    unsafe { memory.release(device) }.map_err(|error| *failure = Some(error)).is_ok()
}

impl Drop for SharedPool {
    /// Releases finished memory at once, unless that would break a capture or wait. Copies may
    /// still use the rest: the device takes it, with their ticks.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let mut failure = None;
        let calls = !self.device.is_capturing();
        if calls && let Err(error) = self.poll() {
            tracing::debug!(%error, "the device could not be asked about the memory of a pool that is gone");
        }
        let state = self.state.get_mut();
        for slab in state.begin_release(u64::MAX) {
            let at_once = calls && failure.is_none();
            if !at_once || !give_back(&slab.memory, &self.device, &mut failure) {
                // SAFETY: nothing of it is in use.
                unsafe { slab.memory.release_later(&self.device, Vec::new()) };
            }
        }
        let uses = state.deferred.ticks();
        for memory in state.take_all() {
            // SAFETY: every buffer keeps the pool, so none is alive; former buffers left the ticks
            // of their copies.
            unsafe { memory.release_later(&self.device, uses.clone()) };
        }
    }
}
