//! The table of private pools: their numbers in the heap, the threads that are routed to them, and
//! the graphs that use them.
//!
//! Invariants: a pool's record says how many regions it has; a closed pool's record goes,
//! and its place serves another pool, once it has none, no graph that it served may be launched or
//! runs, and no thread is routed to it, as a request with its numbers may be under way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ThreadId;

use aquifer_device::internal::{Launches, WaitMark};

use crate::core::graphs::{Graphs, Launched};
use crate::core::heap::HeapPoolOptions;
use crate::error::AllocError;
use crate::size_class::PoolKind;
use crate::types::PoolId;

/// A private pool: its id, and its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolKey {
    pub(crate) id: (u64, u64),
    pub(crate) place: u16,
}

/// The record of a private pool.
#[derive(Debug)]
pub(crate) struct Private {
    pub(crate) id: (u64, u64),
    /// Numbers in the heap of the small and the large pool that captures are served from.
    numbers: [PoolId; 2],
    /// Numbers of the pools that requests outside of captures are served from while the pool has
    /// graphs.
    beside_graphs: [PoolId; 2],
    pub(crate) options: PoolOptions,
    pub(crate) open: bool,
    /// The graphs whose captures allocated from it.
    pub(crate) graphs: Graphs,
    /// How many regions it has by number in the heap, those on their way back to the driver
    /// included: if that refuses one, it returns.
    regions: BTreeMap<PoolId, usize>,
    /// Number of scopes that route threads to it.
    routes: usize,
    /// Number of threads that launch a graph of it, or capture one into it: nothing of it is lent
    /// then.
    pub(crate) busy: usize,
    /// Addresses of graphs whose memory was lent, in order: holes, until a launch brings memory
    /// back.
    pub(crate) lent: Vec<Range<u64>>,
    /// Bytes requested for its live blocks and by requests under way, if it has a limit.
    pub(crate) claimed: u64,
}

/// The private pools, and the threads that allocate from them.
#[derive(Debug, Default)]
pub(crate) struct PoolTable {
    /// The pools by place.
    private: Vec<Option<Private>>,
    /// Places in it that no pool has.
    vacant: BTreeSet<u16>,
    /// Places of closed pools.
    pub(crate) closed: BTreeSet<u16>,
    /// Places of open pools that lend.
    pub(crate) lenders: BTreeSet<u16>,
    /// The pools that each thread is routed to, innermost scope last, each with a number by which
    /// its scope is ended.
    routes: HashMap<ThreadId, Vec<(u64, PoolKey)>>,
}

/// Some pools of the heap.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Which {
    All,
    /// Those that keep no free memory for graphs: the default ones, and those of private pools
    /// that are closed and no graph uses. Their memory may move to others or go back to the device.
    /// To be asked about under the same locks as choosing that memory, because a graph may be
    /// captured while a thread waits.
    NotForGraphs,
    /// The other private ones whose free memory no graph may use. Their pool keeps it unless a
    /// request would be refused otherwise.
    Idle,
    /// Those of a private pool.
    Of(PoolKey),
    /// Those of a private pool, save where a graph of ours may use the free memory.
    UnusedOf(PoolKey),
    /// Those whose graphs are idle and lend their free memory.
    OfIdleGraphs,
    /// Those whose free memory may become that of a heap pool. For one that captures are served
    /// from: those of its private pool that graphs use. For another one: those of its private pool
    /// that none uses, and the unpromised ones.
    For(PoolId),
}

/// Ids of private pools: never reused in a process, as PyTorch's `(0, n)`.
static NEXT_POOL: AtomicU64 = AtomicU64::new(1);

/// The first number of a private pool in the heap. The default pools have the ones below.
const FIRST: u16 = 2;
/// The numbers that each private pool has.
const NUMBERS: u16 = 4;
/// The most private pools at one time.
const POOLS_MAX: u16 = (u16::MAX - FIRST) / NUMBERS;

