//! Graph capture, and refusing what would break one.
//!
//! Captures begin in the relaxed mode. In the other modes, anybody's potentially unsafe call on this thread, or in the whole process,
//! would break the capture. It would also have to end on the thread on which it began, so that a [`crate::Capture`] could not be dropped
//! on another one. The calls made here are relaxed anyway. A thread's default stream cannot be named on other threads, so its capture can
//! only be ended on its own thread.

use std::ffi::c_uint;
use std::ptr;

use crate::fork::Mutex;
use cudarc::driver::sys::{CUgraph, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus as Status};

use super::context::Core;
use super::driver::CudaDriver;
use super::handles::{Kind, Object};
use super::installation::{check, check_function};
use super::memory::bad_value;
use super::raw::{handle, pointer};
use super::streams::LiveStream;
use crate::driver::{CaptureStatus, RawGraph, RawStream};
use crate::error::{Code, DeviceError, ErrorKind, Operation, Result};

/// Graphs, made executable. Each has a lock that is held while it is launched, because a graph must not be used by two calls at a time (CUDA
/// driver API, “Graph object thread safety”). It is a leaf.
#[derive(Debug)]
pub(super) enum Graphs {}

impl Kind for Graphs {
    const NAME: &'static str = "graph";
    const DESTROY: Operation = Operation::DestroyGraph;
    type Extra = Mutex<()>;

    unsafe fn destroy(core: &Core, raw: u64) -> Result<()> {
        match core.functions().cuGraphExecDestroy {
            // SAFETY: the caller vouches for the graph (F1).
            Some(destroy) => check_function(Self::DESTROY, "cuGraphExecDestroy", unsafe { destroy(pointer(raw)) }),
            // Nothing was created then.
            None => Ok(()),
        }
    }
}

/// Destroys a captured graph, from which an executable one may have been made.
///
/// # Safety
/// `raw` must be a live graph that nobody else uses.
unsafe fn destroy_captured(core: &Core, raw: u64) -> Result<()> {
    match core.functions().cuGraphDestroy {
        // SAFETY: the caller vouches for the graph (F1).
        Some(destroy) => check(Operation::DestroyGraph, unsafe { destroy(pointer(raw)) }),
        None => Ok(()),
    }
}

