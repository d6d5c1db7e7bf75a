//! Graphs: work that is captured once and launched many times.

use std::fmt;
use std::sync::Arc;

use aquifer_allocator::internal::{Busy, Outlived, Pass};
use aquifer_allocator::{AccessGuard, CaptureRoute, GraphUses, PoolOptions, PrivatePool, Storage};
use aquifer_device::{AccessKind, Capture, Code, DeviceError, Operation, RawStream, Stream};
use aquifer_transfer::HostUses;
use bytemuck::Pod;

use crate::allocator::Allocator;
use crate::buffer::{Buffer, Handle};
use crate::error::Error;
use crate::transfer::{Pending, Source};

/// Work that was captured into a CUDA graph by [`Allocator::graph`], with what that work returned.
/// One call enqueues all of it.
///
/// A launch is ordered like any other work with the buffers: it comes after everything that was
/// enqueued on them before, on any stream, and later uses come after it. Launches of graphs that
/// share a pool run one after the other.
///
/// The graph keeps the buffers and the pinned memory that its work used, whatever handles the
/// program drops. Memory that the work allocated and dropped is used again by each launch, and does
/// not keep its contents from one launch to the next: other requests may be
/// [lent](PoolOptions::lends_when_idle) it in between. Memory that the work returned is the
/// [`output`](Graph::output): each launch writes it.
///
/// A *parameter* is a buffer that the work reads. [`Graph::update`] uploads into it on the stream
/// of the launch, after earlier launches, so that two launches in flight read their own values. A
/// *result* is read back after the launch, on its stream, into pinned memory of its own for
/// each launch.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB,violations=panic")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let weights = memory.from_slice(&[1.0_f32, 2.0, 3.0], &stream)?;
/// let mut input = memory.alloc_zeros::<f32>(3, &stream)?;
/// let graph = memory.graph(&stream, |stream| {
///     let mut product = weights.like(stream)?;
///     product.copy_from(&input, stream)?;
///     product.axpy(2.0, &weights, stream)?;
///     product.sum(stream)
/// })?;
/// let mut sums = Vec::new();
/// for step in [0.0_f32, 10.0] {
///     graph.update(&mut input, vec![step; 3], &stream)?;
///     graph.launch(&stream)?;
///     sums.push(graph.output().download(vec![0.0], &stream)?); // nothing waits here
/// }
/// let sums: Vec<_> = sums.into_iter().map(|sum| sum.wait()).collect::<Result<_, _>>()?;
/// assert_eq!(sums, [[12.0], [42.0]]);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct Graph<R = ()> {
    output: R,
    graph: aquifer_device::Graph,
    uses: Arc<GraphUses>,
    host: Option<Arc<HostUses>>,
    memory: Allocator,
    pass_bytes: u64,
}

impl Allocator {
    /// Captures `work` into a [`Graph`] that has memory of its own: warm-up, capture and
    /// instantiation.
    ///
    /// `work` is called twice with `stream`, on which it must enqueue everything. The first call,
    /// the *warm-up*, does the work: what needs memory or a module that is loaded at first use gets
    /// it then. The second call is captured and runs nothing. Both must enqueue the same work, and
    /// in both the memory that this thread allocates comes from pools of their own. Work of several
    /// streams is captured if `work` forks and joins them by events
    /// ([`Event`](crate::device::Event)).
    ///
    /// In the capture, uploads read their source once and keep a pinned copy in the graph;
    /// from pinned memory, each launch reads what that holds then. Downloads go to pinned
    /// memory only. Calls that wait, such as [`Buffer::to_vec`], are refused.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB,violations=panic")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let gradient = memory.from_slice(&[1.0_f32; 1000], &stream)?;
    /// let mut weights = memory.alloc_zeros::<f32>(1000, &stream)?;
    /// let step = memory.graph(&stream, |stream| {
    ///     let mut scaled = memory.alloc_zeros::<f32>(1000, stream)?; // a temporary
    ///     scaled.axpy(0.5, &gradient, stream)?;
    ///     weights.axpy(-1.0, &scaled, stream)
    /// })?; // the warm-up was the first step
    /// let other = device.stream()?;
    /// step.launch(&stream)?;
    /// step.launch(&other)?; // ordered after the first
    /// assert_eq!(weights.slice(..1).item(&stream)?, -1.5);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of `work`, in either call. When the capture broke, the error names the call that did
    /// it. A stream of another device, or one that captures already. A graph that failed leaves
    /// nothing behind, and may be tried again.
    pub fn graph<R>(&self, stream: &Stream, work: impl FnMut(&Stream) -> Result<R, Error>) -> Result<Graph<R>, Error> {
        let options = PoolOptions { lends_when_idle: true, ..PoolOptions::default() };
        // The pool is closed at once, and the graph keeps its memory.
        self.graph_in(&self.create_pool(options)?, stream, work)
    }

