//! The memory that a graph uses, as the access guards of its capture say.
//!
//! A graph's work does not run when it is captured, so an access guard of a capturing stream has
//! nothing to order. It notes here what the graph will do with the memory, and every launch takes
//! an access guard on all of that.
//!
//! Memory from outside of the capture is kept as long as the graph: dropping its last handle must
//! not give it to others. Memory of the capture itself is not, so that what the capture drops
//! serves its later requests; the graph's pool keeps it for the graph. If it lives on, such as a
//! result, launches write it.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use aquifer_device::fork::{self, Mutex};
use aquifer_device::internal::Timeline;
use aquifer_device::{AccessKind, Code, DeviceError, Operation, Stream};

use crate::accounting::attribution::replace_driver_bytes_of_graph;
use crate::allocator::Allocator;
use crate::core::pools::PoolKey;
use crate::error::AllocError;
use crate::pools::private_pool::{Busy, PrivatePool};
use crate::sleep::wake_lock::NotedCount;
use crate::state::AllocatorState;
use crate::storage::Storage;
use crate::storage::guard::Held;
use crate::types::StreamId;

/// The memory that a graph uses: collected while the graph is captured, and ordered whenever it is
/// launched.
///
/// ```
/// use aquifer::device::AccessKind;
/// use aquifer::memory::{AccessGuard, PoolOptions};
/// use aquifer::prelude::*;
/// use aquifer_allocator::GraphUses;
/// let device = aquifer::open("sim:24GiB")?;
/// let allocator = Allocator::of(&device)?;
/// let (one, two) = (device.stream()?, device.stream()?);
/// let buffer = allocator.alloc_storage(1 << 20, 512, &one)?;
/// let pool = allocator.create_pool(PoolOptions::default())?;
/// let capture = one.begin_capture()?;
/// let uses = GraphUses::collect(&pool, &one)?;
/// {
///     let _access = AccessGuard::acquire(&one, &[(&buffer, AccessKind::Write)])?;
///     one.fill(buffer.ptr(), 7, buffer.bytes())?;
/// }
/// let graph = capture.end()?;
/// {
///     let memory = uses.memory();
///     let memory: Vec<_> = memory.iter().map(|(storage, kind)| (storage, *kind)).collect();
///     let _access = AccessGuard::acquire(&two, &memory)?;
///     graph.launch(&two)?;
/// }
/// {
///     let _access = AccessGuard::acquire(&one, &[(&buffer, AccessKind::Write)])?; // after the launch
///     one.fill(buffer.ptr(), 8, buffer.bytes())?;
/// }
/// device.assert_no_violations();
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Debug)]
pub struct GraphUses {
    /// Number of the graph.
    graph: u64,
    /// The allocator state that serves the capture, and the pool that does.
    state: &'static AllocatorState,
    pool: PoolKey,
    /// True if the pool may lend memory of idle graphs.
    lends: bool,
    /// Bytes in live blocks of the pool when the capture began, by stream.
    live_before: BTreeMap<StreamId, u64>,
    device_id: u32,
    noted: Mutex<Noted>,
    /// Bytes that the driver took for the graph.
    driver_bytes: Mutex<u64>,
}

#[derive(Debug, Default)]
struct Noted {
    /// By address of the [`Storage`], which a handle keeps from being reused: in the order in which
    /// access guards lock.
    memory: BTreeMap<usize, (Used, AccessKind)>,
    /// Start and end of all memory of the capture, that which is gone included, and of its pool,
    /// which the work may use by bare pointers.
    ranges: BTreeMap<u64, u64>,
}

#[derive(Debug)]
enum Used {
    Outside(Arc<Storage>),
    /// Memory of the capture itself.
    Own(Weak<Storage>),
}

impl Used {
    fn storage(&self) -> Option<Arc<Storage>> {
        match self {
            Used::Outside(storage) => Some(storage.clone()),
            Used::Own(storage) => storage.upgrade(),
        }
    }
}

fn note_range(ranges: &mut BTreeMap<u64, u64>, Range { start, end }: Range<u64>) {
    let known = ranges.entry(start).or_insert(end);
    *known = end.max(*known);
}

impl GraphUses {
    /// Collects what access guards do from now on on streams of the capture that `stream` is part
    /// of, which allocates from `pool`. The graph keeps the result, and by that the memory from
    /// outside of the capture.
    ///
    /// # Errors
    /// When the stream does not capture.
    pub fn collect(pool: &PrivatePool, stream: &Stream) -> Result<Arc<GraphUses>, AllocError> {
        let Some(launches) = stream.launches_of_capture() else {
            return Err(DeviceError::refused(Operation::CaptureStatus, Code::INVALID_VALUE)
                .with_detail("the stream does not capture: begin the capture first")
                .into());
        };
        let uses = Arc::new(GraphUses {
            graph: launches.number(),
            state: pool.allocator().state(),
            pool: pool.key(),
            lends: pool.lends_when_idle(),
            live_before: pool.contents().1,
            device_id: stream.device_id(),
            noted: Mutex::default(),
            driver_bytes: Mutex::default(),
        });
        let kept: Arc<dyn Any + Send + Sync> = uses.clone();
        launches.keep(&kept);
        Ok(uses)
    }

