//! The handles of a private pool: the pool, the routes that send a thread to it, captures that it
//! serves, and what keeps it from lending memory of its graphs.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use aquifer_device::{AnnouncedCapture, DevicePtr, Operation, Stream, fork};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::backing::paged::fill::{Place, try_fill};
use crate::backing::segments::release_where;
use crate::backing::trim::{synchronize_free, trim_pools};
use crate::core::heap::{Passed, State};
use crate::core::pools::{PoolKey, PoolOptions, Private, Which};
use crate::cross_stream::{poll, synchronize_pending};
use crate::error::AllocError;
use crate::pools::wait_for_launched;
use crate::recovery::ladder::climb_dedicated;
use crate::recovery::oom::Tried;
use crate::sleep::options::Part;
use crate::state::{AllocatorState, slow};
use crate::tags::Tag;
use crate::types::{PoolId, Request, StreamId};

/// A separate pool of memory, for a thread ([`PrivatePool::route_thread`]) or for graph captures
/// ([`Allocator::capture`]). Dropping it releases its unused memory; live allocations stay valid,
/// and their memory is released later.
///
/// Free memory in the pool stays where it is until [`PrivatePool::empty_cache`],
/// [`Allocator::empty_cache`] or [`Allocator::trim_to`] is called, the pool is dropped, or a
/// request to the allocator, for whatever pool, would be refused otherwise. Memory
/// of a graph whose capture allocated from the pool stays, in any case, until the graph is dropped
/// and its launches are done. For a graph that another library captured, this is not known here:
/// keep the pool as long as the graph is launched.
///
/// Requests outside of captures never get memory that a graph of the pool uses. Other captures do,
/// so graphs that share a pool run one after the other, whatever streams they are launched on. The
/// order of launches of graphs that another library captured is up to that library. Do not expect a
/// graph to find data that an earlier launch left in memory which its capture freed.
///
/// ```
/// use aquifer::memory::PoolOptions;
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let memory = Allocator::of(&device)?;
/// let pool = memory.create_pool(PoolOptions::default())?;
/// let _route = pool.route_thread();
/// let inside = memory.alloc_bytes(1 << 20, device.default_stream())?; // from the pool
/// # drop(inside);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct PrivatePool {
    pub(crate) allocator: Allocator,
    key: PoolKey,
}

impl fmt::Debug for PrivatePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivatePool").field("key", &self.key).finish_non_exhaustive()
    }
}

static NEXT_ROUTE: AtomicU64 = AtomicU64::new(0);

impl Allocator {
    /// Creates a private pool.
    ///
    /// # Errors
    /// When there are too many pools: some 16 000.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PrivatePool, AllocError> {
        fork::check(Operation::Alloc)?;
        let key = self.state().shared().pools.add(options)?;
        Ok(PrivatePool { allocator: self.clone(), key })
    }
}

// Here, so that what sleeps need not know this type.
impl Part {
    /// The allocations of a private pool, and the memory that its graphs use, in which kernels may
    /// keep state: see [`Contents::Discard`](crate::Contents::Discard). Memory that other requests
    /// borrowed ([`PoolOptions::use_on_oom`]) is theirs.
    pub fn pool(pool: &PrivatePool) -> Part {
        Part::of_pool(pool.key)
    }
}

impl PrivatePool {
    /// The pool's id, which is `segment_pool_id` in snapshots: `(0, n)`, where n is never reused in
    /// this process.
    pub fn id(&self) -> (u64, u64) {
        self.key.id
    }

    pub(crate) fn key(&self) -> PoolKey {
        self.key
    }

    /// Refuses a pool of another allocator.
    pub(crate) fn check_allocator(&self, allocator: &Allocator) -> Result<(), AllocError> {
        if std::ptr::eq(self.allocator.state(), allocator.state()) {
            return Ok(());
        }
        Err(AllocError::wrong_allocator("pool", self.allocator.device().id(), allocator.device().id()))
    }

