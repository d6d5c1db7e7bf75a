//! Graphs that a program captures with cudarc's own functions, or with the driver's.
//!
//! The end of a capture, and launches, need not come by. So memory is tied to the driver's graph
//! (`aquifer::FollowedGraph`), and each call asks the driver which capture the stream is part of.

use std::sync::Arc;

use aquifer::device::DeviceError;
use aquifer::{Allocator, FollowedGraph, Stream};
use aquifer_cudarc::{Error, graph_of_capture};
use aquifer_device::{Code, Operation};
use cudarc::driver::{CudaContext, CudaStream, DriverError, GraphMemory, result, sys};

pub(crate) fn begin(
    memory: &Allocator,
    stream: &Stream,
    begin: &mut dyn FnMut() -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    let mut failed = None;
    let begun = stream.begin_followed_capture(|| {
        begin().map_err(|error| {
            failed = Some(error);
            DeviceError::new(Operation::BeginCapture, Code(error.0 as u32))
        })
    });
    begun.map_err(|error| failed.unwrap_or_else(|| Error::from(error).into()))?;
    // From now on, the graph notes which buffers its work uses.
    memory.followed_graph(stream).map(drop).map_err(|error| {
        let driver = stream.driver();
        let ended = driver.end_capture(stream.raw()).and_then(|graph| driver.destroy_graph(graph));
        ended.err().map_or_else(|| Error::from(error), Error::from).into()
    })
}

pub(crate) fn end(
    memory: &Allocator,
    theirs: &Arc<CudaStream>,
    end: &mut dyn FnMut() -> Result<sys::CUgraphExec, DriverError>,
) -> Result<Option<Box<dyn GraphMemory>>, DriverError> {
    let graph = graph_of_capture(memory, theirs);
    let ended = end();
    // It is over, also where it gave no graph.
    let over = graph_of_capture(memory, theirs);
    let (executable, context) = (Executable(ended?), theirs.context().clone());
    let graph = graph?.filter(|_| !executable.0.is_null());
    over?;
    Ok(graph.map(|graph| Box::new(Memory { graph, executable, context }) as Box<dyn GraphMemory>))
}

struct Executable(sys::CUgraphExec);

struct Memory {
    graph: Arc<FollowedGraph>,
    executable: Executable,
    context: Arc<CudaContext>,
}

impl GraphMemory for Memory {
    fn launch(&self, theirs: &Arc<CudaStream>) -> Result<(), DriverError> {
        let stream = aquifer_cudarc::stream(theirs)?;
        let mut failed = None;
        let launched = self.graph.launch(&stream, || {
            let launch = || {
                self.context.bind_to_thread()?;
                // SAFETY: cudarc's graph, which alone launches through this, has the executable;
                // the stream lives, and is of the current context.
                unsafe { result::graph::launch(self.executable.0, theirs.cu_stream()) }
            };
            launch().map_err(|error| {
                failed = Some(error);
                DeviceError::new(Operation::LaunchGraph, Code(error.0 as u32))
            })
        });
        launched.map_err(|error| failed.unwrap_or_else(|| Error::from(error).into()))
    }
}