    /// Notes what the driver took for the graph while it was instantiated, for
    /// [`Allocator::attribution`](crate::Allocator::attribution) and reports.
    pub fn note_driver_bytes(&self, bytes: u64) {
        let mut noted = self.driver_bytes.lock();
        replace_driver_bytes_of_graph(self.device_id, *noted, bytes);
        *noted = bytes;
    }

    /// True if the stream is part of a capture whose graph notes what it uses.
    pub(crate) fn are_collected(stream: &Stream) -> bool {
        stream.launches_of_capture().is_some_and(|launches| launches.kept::<GraphUses>().is_some())
    }

    /// Notes those of the accesses that are captured, and takes them out.
    pub(super) fn take_captured(wanted: &mut Vec<Held<'_>>) -> Result<(), AllocError> {
        let mut result = Ok(());
        wanted.retain(|&Held { stream, storage, kind, .. }| {
            let Some(uses) = stream.launches_of_capture().and_then(|launches| launches.kept::<GraphUses>()) else {
                return true;
            };
            result = std::mem::replace(&mut result, Ok(())).and_then(|()| uses.note(storage, kind, stream));
            false
        });
        result
    }

    fn note(&self, storage: &Arc<Storage>, kind: AccessKind, stream: &Stream) -> Result<(), AllocError> {
        let place = Arc::as_ptr(storage).addr();
        let mut uses = storage.hold()?;
        let is_own = uses.captured_in() == Some(self.graph);
        if is_own {
            uses.note_user(storage.memory(), stream)?;
        }
        drop(uses);
        let mut noted = self.noted.lock();
        let Noted { memory, ranges } = &mut *noted;
        let used = if is_own {
            note_range(ranges, storage.place().1);
            Used::Own(Arc::downgrade(storage))
        } else {
            Used::Outside(storage.clone())
        };
        let (_, known) = memory.entry(place).or_insert((used, kind));
        *known = kind.max(*known);
        Ok(())
    }

    /// What the graph does with some memory; `None` if no access guard of its capture was on it.
    pub fn of(&self, storage: &Arc<Storage>) -> Option<AccessKind> {
        self.noted.lock().memory.get(&Arc::as_ptr(storage).addr()).map(|&(_, kind)| kind)
    }

    /// All of it that still exists, for an access guard around a launch.
    pub fn memory(&self) -> Vec<(Arc<Storage>, AccessKind)> {
        self.noted.lock().memory.values().filter_map(|(used, kind)| Some((used.storage()?, *kind))).collect()
    }

    /// Notes which addresses the pool has, before the capture ends that `stream` is part of.
    /// Returns how many bytes of the pool the capture leaves in live blocks, of all its streams.
    /// The pool may lend memory of the graph from now on
    /// ([`PoolOptions::lends_when_idle`](crate::PoolOptions::lends_when_idle)), so each launch
    /// needs [`GraphUses::begin_launch`].
    pub fn note_pool(&self, pool: &PrivatePool, stream: &Stream) -> u64 {
        let (ranges, live) = pool.contents();
        let mut noted = self.noted.lock();
        ranges.into_iter().for_each(|range| note_range(&mut noted.ranges, range));
        noted.memory.retain(|_, (used, _)| used.storage().is_some());
        drop(noted);
        let mut core = self.state.lock();
        if let Some(private) = core.pools.find_mut(self.pool) {
            private.graphs.note_bringing_back(self.graph);
        }
        let of_streams = live.into_iter().map(|(id, bytes)| (core.streams.timeline(id).cloned(), id, bytes));
        let of_streams: Vec<_> = of_streams.collect();
        drop(core);
        let launches = stream.launches_of_capture();
        let is_own = |timeline: &Arc<Timeline>| launches.as_ref().is_some_and(|launches| launches.has(timeline));
        let own = of_streams.into_iter().filter(|(timeline, ..)| timeline.as_ref().is_some_and(is_own));
        own.map(|(_, id, bytes)| bytes.saturating_sub(self.live_before.get(&id).copied().unwrap_or(0))).sum()
    }

    /// Keeps the allocator awake, and the graph's memory where it is, until the result is dropped:
    /// while a launch on `stream` is enqueued, which also uses memory that no handle names any
    /// more. If the pool has lent memory of idle graphs, this first brings memory back behind the
    /// same addresses.
    ///
    /// # Errors
    /// [`AllocError::Asleep`] while the allocator, or the graph's part of its memory, sleeps or is
    /// about to; for memory that was lent, as [`Allocator::alloc_bytes`]: what is not back yet
    /// stays lent, and this can be tried again.
    pub fn begin_launch(&self, allocator: &Allocator, stream: &Stream) -> Result<impl Sized + use<>, AllocError> {
        fork::check(Operation::LaunchGraph)?;
        let busy = self.lends.then(|| Busy::begin(self.state, self.pool));
        let ranges: Vec<Range<u64>> = self.noted.lock().ranges.iter().map(|(&start, &end)| start..end).collect();
        let keep_awake = || NotedCount::of_all(self.state, &ranges);
        let mut awake = keep_awake()?;
        if let Some((busy, 1..)) = &busy {
            // Room is made without keeping the allocator awake, as for requests.
            drop(awake);
            busy.bring_back(allocator, stream)?;
            awake = keep_awake()?;
        }
        Ok((awake, busy))
    }
}

impl Drop for GraphUses {
    fn drop(&mut self) {
        if !fork::is_child() && *self.driver_bytes.get_mut() > 0 {
            self.note_driver_bytes(0);
        }
    }
}
