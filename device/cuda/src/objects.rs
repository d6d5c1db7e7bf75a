//! The driver's objects: the data kept with each kind, and how one is destroyed.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use aquifer_device::fork::{Mutex, RwLock};
use aquifer_device::{CaptureStatus, Operation, RawStream, Result};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUgraph, CUstream, CUstreamCaptureStatus as Status};

use crate::context::GpuContext;
use crate::handles::{Kind, OwnedObject};
use crate::installation::{check, check_function};
use crate::raw::{handle, pointer};

/// A live stream.
#[derive(Debug)]
pub(crate) enum StreamEntry {
    /// Created here.
    Owned(OwnedObject<Streams>),
    /// Owned by another library, with the object that keeps it alive if its owner is cudarc.
    Adopted(OnceLock<Arc<CudaStream>>),
}

impl StreamEntry {
    /// Whether cudarc's object of it was asked for, and not taken back since.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(self, StreamEntry::Owned(object) if object.extra.0.get().is_some())
    }

    /// Takes that object back; false while the caller holds it.
    pub(crate) fn take_back(&mut self) -> bool {
        match self {
            StreamEntry::Owned(object) => Streams::release(&mut object.extra),
            StreamEntry::Adopted(_) => true,
        }
    }
}

/// Streams created here.
#[derive(Debug)]
pub(crate) enum Streams {}

/// cudarc's object of a stream of ours, once it was asked for.
#[derive(Debug, Default)]
pub(crate) struct Lent(pub(crate) OnceLock<Arc<CudaStream>>);

impl Lent {
    /// Takes the object back; false while the caller holds it.
    fn take_back(&mut self) -> bool {
        let Some(lent) = self.0.take() else { return true };
        match Arc::try_unwrap(lent) {
            // The object does not own the stream: dropping it makes no call.
            Ok(_) => true,
            Err(lent) => {
                self.0 = OnceLock::from(lent);
                false
            }
        }
    }
}

impl Kind for Streams {
    const NAME: &'static str = "stream";
    const DESTROY: Operation = Operation::DestroyStream;
    type Extra = Lent;

    fn release(lent: &mut Lent) -> bool {
        lent.take_back()
    }

    unsafe fn destroy(context: &GpuContext, raw: u64) -> Result<()> {
        // SAFETY: the caller vouches for the stream.
        unsafe { end_before_destruction(context, pointer(raw)) }?;
        // SAFETY: the caller vouches for the stream (F1).
        check(Self::DESTROY, unsafe { (context.functions().cuStreamDestroy_v2)(pointer(raw)) })?;
        context.shared.end(RawStream(raw));
        Ok(())
    }
}

/// A stream that is alive as long as this, for use in one call.
#[derive(Debug)]
pub(crate) struct LiveStream {
    pub(crate) raw: CUstream,
    pub(crate) _entry: Option<Arc<StreamEntry>>,
}

#[derive(Debug)]
pub(crate) enum Events {}

impl Kind for Events {
    const NAME: &'static str = "event";
    const DESTROY: Operation = Operation::DestroyEvent;
    type Extra = ();

    unsafe fn destroy(context: &GpuContext, raw: u64) -> Result<()> {
        // SAFETY: the caller vouches for the event (F1).
        check(Self::DESTROY, unsafe { (context.functions().cuEventDestroy_v2)(pointer(raw)) })
    }
}

/// Graphs, made executable. Each has a lock that is held while it is launched, because a graph must
/// not be used by two calls at a time (CUDA driver API, “Graph object thread safety”). It is a
/// leaf.
#[derive(Debug)]
pub(crate) enum Graphs {}

impl Kind for Graphs {
    const NAME: &'static str = "graph";
    const DESTROY: Operation = Operation::DestroyGraph;
    type Extra = Mutex<()>;

