//! Graph capture, and refusal of calls that would break one.
//!
//! Captures begin in the relaxed mode. In the other modes, any potentially unsafe call on this
//! thread, or in the whole process, would break the capture. It would also have to end on the
//! thread on which it began, so that a [`aquifer_device::Capture`] could not be dropped on another
//! one. The calls made here are relaxed anyway. A thread's default stream cannot be named on other
//! threads, so its capture can only be ended on its own thread.

use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use aquifer_device::fork::Mutex;
use aquifer_device::{CaptureStatus, Code, DeviceError, ErrorKind, Operation, RawGraph, RawStream, Result};
use cudarc::driver::sys::{CUgraph, CUstream, CUstreamCaptureMode};

use crate::gpu::Gpu;
use crate::handles::OwnedObject;
use crate::installation::{bad_value, check, check_function};
use crate::objects::{LiveStream, destroy_captured};
use crate::raw::{handle, pointer};
use crate::streams;

/// Why the driver refuses to wait for the context although no stream is known to capture.
const UNANNOUNCED: &str = "another library captures a stream of the device's context and did not announce that, and \
    waiting has broken the capture; announce captures with `Stream::announce_capture` or `Allocator::capture` when \
    they begin";

fn refuse(operation: Operation, detail: impl Into<String>) -> DeviceError {
    DeviceError::refused(operation, Code::CAPTURE_UNSUPPORTED).with_detail(detail)
}

pub(crate) fn status(gpu: &Gpu, operation: Operation, stream: CUstream) -> Result<CaptureStatus> {
    // SAFETY: the stream lives (L1).
    unsafe { crate::objects::status(&gpu.context, operation, stream) }
}

