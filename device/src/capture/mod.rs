//! Graph capture: a stream's work is recorded into a graph instead of being run.

pub(crate) mod left;
mod scope;

use std::panic::Location;
use std::sync::Arc;

pub(crate) use scope::Scope;

use crate::context::Context;
use crate::driver::{CaptureStatus, Driver, RawGraph, RawStream};
use crate::error::{Code, DeviceError, ErrorKind, Operation, Result};
use crate::label::DeviceMismatch;
use crate::launches::Launches;
use crate::stream::Stream;

/// How often ending a capture is tried again after a failure.
const ATTEMPTS: u32 = 3;

/// A capture in progress on one stream. Dropping it ends the capture, if that was not done, and discards the graph.
///
/// A capture of a per-thread default stream can only be ended on its own thread. If it is dropped on another thread, this is logged, and
/// the capture goes on until its thread begins another capture there ([`Stream::begin_capture`]), or ends.
///
/// Ticks order nothing across the border of a capture (invariant T5): recording and waiting through ticks fail on the stream until the
/// capture ends, and its timeline learns nothing meanwhile. The same holds for every stream that joins the capture by waiting
/// for an event recorded in it.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (one, two) = (device.create_stream()?, device.create_stream()?);
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
            drop(Capture { stream: stream.clone(), scope: left });
        }
        if timeline.is_of_thread() {
            left::end_with_thread(&scope)?;
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
        self.finish().map(|raw| self.graph(raw))
    }

    fn graph(&self, raw: RawGraph) -> Graph {
        Graph { raw, launches: self.scope.launches.clone(), context: self.stream.context().clone() }
    }

    /// Ends the capture in the driver and for all its streams, or leaves both as they are (T5).
    fn finish(&self) -> Result<RawGraph> {
        let alone = self.scope.ending.lock();
        let operation = Operation::EndCapture;
        if self.scope.is_over() {
            return Err(DeviceError::new(operation, Code::INVALID_VALUE).with_detail(
                "the capture is over: it was ended before, its stream was released, or its thread has ended",
            ));
        }
        let goes_on = |error: DeviceError| error.with_more("the capture goes on");
        let raw = self.stream.timeline().usable(operation).map_err(goes_on)?;
        let graph = self.stream.driver().end_capture(raw);
        let mut late = None;
        if graph.is_err() && !self.is_ended(raw, &mut late) {
            return graph.map_err(goes_on);
        }
        self.scope.close();
        self.scope.launches.cover();
        drop(alone);
        // Dropping what they kept runs foreign code.
        drop(late);
        graph.inspect_err(|_| drop(self.scope.launches.note_gone()))
    }

    /// True if a capture whose end failed has ended all the same, or ends at another attempt, which may give a graph (`late`).
    fn is_ended(&self, raw: RawStream, late: &mut Option<Graph>) -> bool {
        let driver = self.stream.driver();
        // What ending it failed with does not tell: a driver may refuse that now, and end it at another attempt.
        let is_over = || match driver.capture_status(raw) {
            Ok(status) => status == CaptureStatus::None,
            Err(error) => is_without_captures(&error),
        };
        for _ in 0..ATTEMPTS {
            if is_over() {
                return true;
            }
            if let Ok(raw) = driver.end_capture(raw) {
                *late = Some(self.graph(raw));
                return true;
            }
        }
        is_over()
    }

    /// Ends a capture that this library began on an adopted stream, before the stream is released, because nobody can end it afterwards. If
    /// the capture goes on, or another library began it, returns it: it is to be given up when the stream is closed, so that no event is
    /// recorded into it.
    pub(crate) fn end_on(stream: &Stream) -> Option<Arc<Scope>> {
        let timeline = stream.timeline();
        let scope = timeline.capture().filter(|capture| capture.began_on(timeline))?;
        if !scope.launches.is_foreign() {
            drop(Capture { stream: stream.clone(), scope: scope.clone() });
        }
        // A capture of another thread's default stream goes on until that thread ends.
        (!timeline.is_of_thread()).then_some(scope)
    }
}

/// True if an error of a question about a stream means that the stream or the device is gone, so that nothing captures.
fn is_without_captures(error: &DeviceError) -> bool {
    error.code == Code::INVALID_HANDLE || error.kind == ErrorKind::DeviceLost
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.scope.is_over() {
            return;
        }
        match self.finish() {
            Ok(raw) => drop(self.graph(raw)),
            Err(error) => {
                self.scope.leave();
                tracing::warn!(%error, "a capture that was dropped could not be ended");
            }
        }
    }
}

/// The announcement of a capture that another library began on a stream and will end. While this exists, the stream is treated as if
/// [`Stream::begin_capture`] had been called. Drop it once the capture has ended.
///
/// ```
/// use aquifer_device::{Device, Driver, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let stream = device.create_stream()?;
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

impl AnnouncedCapture {
    pub(crate) fn announce(stream: &Stream) -> Result<AnnouncedCapture> {
        let operation = Operation::CaptureStatus;
        let scope = Scope::new(false);
        let raw = stream.timeline().usable(operation)?;
        if stream.timeline().is_of_thread() {
            left::end_with_thread(&scope)?;
        }
        stream.timeline().announce_capture(&scope, || match stream.driver().capture_status(raw)? {
            CaptureStatus::Active => Ok(()),
            CaptureStatus::Invalidated => Err(DeviceError::new(operation, Code::CAPTURE_INVALIDATED)
                .with_detail("an earlier call broke the capture that is announced")),
            CaptureStatus::None => Err(DeviceError::new(operation, Code::INVALID_VALUE)
                .with_detail("the stream does not capture: announce a capture after it began")),
        })?;
        Ok(AnnouncedCapture { scope })
    }
}

impl Drop for AnnouncedCapture {
    fn drop(&mut self) {
        self.scope.close();
    }
}

/// A captured graph, which can be launched any number of times. It uses fixed addresses: keep the memory that it uses until its last
/// launch is done.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (stream, ptr) = (device.create_stream()?, device.alloc(4096)?);
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
    /// When the stream belongs to another device; errors of the driver.
    #[track_caller]
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let _place = stream.called_from(Location::caller());
        if stream.device_id() != self.context.device_id {
            let devices = DeviceMismatch::between(stream.device_id(), self.context.device_id);
            return Err(DeviceError::new(Operation::LaunchGraph, Code::INVALID_HANDLE)
                .with_detail(format!("the stream that the graph is launched on belongs to {devices}")));
        }
        let raw = stream.timeline().usable(Operation::LaunchGraph)?;
        self.launches.launch(stream, || self.context.driver.launch_graph(self.raw, raw))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _kept_until_then = self.launches.note_gone();
        if let Err(error) = self.context.driver.destroy_graph(self.raw) {
            tracing::debug!(%error, "a graph could not be destroyed");
        }
    }
}