#[cfg(all(test, not(aquifer_shuttle)))]
impl PoolKey {
    pub(crate) fn place(self) -> u16 {
        self.place
    }
}

impl Which {
    /// True if the default pools are among them.
    pub(crate) fn has_default(self) -> bool {
        matches!(self, Which::All | Which::NotForGraphs | Which::For(_))
    }
}

impl PoolTable {
    pub(crate) fn find(&self, key: PoolKey) -> Option<&Private> {
        self.private.get(usize::from(key.place))?.as_ref().filter(|private| private.id == key.id)
    }

    pub(crate) fn find_mut(&mut self, key: PoolKey) -> Option<&mut Private> {
        self.private.get_mut(usize::from(key.place))?.as_mut().filter(|private| private.id == key.id)
    }

    /// All private pools, open or closed.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Private> + '_ {
        self.private.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Private> + '_ {
        self.private.iter_mut().flatten()
    }

    pub(crate) fn at(&self, places: impl Iterator<Item = u16>) -> impl Iterator<Item = &Private> {
        places.filter_map(move |place| self.private.get(usize::from(place))?.as_ref())
    }

    /// The pools that lend on OOM.
    pub(crate) fn lenders(&self) -> impl Iterator<Item = &Private> + '_ {
        self.at(self.lenders.iter().copied())
    }

    /// The pool that a thread's innermost scope routes to. Scopes of closed pools are skipped.
    pub(crate) fn routed(&self, thread: ThreadId) -> Option<PoolKey> {
        let own = self.routes.get(&thread)?.iter().rev();
        own.map(|&(_, key)| key).find(|&key| self.find(key).is_some_and(|private| private.open))
    }

    /// The numbers of the pool that a thread's innermost scope routes to, for a request
    /// outside of captures or, with `captured`, for the graph with these launches. Notes in the
    /// latter case that the graph uses the pool, and returns true with the numbers if that was not
    /// known.
    pub(crate) fn route_and_note(
        &mut self,
        thread: ThreadId,
        captured: Option<&Arc<Launches>>,
    ) -> Option<([PoolId; 2], bool)> {
        let key = self.routed(thread)?;
        let private = self.find_mut(key)?;
        private.graphs.forget_those_over();
        Some(match captured {
            Some(launches) => (private.numbers, private.graphs.note(launches)),
            None if private.graphs.any() => (private.beside_graphs, false),
            None => (private.numbers, false),
        })
    }

    /// Routes a thread to a pool, until the scope with this number ends.
    pub(crate) fn begin_route(&mut self, thread: ThreadId, number: u64, key: PoolKey) {
        self.routes.entry(thread).or_default().push((number, key));
        if let Some(private) = self.find_mut(key) {
            private.routes += 1;
        }
    }

    /// Ends a scope of a thread. Returns false if no thread is routed any more.
    pub(crate) fn end_route(&mut self, thread: ThreadId, number: u64) -> bool {
        if let Some(own) = self.routes.get_mut(&thread)
            && let Some(at) = own.iter().rposition(|&(scope, _)| scope == number)
        {
            let (_, key) = own.remove(at);
            if own.is_empty() {
                self.routes.remove(&thread);
            }
            if let Some(private) = self.find_mut(key) {
                private.routes -= 1;
            }
            self.forget_if_over(key.place);
        }
        !self.routes.is_empty()
    }

    /// The private pool that owns a heap pool; `None` for the default pools.
    pub(crate) fn owner_of(&self, number: PoolId) -> Option<&Private> {
        self.private.get(usize::from(place_of(number)?))?.as_ref()
    }

    pub(super) fn owner_mut(&mut self, number: PoolId) -> Option<&mut Private> {
        self.private.get_mut(usize::from(place_of(number)?))?.as_mut()
    }

    /// The second half of the id of the private pool that owns a heap pool, for history; 0 for the
    /// default pools. Heap pools are reused by later private pools, so entries cannot keep their
    /// numbers.
    pub(crate) fn history_id(&self, number: PoolId) -> u32 {
        self.owner_of(number).map_or(0, Private::history_id)
    }

    /// True if a graph may use the free memory of a heap pool.
    pub(crate) fn keeps_for_graphs(&self, number: PoolId) -> bool {
        self.owner_of(number).is_some_and(|private| private.keeps_for_graphs(number))
    }

    /// True if a heap pool is among some pools.
    pub(crate) fn is_among(&self, number: PoolId, which: Which) -> bool {
        let owner = self.owner_of(number);
        match which {
            Which::All => true,
            Which::NotForGraphs => owner.is_none_or(Private::is_released),
            Which::Idle => owner.is_some_and(|private| !private.is_released() && !private.keeps_for_graphs(number)),
            Which::Of(key) => owner.is_some_and(|private| private.id == key.id),
            Which::UnusedOf(key) => {
                owner.is_some_and(|private| private.id == key.id && !private.keeps_for_our_graphs(number))
            }
            Which::OfIdleGraphs => {
                owner.is_some_and(|private| private.keeps_for_graphs(number) && private.lends_when_idle())
            }
            Which::For(pool) => match owner.filter(|private| private.owns(pool)) {
                Some(private) => private.keeps_for_graphs(number) == private.keeps_for_graphs(pool),
                None => owner.is_none_or(Private::is_released) && !self.keeps_for_graphs(pool),
            },
        }
    }

    /// Claims bytes of the limit of the private pool that owns a heap pool, for a request. Returns
    /// false if the limit does not allow them.
    pub(crate) fn claim(&mut self, number: PoolId, bytes: u64) -> bool {
        let Some((private, limit)) = self.owner_mut(number).and_then(|own| own.options.limit.map(|limit| (own, limit)))
        else {
            return true;
        };
        let claimed = private.claimed.saturating_add(bytes);
        private.claimed = if claimed <= limit { claimed } else { private.claimed };
        claimed <= limit
    }

    /// Gives back what a request claimed.
    pub(crate) fn end_claim(&mut self, number: PoolId, bytes: u64) {
        if let Some(private) = self.owner_mut(number).filter(|own| own.options.limit.is_some()) {
            private.claimed = private.claimed.saturating_sub(bytes);
        }
    }

    /// The numbers of private pools among some pools that have regions, in order.
    pub(crate) fn with_regions(&self, which: Which) -> impl Iterator<Item = PoolId> + '_ {
        let (closed, one) = match which {
            Which::All | Which::Idle | Which::OfIdleGraphs => (None, None),
            Which::NotForGraphs => (Some(self.at(self.closed.iter().copied())), None),
            Which::Of(key) | Which::UnusedOf(key) => (None, Some(self.find(key))),
            Which::For(pool) => {
                (Some(self.at(self.closed.iter().copied())), Some(self.owner_of(pool).filter(|private| private.open)))
            }
        };
        let all = (closed.is_none() && one.is_none()).then(|| self.iter());
        let pools = all.into_iter().flatten().chain(closed.into_iter().flatten()).chain(one.flatten());
        let regions = pools.flat_map(|private| private.regions.keys().copied());
        regions.filter(move |&number| self.is_among(number, which))
    }

    /// The launches that memory of closed pools still waits for: of all of them, or of one.
    /// Launches that are not seen here come before `now`.
    pub(crate) fn awaited_launches(&self, now: &WaitMark, of: Option<PoolKey>) -> Launched {
        let closed = self.at(self.closed.iter().copied().filter(|&place| of.is_none_or(|key| key.place == place)));
        let closed = closed.filter(|private| of.is_none_or(|key| key.id == private.id) && private.graphs.any());
        closed.map(|private| private.graphs.launched(now.clone())).fold(Launched::default(), Launched::and)
    }

    /// Closes a pool. Returns the launches that its memory waits for. Graphs of other libraries are
    /// not launched after `now`.
    pub(crate) fn close(&mut self, key: PoolKey, now: WaitMark) -> Launched {
        let Some(private) = self.find_mut(key) else { return Launched::default() };
        private.open = false;
        private.graphs.close(now.clone());
        let launched = private.graphs.launched(now);
        self.lenders.remove(&key.place);
        self.closed.insert(key.place);
        self.forget_if_over(key.place);
        launched
    }

    /// Notes a new region of a heap pool.
    pub(crate) fn note_region(&mut self, number: PoolId) {
        if let Some(private) = self.owner_mut(number) {
            *private.regions.entry(number).or_default() += 1;
        }
    }

    /// Notes that a region of a heap pool is gone.
    pub(crate) fn forget_region(&mut self, number: PoolId) {
        let Some(private) = self.owner_mut(number) else { return };
        if let Some(regions) = private.regions.get_mut(&number) {
            *regions -= 1;
            if *regions == 0 {
                private.regions.remove(&number);
            }
        }
        place_of(number).into_iter().for_each(|place| self.forget_if_over(place));
    }

    /// Forgets a closed pool that holds no memory and will not hold any again.
    pub(crate) fn forget_if_over(&mut self, place: u16) {
        let Some(private) = self.private.get(usize::from(place)).and_then(Option::as_ref) else { return };
        if !private.is_released() || private.routes > 0 || !private.regions.is_empty() {
            return;
        }
        self.private[usize::from(place)] = None;
        self.closed.remove(&place);
        self.vacant.insert(place);
        while self.private.pop_if(|last| last.is_none()).is_some() {
            self.vacant.pop_last();
        }
    }

    #[cfg(all(test, not(aquifer_shuttle)))]
    pub(crate) fn places(&self) -> usize {
        self.private.len()
    }

    /// Forgets all closed pools that are over. Nothing tells when a graph is.
    pub(crate) fn forget_those_over(&mut self) {
        let closed: Vec<u16> = self.closed.iter().copied().collect();
        closed.into_iter().for_each(|place| self.forget_if_over(place));
    }

    /// Adds a pool. It gets the lowest place that is vacant.
    pub(crate) fn add(&mut self, options: PoolOptions) -> Result<PoolKey, AllocError> {
        if self.vacant.is_empty() && self.private.len() >= usize::from(POOLS_MAX) {
            self.forget_those_over();
        }
        let place = match self.vacant.first() {
            Some(&place) => place,
            None => {
                let pools = self.private.len();
                let place = u16::try_from(pools).ok().filter(|&place| place < POOLS_MAX);
                place.ok_or(AllocError::TooManyPools { pools })?
            }
        };
        let id = (0, NEXT_POOL.fetch_add(1, Ordering::Relaxed));
        if usize::from(place) == self.private.len() {
            self.private.push(None);
        }
        self.vacant.remove(&place);
        self.private[usize::from(place)] = Some(Private::new(place, id, options));
        if options.use_on_oom {
            self.lenders.insert(place);
        }
        Ok(PoolKey { id, place })
    }
}

