//! How a request is served: from unused memory, else by growth, else by the further steps of a ladder.
//!
//! The rungs, each of which may serve the request: an unused block; blocks that the device turns out to be done with; a new slab; a
//! large unused slab that would rather be kept whole; a new slab after unused ones went back; a piece of a slab for larger requests; memory kept by
//! idle staging rings; a block that the host waits for. If the last rung fails, the result is [`TransferError::OutOfPinned`].
//!
//! Invariants:
//! * a block is handed out only when every tick that it carries is known to be done on the host; one whose ticks
//!   cannot be answered, because the device is lost, never is;
//! * the pool's lock is a leaf: it is never held across a driver call, a wait for the device, or a timeline's lock;
//! * a request fails only if nothing became available since it last looked, no block waits, and no slab is on its way;
//! * when a call fails, whatever it had taken is back in its place when it returns.

use std::collections::BTreeSet;
use std::fmt;
use std::time::{Duration, Instant};

use aquifer_device::{Device, DeviceError, Operation, RequestError, Tick, fork};

use super::cache::ReclaimableCaches;
use super::class;
use super::config::{PinnedConfig, SlabSource};
use super::deferred::Front;
use super::slabs::BlockId;
use super::source::SlabMemory;
use super::state::{Block, Plan, State};
use crate::error::TransferError;
use crate::sync::{Condvar, Mutex};

/// What all handles of a pool share.
pub(super) struct SharedPool {
    pub(super) device: Device,
    source: SlabSource,
    pub(super) caches: ReclaimableCaches,
    pub(super) state: Mutex<State>,
    /// Told when a slab has come or gone.
    moved: Condvar,
}

impl SharedPool {
    pub(super) fn new(device: &Device, config: PinnedConfig) -> SharedPool {
        let PinnedConfig { limit_bytes, slabs } = config;
        let state = Mutex::new(State::new(limit_bytes));
        SharedPool {
            device: device.clone(),
            source: slabs,
            caches: ReclaimableCaches::default(),
            state,
            moved: Condvar::default(),
        }
    }

    /// A block of at least `bytes` bytes, not 0, that nobody uses and no copy is in flight for.
    #[inline]
    pub(super) fn take(&self, bytes: usize) -> Result<Block, TransferError> {
        fork::check(Operation::HostAlloc)?;
        let too_long = || TransferError::Request(RequestError::LengthOverflow { len: bytes as u64, size: 1 });
        let class = class::round_up(bytes).ok_or_else(too_long)?;
        if let Some(block) = self.state.lock().take(class, false) {
            return Ok(block);
        }
        self.take_slowly(class)
    }

