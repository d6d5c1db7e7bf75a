//! Private pools: memory that is kept separate from everybody else's, as in PyTorch's `MemPool` and graph pools.
//!
//! The two default pools have numbers 0 (small) and 1 (large) in the heap. A private pool has four numbers of its own. Two of them serve
//! captures, and also everybody else as long as no graph may use what is free in them; the other two serve everybody else from then on. A
//! closed pool (its handle was dropped) serves nobody. Its blocks are given back to the device as they become free, at the next release,
//! but not before the launches of graphs whose captures allocated from it are done (invariant A7).

pub(crate) mod capture;
mod graphs;
pub(crate) mod table;

pub use capture::CaptureRoute;

use std::any::Any;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::{DevicePtr, Stream, fork};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::cross_stream::progress::cannot_be_asked;
use crate::error::AllocError;
use crate::pools::graphs::Launched;
use crate::pools::table::{PoolKey, Private, Which};
use crate::shell::special;

/// Options of a private pool.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, PoolOptions};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::parse("64MiB")?));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let stream = device.stream()?;
/// let pool = allocator.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() })?;
/// drop(pool.alloc_bytes(48 << 20, &stream)?); // the pool keeps it
/// let lent = allocator.alloc_bytes(40 << 20, &stream)?; // there is no other memory for this
/// assert_eq!(allocator.memory_reserved(), 48 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Other requests may take free blocks of this pool rather than fail, unless a graph may use them. A request gets blocks that its own
    /// stream freed last, whatever `cross_stream` says.
    pub use_on_oom: bool,
    /// Blocks are handed out whole: each allocation has a segment of its own.
    pub no_split: bool,
}

/// A separate pool of memory, for a thread ([`PrivatePool::route_thread`]) or for graph captures ([`Allocator::capture`]). Dropping it
/// releases its unused memory; live allocations stay valid, and their memory is released later.
///
/// Free memory in the pool stays where it is until [`PrivatePool::empty_cache`] is called or the pool is dropped. Memory of a graph whose
/// capture allocated from the pool stays, in addition, until the graph is dropped and its launches are done. For a graph that another
/// library captured, this is not known here: keep the pool as long as the graph is launched.
///
/// Requests outside of captures never get memory that a graph of the pool uses. Other captures do, so graphs that share a pool run one
/// after the other, whatever streams they are launched on. The order of launches of graphs that another library captured is up to that
/// library. Do not expect a graph to find data that an earlier launch left in memory which its capture freed.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, PoolOptions};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let pool = allocator.create_pool(PoolOptions::default())?;
/// let _route = pool.route_thread();
/// let inside = allocator.alloc_bytes(1 << 20, device.default_stream())?; // from the pool
/// # drop(inside);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PrivatePool {
    pub(crate) allocator: Allocator,
    key: PoolKey,
}

static NEXT_ROUTE: AtomicU64 = AtomicU64::new(0);