/// Whether work of the stream is captured.
///
/// # Safety
/// The stream must live.
unsafe fn status(core: &Core, operation: Operation, stream: CUstream) -> Result<CaptureStatus> {
    let functions = core.functions();
    let _current = core.enter(operation)?;
    let mut status: c_uint = 0;
    let code = match functions.cuStreamGetCaptureInfo_v2 {
        Some(ask) => {
            let (id, graph, dependencies, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
            // SAFETY: the number outlives the call, the caller vouches for the stream (F1), and what is null is not asked for.
            unsafe { ask(stream, &raw mut status, id, graph, dependencies, count) }
        }
        // SAFETY: the number outlives the call, and the caller vouches for the stream (F1).
        None => unsafe { (functions.cuStreamIsCapturing)(stream, &raw mut status) },
    };
    check(Operation::CaptureStatus, code)?;
    Ok(match status {
        status if status == Status::CU_STREAM_CAPTURE_STATUS_NONE as c_uint => CaptureStatus::None,
        status if status == Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as c_uint => CaptureStatus::Active,
        _ => CaptureStatus::Invalidated,
    })
}

/// Ends the capture of a stream that is about to be destroyed, and destroys the captured graph. The CUDA documentation does not
/// specify the fate of a capture whose stream is destroyed; if the capture went on, the context could not be waited for any more.
///
/// # Safety
/// The stream must live, and nobody else may use it.
pub(super) unsafe fn end_before_destruction(core: &Core, stream: CUstream) -> Result<()> {
    let operation = Operation::EndCapture;
    // SAFETY: passed on to the caller.
    let is_over = || unsafe { status(core, operation, stream) }.map(|status| status == CaptureStatus::None);
    if is_over()? {
        return Ok(());
    }
    // Without the function nothing was captured here.
    let Some(end) = core.functions().cuStreamEndCapture else { return Ok(()) };
    let mut graph: CUgraph = ptr::null_mut();
    // SAFETY: the handle outlives the call, and the caller vouches for the stream (F1).
    let ended = check(operation, unsafe { end(stream, &raw mut graph) });
    if !graph.is_null() {
        // SAFETY: the graph was just captured, and nobody else knows it.
        unsafe { core.destroy_or_keep("captured graph", handle(graph), destroy_captured) };
    }
    // A capture that failed to end as it should has mostly ended all the same.
    if is_over()? { Ok(()) } else { ended }
}

/// Why the driver refuses to wait for the context although no stream is known to capture.
const UNANNOUNCED: &str = "somebody else captures a stream of the device's context and did not say so, and waiting has broken the capture; \
                           announce captures with `Stream::announce_capture` or `Allocator::capture` when they begin";

fn refuse(operation: Operation, detail: impl Into<String>) -> DeviceError {
    DeviceError::refused(operation, Code::CAPTURE_UNSUPPORTED).with_detail(detail)
}

impl CudaDriver {
    pub(super) fn status(&self, operation: Operation, stream: CUstream) -> Result<CaptureStatus> {
        // SAFETY: the stream lives (L1).
        unsafe { status(&self.core, operation, stream) }
    }

    pub(super) fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let stream = self.stream(Operation::CaptureStatus, stream)?;
        self.status(Operation::CaptureStatus, stream.raw)
    }

    /// Refuses a call that would break the stream's capture, or not do what it promises, because of `reason`.
    pub(super) fn forbid_capture(&self, operation: Operation, stream: &LiveStream, reason: &str) -> Result<()> {
        match self.status(operation, stream.raw)? {
            CaptureStatus::None => Ok(()),
            CaptureStatus::Active => Err(refuse(operation, format!("the stream captures: {reason}"))),
            CaptureStatus::Invalidated => Err(DeviceError::refused(operation, Code::CAPTURE_INVALIDATED)
                .with_detail("an earlier call broke the stream's capture, which must be ended first")),
        }
    }

    /// Refuses a call that waits for the whole device while a stream of the context is known to capture.
    pub(super) fn forbid_device_wait(&self, operation: Operation) -> Result<()> {
        if !self.core.ongoing.any() {
            return Ok(());
        }
        Err(refuse(operation, "this waits for the device, which is not possible while a stream captures"))
    }

    pub(super) fn synchronize(&self) -> Result<()> {
        let operation = Operation::Synchronize;
        self.forbid_device_wait(operation)?;
        self.core.destroy_left();
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the context is current (C1, F1).
        let waited = check(operation, unsafe { (self.core.functions().cuCtxSynchronize)() });
        waited.map_err(|error| match error.kind {
            ErrorKind::Capture => error.with_detail(UNANNOUNCED),
            _ => error,
        })
    }

    pub(super) fn begin_capture(&self, stream: RawStream) -> Result<()> {
        let operation = Operation::BeginCapture;
        let functions = self.core.functions();
        let begin = self.optional(operation, functions.cuStreamBeginCapture_v2)?;
        self.optional(operation, functions.cuStreamEndCapture)?;
        self.optional(operation, functions.cuGraphInstantiateWithFlags)?;
        self.optional(operation, functions.cuGraphLaunch)?;
        self.optional(operation, functions.cuGraphExecDestroy)?;
        self.optional(operation, functions.cuGraphDestroy)?;
        let live = self.stream(operation, stream)?;
        if stream.is_legacy() {
            return Err(refuse(operation, "the legacy default stream cannot capture"));
        }
        self.forbid_capture(operation, &live, "it cannot begin another capture")?;
        let _current = self.core.enter(operation)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: the stream lives (L1, F1).
        check(operation, unsafe { begin(live.raw, mode) })?;
        self.core.ongoing.begin(stream);
        Ok(())
    }

    pub(super) fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        let operation = Operation::EndCapture;
        let end = self.optional(operation, self.core.functions().cuStreamEndCapture)?;
        let live = self.stream(operation, stream)?;
        if self.status(operation, live.raw)? == CaptureStatus::None {
            self.core.ongoing.end(stream);
            return Err(bad_value(operation, "the stream does not capture"));
        }
        let _current = self.core.enter(operation)?;
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the handle outlives the call, and the stream lives (L1, F1).
        let ended = check(operation, unsafe { end(live.raw, &raw mut graph) });
        // A capture that failed to end as it should has mostly ended all the same.
        if ended.is_ok() || matches!(self.status(operation, live.raw), Ok(CaptureStatus::None)) {
            self.core.ongoing.end(stream);
        }
        ended?;
        if graph.is_null() {
            return Err(DeviceError::new(operation, Code::CAPTURE_INVALIDATED)
                .with_detail("an earlier call broke the capture; it is gone"));
        }
        self.instantiate(graph)
    }

    /// Makes a captured graph executable. What was captured is not needed after that.
    fn instantiate(&self, graph: CUgraph) -> Result<RawGraph> {
        let operation = Operation::EndCapture;
        let functions = self.core.functions();
        let instantiate = self.optional(operation, functions.cuGraphInstantiateWithFlags)?;
        let _current = self.core.enter_relaxed(operation)?;
        let mut executable = ptr::null_mut();
        // SAFETY: the handle outlives the call, and the graph was just captured (F1); 0 asks for nothing special.
        let code = unsafe { instantiate(&raw mut executable, graph, 0) };
        let made = check_function(operation, "cuGraphInstantiateWithFlags", code);
        // SAFETY: the graph was just captured, and nobody else knows it.
        unsafe { self.core.destroy_or_keep("captured graph", handle(graph), destroy_captured) };
        made.map_err(|error| error.with_more("the captured graph could not be made executable"))?;
        let raw = handle(executable);
        // SAFETY: just created, and nobody else knows it.
        self.graphs.insert(raw, unsafe { Object::new(&self.core, raw, Mutex::new(())) });
        Ok(RawGraph(raw))
    }

    pub(super) fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        let operation = Operation::LaunchGraph;
        let launch = self.optional(operation, self.core.functions().cuGraphLaunch)?;
        let (graph, stream) = (self.graphs.find(operation, graph.0)?, self.stream(operation, stream)?);
        // Relaxed: the first launch may prepare the graph.
        let _current = self.core.enter_relaxed(operation)?;
        let _alone = graph.extra.lock();
        // SAFETY: graph and stream live (L1, F1), and no other call uses the graph: it is destroyed after the last launch (L1).
        check(operation, unsafe { launch(pointer(graph.raw()), stream.raw) })
    }
}