impl Gpu {
    pub(crate) fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let stream = streams::live(self, Operation::CaptureStatus, stream)?;
        status(self, Operation::CaptureStatus, stream.raw)
    }

    pub(crate) fn capture_number(&self, stream: RawStream) -> Result<Option<u64>> {
        // The legacy default stream cannot capture, nor be asked while a blocking stream does.
        if stream.is_legacy() { Ok(None) } else { Ok(captured_graph(self, stream)?.map(|(number, _)| number)) }
    }

    /// Ties `what` to the graph by a *user object* (CUDA programming guide, “CUDA User Objects”), of
    /// which clones and executables of the graph, and launches under way, have references, too. This
    /// library must not be unloaded while such graphs live.
    pub(crate) fn keep_for_graph(&self, stream: RawStream, what: Arc<dyn Any + Send + Sync>) -> Result<()> {
        let (operation, functions) = (Operation::CaptureStatus, self.context.functions());
        let create = self.optional(operation, functions.cuUserObjectCreate)?;
        let release = self.optional(operation, functions.cuUserObjectRelease)?;
        let retain = self.optional(operation, functions.cuGraphRetainUserObject)?;
        let captured = captured_graph(self, stream)?;
        let (_, graph) = captured.ok_or_else(|| bad_value(operation, "the stream does not capture"))?;
        let _current = self.context.enter_relaxed(operation)?;
        let kept = Kept { next: ptr::null_mut(), what, gone: self.gone.clone() };
        let (kept, mut object) = (Box::into_raw(Box::new(kept)), ptr::null_mut());
        // `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, the only flag, must be given.
        // SAFETY: the handle outlives the call, and `note_gone` takes the entry (F1).
        let code = unsafe { create(&raw mut object, kept.cast(), note_gone, 1, 1) };
        if let Err(error) = check_function(operation, "cuUserObjectCreate", code) {
            // SAFETY: there is no object that would give it up.
            drop(unsafe { Box::from_raw(kept) });
            return Err(error);
        }
        // The graph gets the object's one reference: `CU_GRAPH_USER_OBJECT_MOVE`. SAFETY: the object
        // was just created, and the graph lives while it is captured, which the caller's stream does
        // (F1).
        let code = unsafe { retain(graph, object, 1, 1) };
        check_function(operation, "cuGraphRetainUserObject", code).inspect_err(|_| {
            // SAFETY: nothing else has the reference (F1).
            unsafe { release(object, 1) };
        })
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let operation = Operation::Synchronize;
        forbid_device_wait(self, operation)?;
        let _current = self.context.enter_relaxed(operation)?;
        // SAFETY: the context is current (C1, F1).
        let waited = check(operation, unsafe { (self.context.functions().cuCtxSynchronize)() });
        waited.map_err(|error| match error.kind {
            ErrorKind::Capture => error.with_detail(UNANNOUNCED),
            _ => error,
        })
    }

    pub(crate) fn begin_capture(&self, stream: RawStream) -> Result<()> {
        let operation = Operation::BeginCapture;
        let functions = self.context.functions();
        let begin = self.optional(operation, functions.cuStreamBeginCapture_v2)?;
        self.optional(operation, functions.cuStreamEndCapture)?;
        self.optional(operation, functions.cuGraphInstantiateWithFlags)?;
        self.optional(operation, functions.cuGraphLaunch)?;
        self.optional(operation, functions.cuGraphExecDestroy)?;
        self.optional(operation, functions.cuGraphDestroy)?;
        let live = streams::live(self, operation, stream)?;
        if stream.is_legacy() {
            return Err(refuse(operation, "the legacy default stream cannot capture"));
        }
        forbid_capture(self, operation, &live, "it cannot begin another capture")?;
        let _current = self.context.enter(operation)?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: the stream lives (L1, F1).
        check(operation, unsafe { begin(live.raw, mode) })?;
        self.context.shared.begin(stream);
        Ok(())
    }

    pub(crate) fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        let operation = Operation::EndCapture;
        let end = self.optional(operation, self.context.functions().cuStreamEndCapture)?;
        let live = streams::live(self, operation, stream)?;
        if status(self, operation, live.raw)? == CaptureStatus::None {
            self.context.shared.end(stream);
            return Err(bad_value(operation, "the stream does not capture"));
        }
        let _current = self.context.enter(operation)?;
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: the handle outlives the call, and the stream lives (L1, F1).
        let ended = check(operation, unsafe { end(live.raw, &raw mut graph) });
        // A capture that failed to end as it should has mostly ended nevertheless.
        if ended.is_ok() || matches!(status(self, operation, live.raw), Ok(CaptureStatus::None)) {
            self.context.shared.end(stream);
        }
        ended?;
        if graph.is_null() {
            return Err(DeviceError::new(operation, Code::CAPTURE_INVALIDATED)
                .with_detail("an earlier call broke the capture; it is gone"));
        }
        instantiate(self, graph)
    }

    pub(crate) fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        let operation = Operation::LaunchGraph;
        let launch = self.optional(operation, self.context.functions().cuGraphLaunch)?;
        let (graph, stream) = (self.graphs.find(operation, graph.0)?, streams::live(self, operation, stream)?);
        // Relaxed: the first launch may prepare the graph.
        let _alone = graph.extra.lock();
        // SAFETY: graph and stream live (L1, F1), and no other call uses the graph: it is destroyed
        // after the last launch (L1).
        self.context.call(operation, |_| unsafe { launch(pointer(graph.raw()), stream.raw) })
    }
}

/// The number and the graph of the stream's capture; `None` if it captures nothing.
fn captured_graph(gpu: &Gpu, stream: RawStream) -> Result<Option<(u64, CUgraph)>> {
    let operation = Operation::CaptureStatus;
    let live = streams::live(gpu, operation, stream)?;
    // SAFETY: the stream lives (L1).
    let info = unsafe { crate::objects::capture_info(&gpu.context, operation, live.raw) }?;
    match info.status {
        CaptureStatus::None => Ok(None),
        CaptureStatus::Active => gpu.optional(operation, info.graph).map(Some),
        CaptureStatus::Invalidated => Err(DeviceError::refused(operation, Code::CAPTURE_INVALIDATED)
            .with_detail("an earlier call broke the stream's capture, which must be ended first")),
    }
}