impl Allocator {
    /// Creates a private pool.
    ///
    /// # Errors
    /// When there are too many pools: some 16 000.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PrivatePool, AllocError> {
        fork::check(aquifer_device::Operation::Alloc)?;
        let key = self.shell().core().pools.add(options)?;
        Ok(PrivatePool { allocator: self.clone(), key })
    }

    /// The numbers of the pool that the thread's innermost scope routes to, for a request for the stream; `None` if there is none. If the
    /// stream captures, this notes that the graph uses the pool, and that its launches come after earlier work of the stream, because the
    /// graph may get memory that this work used.
    pub(crate) fn route_and_note(&self, stream: &Stream) -> Option<[u16; 2]> {
        self.shell().core().pools.routed()?;
        // Before the core's lock is taken, because no timeline is locked under it.
        let captured = stream.launches_of_capture();
        let (numbers, is_new) = self.shell().core().pools.route_and_note(captured.as_ref())?;
        if let Some(launches) = captured {
            launches.come_after(stream.tick());
            if is_new {
                // Otherwise all memory would go back once the last handle of the allocator is dropped.
                let allocator: Arc<dyn Any + Send + Sync> = Arc::new(self.kept_open());
                launches.keep(&allocator);
            }
        }
        Some(numbers)
    }

    /// True if a block granted outside of captures may belong to a graph, because one was captured since the request was routed.
    pub(crate) fn came_from_a_graph(&self, pool: u16, stream: &Stream) -> bool {
        let keeps = self.shell().core().pools.owner_of(pool).is_some_and(|private| private.keeps_for_graphs(pool));
        keeps && !stream.is_capturing()
    }

    /// Waits until launches are done. Skips a stream, or the device, that cannot be waited for now because a stream captures.
    pub(crate) fn wait_for_launched(&self, launched: &Launched) -> Result<(), AllocError> {
        self.synchronize_all(&launched.ticks)?;
        if launched.is_device_pending() {
            match self.device().synchronize() {
                Err(error) if !cannot_be_asked(&error) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }
}

impl PrivatePool {
    /// The pool's id, which is `segment_pool_id` in snapshots: `(0, n)`, where n is never reused in this process.
    pub fn id(&self) -> (u64, u64) {
        self.key.id
    }

    pub(crate) fn key(&self) -> PoolKey {
        self.key
    }

    /// Refuses a pool of another allocator.
    pub(crate) fn check_allocator(&self, allocator: &Allocator) -> Result<(), AllocError> {
        if std::ptr::eq(self.allocator.shell(), allocator.shell()) {
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

    /// Allocates from this pool and enqueues a fill with zeros on `stream`. While the stream captures, the fill is a part of the graph.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes_zeroed`].
    #[track_caller]
    pub fn alloc_bytes_zeroed(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc_bytes_zeroed(bytes, stream)
    }

    /// Allocates from this pool and returns the bare pointer, to be freed with [`Allocator::free_raw`].
    ///
    /// # Errors
    /// As [`Allocator::alloc_raw`].
    #[track_caller]
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
        let _place = self.allocator.device().called_from(Location::caller());
        self.routed(|allocator| allocator.alloc_raw(bytes, stream))
    }

    /// Calls `request` on the allocator while the thread is routed here.
    pub(crate) fn routed<T>(&self, request: impl FnOnce(&Allocator) -> T) -> T {
        // A forked child refuses the request itself.
        let _route = (!fork::is_child()).then(|| self.route_thread());
        request(&self.allocator)
    }

    /// Makes all allocations of the calling thread from the allocator come from this pool, until the result is dropped. Scopes nest; the
    /// innermost counts.
    pub fn route_thread(&self) -> PoolRoute {
        let number = NEXT_ROUTE.fetch_add(1, Ordering::Relaxed);
        let shell = self.allocator.shell();
        let mut core = shell.core();
        core.pools.begin_route(number, self.key);
        shell.special().fetch_or(special::ROUTED, Ordering::Relaxed);
        PoolRoute { allocator: self.allocator.kept_open(), number, not_send: PhantomData }
    }

    /// Gives the pool's unused memory back to the device and returns how many bytes that was. Waits for its blocks that other streams still
    /// use, and for launches of graphs whose captures allocated from the pool. Memory that a graph uses stays until the graph is dropped.
    /// Graphs that other libraries captured must not be launched again. While a stream captures, nothing is given back that needs waiting.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        fork::check(aquifer_device::Operation::Free)?;
        let core = self.allocator.shell().core();
        let Some(private) = core.pools.find(self.key) else { return Ok(0) };
        let launched = core.launches_of(private);
        drop(core);
        self.allocator.wait_for_launched(&launched)?;
        if launched.is_pending() {
            return Ok(0);
        }
        self.allocator.synchronize_pending(Which::Of(self.key))?;
        self.allocator.synchronize_free(Which::Of(self.key))?;
        self.release()
    }

    fn release(&self) -> Result<u64, AllocError> {
        let segments = self.allocator.release_where(|whole| whole.whole_segments(Which::UnusedOf(self.key)))?;
        Ok(segments + self.allocator.trim_pools(Which::UnusedOf(self.key))?)
    }

    /// Closes the pool, and gives back memory that nobody uses any more. Events cover the last uses of the rest, so that later calls can
    /// find out whether it is done, even while the streams capture.
    fn close(&self) -> Result<(), AllocError> {
        let shell = self.allocator.shell();
        let launched = shell.core().close_pool(self.key);
        self.allocator.poll(&launched.ticks)?;
        if shell.core().pools.find(self.key).is_none() {
            return Ok(());
        }
        let free = shell.part(None).free_not_done(Which::Of(self.key));
        self.allocator.poll(&free)?;
        let released = shell.core().pools.find(self.key).is_some_and(Private::is_released);
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
        let shell = self.allocator.shell();
        let mut core = shell.core();
        if !core.pools.end_route(self.number) {
            shell.special().fetch_and(!special::ROUTED, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;