    /// As [`Allocator::graph`], with memory of a pool that several graphs share: together they need
    /// as much as the largest one, besides their outputs. Their launches run one after the other.
    /// The pool lends their memory only if it was made to ([`PoolOptions::lends_when_idle`]).
    ///
    /// ```
    /// use aquifer::memory::PoolOptions;
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB,violations=panic")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let pool = memory.create_pool(PoolOptions::default())?;
    /// let buckets = [1, 2, 4].map(|batch| {
    ///     let work = |stream: &Stream| memory.alloc_zeros::<f32>(batch << 14, stream)?.sum(stream);
    ///     memory.graph_in(&pool, &stream, work)
    /// });
    /// for graph in buckets {
    ///     graph?.launch(&stream)?;
    /// }
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Allocator::graph`], and a pool of another allocator.
    pub fn graph_in<R>(
        &self,
        pool: &PrivatePool,
        stream: &Stream,
        mut work: impl FnMut(&Stream) -> Result<R, Error>,
    ) -> Result<Graph<R>, Error> {
        let (outlived, pass_bytes) = self.warm_up(stream, &mut work)?;
        let (mut capture, output) = self.capture_again(pool, stream, &outlived, &mut work)?;
        capture.pass_bytes = pass_bytes;
        capture.finish(output, Capture::end)
    }

    /// Captures work after its warm-up.
    fn capture_again<'p, R>(
        &self,
        pool: &'p PrivatePool,
        stream: &Stream,
        outlived: &Outlived,
        work: &mut impl FnMut(&Stream) -> Result<R, Error>,
    ) -> Result<(GraphCapture<'p>, R), Error> {
        let pass = Pass::again(self, outlived)?;
        let capture = GraphCapture::new(self, PoolOf::Shared(pool), stream, || stream.begin_capture())?;
        let output = work(stream)?;
        // Other graphs of the pool may write what is left there: it belongs to no buffer of the
        // warm-up.
        let more = pass.outlived().bytes().max(capture.left_in_pool());
        if more > 0 { Err(Error::UnevenWork { bytes: more }) } else { Ok((capture, output)) }
    }

    /// Begins a [`Graph`] whose driver calls another library makes, for adapters: `begin` begins
    /// the capture, as cudarc's `CudaStream::begin_capture` does. What the calling thread allocates
    /// until [`GraphCapture::end`] comes from `pool`, or else from a pool of the graph's own.
    ///
    /// There is no warm-up. So what needs a module that is loaded at first use, or memory of
    /// another library, must have run before.
    ///
    /// # Errors
    /// Those of `begin`; a stream of another device, or one that captures already; a pool of
    /// another allocator.
    pub fn begin_graph<'p>(
        &self,
        pool: Option<&'p PrivatePool>,
        stream: &Stream,
        begin: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<GraphCapture<'p>, Error> {
        let pool = match pool {
            Some(pool) => PoolOf::Shared(pool),
            None => PoolOf::Own(self.create_pool(PoolOptions::default())?),
        };
        GraphCapture::new(self, pool, stream, || stream.begin_capture_with(begin))
    }

    /// Does the work of a graph once and captures it once, as [`Allocator::graph`] does, and
    /// returns what the graph will need: to size the rest of memory, such as a cache, before any
    /// graph is kept. Nothing of the capture is left.
    ///
    /// While a graph is captured into a pool that already serves others, its warm-up needs its pass
    /// beside that pool: fill the rest of memory once the last graph is captured.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let step = |batch: usize| {
    ///     let memory = memory.clone();
    ///     move |stream: &Stream| memory.alloc_zeros::<f32>(batch << 14, stream)?.sum(stream)
    /// };
    /// // Both share a pool, and the larger one is planned first.
    /// let plan = memory.plan_graph(&stream, step(64))?.sharing(memory.plan_graph(&stream, step(8))?);
    /// let mut cache = memory.growable(memory.available_after(&plan)?, &stream)?;
    /// cache.grow_to(cache.capacity() / 64, &stream)?;
    /// let pool = memory.create_pool(Default::default())?;
    /// let graphs = [memory.graph_in(&pool, &stream, step(64))?, memory.graph_in(&pool, &stream, step(8))?];
    /// # drop(graphs);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Allocator::graph`].
    pub fn plan_graph<R>(
        &self,
        stream: &Stream,
        mut work: impl FnMut(&Stream) -> Result<R, Error>,
    ) -> Result<GraphPlan, Error> {
        let (outlived, _) = self.warm_up(stream, &mut work)?;
        let pool = self.create_pool(PoolOptions::default())?;
        let capture = self.capture_again(&pool, stream, &outlived, &mut work)?;
        let pool_bytes = self.reserved_by_private_pools().get(&pool.id()).copied().unwrap_or(0);
        drop(capture);
        pool.empty_cache()?;
        Ok(GraphPlan { pool_bytes, output_bytes: outlived.bytes() })
    }

    /// Bytes that can still be allocated ([`available`](aquifer_allocator::Allocator::available))
    /// once the planned graphs are captured. Where memory is mapped, up to two granules
    /// ([`Config::granule`](crate::memory::Config::granule)) more or less may be left, and less by
    /// the rest of the frames in which outputs end; where it comes in segments, less if graphs share
    /// a pool. What the driver takes for graphs is not known before
    /// ([`Attribution::graphs`](crate::memory::Attribution::graphs)).
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn available_after(&self, plan: &GraphPlan) -> Result<u64, Error> {
        Ok(self.available()?.saturating_sub(plan.bytes()))
    }

    /// Bytes of the device that this allocator does not hold.
    fn held_otherwise(&self) -> Result<u64, Error> {
        let memory = self.device().memory_info()?;
        Ok(memory.total.saturating_sub(memory.free).saturating_sub(self.memory_reserved()))
    }

    /// Does the work once, and gives the memory that it needed back to the device, so that the
    /// capture finds it there. Returns what of it outlived the work, and how much it was.
    fn warm_up<R>(
        &self,
        stream: &Stream,
        work: &mut impl FnMut(&Stream) -> Result<R, Error>,
    ) -> Result<(Outlived, u64), Error> {
        if stream.is_capturing() {
            return Err(DeviceError::refused(Operation::BeginCapture, Code::CAPTURE_UNSUPPORTED)
                .with_detail("the stream captures already: a graph cannot be captured within another one")
                .into());
        }
        let pool = self.create_pool(PoolOptions::default())?;
        let pass = Pass::first(self);
        let route = pool.route_thread();
        let output = work(stream)?;
        let outlived = pass.outlived();
        drop((output, route, pass));
        // Memory is given back once the device is done with it.
        stream.synchronize()?;
        let bytes = self.reserved_by_private_pools().get(&pool.id()).copied();
        // This waits for other streams of the work, too.
        pool.empty_cache()?;
        Ok((outlived, bytes.unwrap_or(0)))
    }
}

