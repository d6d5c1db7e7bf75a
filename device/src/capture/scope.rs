//! The scope of one capture, to which its streams and the events recorded in it refer.
//!
//! Invariant: a scope is over once the driver has ended the capture, or no call can end it any
//! more. Until then all of its streams count as capturing (T5), afterwards none does. It keeps its
//! streams alive until then, because CUDA does not specify the fate of a capture whose stream is
//! destroyed.

use std::any::Any;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::capturing_streams::CapturingStreams;
use crate::driver::{CaptureStatus, Driver, RawGraph, RawStream};
use crate::error::{Code, DeviceError, ErrorKind, Operation, Result};
use crate::fork::{self, Mutex as Leaf};
use crate::launches::{GraphOf, Launches};
use crate::release::Object;
use crate::sync::Mutex;
use crate::thread_end::RunningThread;
use crate::timeline::Timeline;
use crate::unfinished::CleanUp;

/// A handle of a stream, which keeps the stream from being destroyed.
pub(crate) type StreamHandle = Arc<dyn Any + Send + Sync>;

/// A stream that takes part in a capture.
pub(crate) type Member = (Arc<Timeline>, StreamHandle);

/// A capture.
#[derive(Debug)]
pub(crate) struct Scope {
    /// Launches of the graph that the work belongs to.
    pub(crate) launches: Arc<Launches>,
    /// True if another library began the capture, and ends it.
    pub(crate) announced: bool,
    /// Held while the driver ends the capture, so that a later capture on the stream is not ended
    /// in its place, and that no body begins meanwhile. Taken before locks of timelines.
    ending: Mutex<()>,
    /// The capturing streams that its own are among.
    capturing: Arc<CapturingStreams>,
    /// Number of handles of the device that callers have.
    handles: Arc<AtomicUsize>,
    /// The thread that alone can end the capture, if it began on that thread's default stream.
    thread: Option<RunningThread>,
    /// A leaf, below the lock of a timeline.
    members: Leaf<Members>,
}

#[derive(Debug, Default)]
struct Members {
    over: bool,
    /// If this makes a body of a conditional node, and until it is over, the stream with the node,
    /// and its capture.
    around: Option<(Member, Arc<Scope>)>,
    /// Number of bodies of conditional nodes that are being captured.
    bodies: usize,
    /// True if the capture goes on although it was dropped.
    abandoned: bool,
    /// The driver's number of the capture, once it has begun, and if it has one.
    number: Option<u64>,
    /// Its streams: the one that it began on, and those that joined by waiting for one of its
    /// events.
    streams: Vec<Member>,
}

impl Scope {
    /// The scope of a capture on a stream that the calling thread can use.
    pub(super) fn new(timeline: &Timeline, graph: GraphOf) -> Arc<Scope> {
        Scope::with(timeline, Launches::new(graph), graph != GraphOf::Ours, None)
    }

    /// The scope of a capture that another library began, of a body of a conditional node. `None`
    /// if the stream with the node does not capture.
    pub(super) fn of_body(timeline: &Timeline, with_node: Member) -> Option<Arc<Scope>> {
        let around = with_node.0.capture()?;
        let alone = around.ending.lock();
        let mut members = around.members.lock();
        if members.over {
            return None;
        }
        members.bodies += 1;
        drop((members, alone));
        Some(Scope::with(timeline, around.launches.clone(), true, Some((with_node, around))))
    }

    fn with(
        timeline: &Timeline,
        launches: Arc<Launches>,
        announced: bool,
        around: Option<(Member, Arc<Scope>)>,
    ) -> Arc<Scope> {
        let thread = timeline.is_per_thread().then(RunningThread::current);
        let (capturing, handles) = (timeline.context().capturing.clone(), timeline.context().handles.clone());
        let (ending, members) = (Mutex::new(()), Leaf::new(Members { around, ..Members::default() }));
        Arc::new(Scope { launches, announced, ending, capturing, handles, thread, members })
    }

    /// Adds a stream. Returns false if the capture is over already.
    pub(crate) fn join(&self, timeline: &Arc<Timeline>, handle: StreamHandle) -> bool {
        let mut members = self.members.lock();
        if !members.over {
            members.streams.push((timeline.clone(), handle));
        }
        !members.over
    }

    /// Makes launches of the graph come after everything that was enqueued on its streams so far.
    pub(crate) fn come_after_members(&self) {
        let ticks: Vec<_> = self.members.lock().streams.iter().map(|(stream, _)| stream.tick()).collect();
        ticks.into_iter().for_each(|tick| self.launches.come_after(tick));
        self.around().iter().for_each(|(_, around)| around.come_after_members());
    }

