//! Graph capture: a stream's work is recorded into a graph instead of being run.

mod scope;

use std::fmt;
use std::panic::{AssertUnwindSafe, Location};
use std::sync::Arc;

use scope::Unended;
pub(crate) use scope::{Scope, StreamHandle};

use crate::context::Context;
use crate::driver::{CaptureStatus, Driver, KeptAlive, RawGraph, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork;
use crate::label::DeviceMismatch;
use crate::launches::{GraphOf, Launches};
use crate::release::Object;
use crate::stream::Stream;
use crate::unfinished;

/// A capture in progress on one stream. Dropping it ends the capture, if that was not done, and
/// discards the graph.
///
/// If the driver does not end it now, this is logged, and the capture goes on. The next
/// call that enqueues work tries again, and is refused on a stream of the capture if that fails; so
/// do calls that wait for the device, and [`crate::Device::settle`]. A capture of a
/// per-thread default stream can only be ended on its own thread, and is given up once that thread
/// has ended.
///
/// Ticks order nothing across the border of a capture (invariant T5): recording and waiting through
/// ticks fail on the stream until the capture ends, and its timeline learns nothing meanwhile. The
/// same holds for every stream that joins the capture by waiting for an event recorded in it.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// let (one, two) = (device.stream()?, device.stream()?);
/// let (a, b) = (device.alloc(4096)?, device.alloc(4096)?);
/// let (fork, join) = (device.create_event(false)?, device.create_event(false)?);
/// let capture = one.begin_capture()?;
/// fork.record(&one)?;
/// two.wait_event(&fork)?; // the second stream joins: its work is captured, too
/// one.fill(a, 1, 4096)?;
/// two.fill(b, 2, 4096)?;
/// join.record(&two)?;
/// one.wait_event(&join)?; // every stream that joined comes back before the end
/// let graph = capture.end()?;
/// graph.launch(&two)?;
/// # two.synchronize()?;
/// # device.free(a).and(device.free(b))?;
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct Capture {
    stream: Stream,
    scope: Arc<Scope>,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Capture {
    /// The stream that it began on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    pub(crate) fn begin(stream: Stream) -> Result<Capture> {
        let raw = stream.usable(Operation::BeginCapture)?;
        Capture::begin_with(stream.clone(), || stream.driver().begin_capture(raw))
    }

    pub(crate) fn begin_with(stream: Stream, begin: impl FnOnce() -> Result<()>) -> Result<Capture> {
        stream.usable(Operation::BeginCapture)?;
        let (timeline, scope) = (stream.timeline(), Scope::new(stream.timeline(), GraphOf::Ours));
        timeline.begin_capture(&scope, stream.keep_alive(), false, begin)?;
        Ok(Capture { stream, scope })
    }

    /// Ends the capture and returns the graph; works once. The `Capture` keeps the stream alive
    /// until it is dropped.
    ///
    /// # Errors
    /// Errors of the driver, for instance when a call in between broke the capture. The capture has
    /// ended nevertheless, unless [`Stream::is_capturing`] is true. It then goes on, because the
    /// stream is another thread's default stream, on which only that thread can end it, or because
    /// the driver does not end it. This may be called again then.
    ///
    /// ```
    /// let device = aquifer::open("sim:24GiB")?;
    /// let stream = device.per_thread_stream();
    /// let capture = stream.begin_capture()?;
    /// std::thread::scope(|scope| scope.spawn(|| assert!(capture.end().is_err())).join()).unwrap();
    /// assert!(stream.is_capturing());
    /// let graph = capture.end()?;
    /// assert!(!stream.is_capturing() && capture.end().is_err());
    /// # drop(graph);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn end(&self) -> Result<Graph> {
        let raw = self.scope.end(self.stream.timeline(), |raw| self.stream.driver().end_capture(raw))?;
        Ok(self.graph(Work::Driver(raw)))
    }

    /// As [`Capture::end`], where another library makes the driver calls, as cudarc's
    /// `CudaStream::end_capture` does. `end` ends the capture and returns what launches the graph
    /// on a stream; that is dropped with the [`Graph`]. Launches may come from several threads at
    /// once.
    ///
    /// ```
    /// let device = aquifer::open("sim:24GiB")?;
    /// let theirs = device.clone(); // its driver stands for the other library
    /// let (stream, ptr) = (device.stream()?, device.alloc(4096)?);
    /// let capture = stream.begin_capture_with(|| theirs.driver().begin_capture(stream.raw()))?;
    /// stream.fill(ptr, 7, 4096)?;
    /// let graph = capture.end_with(|| {
    ///     let graph = theirs.driver().end_capture(stream.raw())?;
    ///     Ok(move |stream| theirs.driver().launch_graph(graph, stream))
    /// })?;
    /// graph.launch(&stream)?;
    /// # stream.synchronize()?;
    /// # device.free(ptr)?;
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Capture::end`], and those of `end`.
    pub fn end_with<L>(&self, end: impl FnOnce() -> Result<L>) -> Result<Graph>
    where
        L: Fn(RawStream) -> Result<()> + Send + Sync + 'static,
    {
        let launch = self.scope.end(self.stream.timeline(), |_| end())?;
        Ok(self.graph(Work::Other(AssertUnwindSafe(Box::new(launch)))))
    }

    fn graph(&self, work: Work) -> Graph {
        Graph { work: Some(work), launches: self.scope.launches.clone(), context: self.stream.context().clone() }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if fork::is_child() || self.scope.is_over() {
            return;
        }
        if let Err(error) = self.end()
            && !self.scope.is_over()
        {
            tracing::warn!(%error, "a capture that was dropped could not be ended; it will be tried again");
            self.scope.abandon();
            unfinished::keep(Arc::new(Unended(self.scope.clone())));
        }
    }
}

/// The announcement of a capture that another library began on a stream and will end. Until then,
/// the stream is treated as if [`Stream::begin_capture`] had been called. Drop this once the
/// capture has ended. As long as it lives on, calls that the capture would be in the way of ask the
/// driver whether it has.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// let stream = device.stream()?;
/// device.driver().begin_capture(stream.raw())?; // by another library
/// let announced = stream.announce_capture()?;
/// assert!(stream.is_capturing());
/// let graph = device.driver().end_capture(stream.raw())?;
/// drop(announced);
/// # device.driver().destroy_graph(graph)?;
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the capture is taken as over when this is dropped"]
pub struct AnnouncedCapture {
    scope: Arc<Scope>,
}

const NOT_ANNOUNCED: &str = "the capture was not announced";

impl AnnouncedCapture {
    pub(crate) fn announce(stream: &Stream) -> Result<AnnouncedCapture> {
        AnnouncedCapture::begin(stream, Scope::new(stream.timeline(), GraphOf::Others))
    }

    pub(crate) fn announce_body(with_node: &Stream, stream: &Stream) -> Result<AnnouncedCapture> {
        let refused = |code| DeviceError::refused(Operation::CaptureStatus, code).of_request(NOT_ANNOUNCED);
        if with_node.device_id() != stream.device_id() {
            let devices = DeviceMismatch::between(stream.device_id(), with_node.device_id());
            let detail = format!("the stream that a body is captured on belongs to {devices}");
            return Err(refused(Code::INVALID_HANDLE).with_detail(detail));
        }
        let node = (with_node.timeline().clone(), with_node.keep_alive());
        let Some(scope) = Scope::of_body(stream.timeline(), node) else {
            return Err(refused(Code::INVALID_VALUE).with_detail(
                "the stream with the conditional node is not known to capture: begin, or announce, that capture first",
            ));
        };
        let announced = AnnouncedCapture::begin(stream, scope)?;
        stream.timeline().come_after_captured(with_node.timeline());
        Ok(announced)
    }

    fn begin(stream: &Stream, scope: Arc<Scope>) -> Result<AnnouncedCapture> {
        let operation = Operation::CaptureStatus;
        let announced = AnnouncedCapture { scope };
        let raw = stream.usable(operation)?;
        stream.timeline().begin_capture(&announced.scope, stream.keep_alive(), true, || {
            match stream.driver().capture_status(raw)? {
                CaptureStatus::Active => Ok(()),
                CaptureStatus::Invalidated => Err(DeviceError::refused(operation, Code::CAPTURE_INVALIDATED)
                    .of_request(NOT_ANNOUNCED)
                    .with_detail("an earlier call broke the capture that is announced")),
                CaptureStatus::None => Err(DeviceError::refused(operation, Code::INVALID_VALUE)
                    .of_request(NOT_ANNOUNCED)
                    .with_detail("the stream does not capture: announce a capture after it began")),
            }
        })?;
        unfinished::keep(Arc::new(Unended(announced.scope.clone())));
        Ok(announced)
    }
}

impl Drop for AnnouncedCapture {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        drop(self.scope.close_announced());
    }
}

/// Asks the driver whether the stream captures. Registers a capture that another library began, or
/// that the stream joined by calls of another library, and ends the record of one that is over.
/// Returns the launches of the graph, unless the capture is broken.
pub(crate) fn follow(stream: &Stream) -> Result<Option<Arc<Launches>>> {
    let (timeline, driver) = (stream.timeline(), stream.driver());
    let known = timeline.capture();
    if driver.info().is_virtual || timeline.raw().is_legacy() {
        return Ok(known.map(|scope| scope.launches.clone()));
    }
    let number = driver.capture_number(timeline.usable(Operation::CaptureStatus)?);
    if let Some(scope) = known {
        // The known capture goes on where the driver does not tell, as when the capture is broken.
        let goes_on = number.as_ref().map_or(true, |number| number.is_some() && *number == scope.number());
        if goes_on || !scope.announced {
            return Ok(Some(scope.launches.clone()));
        }
        drop(scope.close_announced());
    }
    let number = match number {
        // No graph comes of a broken capture.
        Err(error) if error.code == Code::CAPTURE_INVALIDATED => return Ok(None),
        number => number?,
    };
    let Some(number) = number else { return Ok(None) };
    let mut scopes = stream.context().captures().into_iter().filter_map(|capture| capture.downcast::<Scope>().ok());
    if let Some(scope) = scopes.find(|scope| scope.number() == Some(number)) {
        timeline.note_joined(&scope, stream.keep_alive())?;
        return Ok(Some(scope.launches.clone()));
    }
    begin_followed(stream, true, || Ok(())).map(Some)
}

/// Makes a capture known whose graph, and whose end, is another library's: `begin` begins it,
/// unless it `is_begun`.
pub(crate) fn begin_followed(
    stream: &Stream,
    is_begun: bool,
    begin: impl FnOnce() -> Result<()>,
) -> Result<Arc<Launches>> {
    let (scope, driver) = (Scope::new(stream.timeline(), GraphOf::Driver), stream.driver());
    let raw = stream.usable(Operation::BeginCapture)?;
    stream.timeline().begin_capture(&scope, stream.keep_alive(), is_begun, || {
        begin()?;
        let launches: KeptAlive = scope.launches.clone();
        driver.keep_for_graph(raw, launches).inspect_err(|_| {
            if !is_begun && let Err(error) = driver.end_capture(raw).and_then(|graph| driver.destroy_graph(graph)) {
                tracing::warn!(%error, "a capture could not be ended that nothing would keep memory for");
            }
        })
    })?;
    unfinished::keep(Arc::new(Unended(scope.clone())));
    Ok(scope.launches.clone())
}

/// A captured graph, which can be launched any number of times. It uses fixed addresses: keep the
/// memory that it uses until its last launch is done.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// let (stream, ptr) = (device.stream()?, device.alloc(4096)?);
/// let capture = stream.begin_capture()?;
/// stream.fill(ptr, 7, 4096)?; // captured, not run
/// let graph = capture.end()?;
/// for _ in 0..3 {
///     graph.launch(&stream)?;
/// }
/// stream.synchronize()?;
/// device.free(ptr)?;
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct Graph {
    /// `None` only while it is dropped.
    work: Option<Work>,
    launches: Arc<Launches>,
    context: Arc<Context>,
}

/// The captured work.
enum Work {
    /// As the driver has it.
    Driver(RawGraph),
    /// As another library has it, which this launches. A launch that panics leaves nothing half
    /// done here.
    Other(AssertUnwindSafe<Box<dyn Fn(RawStream) -> Result<()> + Send + Sync>>),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Work::Driver(raw) => raw.fmt(f),
            Work::Other(_) => f.write_str("another library's"),
        }
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("work", &self.work).finish_non_exhaustive()
    }
}

impl Graph {
    /// Enqueues the graph's work on a stream. It comes after earlier uses of the memory that its
    /// capture allocated ([`Launches::come_after`]), and after launches of other graphs that use
    /// the same memory ([`Launches::keep_order`]). To order it with other streams' work on other
    /// buffers, take an access guard on them around this call (`aquifer_allocator::AccessGuard`).
    ///
    /// # Errors
    /// When the stream belongs to another device, or captures: CUDA does not capture launches of
    /// graphs. Errors of the driver.
    #[track_caller]
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _place = stream.called_from(Location::caller());
        if stream.device_id() != self.context.device_id {
            let devices = DeviceMismatch::between(stream.device_id(), self.context.device_id);
            return Err(DeviceError::refused(Operation::LaunchGraph, Code::INVALID_HANDLE)
                .with_detail(format!("the stream that the graph is launched on belongs to {devices}")));
        }
        let raw = stream.usable(Operation::LaunchGraph)?;
        if stream.launches_of_capture().is_some() {
            return Err(DeviceError::new(Operation::LaunchGraph, Code::CAPTURE_UNSUPPORTED)
                .with_detail("the stream captures, and CUDA does not capture launches of graphs"));
        }
        self.launches.launch(stream.timeline(), || match &self.work {
            Some(Work::Driver(graph)) => self.context.driver.launch_graph(*graph, raw),
            Some(Work::Other(launch)) => launch(raw),
            None => Ok(()),
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if fork::is_child() {
            // The other library's code must not call the driver here.
            std::mem::forget(self.work.take());
            return;
        }
        let _kept_until_then = self.launches.note_gone();
        match self.work.take() {
            Some(Work::Driver(raw)) => self.context.releases.release(Object::Graph(raw)),
            // Dropped before what was kept for it.
            other => drop(other),
        }
    }
}