/// What is kept for a graph.
#[derive(Debug)]
pub(crate) struct Kept {
    next: *mut Kept,
    what: Arc<dyn Any + Send + Sync>,
    gone: Arc<Gone>,
}

/// What was kept for graphs that are gone: a list, the last one first.
pub(crate) type Gone = AtomicPtr<Kept>;

/// Adds what was kept for a graph to the list. The driver calls this on a thread of its own, where
/// CUDA may not be called, and at any time: so it takes no lock, allocates nothing and cannot
/// panic.
unsafe extern "C" fn note_gone(kept: *mut c_void) {
    let kept = kept.cast::<Kept>();
    // SAFETY: `keep_for_graph` gave the entry to the driver, which gives it up here, once. No other
    // thread has it before it is in the list.
    let gone = unsafe { Arc::as_ptr(&(*kept).gone) };
    // SAFETY: the entry keeps the list, and is in there only once nothing is done here any more.
    let gone = unsafe { &*gone };
    let mut head = gone.load(Ordering::Relaxed);
    loop {
        // SAFETY: as for the entry above.
        unsafe { (*kept).next = head };
        match gone.compare_exchange_weak(head, kept, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => head = now,
        }
    }
}

pub(crate) fn take_kept(gpu: &Gpu) -> Vec<Arc<dyn Any + Send + Sync>> {
    let mut all = Vec::new();
    if gpu.gone.load(Ordering::Relaxed).is_null() {
        return all;
    }
    let mut next = gpu.gone.swap(ptr::null_mut(), Ordering::Acquire);
    while !next.is_null() {
        // SAFETY: entries of the list are boxes of `keep_for_graph`, and the swap gave all to this
        // thread.
        let kept = unsafe { Box::from_raw(next) };
        next = kept.next;
        all.push(kept.what);
    }
    all
}

/// Refuses a call that would break the stream's capture, or not keep its contract, because of
/// `reason`.
pub(crate) fn forbid_capture(gpu: &Gpu, operation: Operation, stream: &LiveStream, reason: &str) -> Result<()> {
    match status(gpu, operation, stream.raw)? {
        CaptureStatus::None => Ok(()),
        CaptureStatus::Active => Err(refuse(operation, format!("the stream captures: {reason}"))),
        CaptureStatus::Invalidated => Err(DeviceError::refused(operation, Code::CAPTURE_INVALIDATED)
            .with_detail("an earlier call broke the stream's capture, which must be ended first")),
    }
}

/// Refuses a call that waits for the whole device while a stream of the context is known to
/// capture.
pub(crate) fn forbid_device_wait(gpu: &Gpu, operation: Operation) -> Result<()> {
    if !gpu.context.shared.any() {
        return Ok(());
    }
    Err(refuse(operation, "this waits for the device, which is not possible while a stream captures"))
}

/// Makes a captured graph executable. What was captured is not needed after that.
fn instantiate(gpu: &Gpu, graph: CUgraph) -> Result<RawGraph> {
    let operation = Operation::EndCapture;
    let functions = gpu.context.functions();
    let instantiate = gpu.optional(operation, functions.cuGraphInstantiateWithFlags)?;
    let _current = gpu.context.enter_relaxed(operation)?;
    let mut executable = ptr::null_mut();
    // SAFETY: the handle outlives the call, and the graph was just captured (F1); 0 asks for
    // nothing special.
    let code = unsafe { instantiate(&raw mut executable, graph, 0) };
    let made = check_function(operation, "cuGraphInstantiateWithFlags", code);
    // SAFETY: the graph was just captured, and is known only here.
    unsafe { gpu.context.destroy_or_leak("captured graph", handle(graph), destroy_captured) };
    made.map_err(|error| error.with_more("the captured graph could not be made executable"))?;
    let raw = handle(executable);
    // SAFETY: just created, and known only here.
    gpu.graphs.insert(raw, unsafe { OwnedObject::new(&gpu.context, raw, Mutex::new(())) });
    Ok(RawGraph(raw))
}
