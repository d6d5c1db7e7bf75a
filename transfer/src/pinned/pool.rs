//! The pool: unused memory first, then growth, then what it takes when neither serves.
//!
//! A request climbs rungs, each of which may end it: an unused block; blocks that the device turns out to be done with; a new slab; a
//! large unused slab that would rather be kept whole; a new slab after unused ones went back; a block that the host
//! waits for. The last of them ends in [`TransferError::OutOfPinned`].
//!
//! Invariants:
//! * a block is handed out only when every tick that it carries is known to be done on the host; one whose ticks
//!   cannot be answered, because the device is lost, never is;
//! * `reserved = Σ slabs + slabs on their way here or back`, and never exceeds the limit because of growth;
//! * slabs are wasted by choice only within an eighth of the most that was ever in use, and 32 MiB.
//!
//! The pool's lock is a leaf: it is never held across a driver call, a wait, or a timeline's lock.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_device::{Device, Tick};
use parking_lot::Mutex;

use super::class::{self, PAGE, SLAB};
use super::slabs::{BlockId, Slabs};
use super::source::{SlabMemory, SlabSource};
use super::stats::HostMemoryStats;
use super::waiting::{Front, Waiting};
use crate::error::TransferError;

/// How a pool of page-locked memory behaves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedConfig {
    /// Most bytes that the pool may hold from the system; `None` is no limit but the system's.
    pub limit_bytes: Option<u64>,
    /// Where slabs come from.
    pub slabs: SlabSource,
}

impl PinnedConfig {
    /// Sets [`PinnedConfig::limit_bytes`].
    #[must_use]
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.limit_bytes = Some(bytes);
        self
    }

    /// Sets [`PinnedConfig::slabs`].
    #[must_use]
    pub fn slabs(mut self, slabs: SlabSource) -> Self {
        self.slabs = slabs;
        self
    }
}

/// Page-locked host memory of one device, kept for reuse. Cloning gives another handle of the same pool.
///
/// Sizes are rounded to eight classes for each doubling, so a buffer holds less than an eighth more than it was asked for, and at
/// least 512 bytes. Small ones are carved from slabs of 2 MiB, which grow with the pool; buffers of 16 MiB and more get slabs of their
/// own, which are split for smaller requests while nobody needs them whole.
///
/// Dropping a buffer makes no driver call and waits for nothing: its memory is handed out again when every copy that used it
/// is done. The memory itself goes back to the system by [`PinnedPool::trim_to`] and [`PinnedPool::empty_cache`], under the
/// pressure of the limit or the system, and some time after the pool and its last buffer are gone: by then the device may still
/// copy, so the device keeps it until its next [`Device::alloc`] or [`Device::settle`], or its own end.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// use aquifer_transfer::{PinnedConfig, PinnedPool};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut buffer = pool.alloc_from(&[1.0_f32, 2.0, 3.0])?;
/// buffer.write()?[0] = 4.0;
/// assert_eq!(buffer.read()?, [4.0, 2.0, 3.0]);
/// drop(buffer);
/// assert_eq!((pool.stats().active_bytes.current, pool.empty_cache()?), (0, 2 << 20));
/// # Ok::<(), aquifer_transfer::TransferError>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool(Arc<Inner>);

pub(super) struct Inner {
    pub(super) device: Device,
    source: SlabSource,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    slabs: Slabs<SlabMemory>,
    waiting: Waiting,
    /// Bytes of slabs that are on their way from the system, or back to it.
    moving: usize,
    limit: Option<u64>,
    stats: HostMemoryStats,
    /// The most bytes that were ever in use.
    most_active: usize,
}

/// How a request was met, or is to be.
enum Plan {
    Taken(Block),
    /// A slab of one of these lengths must come, the first if possible.
    Grow([usize; 3]),
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) id: BlockId,
    pub(super) start: usize,
}

/// Growth that the pool likes to have in hand, as a part of what it holds, and at most.
const GROWTH_PART: usize = 8;
const GROWTH_MOST: usize = 32 << 20;

impl PinnedPool {
    /// A pool for copies to and from `device`. Takes nothing from the system yet.
    ///
    /// # Errors
    /// [`TransferError::Unsupported`] when the configuration asks for something that is not there.
    pub fn new(device: &Device, config: PinnedConfig) -> Result<PinnedPool, TransferError> {
        let PinnedConfig { limit_bytes: limit, slabs: source } = config;
        let state = State {
            slabs: Slabs::default(),
            waiting: Waiting::default(),
            moving: 0,
            limit,
            stats: HostMemoryStats::default(),
            most_active: 0,
        };
        Ok(PinnedPool(Arc::new(Inner { device: device.clone(), source, state: Mutex::new(state) })))
    }