/// A graph that is being captured on a stream: see [`Allocator::begin_graph`]. It belongs to the
/// thread that began it, whose allocations are the graph's. Dropping it ends the capture, of which
/// nothing is left.
#[derive(Debug)]
#[must_use = "the capture ends when it is dropped"]
pub struct GraphCapture<'p> {
    // Dropped first, so that the capture is over before the thread allocates from other pools.
    capture: Capture,
    _route: CaptureRoute,
    /// Keeps the pool from lending.
    _held: Busy,
    pool: PoolOf<'p>,
    uses: Arc<GraphUses>,
    host: Option<Arc<HostUses>>,
    memory: Allocator,
    /// Bytes of the device that the allocator did not hold when the capture began.
    before: u64,
    pass_bytes: u64,
}

#[derive(Debug)]
enum PoolOf<'p> {
    Own(PrivatePool),
    Shared(&'p PrivatePool),
}

impl PoolOf<'_> {
    fn get(&self) -> &PrivatePool {
        match self {
            PoolOf::Own(pool) => pool,
            PoolOf::Shared(pool) => pool,
        }
    }
}

impl<'p> GraphCapture<'p> {
    fn new(
        memory: &Allocator,
        pool: PoolOf<'p>,
        stream: &Stream,
        begin: impl FnOnce() -> Result<Capture, DeviceError>,
    ) -> Result<Self, Error> {
        let held = pool.get().hold_for_capture(memory, stream)?;
        let before = memory.held_otherwise()?;
        let capture = begin()?;
        let (uses, host) = (GraphUses::collect(pool.get(), stream)?, HostUses::collect(stream));
        let route = memory.capture(stream, pool.get())?;
        let memory = memory.clone();
        Ok(GraphCapture { capture, _route: route, _held: held, pool, uses, host, memory, before, pass_bytes: 0 })
    }

