//! Graphs that cudarc captures, with memory of Aquifer's.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use aquifer::device::DevicePtr;
use aquifer::memory::PrivatePool;
use aquifer::{Allocator, FollowedGraph, GraphCapture, Stream};
use aquifer_device::{Code, DeviceError, Operation, RawStream};
use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode, CUstreamCaptureStatus as Status};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError, result};

use crate::{Error, stream};

/// A graph that is being captured: what `CudaStream::begin_capture` begins, with memory of
/// Aquifer's. See [`AllocatorExt::begin_capture`](crate::AllocatorExt::begin_capture).
///
/// It belongs to the thread that began it, whose allocations are the graph's. Dropping it ends the
/// capture, of which nothing is left.
#[derive(Debug)]
#[must_use = "the capture ends when it is dropped"]
pub struct Capture<'p> {
    capture: GraphCapture<'p>,
    stream: Arc<CudaStream>,
}

impl<'p> Capture<'p> {
    pub(crate) fn begin(
        memory: &Allocator,
        pool: Option<&'p PrivatePool>,
        theirs: &Arc<CudaStream>,
        mode: CUstreamCaptureMode,
    ) -> Result<Capture<'p>, Error> {
        let begin = || {
            theirs.context().bind_to_thread()?;
            // Not by cudarc's own method, in which an allocator of the context may begin a graph,
            // too.
            // SAFETY: the stream lives, and its context is current.
            unsafe { result::stream::begin_capture(theirs.cu_stream(), mode) }
        };
        let begin = || begin().map_err(|error| failed(Operation::BeginCapture, error));
        let capture = memory.begin_graph(pool, &stream(theirs)?, begin)?;
        Ok(Capture { capture, stream: theirs.clone() })
    }

    /// Ends the capture and returns the graph, which keeps `output`: the slices that the work
    /// wrote, and those from outside that it used. Buffers of
    /// [`StreamExt::with`](crate::StreamExt::with) need not be among them.
    ///
    /// # Errors
    /// When a call broke the capture; when the driver does not take the flags; what
    /// [`GraphCapture::end`] adds. The capture has ended in any case.
    pub fn end<R>(self, flags: CUgraphInstantiate_flags, output: R) -> Result<Graph<R>, Error> {
        let Capture { capture, stream } = self;
        let mut ended = None;
        let graph = capture.end(output, || {
            let graph = stream.end_capture(flags).map_err(|error| failed(Operation::EndCapture, error))?;
            let broken = DeviceError::new(Operation::EndCapture, Code::CAPTURE_INVALIDATED);
            let graph = Mutex::new(Exclusive(graph.ok_or(broken)?));
            let theirs = Arc::new(Theirs { graph, context: stream.context().clone() });
            ended = Some(theirs.clone());
            Ok(move |on: RawStream| theirs.launch(on))
        })?;
        let theirs = ended.ok_or_else(|| DeviceError::new(Operation::EndCapture, Code::CAPTURE_INVALIDATED))?;
        Ok(Graph { graph, theirs, stream })
    }
}

/// The memory of the graph that a stream is captured into, by cudarc or by the driver's functions;
/// `None` if it captures nothing, or if
/// [`AllocatorExt::begin_capture`](crate::AllocatorExt::begin_capture) began that, whose thread's
/// requests are the graph's. A stream that joined a capture by an event of cudarc's is a part of it
/// afterwards.
///
/// # Errors
/// As [`Allocator::followed_graph`]; a stream that is being destroyed.
pub fn graph_of_capture(memory: &Allocator, theirs: &Arc<CudaStream>) -> Result<Option<Arc<FollowedGraph>>, Error> {
    let ours = stream(theirs)?;
    if may_be_captured(&ours, theirs)? { Ok(memory.followed_graph(&ours)?) } else { Ok(None) }
}

