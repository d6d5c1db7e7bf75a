//! Private pools: memory that is served apart from everybody else's, as PyTorch's `MemPool` and graph pools.
//!
//! The two default pools are numbers 0 (small) and 1 (large) of the heap. A private pool has four of its own: two that captures are
//! served from, and everybody else as long as no graph may use what is free in them, and two for everybody else from then on. A closed
//! pool (its handle was dropped) serves nobody; its blocks are given back to the device as they become free, at the next release, but
//! not before the launches are done of graphs whose captures allocated from it.

pub(crate) mod capture;
mod graphs;

pub use capture::CaptureRoute;

use std::any::Any;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use aquifer_device::{Launches, Stream};

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::cross_stream::lending::cannot_be_asked;
use crate::error::AllocError;
use crate::heap::{Heap, kind_of};
use crate::pools::graphs::{Graphs, Launched};
use crate::shell::core::Core;
use crate::shell::special;
use crate::shell::whole::Whole;
use crate::size_class::PoolKind;

/// How a private pool behaves.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, PoolOptions};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::parse("64MiB")?));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let stream = device.create_stream()?;
/// let pool = allocator.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() })?;
/// drop(pool.alloc(48 << 20, &stream)?); // the pool keeps it
/// let lent = allocator.alloc(40 << 20, &stream)?; // there is no other memory for this
/// assert_eq!(allocator.reserved_bytes(), 48 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Other requests may take free blocks of this pool rather than fail, unless a graph may use them.
    pub use_on_oom: bool,
    /// Blocks are handed out whole: each allocation has a segment of its own.
    pub no_split: bool,
}

/// A private pool as the core knows it.
#[derive(Debug)]
pub(crate) struct Private {
    pub(crate) id: (u64, u64),
    /// Numbers in the heap of the small and the large pool that captures are served from.
    numbers: [u16; 2],
    /// Those of the pools that requests outside of captures are served from while it has graphs.
    beside_graphs: [u16; 2],
    pub(crate) options: PoolOptions,
    pub(crate) open: bool,
    /// Graphs whose captures allocated from it.
    graphs: Graphs,
}

/// Private pools, and which threads allocate from them.
#[derive(Debug, Default)]
pub(crate) struct PoolTable {
    pub(crate) private: Vec<Private>,
    /// Pools that threads allocate from, innermost scope last, with a number to end the right one.
    routes: Vec<(ThreadId, u64, (u64, u64))>,
}

/// Ids of private pools: never reused in a process, as PyTorch's `(0, n)`.
static NEXT_POOL: AtomicU64 = AtomicU64::new(1);
static NEXT_ROUTE: AtomicU64 = AtomicU64::new(0);

/// Private pools that there can be at a time: each has four of the heap's numbers, and the default pools have two.
const POOLS_MAX: u16 = (u16::MAX - 2) / 4;

impl PoolTable {
    pub(crate) fn find(&self, id: (u64, u64)) -> Option<&Private> {
        self.private.iter().find(|private| private.id == id)
    }

    /// The pool that the calling thread's innermost scope routes to, those of closed pools passed over.
    pub(crate) fn routed(&self) -> Option<&Private> {
        let thread = std::thread::current().id();
        let mut own = self.routes.iter().rev().filter(|(routed, ..)| *routed == thread);
        own.find_map(|(.., id)| self.find(*id).filter(|private| private.open))
    }

    /// The numbers of the pool that the calling thread's innermost scope routes to, for a request outside of captures, or of the graph that
    /// is captured with these launches: it is noted that the graph uses the pool. And whether that was not known.
    fn route_and_note(&mut self, captured: Option<&Arc<Launches>>) -> Option<([u16; 2], bool)> {
        let id = self.routed()?.id;
        let private = self.private.iter_mut().find(|private| private.id == id)?;
        Some(match captured {
            Some(launches) => (private.numbers, private.graphs.note(launches)),
            None if private.graphs.any() => (private.beside_graphs, false),
            None => (private.numbers, false),
        })
    }

