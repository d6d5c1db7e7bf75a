//! Graphs that a program captures with cudarc's own functions.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use aquifer::device::DevicePtr;
use aquifer::{Allocator, Graph, GraphCapture, Stream};
use aquifer_cudarc::Error;
use aquifer_device::{Code, DeviceError, Operation, RawStream};
use cudarc::driver::{CudaContext, CudaStream, DriverError, GraphMemory, result, sys};

thread_local! {
    /// The captures that this thread began, by stream.
    static CAPTURES: RefCell<Vec<(u32, GraphCapture<'static>)>> = const { RefCell::new(Vec::new()) };
}

/// What the graph keeps that a stream is captured into.
#[derive(Default)]
struct OfCapture {
    /// The thread that began the capture, if that was here.
    thread: Option<ThreadId>,
    /// Addresses of memory that was allocated in the capture.
    own: Mutex<HashSet<u64>>,
}

/// Notes memory that was allocated in a capture.
pub(crate) fn note(stream: &Stream, ptr: DevicePtr) {
    let Some(launches) = stream.launches_of_capture() else { return };
    let of_capture = launches.kept::<OfCapture>().unwrap_or_else(|| {
        let new = Arc::<OfCapture>::default();
        let kept: Arc<dyn Any + Send + Sync> = new.clone();
        launches.keep(&kept);
        new
    });
    of_capture.own.lock().unwrap_or_else(PoisonError::into_inner).insert(ptr.0);
}

/// Has the graph keep memory that is freed in its capture, unless that was allocated there: its
/// work may use it. Returns true if it does.
pub(crate) fn keep(memory: &Allocator, stream: &Stream, ptr: DevicePtr) -> bool {
    let Some(launches) = stream.launches_of_capture() else { return false };
    let is_own =
        |of_capture: Arc<OfCapture>| of_capture.own.lock().unwrap_or_else(PoisonError::into_inner).remove(&ptr.0);
    if launches.kept::<OfCapture>().is_some_and(is_own) {
        return false;
    }
    // The launches of another library's graph are not seen, so it keeps the memory for ever.
    if !launches.is_foreign() {
        let kept: Arc<dyn Any + Send + Sync> = Arc::new(memory.freed_once_idle(ptr));
        launches.keep(&kept);
    }
    true
}

/// Calls one of cudarc's functions in one of Aquifer's, and returns the error of whichever failed.
fn through<R>(
    theirs: impl FnOnce() -> Result<R, DriverError>,
    operation: Operation,
    failed: &mut Option<DriverError>,
) -> Result<R, DeviceError> {
    theirs().map_err(|error| {
        *failed = Some(error);
        DeviceError::new(operation, Code(error.0 as u32))
    })
}

pub(crate) fn begin(
    memory: &Allocator,
    stream: &Stream,
    begin: &mut dyn FnMut() -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    // A thread that is ending cannot keep the capture.
    CAPTURES.try_with(|_| ()).map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_PERMITTED))?;
    let mut failed = None;
    let begun = memory.begin_graph(None, stream, || through(begin, Operation::BeginCapture, &mut failed));
    let capture = begun.map_err(|error| failed.unwrap_or_else(|| Error::from(error).into()))?;
    if let Some(launches) = stream.launches_of_capture() {
        let of_capture: Arc<dyn Any + Send + Sync> =
            Arc::new(OfCapture { thread: Some(thread::current().id()), ..OfCapture::default() });
        launches.keep(&of_capture);
    }
    CAPTURES.with_borrow_mut(|captures| captures.push((stream.id(), capture)));
    Ok(())
}

pub(crate) fn end(
    context: &Arc<CudaContext>,
    stream: &Stream,
    end: &mut dyn FnMut() -> Result<sys::CUgraphExec, DriverError>,
) -> Result<Option<Box<dyn GraphMemory>>, DriverError> {
    let begun = CAPTURES.try_with(|captures| {
        let mut captures = captures.borrow_mut();
        let at = captures.iter().position(|(of, _)| *of == stream.id())?;
        Some(captures.remove(at).1)
    });
    let Ok(Some(capture)) = begun else {
        let elsewhere = stream.launches_of_capture().and_then(|launches| launches.kept::<OfCapture>()?.thread);
        return match elsewhere {
            // Its memory is bound to that thread.
            Some(_) => Err(DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)),
            None => end().map(|_| None),
        };
    };
    let mut failed = None;
    let graph = capture.end((), || {
        let executable = through(end, Operation::EndCapture, &mut failed)?.expose_provenance();
        let context = context.clone();
        Ok(move |on: RawStream| {
            let launch = || {
                context.bind_to_thread()?;
                let executable = std::ptr::with_exposed_provenance_mut(executable);
                // SAFETY: cudarc's graph, which alone launches this, has the executable; the stream is
                // that of a live handle, in the current context.
                unsafe { result::graph::launch(executable, on.0 as sys::CUstream) }
            };
            launch().map_err(|error| DeviceError::new(Operation::LaunchGraph, Code(error.0 as u32)))
        })
    });
    let graph = graph.map_err(|error| failed.unwrap_or_else(|| Error::from(error).into()))?;
    Ok(Some(Box::new(Memory(graph))))
}

struct Memory(Graph);

impl GraphMemory for Memory {
    fn launch(&self, stream: &Arc<CudaStream>) -> Result<(), DriverError> {
        Ok(self.0.launch(&aquifer_cudarc::stream(stream)?).map_err(Error::from)?)
    }
}