    /// Allocates from this pool.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`].
    #[track_caller]
    pub fn alloc_bytes(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc_bytes(bytes, stream)
    }

    /// Allocates from this pool with a larger alignment, as [`Allocator::alloc_aligned`] does.
    ///
    /// # Errors
    /// As [`Allocator::alloc_aligned`].
    #[track_caller]
    pub fn alloc_aligned(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc_aligned(bytes, alignment, stream)
    }

    /// Allocates from this pool and enqueues a fill with zeros on `stream`. While the stream
    /// captures, the fill is a part of the graph.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes_zeroed`].
    #[track_caller]
    pub fn alloc_bytes_zeroed(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc_bytes_zeroed(bytes, stream)
    }

    /// Allocates from this pool and returns the bare pointer, to be freed with
    /// [`Allocator::free_raw`].
    ///
    /// # Errors
    /// As [`Allocator::alloc_raw`].
    #[track_caller]
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
        let _place = self.allocator.device().called_from(Location::caller());
        self.routed(|allocator| allocator.alloc_raw(bytes, stream))
    }

    pub(crate) fn lends_when_idle(&self) -> bool {
        self.allocator.state().shared().pools.find(self.key).is_some_and(|private| private.options.lends_when_idle)
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// The addresses of the pool, and the bytes in its live blocks by the stream that they were
    /// allocated for.
    pub(crate) fn contents(&self) -> (Vec<Range<u64>>, BTreeMap<StreamId, u64>) {
        let (mut ranges, mut live) = (Vec::<Range<u64>>::new(), BTreeMap::new());
        self.allocator.state().walk(|core, Passed { block, .. }| {
            if !core.pools.find(self.key).is_some_and(|private| private.owns(block.pool)) {
                return;
            }
            if block.state == State::Live {
                *live.entry(block.owner).or_default() += block.requested;
            }
            let end = block.addr + block.size;
            match ranges.last_mut().filter(|last| last.end == block.addr) {
                Some(last) => last.end = end,
                None => ranges.push(block.addr..end),
            }
        });
        (ranges, live)
    }

    /// Keeps the pool from lending memory of its graphs ([`PoolOptions::lends_when_idle`]) until
    /// the result is dropped, and brings memory back where it has lent some: for a capture into the
    /// pool.
    ///
    /// # Errors
    /// A pool of another allocator; for memory that was lent, as [`Allocator::alloc_bytes`].
    pub fn hold_for_capture(&self, allocator: &Allocator, stream: &Stream) -> Result<Busy, AllocError> {
        fork::check(Operation::BeginCapture)?;
        self.check_allocator(allocator)?;
        let (busy, lent) = Busy::begin(self.allocator.state(), self.key);
        if lent > 0 {
            busy.bring_back(allocator, stream)?;
        }
        Ok(busy)
    }

    /// Calls `request` on the allocator while the thread is routed here.
    pub(crate) fn routed<T>(&self, request: impl FnOnce(&Allocator) -> T) -> T {
        // A forked child refuses the request itself.
        let _route = (!fork::is_child()).then(|| self.route_thread());
        request(&self.allocator)
    }

    /// Makes all allocations of the calling thread from the allocator come from this pool, until
    /// the result is dropped. Scopes nest; the innermost counts.
    pub fn route_thread(&self) -> PoolRoute {
        let number = NEXT_ROUTE.fetch_add(1, Ordering::Relaxed);
        let state = self.allocator.state();
        let mut shared = state.shared();
        shared.pools.begin_route(thread::current().id(), number, self.key);
        state.slow_reasons().fetch_or(slow::ROUTED, Ordering::Relaxed);
        PoolRoute { allocator: self.allocator.kept_open(), number, not_send: PhantomData }
    }

    /// Gives the pool's unused memory back to the device and returns how many bytes that was. Waits
    /// for its blocks that other streams still use, and for launches of graphs whose captures
    /// allocated from the pool. Memory that a graph uses stays until the graph is dropped. Graphs
    /// that other libraries captured must not be launched again. While a stream captures, nothing
    /// is given back that needs waiting.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        fork::check(Operation::Free)?;
        let now = self.allocator.device().wait_mark();
        let shared = self.allocator.state().shared();
        let Some(private) = shared.pools.find(self.key) else { return Ok(0) };
        let launched = private.graphs.launched(now);
        drop(shared);
        wait_for_launched(&self.allocator, &launched)?;
        if launched.is_pending() {
            return Ok(0);
        }
        synchronize_pending(&self.allocator, Which::Of(self.key))?;
        synchronize_free(&self.allocator, Which::Of(self.key))?;
        self.release()
    }

    fn release(&self) -> Result<u64, AllocError> {
        let segments = release_where(&self.allocator, |guard| guard.whole_segments(Which::UnusedOf(self.key)))?;
        Ok(segments + trim_pools(&self.allocator, 0, Which::UnusedOf(self.key))?)
    }

    /// Closes the pool, and gives back memory that is no longer used. Events cover the last uses
    /// of the rest, so that later calls can find out whether it is done, even while the streams
    /// capture.
    fn close(&self) -> Result<(), AllocError> {
        let state = self.allocator.state();
        let now = self.allocator.device().wait_mark();
        let launched = state.shared().pools.close(self.key, now);
        poll(&launched.ticks)?;
        if state.shared().pools.find(self.key).is_none() {
            return Ok(());
        }
        let free = state.lock().free_not_done(Which::Of(self.key));
        poll(&free)?;
        let released = state.shared().pools.find(self.key).is_some_and(Private::is_released);
        if released { self.release().map(|_| ()) } else { Ok(()) }
    }
}