    /// Whether a thread is routed to the pool: a request that was may be under way, with the pool's numbers.
    fn is_routed_to(&self, private: &Private) -> bool {
        self.routes.iter().any(|&(.., id)| id == private.id)
    }

    /// The private pool that owns a heap pool; `None` for the default pools.
    pub(crate) fn owner_of(&self, number: u16) -> Option<&Private> {
        self.private.iter().find(|private| private.owns(number))
    }

    /// The heap pools whose free memory a graph of ours may use, so that it stays whoever gives memory back. To be asked under the locks
    /// under which that is chosen: a graph may be captured while somebody waits.
    pub(crate) fn kept_for_our_graphs(&self) -> Vec<u16> {
        let with_graphs = self.private.iter().filter(|private| private.graphs.any_of_ours());
        with_graphs.flat_map(|private| private.numbers).collect()
    }

    /// The second half of the id of the private pool that owns a heap pool, for history; 0 for the default pools. Heap
    /// pools are reused by later private pools, so entries cannot keep their numbers.
    pub(crate) fn history_id(&self, number: u16) -> u32 {
        let private = if number < 2 { None } else { self.owner_of(number) };
        private.map_or(0, Private::history_id)
    }
}

impl Private {
    /// The pool at a place of the table.
    fn new(at: u16, id: (u64, u64), options: PoolOptions) -> Private {
        let first = 4 * at + 2;
        let (numbers, beside_graphs) = ([first, first + 1], [first + 2, first + 3]);
        Private { id, numbers, beside_graphs, options, open: true, graphs: Graphs::default() }
    }

    /// All its numbers in the heap.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u16> + use<> {
        self.numbers.into_iter().chain(self.beside_graphs)
    }

    pub(crate) fn owns(&self, number: u16) -> bool {
        self.numbers().any(|own| own == number)
    }

    /// Whether a graph may use what is free in the pool of this number.
    pub(crate) fn keeps_for_graphs(&self, number: u16) -> bool {
        self.numbers.contains(&number) && self.graphs.any()
    }

    /// Its pools of a kind whose free memory other requests may take.
    pub(crate) fn lent(&self, kind: PoolKind) -> impl Iterator<Item = u16> {
        let lends = self.open && self.options.use_on_oom;
        self.numbers().filter(move |&number| lends && kind_of(number) == kind && !self.keeps_for_graphs(number))
    }

    /// Whether nobody is promised its free memory: it is closed, and no graph that it served may be launched, or runs.
    pub(crate) fn is_released(&self) -> bool {
        !self.open && !self.graphs.any()
    }

    /// Tells an arena's heap what kind of pools these are.
    pub(crate) fn set_up(&self, heap: &mut Heap) {
        for number in self.numbers() {
            let pool = &mut heap.pools[usize::from(number)];
            (pool.no_split, pool.history_id) = (self.options.no_split, self.history_id());
        }
    }

    /// The second half of its id, for history.
    fn history_id(&self) -> u32 {
        u32::try_from(self.id.1).unwrap_or(u32::MAX)
    }
}

impl Core {
    /// What must be done before memory of a pool goes that graphs used which are launched no more.
    fn launches_of(&self, private: &Private) -> Launched {
        self.device.as_ref().map_or_else(Launched::default, |device| private.graphs.launched(device.wait_mark()))
    }

    /// Closes a pool; tells what its memory waits for.
    fn close_pool(&mut self, id: (u64, u64)) -> Launched {
        let Core { pools, device: Some(device), .. } = self else { return Launched::default() };
        let Some(private) = pools.private.iter_mut().find(|private| private.id == id) else {
            return Launched::default();
        };
        let now = device.wait_mark();
        private.open = false;
        private.graphs.close(now.clone());
        private.graphs.launched(now)
    }

