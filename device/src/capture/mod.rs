//! Graph capture: a stream's work is recorded into a graph instead of being run.

mod of_thread;
mod scope;

use std::panic::Location;
use std::sync::Arc;

pub(crate) use scope::Scope;

use crate::context::Context;
use crate::deferred::{self, Deferred};
use crate::driver::{CaptureStatus, Driver, RawGraph, RawStream};
use crate::error::{Code, DeviceError, ErrorKind, Operation, Result};
use crate::fork;
use crate::label::DeviceMismatch;
use crate::launches::Launches;
use crate::orphans::Orphan;
use crate::stream::Stream;
use crate::timeline::Timeline;

/// How often ending a capture is tried again after a failure.
const ATTEMPTS: u32 = 3;

/// A capture in progress on one stream. Dropping it ends the capture, if that was not done, and discards the graph.
///
/// If the driver does not end it now, this is logged, and the capture goes on. It is ended when its stream next begins a capture
/// ([`Stream::begin_capture`]), a device is opened or settled ([`crate::Device::settle`]), or somebody wants to wait for its device. A capture
/// of a per-thread default stream can only be ended on its own thread, or ends with it.
///
/// Ticks order nothing across the border of a capture (invariant T5): recording and waiting through ticks fail on the stream until the
/// capture ends, and its timeline learns nothing meanwhile. The same holds for every stream that joins the capture by waiting
/// for an event recorded in it.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (one, two) = (device.stream()?, device.stream()?);
/// let (a, b) = (device.alloc(4096)?, device.alloc(4096)?);
/// let (fork, join) = (device.create_event(false)?, device.create_event(false)?);
/// let capture = one.begin_capture()?;
/// fork.record(&one)?;
/// two.wait_event(&fork)?; // the second stream joins: what is enqueued there is captured, too
/// one.fill(a, 1, 4096)?;
/// two.fill(b, 2, 4096)?;
/// join.record(&two)?;
/// one.wait_event(&join)?; // every stream that joined comes back before the end
/// let graph = capture.end()?;
/// graph.launch(&two)?;
/// # two.synchronize()?;
/// # device.free(a).and(device.free(b))?;
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Capture {
    stream: Stream,
    scope: Arc<Scope>,
}

impl Capture {
    pub(crate) fn begin(stream: Stream) -> Result<Capture> {
        let (timeline, scope) = (stream.timeline(), Scope::new(true));
        let raw = timeline.usable(Operation::BeginCapture)?;
        if let Some(left) = timeline.capture().filter(|capture| capture.is_left_to(timeline)) {
            end_left(&left);
        }
        if timeline.is_of_thread() {
            of_thread::end_with_thread(&scope)?;
        }
        timeline.begin_capture(&scope, || stream.driver().begin_capture(raw))?;
        Ok(Capture { stream, scope })
    }

    /// Ends the capture and returns the graph; works once. The `Capture` keeps the stream alive until it is dropped.
    ///
    /// # Errors
    /// Errors of the driver, for instance when a call in between broke the capture. The capture has ended all the same, unless
    /// [`Stream::is_capturing`] is true. It then goes on, because the stream is another thread's default stream, on which only that thread
    /// can end it, or because the driver does not end it. This may be called again then.
    ///
    /// ```
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let stream = device.per_thread_stream();
    /// let capture = stream.begin_capture()?;
    /// std::thread::scope(|scope| scope.spawn(|| assert!(capture.end().is_err())).join()).unwrap();
    /// assert!(stream.is_capturing());
    /// let graph = capture.end()?;
    /// assert!(!stream.is_capturing() && capture.end().is_err());
    /// # drop(graph);
    /// # Ok::<(), aquifer_device::DeviceError>(())
    /// ```
    pub fn end(&self) -> Result<Graph> {
        finish(self.stream.timeline(), &self.scope)
    }

    /// Ends a capture that this library began on an adopted stream, before the stream is released, because nobody can end it afterwards. If
    /// the capture goes on, or another library began it, returns it: it is to be given up when the stream is closed, so that no event is
    /// recorded into it.
    pub(crate) fn end_on(stream: &Stream) -> Option<Arc<Scope>> {
        let timeline = stream.timeline();
        let scope = timeline.capture().filter(|capture| capture.began_on(timeline))?;
        if !scope.launches.is_foreign()
            && let Err(error) = finish(timeline, &scope)
        {
            tracing::warn!(%error, "a capture on an adopted stream could not be ended");
        }
        // A capture of another thread's default stream goes on until that thread ends.
        (!timeline.is_of_thread()).then_some(scope)
    }
}

/// Ends a capture in the driver and for all its streams, or leaves both as they are (T5).
fn finish(timeline: &Timeline, scope: &Arc<Scope>) -> Result<Graph> {
    let operation = Operation::EndCapture;
    fork::check(operation)?;
    let alone = scope.ending.lock();
    if scope.is_over() {
        return Err(DeviceError::refused(operation, Code::INVALID_VALUE).with_detail(
            "the capture is over: it was ended before, its stream was released, or its thread has ended",
        ));
    }
    let goes_on = |error: DeviceError| error.with_more("the capture goes on");
    let raw = timeline.usable(operation).map_err(goes_on)?;
    let context = timeline.context();
    let graph = |raw| Graph { raw, launches: scope.launches.clone(), context: context.clone() };
    let ended = context.driver.end_capture(raw).map(graph);
    let mut late = None;
    if ended.is_err() && !is_ended(context, raw, &mut late) {
        return ended.map_err(goes_on);
    }
    let late = late.map(graph);
    scope.close();
    scope.launches.cover();
    drop(alone);
    // Dropping what they kept runs foreign code.
    drop(late);
    ended.inspect_err(|_| drop(scope.launches.note_gone()))
}