impl Drop for PrivatePool {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!(%error, "a private pool's memory could not be released; the next release tries again");
        }
    }
}

/// While it lives, the thread that made it allocates from a private pool.
#[derive(Debug)]
#[must_use = "the thread goes back to the pools it used before when this is dropped"]
pub struct PoolRoute {
    pub(crate) allocator: Allocator,
    number: u64,
    /// Not `Send`: a route belongs to the thread that made it.
    not_send: PhantomData<*const ()>,
}

impl Drop for PoolRoute {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let state = self.allocator.state();
        let mut shared = state.shared();
        if !shared.pools.end_route(thread::current().id(), self.number) {
            state.slow_reasons().fetch_and(!slow::ROUTED, Ordering::Relaxed);
        }
    }
}

/// While it lives, a stream is known to capture, and the thread that made it allocates from a
/// private pool. Made by [`Allocator::capture`].
#[derive(Debug)]
#[must_use = "the thread goes back to the pools it used before when this is dropped"]
pub struct CaptureRoute {
    // Dropped first, so that the capture is over before the thread allocates from other pools.
    _announced: Option<AnnouncedCapture>,
    _route: PoolRoute,
}

impl Allocator {
    /// Announces that `stream` captures, and that allocations of the calling thread until the
    /// result is dropped are for the graph: they come from `pool`. Call it when the capture has
    /// begun, whether by [`Stream::begin_capture`], by cudarc, or by another library. Drop the
    /// result when the capture has ended.
    ///
    /// Where a library tells in two steps, as PyTorch does, there is a call for each. PyTorch calls
    /// an allocator's `beginAllocateToPool` before the capture begins, and `endAllocateToPool`
    /// after it has ended: between them hold [`PrivatePool::route_thread`]. Hold
    /// [`Stream::announce_capture`] from `markCaptureBegin` to `markCaptureEnd`, or, in versions
    /// without these, from the first request of the stream on.
    ///
    /// Memory of the graph may have been used before the capture by work that is not done yet.
    /// [`aquifer_device::Graph::launch`] orders the graph after that work. A graph that another
    /// library launches is ordered only by the stream that it is launched on. If that is not the
    /// stream that it was captured on, launch it after that stream's earlier work.
    ///
    /// ```
    /// use aquifer::memory::PoolOptions;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let (stream, pool) = (device.stream()?, memory.create_pool(PoolOptions::default())?);
    /// let capture = stream.begin_capture()?;
    /// let route = memory.capture(&stream, &pool)?;
    /// let scratch = memory.alloc_bytes(1 << 20, &stream)?;
    /// stream.fill(scratch.ptr(), 7, 1 << 20)?;
    /// drop(scratch); // the pool keeps it for the graph
    /// let graph = capture.end()?;
    /// drop(route);
    /// graph.launch(&stream)?;
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the stream is of another device, the pool is of another allocator, or the stream does
    /// not capture; errors of the driver.
    pub fn capture(&self, stream: &Stream, pool: &PrivatePool) -> Result<CaptureRoute, AllocError> {
        fork::check(Operation::CaptureStatus)?;
        self.check_stream(stream)?;
        pool.check_allocator(self)?;
        stream.end_abandoned_captures()?;
        let announced = if stream.is_capturing() { None } else { Some(stream.announce_capture()?) };
        Ok(CaptureRoute { _announced: announced, _route: pool.route_thread() })
    }
}