    /// Ends the capture: `end` makes the driver calls, as cudarc's `CudaStream::end_capture` does,
    /// and returns what launches the graph on a stream. The graph keeps `output`, and what `end`
    /// returned.
    ///
    /// Memory of a pool of the graph's own may live on: launches write it.
    ///
    /// # Errors
    /// Those of `end`, and of a capture that broke, with the call that did it.
    /// [`Error::UnevenWork`] if memory of a shared pool lives on, which other graphs of the pool
    /// may write: allocate it before the capture. The capture has ended in any case.
    pub fn end<R, L>(self, output: R, end: impl FnOnce() -> Result<L, DeviceError>) -> Result<Graph<R>, Error>
    where
        L: Fn(RawStream) -> Result<(), DeviceError> + Send + Sync + 'static,
    {
        let bytes = self.left_in_pool();
        if bytes > 0 && matches!(self.pool, PoolOf::Shared(_)) {
            return Err(Error::UnevenWork { bytes });
        }
        self.finish(output, |capture| capture.end_with(end))
    }

    /// Notes the addresses of the pool, and returns how many bytes of it the capture leaves in live
    /// blocks.
    fn left_in_pool(&self) -> u64 {
        self.uses.note_pool(self.pool.get(), self.capture.stream())
    }

    fn finish<R>(
        self,
        output: R,
        end: impl FnOnce(&Capture) -> Result<aquifer_device::Graph, DeviceError>,
    ) -> Result<Graph<R>, Error> {
        let GraphCapture { capture, _route, _held, pool, uses, host, memory, before, pass_bytes } = self;
        let graph = end(&capture)?;
        drop((capture, _route));
        uses.note_driver_bytes(memory.held_otherwise()?.saturating_sub(before));
        let pass_bytes = match &pool {
            PoolOf::Own(pool) => memory.reserved_by_private_pools().get(&pool.id()).copied().unwrap_or(0),
            PoolOf::Shared(_) => pass_bytes,
        };
        Ok(Graph { output, graph, uses, host, memory, pass_bytes })
    }
}