    /// The device whose copies the memory is for.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Gives slabs of which nothing is in use back to the system, the largest first, until the pool holds at most `bytes`. Returns how
    /// many bytes went back. Asks the driver what it is done with, and does not wait for the rest.
    ///
    /// # Errors
    /// Those of the driver. What did not go stays in the pool.
    pub fn trim_to(&self, bytes: u64) -> Result<u64, TransferError> {
        self.0.poll()?;
        let held = self.0.reserved();
        let excess = held.saturating_sub(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(self.0.release(excess)? as u64)
    }

    /// Gives every slab back of which nothing is in use; returns their bytes. As [`PinnedPool::trim_to`] with 0.
    ///
    /// # Errors
    /// As [`PinnedPool::trim_to`].
    pub fn empty_cache(&self) -> Result<u64, TransferError> {
        self.trim_to(0)
    }

    /// Limits what the pool may hold from the system. What it holds already stays: see [`PinnedPool::trim_to`].
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.0.state.lock().limit = bytes;
    }

    /// What the pool counts. Makes no driver call.
    pub fn stats(&self) -> HostMemoryStats {
        let mut state = self.0.state.lock();
        state.reap();
        state.stats
    }

    /// Sets every peak to the current value.
    pub fn reset_peak_stats(&self) {
        self.0.state.lock().stats.reset_peaks();
    }

    /// Starts accumulated values and counts of events from zero.
    pub fn reset_accumulated_stats(&self) {
        self.0.state.lock().stats.reset_accumulated();
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool")
            .field("device", &self.device.id())
            .field("source", &self.source)
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// A block of at least `bytes` bytes, not 0, that nobody uses and no copy is in flight for.
    #[inline]
    pub(super) fn take(&self, bytes: usize) -> Result<Block, TransferError> {
        let too_long = || TransferError::LengthOverflow { len: bytes as u64, size: 1 };
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
            if let Some(block) = self.state.lock().take(class, true) {
                return Ok(block);
            }
            if self.make_room(class, refusal.is_some())? {
                refusal = match self.grow(class, &sizes[1..])? {
                    Ok(block) => return Ok(block),
                    Err(refusal) => refusal,
                };
            }
            if !self.wait_for_one()? {
                return Err(self.out_of_pinned(class, refusal));
            }
        }
    }

