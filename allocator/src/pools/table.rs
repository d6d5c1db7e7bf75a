//! The table of private pools in the core: their numbers in the heap, the threads that are routed to them, and the graphs that use them.
//! The core's lock protects it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use aquifer_device::Launches;

use crate::error::AllocError;
use crate::heap::{Heap, kind_of};
use crate::pools::PoolOptions;
use crate::pools::graphs::{Graphs, Launched};
use crate::shell::core::Core;
use crate::shell::whole::Whole;
use crate::size_class::PoolKind;

/// The record of a private pool.
#[derive(Debug)]
pub(crate) struct Private {
    pub(crate) id: (u64, u64),
    /// Numbers in the heap of the small and the large pool that captures are served from.
    numbers: [u16; 2],
    /// Numbers of the pools that requests outside of captures are served from while the pool has graphs.
    beside_graphs: [u16; 2],
    pub(crate) options: PoolOptions,
    pub(crate) open: bool,
    /// The graphs whose captures allocated from it.
    graphs: Graphs,
}

/// The private pools, and the threads that allocate from them.
#[derive(Debug, Default)]
pub(crate) struct PoolTable {
    pub(crate) private: Vec<Private>,
    /// The pools that threads are routed to, innermost scope last, each with a number by which its scope is ended.
    pub(super) routes: Vec<(ThreadId, u64, (u64, u64))>,
}

/// Ids of private pools: never reused in a process, as PyTorch's `(0, n)`.
static NEXT_POOL: AtomicU64 = AtomicU64::new(1);

/// The most private pools at one time: each has four of the heap's numbers, and the default pools have two.
const POOLS_MAX: u16 = (u16::MAX - 2) / 4;

impl PoolTable {
    pub(crate) fn find(&self, id: (u64, u64)) -> Option<&Private> {
        self.private.iter().find(|private| private.id == id)
    }

    /// The pool that the calling thread's innermost scope routes to. Scopes of closed pools are skipped.
    pub(crate) fn routed(&self) -> Option<&Private> {
        let thread = std::thread::current().id();
        let mut own = self.routes.iter().rev().filter(|(routed, ..)| *routed == thread);
        own.find_map(|(.., id)| self.find(*id).filter(|private| private.open))
    }

    /// The numbers of the pool that the calling thread's innermost scope routes to, for a request outside of captures or, with `captured`,
    /// for the graph with these launches. Notes in the latter case that the graph uses the pool, and returns true with the numbers if that
    /// was not known.
    pub(super) fn route_and_note(&mut self, captured: Option<&Arc<Launches>>) -> Option<([u16; 2], bool)> {
        let id = self.routed()?.id;
        let private = self.private.iter_mut().find(|private| private.id == id)?;
        Some(match captured {
            Some(launches) => (private.numbers, private.graphs.note(launches)),
            None if private.graphs.any() => (private.beside_graphs, false),
            None => (private.numbers, false),
        })
    }

    /// True if a thread is routed to the pool. Then a request with the pool's numbers may be under way.
    fn is_routed_to(&self, private: &Private) -> bool {
        self.routes.iter().any(|&(.., id)| id == private.id)
    }

    /// The private pool that owns a heap pool; `None` for the default pools.
    pub(crate) fn owner_of(&self, number: u16) -> Option<&Private> {
        self.private.iter().find(|private| private.owns(number))
    }

    /// The heap pools whose free memory a graph captured here may use, so that it must stay. To be called under the same locks as choosing
    /// the memory that goes back, because a graph may be captured while a thread waits.
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
    /// A new record for a place of the table.
    fn new(at: u16, id: (u64, u64), options: PoolOptions) -> Private {
        let first = 4 * at + 2;
        let (numbers, beside_graphs) = ([first, first + 1], [first + 2, first + 3]);
        Private { id, numbers, beside_graphs, options, open: true, graphs: Graphs::default() }
    }

    /// All numbers of the pool in the heap.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u16> + use<> {
        self.numbers.into_iter().chain(self.beside_graphs)
    }

    pub(crate) fn owns(&self, number: u16) -> bool {
        self.numbers().any(|own| own == number)
    }

    /// True if a graph may use the free memory of the heap pool with this number.
    pub(crate) fn keeps_for_graphs(&self, number: u16) -> bool {
        self.numbers.contains(&number) && self.graphs.any()
    }

    /// The heap pools of a kind whose free memory other requests may take.
    pub(crate) fn lent(&self, kind: PoolKind) -> impl Iterator<Item = u16> {
        let lends = self.open && self.options.use_on_oom;
        self.numbers().filter(move |&number| lends && kind_of(number) == kind && !self.keeps_for_graphs(number))
    }

    /// True if its free memory is promised to nobody: it is closed, and no graph that it served may be launched, or runs.
    pub(crate) fn is_released(&self) -> bool {
        !self.open && !self.graphs.any()
    }

    /// Sets the options of its pools in an arena's heap.
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
    /// The work that must be done before memory of a pool may go that was used by graphs which are not launched any more.
    pub(super) fn launches_of(&self, private: &Private) -> Launched {
        self.device.as_ref().map_or_else(Launched::default, |device| private.graphs.launched(device.wait_mark()))
    }

    /// Closes a pool. Returns the launches that its memory waits for.
    pub(super) fn close_pool(&mut self, id: (u64, u64)) -> Launched {
        let Core { pools, device: Some(device), .. } = self else { return Launched::default() };
        let Some(private) = pools.private.iter_mut().find(|private| private.id == id) else {
            return Launched::default();
        };
        let now = device.wait_mark();
        private.open = false;
        private.graphs.close(now.clone());
        private.graphs.launched(now)
    }

    /// The launches that memory of closed pools still waits for, in the pools for which `of` is true.
    pub(crate) fn awaited_launches(&self, of: impl Fn(u16) -> bool) -> Launched {
        let closed = self.pools.private.iter().filter(|private| !private.open && private.numbers().any(&of));
        closed.map(|private| self.launches_of(private)).fold(Launched::default(), Launched::and)
    }
}

impl Whole {
    /// Adds a private pool and returns its id. It reuses the numbers of a closed pool that holds no memory and will not hold any again.
    /// Requests routed to a pool before it was closed still have its numbers, so a pool with such requests is not reused.
    pub(super) fn add_private(&mut self, options: PoolOptions) -> Result<(u64, u64), AllocError> {
        let id = (0, NEXT_POOL.fetch_add(1, Ordering::Relaxed));
        // A segment on its way back to the driver may return to the pool.
        let with_memory = || self.heaps().flat_map(Heap::regions).map(|region| region.pool);
        let holds_memory =
            |private: &Private| with_memory().chain(self.releasing.iter().copied()).any(|pool| private.owns(pool));
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
