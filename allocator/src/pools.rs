//! Private pools: memory that is served apart from everybody else's, as PyTorch's `MemPool` and graph pools.
//!
//! The two default pools are numbers 0 (small) and 1 (large) of the heap; a private pool has two of its own. A closed pool
//! (its handle was dropped) serves nobody; its blocks are given back to the device as they become free, at the next release.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::heap::Heap;
use crate::shell::special;
use crate::whole::Whole;

/// How a private pool behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Other requests may take free blocks of this pool rather than fail.
    pub use_on_oom: bool,
    /// Blocks are handed out whole: each allocation has a segment of its own.
    pub no_split: bool,
}

/// A private pool as the core knows it.
#[derive(Debug)]
pub(crate) struct Private {
    pub(crate) id: (u64, u64),
    /// Numbers of its small and large pool in the heap.
    pub(crate) numbers: [u16; 2],
    pub(crate) options: PoolOptions,
    pub(crate) open: bool,
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

    /// The private pool that owns a heap pool; `None` for the default pools.
    pub(crate) fn owner_of(&self, number: u16) -> Option<&Private> {
        self.private.iter().find(|private| private.numbers.contains(&number))
    }

    /// The second half of the id of the private pool that owns a heap pool, for history; 0 for the default pools. Heap
    /// pools are reused by later private pools, so entries cannot keep their numbers.
    pub(crate) fn history_id(&self, number: u16) -> u32 {
        let private = if number < 2 { None } else { self.owner_of(number) };
        private.map_or(0, Private::history_id)
    }
}

impl Private {
    /// Tells an arena's heap what kind of pools these are.
    pub(crate) fn set_up(&self, heap: &mut Heap) {
        for number in self.numbers {
            let pool = &mut heap.pools[usize::from(number)];
            (pool.no_split, pool.history_id) = (self.options.no_split, self.history_id());
        }
    }

    /// The second half of its id, for history.
    fn history_id(&self) -> u32 {
        u32::try_from(self.id.1).unwrap_or(u32::MAX)
    }
}

impl Whole {
    /// A pool record; reuses the numbers of a closed pool that holds no memory any more.
    fn add_private(&mut self, options: PoolOptions) -> (u64, u64) {
        let id = (0, NEXT_POOL.fetch_add(1, Ordering::Relaxed));
        let holds_memory = |private: &Private| {
            self.heaps().flat_map(Heap::regions).any(|region| private.numbers.contains(&region.pool))
        };
        let unused = self.pools.private.iter().position(|private| !private.open && !holds_memory(private));
        let at = unused.unwrap_or(self.pools.private.len());
        if unused.is_none() {
            let small = u16::try_from(2 * at + 2).unwrap_or(u16::MAX - 1);
            self.pools.private.push(Private { id, numbers: [small, small + 1], options, open: true });
            self.arenas.iter_mut().for_each(|arena| arena.heap.add_pools());
        }
        let private = &mut self.pools.private[at];
        (private.id, private.options, private.open) = (id, options, true);
        let (core, arenas) = self.core_and_arenas();
        arenas.iter_mut().for_each(|arena| core.pools.private[at].set_up(&mut arena.heap));
        id
    }
}

/// A pool of memory of its own. Dropping it releases what it caches; what is live stays valid and is released later.
///
/// Where memory is mapped, what is free in the pool stays where it is until [`PrivatePool::empty_cache`] is called or the pool
/// is dropped: a graph that was captured with it may use it whenever it is launched. So keep the pool as long as its graphs.
///
/// ```
/// use aquifer_allocator::{Allocator, Config, PoolOptions};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let pool = allocator.create_pool(PoolOptions::default());
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
    pub fn create_pool(&self, options: PoolOptions) -> PrivatePool {
        let id = self.shell().whole().add_private(options);
        PrivatePool { allocator: self.clone(), id }
    }
}

impl PrivatePool {
    /// Its id, `segment_pool_id` in snapshots: `(0, n)` with n never reused in this process.
    pub fn id(&self) -> (u64, u64) {
        self.id
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
    pub fn alloc(&self, bytes: u64, stream: &aquifer_device::Stream) -> Result<Allocation, AllocError> {
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
        PoolRoute { allocator: self.allocator.clone(), number, not_send: PhantomData }
    }

    /// Gives the pool's unused segments back to the device; tells how many bytes. Waits for its blocks that other streams
    /// still use.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn empty_cache(&self) -> Result<u64, AllocError> {
        if let Some(numbers) = self.numbers() {
            self.allocator.synchronize_pending(|pool| numbers.contains(&pool))?;
            self.allocator.synchronize_free(|pool| numbers.contains(&pool))?;
        }
        self.release()
    }

    fn numbers(&self) -> Option<[u16; 2]> {
        self.allocator.shell().core().pools.find(self.id).map(|private| private.numbers)
    }

    fn release(&self) -> Result<u64, AllocError> {
        let numbers = self.numbers();
        let segments = self.allocator.release_where(|whole| {
            numbers.into_iter().flatten().flat_map(|number| whole.whole_segments(number)).collect()
        })?;
        let of_this = |pool: u16| numbers.is_some_and(|numbers| numbers.contains(&pool));
        Ok(segments + self.allocator.trim_paged(0, &of_this)?)
    }
}

impl Drop for PrivatePool {
    fn drop(&mut self) {
        let mut core = self.allocator.shell().core();
        if let Some(private) = core.pools.private.iter_mut().find(|private| private.id == self.id) {
            private.open = false;
        }
        drop(core);
        if let Err(error) = self.release() {
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