    /// Launches that memory of closed pools still waits for, of those that `of` picks.
    pub(crate) fn awaited_launches(&self, of: impl Fn(u16) -> bool) -> Launched {
        let closed = self.pools.private.iter().filter(|private| !private.open && private.numbers().any(&of));
        closed.map(|private| self.launches_of(private)).fold(Launched::default(), Launched::and)
    }
}

impl Allocator {
    /// Waits until launches are done. A stream, or the device, that cannot be waited for now, because something captures, is passed over.
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

impl Whole {
    /// A pool record; reuses the numbers of a closed pool that holds no memory any more, and will not: requests that were routed to it
    /// before it was closed know it by its numbers.
    fn add_private(&mut self, options: PoolOptions) -> Result<(u64, u64), AllocError> {
        let id = (0, NEXT_POOL.fetch_add(1, Ordering::Relaxed));
        let holds_memory =
            |private: &Private| self.heaps().flat_map(Heap::regions).any(|region| private.owns(region.pool));
        let is_over = |private: &Private| private.is_released() && !self.pools.is_routed_to(private);
        let unused = self.pools.private.iter().position(|private| is_over(private) && !holds_memory(private));
        let at = unused.unwrap_or(self.pools.private.len());
        let number =
            u16::try_from(at).ok().filter(|&at| at < POOLS_MAX).ok_or(AllocError::TooManyPools { pools: at })?;
        if unused.is_none() {
            self.pools.private.push(Private::new(number, id, options));
            self.arenas.iter_mut().for_each(|arena| arena.heap.add_private_pools());
        }
        self.pools.private[at] = Private::new(number, id, options);
        let (core, arenas) = self.core_and_arenas();
        arenas.iter_mut().for_each(|arena| core.pools.private[at].set_up(&mut arena.heap));
        Ok(id)
    }
}

/// A pool of memory of its own. Dropping it releases what it caches; what is live stays valid and is released later.
///
/// What is free in the pool stays where it is until [`PrivatePool::empty_cache`] is called or the pool is dropped. What a graph uses whose
/// capture allocated from the pool stays until the graph is dropped, too, and its launches are done. Only of a graph that another library
/// captured nobody knows how long it is launched: keep the pool as long.
///
/// Requests outside of captures never get what a graph of the pool uses. Other captures do, so launches of graphs that share a pool come
/// one after the other, on whichever streams; those of graphs that another library captured are its own affair. Do not expect a graph
/// to find what an earlier launch left in memory that its capture gave back.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, PoolOptions};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let pool = allocator.create_pool(PoolOptions::default())?;
/// let _route = pool.route_thread();
/// let inside = allocator.alloc(1 << 20, device.default_stream())?; // from the pool
/// # drop(inside);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PrivatePool {
    allocator: Allocator,
    id: (u64, u64),
}

impl Allocator {
    /// A new private pool.
    ///
    /// # Errors
    /// When there are too many: some 16 000.
    pub fn create_pool(&self, options: PoolOptions) -> Result<PrivatePool, AllocError> {
        let id = self.shell().whole().add_private(options)?;
        Ok(PrivatePool { allocator: self.clone(), id })
    }
}

impl Allocator {
    /// The numbers of the pool that the thread's innermost scope routes to, for a request for the stream. What the stream captures
    /// may get memory that was in use before, by work after which it comes by itself only if it is launched on the same stream; that is noted,
    /// and that the graph uses the pool.
    pub(crate) fn route_and_note(&self, stream: &Stream) -> Option<[u16; 2]> {
        self.shell().core().pools.routed()?;
        // Without the core's lock, under which no timeline is asked.
        let captured = stream.launches_of_capture();
        let (numbers, is_new) = self.shell().core().pools.route_and_note(captured.as_ref())?;
        if let Some(launches) = captured {
            launches.come_after(stream.tick());
            if is_new {
                // Else all memory would go back once nobody has the allocator any more.
                let allocator: Arc<dyn Any + Send + Sync> = Arc::new(self.kept_open());
                launches.keep(&allocator);
            }
        }
        Some(numbers)
    }