/// Enqueues a launch, in order with other work on the memory that the graph uses.
#[track_caller]
pub(crate) fn launch(
    memory: &Allocator,
    uses: &GraphUses,
    host: Option<&Arc<HostUses>>,
    stream: &Stream,
    enqueue: impl FnOnce() -> Result<(), DeviceError>,
) -> Result<(), Error> {
    stream.end_abandoned_captures()?;
    if stream.is_capturing() {
        return Err(DeviceError::refused(Operation::LaunchGraph, Code::CAPTURE_UNSUPPORTED)
            .with_detail("the stream captures, and CUDA does not capture launches of graphs")
            .into());
    }
    let _ready = uses.begin_launch(memory, stream)?;
    let used = uses.memory();
    let used: Vec<(&Arc<Storage>, AccessKind)> = used.iter().map(|(storage, kind)| (storage, *kind)).collect();
    let Some(host) = host.filter(|host| !host.is_empty()) else {
        let _access = AccessGuard::acquire(stream, &used)?;
        return Ok(enqueue()?);
    };
    Ok(memory.transfer()?.launch(stream, &used, host, enqueue)?)
}

/// What graphs will need, as [`Allocator::plan_graph`] found out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GraphPlan {
    /// Bytes that the pool of the graphs needs at most.
    pub pool_bytes: u64,
    /// Bytes of their outputs.
    pub output_bytes: u64,
}

impl GraphPlan {
    /// The plan of both, in one pool: as large as the larger one needs.
    #[must_use]
    pub fn sharing(self, other: GraphPlan) -> GraphPlan {
        GraphPlan {
            pool_bytes: self.pool_bytes.max(other.pool_bytes),
            output_bytes: self.output_bytes.saturating_add(other.output_bytes),
        }
    }

    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.pool_bytes.saturating_add(self.output_bytes)
    }
}

impl<R> Graph<R> {
    /// Enqueues the captured work on `stream`, of the graph's device.
    ///
    /// # Errors
    /// A stream of another device, or one that captures: CUDA does not capture launches of graphs.
    /// When this thread is within [`with`](crate::buffer::with) with one of the graph's buffers;
    /// when the allocator sleeps ([`Error::is_asleep`]); while the host reads pinned memory that
    /// the graph writes, or writes pinned memory that it uses
    /// ([`UsedByGraph`](aquifer_transfer::TransferError::UsedByGraph)); errors of the driver. When
    /// memory of the graph was lent ([`PoolOptions::lends_when_idle`]) and as much is not free now,
    /// [`Error::is_out_of_memory`]: nothing is launched, and this can be tried again.
    #[track_caller]
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        launch(&self.memory, &self.uses, self.host.as_ref(), stream, || self.graph.launch(stream))
    }

    /// Uploads new values into a buffer that the graph's work uses, for launches on `stream` from
    /// now on. It is an ordinary [`Buffer::upload`]: earlier launches read the values that they
    /// were launched with.
    ///
    /// # Errors
    /// [`Error::NotOfGraph`] if the work does not use the buffer, and as [`Buffer::upload`].
    #[track_caller]
    pub fn update<T: Pod + Send + Sync>(
        &self,
        parameter: &mut Buffer<T>,
        values: impl Source<T>,
        stream: &Stream,
    ) -> Result<Pending<()>, Error> {
        if !parameter.is_empty() {
            self.access_to(parameter).ok_or(Error::NotOfGraph)?;
        }
        parameter.upload(values, stream)
    }

    /// The value that the work returned when it was captured: buffers that each launch writes.
    pub fn output(&self) -> &R {
        &self.output
    }

    /// What the graph's work does with a buffer's memory; `None` if it does not use it.
    pub fn access_to<T>(&self, buffer: &Buffer<T, impl Handle>) -> Option<AccessKind> {
        self.uses.of(buffer.storage())
    }

    /// Bytes that one pass of the work allocates, including its output, as the warm-up did it.
    pub fn pass_bytes(&self) -> u64 {
        self.pass_bytes
    }
}

impl<R> fmt::Debug for Graph<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("graph", &self.graph)
            .field("pass_bytes", &self.pass_bytes)
            .finish_non_exhaustive()
    }
}