/// The place of the private pool that a heap pool belongs to.
fn place_of(number: PoolId) -> Option<u16> {
    Some(number.number().checked_sub(FIRST)? / NUMBERS)
}

impl Private {
    /// A new record for a place of the table.
    fn new(place: u16, id: (u64, u64), options: PoolOptions) -> Private {
        let first = NUMBERS * place + FIRST;
        Private {
            id,
            numbers: [first, first + 1].map(PoolId::numbered),
            beside_graphs: [first + 2, first + 3].map(PoolId::numbered),
            options,
            open: true,
            graphs: Graphs::default(),
            regions: BTreeMap::new(),
            routes: 0,
            busy: 0,
            lent: Vec::new(),
            claimed: 0,
        }
    }

    /// All numbers of the pool in the heap.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = PoolId> + use<> {
        self.numbers.into_iter().chain(self.beside_graphs)
    }

    pub(crate) fn owns(&self, number: PoolId) -> bool {
        self.numbers().any(|own| own == number)
    }

    /// True if a graph may use the free memory of the heap pool with this number.
    pub(crate) fn keeps_for_graphs(&self, number: PoolId) -> bool {
        self.numbers.contains(&number) && self.graphs.any()
    }

    /// True if a graph captured here may use it, so that it must stay.
    pub(crate) fn keeps_for_our_graphs(&self, number: PoolId) -> bool {
        self.numbers.contains(&number) && self.graphs.any_of_ours()
    }

    /// The heap pools of a kind whose free memory other requests may take.
    pub(crate) fn lent(&self, kind: PoolKind) -> impl Iterator<Item = PoolId> {
        let lends = self.open && self.options.use_on_oom;
        self.numbers().filter(move |&number| lends && number.kind() == kind && !self.keeps_for_graphs(number))
    }

    /// True if its free memory may be lent: every graph of it brings memory back before a launch,
    /// no launch is under way or is about to be, and nothing is captured.
    pub(crate) fn lends_when_idle(&self) -> bool {
        self.options.lends_when_idle && self.busy == 0 && self.graphs.are_idle()
    }

    /// Bytes that are lent.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.lent.iter().map(|range| range.end - range.start).sum()
    }

    /// True if it keeps no free memory: it is closed, and no graph that it served may
    /// be launched, or runs.
    pub(crate) fn is_released(&self) -> bool {
        !self.open && !self.graphs.any()
    }

    #[cfg(all(test, not(aquifer_shuttle)))]
    pub(crate) fn regions(&self) -> impl Iterator<Item = (PoolId, usize)> + '_ {
        self.regions.iter().map(|(&number, &count)| (number, count))
    }

    #[cfg(all(test, not(aquifer_shuttle)))]
    pub(crate) fn graphs_known(&self) -> usize {
        self.graphs.known()
    }

    pub(crate) fn heap_options(&self) -> HeapPoolOptions {
        HeapPoolOptions { no_split: self.options.no_split, history_id: self.history_id() }
    }

    /// The second half of its id, for history.
    fn history_id(&self) -> u32 {
        u32::try_from(self.id.1).unwrap_or(u32::MAX)
    }
}