    /// Gets a slab of the first of these lengths that the limit and the system allow. If none is, the inner error is what the system
    /// said, or `None` if it was not asked.
    fn grow(&self, class: usize, sizes: &[usize]) -> Result<Result<Block, Option<TransferError>>, TransferError> {
        let mut refusal = None;
        for &bytes in sizes {
            if !self.state.lock().begin_growth(bytes) {
                continue;
            }
            let begun = Instant::now();
            let memory = SlabMemory::obtain(&self.source, &self.device, bytes);
            let mut state = self.state.lock();
            state.moving -= bytes;
            match memory {
                Ok(memory) => return Ok(Ok(state.add(memory, bytes, class, begun.elapsed()))),
                Err(error) if error.is_out_of_memory() => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        Ok(Err(refusal))
    }

    /// Gives unused slabs back so that one for `class` can come; all of them if the system refused it. Whether any went.
    fn make_room(&self, class: usize, system: bool) -> Result<bool, TransferError> {
        let before = self.reserved();
        let excess = if system { usize::MAX } else { self.state.lock().excess(class) };
        self.release(excess).map(drop).or_else(unless_lost)?;
        Ok(self.reserved() < before)
    }

    /// Gives unused slabs of `bytes` bytes or a little more back, as far as there are any. Returns how many bytes went.
    fn release(&self, bytes: usize) -> Result<usize, TransferError> {
        let removed = {
            let mut state = self.state.lock();
            let removed = state.slabs.remove_unused(bytes);
            state.moving += removed.iter().map(|slab| slab.bytes).sum::<usize>();
            removed
        };
        let (mut released, mut failure) = (0, None);
        for mut slab in removed {
            let begun = Instant::now();
            // After a failure the rest stays, rather than that each of them fails in turn.
            let gone = failure.is_none().then(|| slab.memory.release(&self.device));
            let mut state = self.state.lock();
            state.moving -= slab.bytes;
            match gone {
                Some(Ok(())) => {
                    released += slab.bytes;
                    state.stats.lost(slab.bytes, begun.elapsed());
                    continue;
                }
                Some(Err(error)) => failure = Some(error),
                None => {}
            }
            state.slabs.put_back(slab);
        }
        failure.map_or(Ok(released), |error| Err(error.into()))
    }

    /// Asks the driver how far the streams got that blocks wait for, and makes available what is done: one question for each stream,
    /// again where a block then waits for another one.
    fn poll(&self) -> Result<(), TransferError> {
        let (mut outcome, mut asked) = (Ok(()), BTreeSet::new());
        let mut fronts = self.fronts();
        while !fronts.is_empty() {
            for front in &fronts {
                // A tick that no event covers would never be known to be done.
                let answer = front.tick.cover().and_then(|()| front.tick.is_done());
                outcome = outcome.and(answer.map(drop));
            }
            asked.extend(fronts.iter().map(Front::place));
            fronts = self.fronts();
            fronts.retain(|front| !asked.contains(&front.place()));
        }
        outcome.map_err(TransferError::from)
    }

    /// What blocks wait for, after those that are known to be done became available.
    fn fronts(&self) -> Vec<Front> {
        let mut state = self.state.lock();
        state.reap();
        state.waiting.fronts()
    }

    /// Waits until a block that waits is done with the tick that is before it now. Whether there was one.
    fn wait_for_one(&self) -> Result<bool, TransferError> {
        let fronts = self.fronts();
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
        let state = self.state.lock();
        state.slabs.reserved() + state.moving
    }

    fn out_of_pinned(&self, class: usize, source: Option<TransferError>) -> TransferError {
        let mut state = self.state.lock();
        state.stats.num_ooms += 1;
        TransferError::OutOfPinned {
            requested: class as u64,
            reserved: (state.slabs.reserved() + state.moving) as u64,
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

impl State {
    #[inline]
    fn take(&mut self, class: usize, any: bool) -> Option<Block> {
        let id = self.slabs.take(class, any)?;
        Some(self.activate(id))
    }

    #[inline]
    fn activate(&mut self, id: BlockId) -> Block {
        self.stats.activate(self.slabs.bytes(id));
        Block { id, start: self.slabs.start(id) }
    }

    #[inline]
    fn give(&mut self, block: BlockId, ticks: Vec<Tick>) {
        if ticks.is_empty() || !self.waiting.insert(block, ticks) {
            self.rest(block);
        } else {
            self.slabs.wait(block);
        }
    }

    #[inline]
    fn rest(&mut self, block: BlockId) {
        self.note_most_active();
        self.stats.deactivate(self.slabs.bytes(block));
        self.slabs.rest(block);
    }

    /// Makes what is known to be done available.
    fn reap(&mut self) {
        if !self.waiting.is_empty() {
            for block in self.waiting.reap() {
                self.rest(block);
            }
        }
    }

    /// Active bytes rise only until something is given back.
    #[inline]
    fn note_most_active(&mut self) {
        self.most_active = self.most_active.max(self.active());
    }

    fn active(&self) -> usize {
        usize::try_from(self.stats.active_bytes.current).unwrap_or(usize::MAX)
    }

    /// Takes a block, or says how the pool should grow: rather than that it splits a large slab, but only while that wastes little.
    fn plan(&mut self, class: usize) -> Plan {
        if let Some(block) = self.take(class, false) {
            return Plan::Taken(block);
        }
        self.note_most_active();
        let held = self.slabs.reserved() + self.moving;
        let least = class.next_multiple_of(SLAB);
        let handy = (held / GROWTH_PART).min(GROWTH_MOST) / SLAB * SLAB;
        let sizes = [handy.max(least), least, class.next_multiple_of(PAGE)];
        let most = self.most_active.max(self.active() + class);
        if held + sizes[0] > most + most / GROWTH_PART + GROWTH_MOST
            && let Some(block) = self.take(class, true)
        {
            return Plan::Taken(block);
        }
        Plan::Grow(sizes)
    }

    /// Counts a slab that is to come, if the limit lets it.
    fn begin_growth(&mut self, bytes: usize) -> bool {
        let after = (self.slabs.reserved() + self.moving).checked_add(bytes);
        let fits = after.is_some_and(|after| self.limit.is_none_or(|limit| after as u64 <= limit));
        if fits {
            self.moving += bytes;
        }
        fits
    }

    /// How many bytes must go before a slab for `class` can come.
    fn excess(&self, class: usize) -> usize {
        let after = (self.slabs.reserved() + self.moving).saturating_add(class.next_multiple_of(PAGE));
        let limit = self.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        if class > limit { 0 } else { after.saturating_sub(limit) }
    }

    fn add(&mut self, memory: SlabMemory, bytes: usize, class: usize, time: Duration) -> Block {
        let id = self.slabs.add(memory.start(), bytes, class, memory);
        self.stats.gained(bytes, time);
        self.activate(id)
    }
}

impl Drop for Inner {
    /// Copies may still be in flight, and driver calls and waits have no place here: the device takes the memory.
    fn drop(&mut self) {
        for memory in self.state.get_mut().slabs.drain() {
            memory.release_later(&self.device);
        }
    }
}