/// Keeps a pool from lending, until it is dropped.
#[derive(Debug)]
pub struct Busy {
    state: &'static AllocatorState,
    key: PoolKey,
}

impl Busy {
    /// Returns the bytes that the pool has lent, too. The allocator state must not be recycled
    /// meanwhile: an allocator keeps it.
    pub(crate) fn begin(state: &'static AllocatorState, key: PoolKey) -> (Busy, u64) {
        let lent = state.shared().begin_busy(key);
        (Busy { state, key }, lent)
    }

    /// Brings memory back behind all addresses of the pool whose memory is lent, for work on
    /// `stream`.
    ///
    /// # Errors
    /// A stream of another device; otherwise as a request for so much memory.
    pub(crate) fn bring_back(&self, allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
        allocator.check_stream(stream)?;
        let mut core = self.state.shared();
        let (bytes, stream) = (core.lent_by(self.key), core.stream(stream));
        drop(core);
        let (requested, size, pool, tag) = (bytes, bytes, PoolId::LARGE, Tag::default());
        let request = Request { requested, size, pool, stream, tag, is_regular: false };
        let place = Place::Lent(self.key);
        let tried = Tried::for_launch(self.key.id);
        climb_dedicated(allocator, &request, tried, true, || try_fill(allocator, &request, &place))?;
        tracing::debug!(target: "aquifer::remap", bytes, "memory that a graph had lent was brought back");
        Ok(())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if !fork::is_child() {
            self.state.shared().end_busy(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};
    use proptest::prelude::*;

    use super::*;
    use crate::{Allocator, Config};

    const MIB: u64 = 1 << 20;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
        /// Memory taken ahead of need follows what a pool uses, not what the process holds.
        #[test]
        fn a_pool_holds_at_most_twice_what_it_uses(
            elsewhere in 0..40u64,
            blocks in prop::collection::vec((0..6usize, 1..24 * MIB), 1..60),
        ) {
            let device = Device::new(SimDriver::new(SimConfig::default()));
            let allocator = Allocator::new(&device, Config::default()).unwrap();
            let stream = device.default_stream();
            let _elsewhere: Vec<_> = (0..elsewhere).map(|_| allocator.alloc_bytes(1 << 30, stream).unwrap()).collect();
            let pools: Vec<_> = (0..6).map(|_| allocator.create_pool(PoolOptions::default()).unwrap()).collect();
            let mut used = [0; 6];
            let mut held = Vec::new();
            for (pool, bytes) in blocks {
                held.push(pools[pool].alloc_bytes(bytes, stream).unwrap());
                used[pool] += bytes.next_multiple_of(2 * MIB);
                let reserved = allocator.reserved_by_private_pools().get(&pools[pool].id()).copied().unwrap_or(0);
                // A pool of small blocks and one of large ones, each with a granule more.
                prop_assert!(reserved <= 2 * used[pool] + 4 * MIB, "{reserved} for {}", used[pool]);
            }
        }
    }
}