/// Options of a private pool.
///
/// ```
/// use aquifer::memory::PoolOptions;
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:64MiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let pool = memory.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() })?;
/// drop(pool.alloc_bytes(48 << 20, &stream)?); // the pool keeps it
/// let lent = memory.alloc_bytes(40 << 20, &stream)?; // there is no other memory for this
/// assert_eq!(memory.memory_reserved(), 48 << 20);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Other requests may take free blocks of this pool rather than fail, unless a graph may use
    /// them. A request gets blocks that its own stream freed last, whatever `cross_stream` says.
    pub use_on_oom: bool,
    /// Blocks are handed out whole: each allocation has a segment of its own.
    pub no_split: bool,
    /// Rather than that a request is refused, it gets memory that the graphs of this pool freed in
    /// their captures, while none of them runs. A launch first brings memory back to the same
    /// addresses, and is refused if there is none. So a graph finds nothing there that an earlier
    /// launch left: set this only if no kernel keeps state in such memory. It takes effect where
    /// memory is mapped, and as long as all graphs of the pool are `aquifer::Graph`s.
    pub lends_when_idle: bool,
    /// The most bytes in live blocks of this pool, as requested; `None`, the default, is no limit. A
    /// request beyond it is refused at once ([`Refusal::PoolLimit`](crate::Refusal::PoolLimit)), and
    /// the report says which tags hold the pool's memory. What other requests borrow from the pool
    /// does not count.
    pub limit: Option<u64>,
}