    unsafe fn destroy(context: &GpuContext, raw: u64) -> Result<()> {
        match context.functions().cuGraphExecDestroy {
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
/// `raw` must be a live graph that nothing else uses.
pub(crate) unsafe fn destroy_captured(context: &GpuContext, raw: u64) -> Result<()> {
    match context.functions().cuGraphDestroy {
        // SAFETY: the caller vouches for the graph (F1).
        Some(destroy) => check(Operation::DestroyGraph, unsafe { destroy(pointer(raw)) }),
        None => Ok(()),
    }
}

/// What the driver says of a stream's capture.
#[derive(Debug)]
pub(crate) struct CaptureInfo {
    pub(crate) status: CaptureStatus,
    /// The number and the graph, where the capture is active and the driver is of CUDA 11.3 or
    /// newer.
    pub(crate) graph: Option<(u64, CUgraph)>,
}

/// Whether work of the stream is captured.
///
/// # Safety
/// The stream must live.
pub(crate) unsafe fn status(context: &GpuContext, operation: Operation, stream: CUstream) -> Result<CaptureStatus> {
    // SAFETY: passed on to the caller.
    unsafe { capture_info(context, operation, stream) }.map(|info| info.status)
}

/// As [`status`], with what else is known of the capture.
///
/// # Safety
/// As for [`status`].
pub(crate) unsafe fn capture_info(context: &GpuContext, operation: Operation, stream: CUstream) -> Result<CaptureInfo> {
    let functions = context.functions();
    let _current = context.enter(operation)?;
    let (mut status, mut number, mut graph) = (0, 0, ptr::null_mut());
    let code = match functions.cuStreamGetCaptureInfo_v2 {
        Some(ask) => {
            let (dependencies, count) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: what is written outlives the call, the caller vouches for the stream (F1),
            // and null pointers ask for nothing.
            unsafe { ask(stream, &raw mut status, &raw mut number, &raw mut graph, dependencies, count) }
        }
        // SAFETY: the number outlives the call, and the caller vouches for the stream (F1).
        None => unsafe { (functions.cuStreamIsCapturing)(stream, &raw mut status) },
    };
    check(Operation::CaptureStatus, code)?;
    let status = match status {
        status if status == Status::CU_STREAM_CAPTURE_STATUS_NONE as c_uint => CaptureStatus::None,
        status if status == Status::CU_STREAM_CAPTURE_STATUS_ACTIVE as c_uint => CaptureStatus::Active,
        _ => CaptureStatus::Invalidated,
    };
    // Otherwise the driver writes nothing.
    let is_known = status == CaptureStatus::Active && functions.cuStreamGetCaptureInfo_v2.is_some();
    Ok(CaptureInfo { status, graph: is_known.then_some((number, graph)) })
}

/// Ends the capture of a stream that is about to be destroyed, and destroys the captured graph. The
/// CUDA documentation does not specify the fate of a capture whose stream is destroyed; if the
/// capture went on, the context could not be waited for any more.
///
/// # Safety
/// The stream must live, and nothing else may use it.
unsafe fn end_before_destruction(context: &GpuContext, stream: CUstream) -> Result<()> {
    let operation = Operation::EndCapture;
    // SAFETY: passed on to the caller.
    let is_over = || unsafe { status(context, operation, stream) }.map(|status| status == CaptureStatus::None);
    if is_over()? {
        return Ok(());
    }
    // Without the function nothing was captured here.
    let Some(end) = context.functions().cuStreamEndCapture else { return Ok(()) };
    let mut graph: CUgraph = ptr::null_mut();
    // SAFETY: the handle outlives the call, and the caller vouches for the stream (F1).
    let ended = check(operation, unsafe { end(stream, &raw mut graph) });
    if !graph.is_null() {
        // SAFETY: the graph was just captured, and is known only here.
        unsafe { context.destroy_or_leak("captured graph", handle(graph), destroy_captured) };
    }
    // A capture that failed to end as it should has mostly ended nevertheless.
    if is_over()? { Ok(()) } else { ended }
}

#[derive(Debug)]
pub(crate) enum Physicals {}

impl Kind for Physicals {
    const NAME: &'static str = "physical memory";
    const DESTROY: Operation = Operation::ReleasePhysical;
    /// Length in bytes.
    type Extra = u64;

    unsafe fn destroy(context: &GpuContext, raw: u64) -> Result<()> {
        match context.functions().cuMemRelease {
            // SAFETY: the caller vouches for the memory (F1).
            Some(release) => check(Self::DESTROY, unsafe { release(raw) }),
            // Nothing was created then.
            None => Ok(()),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Modules {}

impl Kind for Modules {
    const NAME: &'static str = "module";
    const DESTROY: Operation = Operation::UnloadModule;
    type Extra = Kernels;

    unsafe fn destroy(context: &GpuContext, raw: u64) -> Result<()> {
        // SAFETY: the caller vouches for the module (F1).
        check(Self::DESTROY, unsafe { (context.functions().cuModuleUnload)(pointer(raw)) })
    }
}

/// The kernels of a module that were launched so far, by name. They live as long as the module.
#[derive(Debug, Default)]
pub(crate) struct Kernels(pub(crate) RwLock<HashMap<&'static str, Kernel>>);

#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) raw: u64,
    /// Most dynamic shared memory that it was allowed so far.
    pub(crate) shared_bytes: AtomicU32,
}

/// The call that allocated device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Plain,
    Pool,
}

/// How host memory became pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// So many bytes behind where the driver's allocation starts.
    Allocated {
        skipped: u64,
    },
    Registered,
}
