//! Graph capture: a stream's work is recorded into a graph instead of being run.

use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::context::Context;
use crate::driver::{CaptureStatus, Driver, RawGraph, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::label::DeviceMismatch;
use crate::launches::Launches;
use crate::stream::Stream;
use crate::timeline::Timeline;

/// How often a capture that could not be ended is ended once more.
const ATTEMPTS: u32 = 3;

/// A capture in progress on one stream. Dropping it ends the capture and throws the graph away.
///
/// Ticks order nothing across its border (invariant T5): recording and waiting through ticks fail on the stream until the
/// capture ends, and its timeline learns nothing meanwhile. The same goes for every stream that joins the capture by waiting
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
    context: Arc<Context>,
    scope: Arc<Scope>,
    ended: bool,
}

impl Capture {
    pub(crate) fn begin(stream: Stream, context: Arc<Context>) -> Result<Capture> {
        let scope = Scope::new(true);
        let raw = stream.timeline().usable(Operation::BeginCapture)?;
        stream.timeline().begin_capture(&scope, || context.driver.begin_capture(raw))?;
        Ok(Capture { stream, context, scope, ended: false })
    }

    /// Ends the capture and returns the graph.
    ///
    /// # Errors
    /// Those of the driver, for instance when a call in between broke the capture. It has ended all the same.
    pub fn end(mut self) -> Result<Graph> {
        let raw = self.finish()?;
        Ok(Graph { raw, launches: self.scope.launches.clone(), context: self.context.clone() })
    }

    fn finish(&mut self) -> Result<RawGraph> {
        self.ended = true;
        let graph = match self.stream.timeline().usable(Operation::EndCapture) {
            Ok(raw) => self.context.driver.end_capture(raw).inspect_err(|_| self.abandon(raw)),
            Err(error) => Err(error),
        };
        self.stream.timeline().end_capture(&self.scope);
        self.scope.end().iter().for_each(|joined| joined.end_capture(&self.scope));
        self.scope.launches.cover();
        graph.inspect_err(|_| drop(self.scope.launches.note_gone()))
    }
}

impl Capture {
    /// Ends a capture that could not be ended, in case it goes on: whatever is enqueued later would become part of it.
    fn abandon(&self, raw: RawStream) {
        let driver = &self.context.driver;
        for _ in 0..ATTEMPTS {
            if let Ok(CaptureStatus::None) = driver.capture_status(raw) {
                return;
            }
            if let Ok(raw) = driver.end_capture(raw) {
                drop(Graph { raw, launches: self.scope.launches.clone(), context: self.context.clone() });
            }
        }
        tracing::warn!("a capture could not be ended; what is enqueued on its stream is not run");
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        match self.finish() {
            Ok(raw) => drop(Graph { raw, launches: self.scope.launches.clone(), context: self.context.clone() }),
            Err(error) => tracing::warn!(%error, "a capture that was dropped could not be ended"),
        }
    }
}

/// A capture that somebody else began on a stream of ours and will end, made known: while this lives, the stream is treated as if
/// [`Stream::begin_capture`] had been called. Drop it once the capture ended.
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
    stream: Stream,
    scope: Arc<Scope>,
}

impl AnnouncedCapture {
    pub(crate) fn announce(stream: Stream, context: &Context) -> Result<AnnouncedCapture> {
        let operation = Operation::CaptureStatus;
        let scope = Scope::new(false);
        let raw = stream.timeline().usable(operation)?;
        stream.timeline().begin_capture(&scope, || match context.driver.capture_status(raw)? {
            CaptureStatus::Active => Ok(()),
            CaptureStatus::Invalidated => Err(DeviceError::new(operation, Code::CAPTURE_INVALIDATED)
                .with_detail("an earlier call broke the capture that is announced")),
            CaptureStatus::None => Err(DeviceError::new(operation, Code::INVALID_VALUE)
                .with_detail("the stream does not capture: announce a capture after it began")),
        })?;
        Ok(AnnouncedCapture { stream, scope })
    }
}

impl Drop for AnnouncedCapture {
    fn drop(&mut self) {
        self.stream.timeline().end_capture(&self.scope);
        self.scope.end().iter().for_each(|joined| joined.end_capture(&self.scope));
    }
}

/// One capture, as its streams and the events recorded in it refer to it.
///
/// Its lock is a leaf, below that of a timeline.
#[derive(Debug)]
pub(crate) struct Scope {
    /// Those of the graph that comes of it.
    pub(crate) launches: Arc<Launches>,
    members: Mutex<Members>,
}

#[derive(Debug, Default)]
struct Members {
    over: bool,
    /// Streams that joined by waiting for an event of the capture.
    joined: Vec<Arc<Timeline>>,
}

impl Scope {
    /// Of a capture that is ours, or one that somebody else began.
    fn new(ours: bool) -> Arc<Scope> {
        Arc::new(Scope { launches: Launches::new(ours), members: Mutex::default() })
    }

    /// Adds a stream; false when the capture is over already.
    pub(crate) fn join(&self, timeline: &Arc<Timeline>) -> bool {
        let mut members = self.members.lock();
        if !members.over {
            members.joined.push(timeline.clone());
        }
        !members.over
    }

    /// Whether the capture has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.members.lock().over
    }

    /// Closes the scope and returns the streams that joined.
    fn end(&self) -> Vec<Arc<Timeline>> {
        let mut members = self.members.lock();
        members.over = true;
        mem::take(&mut members.joined)
    }
}

/// A captured graph, ready to launch, as often as one likes. It uses fixed addresses: keep what it uses until its last launch is done.
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
    /// Enqueues the graph's work on a stream. It comes after what memory that its capture allocated was used for before
    /// ([`Launches::come_after`]), and after launches of other graphs that use the same memory ([`Launches::keep_order`]). What orders
    /// it with other streams' work on other buffers is a turn with them around this call (`aquifer_allocator::Turn`).
    ///
    /// # Errors
    /// When the stream belongs to another device, and those of the driver.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
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