    #[cold]
    fn take_slowly(&self, class: usize) -> Result<Block, TransferError> {
        // What the driver cannot tell now is not done.
        self.poll().or_else(unless_lost)?;
        let plan = self.state.lock().plan(class);
        let sizes = match plan {
            Plan::Taken(block) => return Ok(block),
            Plan::Grow(sizes) => sizes,
        };
        let mut refusal = match self.grow(class, &sizes)? {
            Ok(block) => return Ok(block),
            Err(refusal) => refusal,
        };
        loop {
            let seen = {
                let mut state = self.state.lock();
                if let Some(block) = state.take(class, true) {
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
            // A piece of a slab for larger requests, which is more than a small one needs.
            if class < class::PAGED
                && let Some(block) = self.state.lock().take(class::PAGED, true)
            {
                return Ok(block);
            }
            if self.caches.reclaim() {
                self.poll().or_else(unless_lost)?;
            } else if !self.wait_for_more(seen)? {
                return Err(self.out_of_pinned(class, refusal));
            }
        }
    }

    /// Gets a slab of the first of these lengths that the limit and the system allow. If none is, the inner error is what the system
    /// said, or `None` if it was not asked.
    fn grow(&self, class: usize, sizes: &[usize]) -> Result<Result<Block, Option<TransferError>>, TransferError> {
        let mut refusal = None;
        for &bytes in sizes {
            match self.obtain(bytes, |state, memory, time| state.add(memory, bytes, class, time)) {
                None => {}
                Some(Ok(block)) => return Ok(Ok(block)),
                Some(Err(error)) if error.is_out_of_memory() => refusal = Some(error),
                Some(Err(error)) => return Err(error),
            }
        }
        Ok(Err(refusal))
    }

    /// Gets a slab of `bytes` bytes for requests to come. Nothing is given back for it.
    pub(super) fn prewarm(&self, bytes: usize) -> Result<(), TransferError> {
        match self.obtain(bytes, |state, memory, time| state.add_open(memory, bytes, time)) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if !error.is_out_of_memory() => Err(error),
            refused => Err(self.out_of_pinned(bytes, refused.and_then(Result::err))),
        }
    }

    /// Gets a slab from the system and hands it to `add`, with the time that took; `None` where the limit does not let it come.
    fn obtain<R>(
        &self,
        bytes: usize,
        add: impl FnOnce(&mut State, SlabMemory, Duration) -> R,
    ) -> Option<Result<R, TransferError>> {
        if !self.state.lock().begin_growth(bytes) {
            return None;
        }
        let begun = Instant::now();
        let memory = SlabMemory::obtain(&self.source, &self.device, bytes);
        let mut state = self.state.lock();
        let added = memory.map(|memory| add(&mut state, memory, begun.elapsed()));
        state.moving -= bytes;
        drop(state);
        self.moved.notify_all();
        Some(added)
    }

    /// Gives unused slabs back so that one for `class` can come; all of them if the system refused it. Whether it may come now.
    fn make_room(&self, class: usize, system: bool) -> Result<bool, TransferError> {
        let excess = if system { usize::MAX } else { self.state.lock().excess(class) };
        let released =
            self.release(excess).map(|released| released > 0).or_else(|error| unless_lost(error).map(|()| true))?;
        Ok(released || !system && self.state.lock().has_room_for(class))
    }

    /// Gives unused slabs of `bytes` bytes or a little more back, as far as there are any. Returns how many bytes went.
    pub(super) fn release(&self, bytes: usize) -> Result<usize, TransferError> {
        let removed = self.state.lock().begin_release(bytes);
        let (mut released, mut failure) = (0, None);
        for mut slab in removed {
            let begun = Instant::now();
            // After a failure the rest stays, rather than that each of them fails in turn.
            let gone = failure.is_none() && give_back(&mut slab.memory, &self.device, &mut failure);
            released += if gone { slab.bytes } else { 0 };
            self.state.lock().end_release(slab, gone, begun.elapsed());
            self.moved.notify_all();
        }
        failure.map_or(Ok(released), |error| Err(error.into()))
    }

    /// Asks the driver how far the streams got that blocks wait for, and makes available what is done: one question for each stream,
    /// again where a block then waits for another one.
    pub(super) fn poll(&self) -> Result<(), TransferError> {
        let (mut outcome, mut asked) = (Ok(()), BTreeSet::new());
        let mut fronts = self.state.lock().fronts();
        while !fronts.is_empty() {
            for front in &fronts {
                // A tick that no event covers would never be known to be done.
                let answer = front.tick.cover().and_then(|()| front.tick.is_done());
                outcome = outcome.and(answer.map(drop));
            }
            asked.extend(fronts.iter().map(Front::place));
            fronts = self.state.lock().fronts();
            fronts.retain(|front| !asked.contains(&front.place()));
        }
        outcome.map_err(TransferError::from)
    }

    /// Waits until more may be available than when [`State::available`] was `seen`: until a block that waits is done with the tick that is
    /// before it now, or a slab that another thread moves has come or gone. Whether there is anything to wait for.
    fn wait_for_more(&self, seen: u64) -> Result<bool, TransferError> {
        let mut state = self.state.lock();
        let fronts = state.fronts();
        if state.available != seen {
            return Ok(true);
        }
        if fronts.is_empty() {
            let moves = state.moving > 0;
            if moves {
                drop(self.moved.wait(state));
            }
            return Ok(moves);
        }
        drop(state);
        let mut failure = None;
        for front in fronts {
            match self.wait_for(&front.tick) {
                Ok(()) => {
                    self.state.lock().reap();
                    return Ok(true);
                }
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(false), Err)
    }

    /// The host waits until the tick is done; counted if it was not.
    pub(super) fn wait_for(&self, tick: &Tick) -> Result<(), TransferError> {
        if tick.is_done()? {
            return Ok(());
        }
        let begun = Instant::now();
        let waited = tick.synchronize();
        self.state.lock().stats.waited(begun.elapsed());
        Ok(waited?)
    }

    /// Takes a block back that copies may be in flight for. Makes no driver call and waits for nothing.
    #[inline]
    pub(super) fn give(&self, block: BlockId, ticks: Vec<Tick>) {
        self.state.lock().give(block, ticks);
    }

    /// Bytes held from the system.
    pub(super) fn reserved(&self) -> usize {
        self.state.lock().reserved()
    }

    fn out_of_pinned(&self, class: usize, source: Option<TransferError>) -> TransferError {
        self.state.lock().stats.num_ooms += 1;
        self.refusal(class, source)
    }

    /// That `bytes` bytes could not be had.
    pub(super) fn refusal(&self, bytes: usize, source: Option<TransferError>) -> TransferError {
        let state = self.state.lock();
        TransferError::OutOfPinned {
            requested: bytes as u64,
            reserved: state.reserved() as u64,
            free: state.slabs.unused() as u64,
            limit: state.limit,
            source: source.map(Box::new),
        }
    }
}

/// Lets a failure pass that concerns nothing but cached memory: the request may be served all the same.
fn unless_lost(error: TransferError) -> Result<(), TransferError> {
    if error.is_device_lost() {
        return Err(error);
    }
    tracing::warn!(%error, "cached page-locked memory could not be asked for or given back");
    Ok(())
}

impl fmt::Debug for SharedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool")
            .field("device", &self.device.id())
            .field("source", &self.source)
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}

/// Gives an unused slab back, or notes why that failed. Whether it is gone.
#[allow(unsafe_code, reason = "the driver takes memory back by its address")]
fn give_back(memory: &mut SlabMemory, device: &Device, failure: &mut Option<DeviceError>) -> bool {
    // SAFETY: the slab was taken out of the pool unused: no buffer holds a part of it, and the ticks of those that did are done.
    unsafe { memory.release(device) }.map_err(|error| *failure = Some(error)).is_ok()
}

impl Drop for SharedPool {
    /// What is known to be done goes back at once, unless that would break a capture or wait. Copies may still use the rest, and waits
    /// have no place here: the device takes that, with their ticks.
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
        for mut slab in state.begin_release(usize::MAX) {
            let at_once = calls && failure.is_none() && !slab.memory.waits_for_device();
            if !at_once || !give_back(&mut slab.memory, &self.device, &mut failure) {
                // SAFETY: nothing of it is in use.
                unsafe { slab.memory.release_later(&self.device, Vec::new()) };
            }
        }
        let uses = state.deferred.ticks();
        for memory in state.slabs.drain() {
            // SAFETY: every buffer keeps the pool, so none is left; those that there were went with the ticks of their copies.
            unsafe { memory.release_later(&self.device, uses.clone()) };
        }
    }
}