/// Has the graph keep memory from outside of its capture that is freed while `theirs` is captured:
/// until it is gone, or for ever if another library captures it and announced that. Returns false
/// where the memory is to be freed now.
///
/// # Errors
/// As [`graph_of_capture`]; a pointer that is not of this allocator.
pub fn keep_for_capture(memory: &Allocator, theirs: &Arc<CudaStream>, ptr: DevicePtr) -> Result<bool, Error> {
    let graph = graph_of_capture(memory, theirs)?;
    let ours = stream(theirs)?;
    let Some(launches) = ours.launches_of_capture() else { return Ok(false) };
    if memory.is_kept_for(ptr, &launches)? {
        return Ok(false);
    }
    match graph {
        Some(graph) => graph.free_raw_on(memory, ptr, &ours)?,
        None if !launches.is_foreign() => {
            let kept: Arc<dyn Any + Send + Sync> = Arc::new(memory.freed_once_idle(ptr));
            launches.keep(&kept);
        }
        None => {}
    }
    Ok(true)
}

/// False if the stream captures nothing, and is not known to.
pub(crate) fn may_be_captured(ours: &Stream, theirs: &CudaStream) -> Result<bool, DriverError> {
    // The legacy default stream, which is null, cannot capture.
    let may_capture = !theirs.cu_stream().is_null();
    Ok(may_capture && (ours.is_capturing() || theirs.capture_status()? != Status::CU_STREAM_CAPTURE_STATUS_NONE))
}

/// A driver call of cudarc's that failed.
fn failed(operation: Operation, error: DriverError) -> DeviceError {
    DeviceError::new(operation, Code(error.0 as u32))
}

/// A [`CudaGraph`] whose memory is of Aquifer's: [`Capture::end`] makes it.
///
/// It has the guarantees of [`aquifer::Graph`]: memory that the capture allocated serves no other
/// request while the graph lives, the graph keeps the buffers that its work named with
/// [`StreamExt::with`](crate::StreamExt::with), and launches are ordered with what other streams do
/// with them.
#[derive(Debug)]
pub struct Graph<R = ()> {
    graph: aquifer::Graph<R>,
    theirs: Arc<Theirs>,
    stream: Arc<CudaStream>,
}

impl<R> Graph<R> {
    /// Launches the graph on the stream that it was captured on, as [`CudaGraph::launch`] does.
    ///
    /// # Errors
    /// As [`aquifer::Graph::launch`].
    #[track_caller]
    pub fn launch(&self) -> Result<(), Error> {
        self.launch_on(&self.stream)
    }

    /// Launches the graph on any stream of its context.
    ///
    /// # Errors
    /// As [`aquifer::Graph::launch`].
    #[track_caller]
    pub fn launch_on(&self, theirs: &Arc<CudaStream>) -> Result<(), Error> {
        Ok(self.graph.launch(&stream(theirs)?)?)
    }

    /// The graph as Aquifer has it: with [`update`](aquifer::Graph::update) of parameters, and with
    /// [`output`](aquifer::Graph::output).
    pub fn graph(&self) -> &aquifer::Graph<R> {
        &self.graph
    }

    /// Gives `look` the graph as cudarc has it, to look at its nodes or to upload it. Launches of
    /// other threads wait meanwhile. Do not launch it there: nothing would order that, or bring
    /// back what the graph lent. Take no access to buffers there: a launch may hold it, and wait.
    pub fn with_cuda_graph<T>(&self, look: impl FnOnce(&CudaGraph) -> T) -> T {
        look(&self.theirs.graph.lock().unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// The graph as cudarc has it, used by one thread at a time, as CUDA asks for.
struct Theirs {
    graph: Mutex<Exclusive>,
    context: Arc<CudaContext>,
}

struct Exclusive(CudaGraph);

// SAFETY: any thread may use CUDA's graphs, one at a time, for which `Theirs` has the lock.
unsafe impl Send for Exclusive {}

impl Theirs {
    fn launch(&self, on: RawStream) -> Result<(), DeviceError> {
        let graph = self.graph.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = on.0 as sys::CUstream;
        let launch = || {
            self.context.bind_to_thread()?;
            // SAFETY: the executable lives in `graph`; Aquifer's handle keeps the stream, which is
            // of the current context.
            unsafe { result::graph::launch(graph.0.cu_graph_exec(), stream) }
        };
        launch().map_err(|error| failed(Operation::LaunchGraph, error))
    }
}

impl fmt::Debug for Theirs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CudaGraph")
    }
}