    /// Whether a block that was granted outside of captures may have been a graph's, because one was captured since the request was routed.
    pub(crate) fn came_from_a_graph(&self, pool: u16, stream: &Stream) -> bool {
        let keeps = self.shell().core().pools.owner_of(pool).is_some_and(|private| private.keeps_for_graphs(pool));
        keeps && !stream.is_capturing()
    }
}

impl PrivatePool {
    /// Its id, `segment_pool_id` in snapshots: `(0, n)` with n never reused in this process.
    pub fn id(&self) -> (u64, u64) {
        self.id
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
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
    /// As [`Allocator::alloc`].
    pub fn alloc(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        let _route = self.route_thread();
        self.allocator.alloc(bytes, stream)
    }

    /// Until the result is dropped, everything that the calling thread allocates from the allocator comes from this pool.
    /// Scopes nest; the innermost counts.
    pub fn route_thread(&self) -> PoolRoute {
        let number = NEXT_ROUTE.fetch_add(1, Ordering::Relaxed);
        let shell = self.allocator.shell();
        let mut core = shell.core();
        core.pools.routes.push((std::thread::current().id(), number, self.id));
        shell.special().fetch_or(special::ROUTED, Ordering::Relaxed);
        PoolRoute { allocator: self.allocator.kept_open(), number, not_send: PhantomData }
    }

    /// Gives the pool's unused memory back to the device; tells how many bytes. Waits for its blocks that other streams still use,
    /// and for launches of graphs whose captures allocated from the pool. Memory that a graph uses stays until the graph is dropped; graphs
    /// that others captured must not be launched again. Nothing goes while what must be waited for cannot be, because a stream
    /// captures.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        let core = self.allocator.shell().core();
        let Some(private) = core.pools.find(self.id) else { return Ok(0) };
        let launched = core.launches_of(private);
        let numbers: Vec<u16> = private.numbers().collect();
        drop(core);
        self.allocator.wait_for_launched(&launched)?;
        if launched.is_pending() {
            return Ok(0);
        }
        self.allocator.synchronize_pending(|pool| numbers.contains(&pool))?;
        self.allocator.synchronize_free(|pool| numbers.contains(&pool))?;
        self.release(&numbers)
    }

    fn release(&self, numbers: &[u16]) -> Result<u64, AllocError> {
        let segments = self
            .allocator
            .release_where(|whole| numbers.iter().flat_map(|&number| whole.whole_segments(number)).collect())?;
        Ok(segments + self.allocator.trim_paged(0, &|pool| numbers.contains(&pool))?)
    }

    /// Closes the pool, and gives back what nobody uses any more. What is left is covered by events: it can be learnt later that it is
    /// done, while the streams capture, too.
    fn close(&self) -> Result<(), AllocError> {
        let shell = self.allocator.shell();
        let launched = shell.core().close_pool(self.id);
        self.allocator.poll(&launched.ticks)?;
        let numbers: Vec<u16> = shell.core().pools.find(self.id).into_iter().flat_map(Private::numbers).collect();
        let free = shell.whole().free_not_done(|pool| numbers.contains(&pool));
        self.allocator.poll(&free)?;
        let released = shell.core().pools.find(self.id).is_some_and(Private::is_released);
        if released { self.release(&numbers).map(|_| ()) } else { Ok(()) }
    }
}

impl Drop for PrivatePool {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "a private pool's memory could not be released; the next release tries again");
        }
    }
}

/// While it lives, the thread that made it allocates from a private pool.
#[derive(Debug)]
#[must_use = "the thread goes back to the pools it used before when this is dropped"]
pub struct PoolRoute {
    allocator: Allocator,
    number: u64,
    /// Routes belong to the thread that made them.
    not_send: PhantomData<*const ()>,
}

impl Drop for PoolRoute {
    fn drop(&mut self) {
        let shell = self.allocator.shell();
        let mut core = shell.core();
        core.pools.routes.retain(|&(_, number, _)| number != self.number);
        if core.pools.routes.is_empty() {
            shell.special().fetch_and(!special::ROUTED, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