/// True if a capture whose end failed has ended all the same, or ends at another attempt, which may give a graph (`late`).
fn is_ended(context: &Context, raw: RawStream, late: &mut Option<RawGraph>) -> bool {
    // What ending it failed with does not tell: a driver may refuse that now, and end it at another attempt.
    let is_over = || match context.driver.capture_status(raw) {
        Ok(status) => status == CaptureStatus::None,
        Err(error) => is_without_captures(&error),
    };
    for _ in 0..ATTEMPTS {
        if is_over() {
            return true;
        }
        if let Ok(raw) = context.driver.end_capture(raw) {
            *late = Some(raw);
            return true;
        }
    }
    is_over()
}

/// Ends a capture that nobody holds, and discards its graph. Returns false if it goes on.
pub(crate) fn end_left(scope: &Arc<Scope>) -> bool {
    if scope.is_over() {
        return true;
    }
    let Some(timeline) = scope.origin() else { return true };
    match finish(&timeline, scope) {
        Ok(graph) => drop(graph),
        Err(error) => tracing::debug!(%error, "a capture that was dropped could not be ended"),
    }
    scope.is_over()
}

/// True if an error of a question about a stream means that the stream or the device is gone, so that nothing captures.
fn is_without_captures(error: &DeviceError) -> bool {
    error.code == Code::INVALID_HANDLE || error.kind == ErrorKind::DeviceLost
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
            self.scope.leave();
            deferred::keep(Deferred::Capture(self.scope.clone()));
        }
    }
}

/// The announcement of a capture that another library began on a stream and will end. While this exists, the stream is treated as if
/// [`Stream::begin_capture`] had been called. Drop it once the capture has ended.
///
/// ```
/// use aquifer_device::{Device, Driver, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let stream = device.stream()?;
/// device.driver().begin_capture(stream.raw())?; // what another library does
/// let announced = stream.announce_capture()?;
/// assert!(stream.is_capturing());
/// let graph = device.driver().end_capture(stream.raw())?;
/// drop(announced);
/// # device.driver().destroy_graph(graph)?;
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
#[must_use = "the capture is taken as over when this is dropped"]
pub struct AnnouncedCapture {
    scope: Arc<Scope>,
}

const NOT_ANNOUNCED: &str = "the capture was not announced";

impl AnnouncedCapture {
    pub(crate) fn announce(stream: &Stream) -> Result<AnnouncedCapture> {
        let operation = Operation::CaptureStatus;
        let scope = Scope::new(false);
        let raw = stream.timeline().usable(operation)?;
        if stream.timeline().is_of_thread() {
            of_thread::end_with_thread(&scope)?;
        }
        stream.timeline().announce_capture(&scope, || match stream.driver().capture_status(raw)? {
            CaptureStatus::Active => Ok(()),
            CaptureStatus::Invalidated => Err(DeviceError::refused(operation, Code::CAPTURE_INVALIDATED)
                .of_request(NOT_ANNOUNCED)
                .with_detail("an earlier call broke the capture that is announced")),
            CaptureStatus::None => Err(DeviceError::refused(operation, Code::INVALID_VALUE)
                .of_request(NOT_ANNOUNCED)
                .with_detail("the stream does not capture: announce a capture after it began")),
        })?;
        Ok(AnnouncedCapture { scope })
    }
}

impl Drop for AnnouncedCapture {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.scope.close();
    }
}

/// A captured graph, which can be launched any number of times. It uses fixed addresses: keep the memory that it uses until its last
/// launch is done.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (stream, ptr) = (device.stream()?, device.alloc(4096)?);
/// let capture = stream.begin_capture()?;
/// stream.fill(ptr, 7, 4096)?; // captured, not run
/// let graph = capture.end()?;
/// for _ in 0..3 {
///     graph.launch(&stream)?;
/// }
/// stream.synchronize()?;
/// device.free(ptr)?;
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Graph {
    raw: RawGraph,
    launches: Arc<Launches>,
    context: Arc<Context>,
}

impl Graph {
    /// Enqueues the graph's work on a stream. It comes after earlier uses of the memory that its capture allocated
    /// ([`Launches::come_after`]), and after launches of other graphs that use the same memory ([`Launches::keep_order`]). To order it with
    /// other streams' work on other buffers, take a turn with them around this call (`aquifer_allocator::Turn`).
    ///
    /// # Errors
    /// When the stream belongs to another device, or captures: CUDA does not capture launches of graphs. Errors of the driver.
    #[track_caller]
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _place = stream.called_from(Location::caller());
        if stream.device_id() != self.context.device_id {
            let devices = DeviceMismatch::between(stream.device_id(), self.context.device_id);
            return Err(DeviceError::refused(Operation::LaunchGraph, Code::INVALID_HANDLE)
                .with_detail(format!("the stream that the graph is launched on belongs to {devices}")));
        }
        let raw = stream.timeline().usable(Operation::LaunchGraph)?;
        if stream.launches_of_capture().is_some() {
            return Err(DeviceError::new(Operation::LaunchGraph, Code::CAPTURE_UNSUPPORTED)
                .with_detail("the stream captures, and CUDA does not capture launches of graphs"));
        }
        self.launches.launch(stream, || self.context.driver.launch_graph(self.raw, raw))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        let _kept_until_then = self.launches.note_gone();
        self.context.orphans.give_back(Orphan::Graph(self.raw));
    }
}
