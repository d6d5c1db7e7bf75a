//! A device of the stand-in with the hook, and graphs that the driver's functions end and launch.
#![allow(dead_code, reason = "each program uses a part")]

use std::ptr::null_mut;
use std::sync::Arc;

use aquifer::Allocator;
use aquifer_standin::StandinDevice;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DriverError, result, sys};

pub const RELAXED: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
pub const FLAGS: sys::CUgraphInstantiate_flags =
    sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

/// What uses the device is dropped before it.
pub struct Gpu {
    pub memory: Allocator,
    pub context: Arc<CudaContext>,
    pub standin: StandinDevice,
}

impl Gpu {
    /// Without cudarc's event tracking, as programs capture.
    pub fn new() -> Gpu {
        let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
        let context = CudaContext::new(standin.ordinal() as usize).unwrap();
        let memory = aquifer_cudarc_hook::install(&context).unwrap();
        // SAFETY: what streams do with the slices of others is ordered by joins.
        unsafe { context.disable_event_tracking() };
        Gpu { memory, context, standin }
    }

    pub fn stream(&self) -> Arc<CudaStream> {
        self.context.new_stream().unwrap()
    }

    /// Everything went back, now that nothing is used any more.
    pub fn assert_all_is_back(&self) {
        self.context.synchronize().unwrap();
        self.standin.run_destructors();
        self.memory.empty_cache().unwrap();
        let held = (self.memory.memory_allocated(), self.memory.memory_reserved());
        assert_eq!(held, (0, 0), "{}", self.memory.summary());
        assert_eq!(self.standin.violations(), Vec::<String>::new());
    }
}

/// A slice of bytes on a stream, all of them `value` once the stream's work so far is done.
pub fn filled(stream: &Arc<CudaStream>, bytes: usize, value: u8) -> CudaSlice<u8> {
    let mut slice = stream.alloc_zeros::<u8>(bytes).unwrap();
    fill(stream, &mut slice, value);
    slice
}

pub fn fill(stream: &CudaStream, slice: &mut CudaSlice<u8>, value: u8) {
    let ptr = address(slice);
    // SAFETY: the memory is the slice's.
    unsafe { result::memset_d8_async(ptr, value, slice.len(), stream.cu_stream()) }.unwrap();
}

pub fn address(slice: &CudaSlice<u8>) -> sys::CUdeviceptr {
    use cudarc::driver::DevicePtr as _;
    slice.device_ptr(slice.stream()).0
}

/// The value that all bytes of a slice have.
pub fn value_of(slice: &CudaSlice<u8>) -> u8 {
    let bytes = slice.stream().clone_dtoh(slice).unwrap();
    assert!(bytes == vec![bytes[0]; bytes.len()], "several values in one slice");
    bytes[0]
}

/// Begins a capture by the driver's function.
pub fn begin_raw(stream: &CudaStream) {
    // SAFETY: the stream lives.
    unsafe { result::stream::begin_capture(stream.cu_stream(), RELAXED) }.unwrap();
}

/// A graph of the driver's, and executables of it, destroyed with it.
pub struct Raw {
    graph: sys::CUgraph,
    executables: Vec<sys::CUgraphExec>,
}

impl Raw {
    /// Ends a capture by the driver's function.
    pub fn end(stream: &CudaStream) -> Result<Raw, DriverError> {
        // SAFETY: the stream lives.
        let graph = unsafe { result::stream::end_capture(stream.cu_stream()) }?;
        Ok(Raw { graph, executables: Vec::new() })
    }

    pub fn instantiate(&mut self) {
        let mut executable = null_mut();
        // SAFETY: the graph lives.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, self.graph, 0) }.result().unwrap();
        self.executables.push(executable);
    }

    pub fn clone(&self) -> Raw {
        let mut graph = null_mut();
        // SAFETY: the graph lives.
        unsafe { sys::cuGraphClone(&raw mut graph, self.graph) }.result().unwrap();
        Raw { graph, executables: Vec::new() }
    }

    /// Destroys the graph, not its executables.
    pub fn destroy_graph(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: it is destroyed once.
            unsafe { result::graph::destroy(self.graph) }.unwrap();
            self.graph = null_mut();
        }
    }

    pub fn destroy_executable(&mut self) {
        if let Some(executable) = self.executables.pop() {
            // SAFETY: it is destroyed once.
            unsafe { result::graph::exec_destroy(executable) }.unwrap();
        }
    }

    pub fn has_graph(&self) -> bool {
        !self.graph.is_null()
    }

    pub fn executables(&self) -> usize {
        self.executables.len()
    }

    pub fn launch(&self, stream: &CudaStream) {
        let executable = *self.executables.last().unwrap();
        // SAFETY: both live.
        unsafe { result::graph::launch(executable, stream.cu_stream()) }.unwrap();
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        while !self.executables.is_empty() {
            self.destroy_executable();
        }
        self.destroy_graph();
    }
}