    /// If this makes a body of a conditional node, the stream with the node, and its capture.
    pub(crate) fn around(&self) -> Option<(Member, Arc<Scope>)> {
        self.members.lock().around.clone()
    }

    /// True if the capture is over.
    pub(crate) fn is_over(&self) -> bool {
        self.members.lock().over
    }

    /// True if the capture began on this stream.
    pub(crate) fn began_on(&self, timeline: &Timeline) -> bool {
        self.members.lock().streams.first().is_some_and(|(first, _)| ptr::eq(&raw const **first, timeline))
    }

    pub(crate) fn number(&self) -> Option<u64> {
        self.members.lock().number
    }

    pub(crate) fn set_number(&self, number: Option<u64>) {
        self.members.lock().number = number;
    }

    /// Notes that the capture goes on although it was dropped.
    pub(super) fn abandon(&self) {
        self.members.lock().abandoned = true;
    }

    /// Ends the capture now if it was dropped before it ended: its graph cannot be launched, so
    /// work must not go there. Does nothing for other captures.
    ///
    /// # Errors
    /// When the capture goes on, with the reason.
    pub(crate) fn end_if_abandoned(self: &Arc<Self>, operation: Operation) -> Result<()> {
        self.close_if_ended();
        if !self.members.lock().abandoned {
            return Ok(());
        }
        self.end_abandoned().map_err(|error| {
            let detail = format!(
                "the stream is part of a capture that was dropped before it ended, which would lose the work, and the \
                 capture cannot be ended now ({error}): try again, or call `Device::settle` on the thread that began it",
            );
            DeviceError::in_capture(operation, detail).of_request("nothing was enqueued")
        })
    }

    /// Ends the capture, in the driver by `end` and for all its streams, or leaves both as they are
    /// (T5). Returns the graph.
    pub(crate) fn end<G>(self: &Arc<Self>, timeline: &Timeline, end: impl FnOnce(RawStream) -> Result<G>) -> Result<G> {
        self.end_and(timeline, false, end)
    }

    /// As [`Scope::end`], for a graph that the caller destroys at once: it counts as gone before
    /// the capture counts as over.
    pub(crate) fn end_to_discard(self: &Arc<Self>, timeline: &Timeline) -> Result<RawGraph> {
        self.end_and(timeline, true, |raw| timeline.context().driver.end_capture(raw))
    }

    fn end_and<G>(
        self: &Arc<Self>,
        timeline: &Timeline,
        discards: bool,
        end: impl FnOnce(RawStream) -> Result<G>,
    ) -> Result<G> {
        let operation = Operation::EndCapture;
        fork::check(operation)?;
        let alone = self.ending.lock();
        if self.is_over() {
            return Err(DeviceError::refused(operation, Code::INVALID_VALUE).with_detail(
                "the capture is over: it was ended before, its stream was released, or its thread has ended",
            ));
        }
        let goes_on = |error: DeviceError| error.with_more("the capture goes on");
        if self.members.lock().bodies > 0 {
            return Err(goes_on(DeviceError::refused(operation, Code::CAPTURE_UNJOINED).with_detail(
                "a body of a conditional node of the graph is being captured: end that, and drop what `Stream::announce_body` \
                 returned",
            )));
        }
        let raw = timeline.usable(operation).map_err(goes_on)?;
        let driver = &timeline.context().driver;
        let broken_by = self.capturing.refused();
        let ended = end(raw).map_err(|error| match broken_by {
            Some(call) if error.code == Code::CAPTURE_INVALIDATED => {
                error.with_more(format_args!("the call that broke it: {call}"))
            }
            None if error.code == Code::CAPTURE_INVALIDATED => error.with_more("no call of this library broke it"),
            _ if error.code == Code::CAPTURE_UNJOINED => error.with_more(
                "a stream that joined the capture goes on: have the first stream wait for an event recorded on it",
            ),
            _ => error,
        });
        if let Err(error) = &ended {
            // The error does not tell: a capture that failed to end as it should has mostly ended
            // nevertheless.
            let is_over = match driver.capture_status(raw) {
                Ok(status) => status == CaptureStatus::None,
                Err(error) => error.code == Code::INVALID_HANDLE || error.kind == ErrorKind::DeviceLost,
            };
            if !is_over {
                return Err(goes_on(error.clone()));
            }
        }
        let kept = if discards || ended.is_err() { self.launches.note_gone() } else { Vec::new() };
        let streams = self.close();
        self.launches.cover();
        drop(alone);
        // Dropping streams, and the objects that the launches keep, runs code of callers.
        drop((streams, kept));
        ended
    }

    /// Makes the capture over for all its streams. Makes no driver call. Returns the streams, to be
    /// dropped where no lock is held.
    #[must_use]
    pub(super) fn close(self: &Arc<Self>) -> Vec<Member> {
        self.close_once().unwrap_or_default()
    }

    /// As [`Scope::close`]; `None` if the capture is over already.
    fn close_once(self: &Arc<Self>) -> Option<Vec<Member>> {
        let mut members = self.members.lock();
        if std::mem::replace(&mut members.over, true) {
            return None;
        }
        let streams = std::mem::take(&mut members.streams);
        drop(members);
        streams.iter().for_each(|(stream, _)| stream.end_capture(self));
        Some(streams)
    }

    /// Makes a capture over that another library has ended. Its announcement may live on: a library
    /// may not tell of a capture that failed.
    fn close_if_ended(self: &Arc<Self>) {
        if !self.announced {
            return;
        }
        let origin = self.members.lock().streams.first().map(|(first, _)| first.clone());
        let Some(timeline) = origin else { return };
        let (operation, driver) = (Operation::CaptureStatus, &timeline.context().driver);
        let is_over = timeline.usable(operation).and_then(|raw| match self.number() {
            // Another capture may have begun since.
            Some(_) => Ok(driver.capture_number(raw)? != self.number()),
            None => Ok(driver.capture_status(raw)? == CaptureStatus::None),
        });
        if matches!(is_over, Ok(true)) {
            drop(self.close_announced());
        }
    }

    /// As [`Scope::close`], for an announced capture. What the streams of a body did stays a part
    /// of the graph, and the node's stream goes on after it.
    #[must_use]
    pub(super) fn close_announced(self: &Arc<Self>) -> Vec<Member> {
        let Some((with_node, around)) = self.around() else { return self.close() };
        self.come_after_members();
        let first = self.members.lock().streams.first().map(|(first, _)| first.clone());
        if let Some(first) = first.filter(|_| !around.is_over()) {
            with_node.0.come_after_captured(&first);
        }
        let Some(streams) = self.close_once() else { return Vec::new() };
        self.launches.note_body(streams.iter().map(|(stream, _)| stream.id()));
        around.members.lock().bodies -= 1;
        self.members.lock().around = None;
        streams
    }

    /// As [`Scope::close`], for a capture that ended elsewhere, or that no call can end any more:
    /// it gives no graph here. The graph of a body goes on.
    pub(crate) fn give_up(self: &Arc<Self>) {
        if self.around().is_some() {
            return drop(self.close_announced());
        }
        let alone = self.ending.lock();
        if self.is_over() {
            return;
        }
        // Another library may have made a graph of an announced capture.
        let kept = if self.announced { Vec::new() } else { self.launches.note_gone() };
        let streams = self.close();
        drop(alone);
        // Dropping these runs code of callers.
        drop((kept, streams));
    }
}

impl Scope {
    /// Ends a capture that was dropped and that the driver did not end, and discards its graph.
    ///
    /// # Errors
    /// When the capture goes on.
    fn end_abandoned(self: &Arc<Self>) -> Result<()> {
        let origin = self.members.lock().streams.first().map(|(first, _)| first.clone());
        let Some(timeline) = origin else { return Ok(()) };
        if self.thread.as_ref().is_some_and(RunningThread::has_ended) {
            self.give_up();
            return Ok(());
        }
        match self.end_to_discard(&timeline) {
            Ok(raw) => timeline.context().releases.release(Object::Graph(raw)),
            Err(error) if self.is_over() => tracing::debug!(%error, "a capture that was dropped broke before"),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// A capture that another library began and ends, or that was dropped and that the driver did not
/// end.
#[derive(Debug)]
pub(super) struct Unended(pub(super) Arc<Scope>);

impl CleanUp for Unended {
    fn captures_in(&self) -> Option<Arc<CapturingStreams>> {
        Some(self.0.capturing.clone())
    }

    fn has_callers(&self) -> bool {
        self.0.handles.load(Ordering::Acquire) > 0
    }

    fn finish(&self) -> bool {
        let Unended(scope) = self;
        if scope.announced {
            scope.close_if_ended();
            return scope.is_over();
        }
        let ended = scope.end_abandoned();
        ended.inspect_err(|error| tracing::debug!(%error, "a capture that was dropped could not be ended")).is_ok()
    }
}
