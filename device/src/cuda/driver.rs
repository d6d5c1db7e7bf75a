//! [`Driver`] for a real GPU: each call delegates to the file of its family.

use std::any::Any;
use std::sync::Arc;

use crate::fork::Mutex;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUdevice_attribute as Attr;

use super::batch::has_batches;
use super::captures::Graphs;
use super::context::{Core, persistently};
use super::events::Events;
use super::functions::{CALLED_BY_CUDARC, Functions};
use super::handles::{Handles, Object};
use super::installation::Installation;
use super::mappings::Physicals;
use super::memory::{Locked, Source};
use super::modules::Modules;
use super::peers::Peers;
use super::ranges::Ranges;
use super::streams::Entry;
use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, PoolUsage, RawEvent, RawGraph,
    RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::fork;
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;

/// A real GPU, through NVIDIA's driver. See the [module documentation](super).
///
/// What is still alive when it is dropped, memory included, is given back then.
#[derive(Debug)]
pub struct CudaDriver {
    pub(super) core: Arc<Core>,
    pub(super) info: DeviceInfo,
    pub(super) facts: Facts,
    pub(super) streams: Handles<Entry>,
    /// Streams to be destroyed once cudarc's objects of them are given back.
    pub(super) lent: Mutex<Vec<Arc<Entry>>>,
    pub(super) events: Handles<Object<Events>>,
    pub(super) graphs: Handles<Object<Graphs>>,
    pub(super) modules: Handles<Object<Modules>>,
    pub(super) physicals: Handles<Object<Physicals>>,
    /// Allocated device memory.
    pub(super) memory: Ranges<Source>,
    /// Page-locked host memory.
    pub(super) host: Ranges<Locked>,
    /// Reserved addresses.
    pub(super) reserved: Ranges<()>,
    /// Mappings, all in reserved addresses.
    pub(super) mapped: Ranges<()>,
    /// Held while mappings change.
    pub(super) rules: Mutex<()>,
    /// Devices whose memory this one was allowed to reach directly, if it can.
    pub(super) peers: Peers,
}

/// Capabilities of the GPU that calls ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) rdma: bool,
    pub(super) posix_fd: bool,
    /// The device knows registered host memory by the host's address.
    pub(super) registered_by_address: bool,
    /// How far apart rows may lie that one call copies, in bytes.
    pub(super) pitch_max: u64,
}

impl CudaDriver {
    pub(super) fn new(core: Arc<Core>, ordinal: u32) -> Result<Arc<CudaDriver>> {
        let mut info = core.installation.info(ordinal)?;
        info.priorities = core.priorities()?;
        let can_map = info.granularity_bytes.is_some();
        let has =
            |attribute| Ok::<_, DeviceError>(can_map && core.installation.attribute(core.device, attribute)? != 0);
        let ask = |attribute| core.installation.attribute(core.device, attribute);
        let facts = Facts {
            registered_by_address: ask(Attr::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)? != 0,
            pitch_max: ask(Attr::CU_DEVICE_ATTRIBUTE_MAX_PITCH)?,
            rdma: has(Attr::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
            posix_fd: has(Attr::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
        };
        Ok(Arc::new(CudaDriver {
            core,
            info,
            facts,
            streams: Handles::default(),
            lent: Mutex::default(),
            events: Handles::default(),
            graphs: Handles::default(),
            modules: Handles::default(),
            physicals: Handles::default(),
            memory: Ranges::default(),
            host: Ranges::default(),
            reserved: Ranges::default(),
            mapped: Ranges::default(),
            rules: Mutex::default(),
            peers: Peers::default(),
        }))
    }

    /// Opens a GPU in its primary context, the one that the CUDA runtime and most libraries use.
    ///
    /// # Errors
    /// When no driver or no such GPU can be used; the error says why and what to do.
    pub fn open(ordinal: u32) -> Result<Arc<CudaDriver>> {
        Self::open_in(Installation::find()?, ordinal)
    }

    /// As [`CudaDriver::open`], as if the driver lacked functions: for tests of what an older driver is good for.
    ///
    /// # Errors
    /// As [`CudaDriver::open`].
    #[doc(hidden)]
    pub fn open_without(ordinal: u32, missing: &[&str]) -> Result<Arc<CudaDriver>> {
        Self::open_in(Installation::find_without(missing)?, ordinal)
    }

    /// Names of the driver's functions without which nothing works, and of those whose absence turns a capability off: for tests of
    /// [`CudaDriver::open_without`].
    #[doc(hidden)]
    pub fn functions() -> (Vec<&'static str>, &'static [&'static str]) {
        (Functions::REQUIRED.iter().chain(&CALLED_BY_CUDARC).copied().collect(), Functions::OPTIONAL)
    }

    fn open_in(installation: Installation, ordinal: u32) -> Result<Arc<CudaDriver>> {
        Self::new(Core::primary(installation, ordinal)?, ordinal)
    }

    /// Drives a GPU in a context that the caller made with cudarc. The context is kept as long as the driver.
    ///
    /// # Errors
    /// When the context's GPU cannot be asked about.
    pub fn from_context(context: Arc<CudaContext>) -> Result<Arc<CudaDriver>> {
        let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
        Self::new(Core::shared(Installation::find()?, context), ordinal)
    }

    /// A function that not every driver has.
    pub(super) fn optional<F>(&self, operation: Operation, function: Option<F>) -> Result<F> {
        function.ok_or_else(|| {
            let (major, minor) = self.core.installation.version;
            DeviceError::refused(operation, Code::NOT_SUPPORTED)
                .with_detail(format!("this driver, for CUDA {major}.{minor}, lacks the function; a newer one has it"))
        })
    }

    /// Gives back what is still alive. Objects with handles follow, when their tables are dropped.
    fn give_everything_back(&self) -> Result<()> {
        // Unmapping and freeing page-locked memory do not wait for work.
        let mut outcome = persistently(|| self.synchronize());
        if outcome.as_ref().is_err_and(|error| !error.is_device_lost()) {
            self.leak_everything();
            return outcome;
        }
        let mut attempt = |call: &dyn Fn() -> Result<()>| {
            outcome = std::mem::replace(&mut outcome, Ok(())).and(persistently(call));
        };
        self.memory.drain().into_iter().for_each(|(ptr, ..)| attempt(&|| self.free_raw(ptr)));
        self.mapped.drain().into_iter().for_each(|(ptr, bytes, ())| attempt(&|| self.unmap_raw(ptr, bytes)));
        self.reserved.drain().into_iter().for_each(|(ptr, bytes, ())| attempt(&|| self.unreserve_raw(ptr, bytes)));
        for (start, _, locked) in self.host.drain() {
            attempt(&|| match locked {
                // SAFETY: whoever has memory of this driver's keeps the driver, so it is nobody's; the context was waited for, or is
                // lost. A call that failed did not free it.
                Locked::Allocated { skipped } => unsafe { self.host_free_raw(start - skipped) },
                // SAFETY: whoever has registered memory here keeps the driver, so nobody does any more; the context was waited for, or is
                // lost. A call that failed did not unregister it.
                Locked::Registered => unsafe { self.host_unregister_raw(start) },
            });
        }
        outcome
    }

    /// Leaves everything that work may still use to the context, for as long as that lives.
    fn leak_everything(&self) {
        self.modules.forget_all();
        let ranges = [self.memory.drain().len(), self.mapped.drain().len(), self.host.drain().len()];
        let ranges = ranges.iter().sum::<usize>();
        self.reserved.drain();
        if ranges > 0 {
            tracing::warn!(
                "{ranges} pieces of memory of a device that was dropped are leaked, as work may still use them"
            );
        }
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        if let Err(error) = self.give_everything_back() {
            tracing::debug!(%error, "not everything could be given back at the end of a device");
        }
    }
}

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        self.core.ongoing.known.clone()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.memory_info()
    }

    fn attribute(&self, attribute: Attribute) -> Result<u64> {
        let ask = |attribute| self.core.installation.attribute(self.core.device, attribute);
        match attribute {
            Attribute::ComputeCapabilityMajor => ask(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            Attribute::ComputeCapabilityMinor => ask(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            Attribute::MultiprocessorCount => ask(Attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            Attribute::AsyncEngineCount => ask(Attr::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
            Attribute::VirtualMemoryManagement => Ok(self.info.granularity_bytes.is_some().into()),
            Attribute::MemoryPools if !self.core.functions().has_pool() => Ok(0),
            Attribute::MemoryPools => ask(Attr::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            Attribute::GpuDirectRdmaWithVmm => Ok(self.facts.rdma.into()),
            Attribute::PosixFdHandles => Ok(self.facts.posix_fd.into()),
            Attribute::BatchedCopies => Ok(has_batches(self.core.functions()).into()),
        }
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        self.alloc(bytes)
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.free(ptr)
    }

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        self.alloc_async(bytes, stream)
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        self.free_async(ptr, stream)
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr> {
        self.reserve(bytes, alignment)
    }

    fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.unreserve(ptr, bytes)
    }

    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        self.create_physical(bytes, options)
    }

    fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        self.release_physical(physical)
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        self.map(ptr, bytes, physical)
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.unmap(ptr, bytes)
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        self.set_access(ptr, bytes, devices)
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        self.host_alloc(bytes)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.host_free(ptr) }
    }

    fn host_access(&self, _ptr: HostPtr, _bytes: usize, _kind: AccessKind) -> Result<()> {
        Ok(())
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        // SAFETY: passed on to the caller.
        unsafe { self.host_register(ptr, bytes) }
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.host_unregister(ptr) }
    }

    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        self.create_stream(flags)
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.destroy_stream(stream)
    }

    unsafe fn adopt_stream(&self, stream: RawStream) {
        self.adopt(stream);
    }

    fn release_stream(&self, stream: RawStream) {
        self.release(stream);
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.synchronize_stream(stream)
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.query_stream(stream)
    }

    fn create_event(&self, timing: bool) -> Result<RawEvent> {
        self.create_event(timing)
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.events.destroy(event.0)
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.record(event, stream)
    }

    fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.wait(stream, event)
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.wait_peer(stream, peer, event)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.query_event(event)
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.synchronize_event(event)
    }

    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        self.elapsed_ms(start, end)
    }

    fn synchronize(&self) -> Result<()> {
        self.synchronize()
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.copy_to_device(dst, src, bytes, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.copy_to_host(dst, src, bytes, stream) }
    }

    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
        self.copy_on_device(dst, src, bytes, stream)
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        self.copy_peer(dst, peer, src, bytes, stream)
    }

    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.copy_2d(copy, stream) }
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.copy_batch(copies, stream) }
    }

    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
        self.memset(ptr, value, bytes, stream)
    }

    fn load_module(&self, ptx: &str) -> Result<RawModule> {
        self.load_module(ptx)
    }

    fn unload_module(&self, module: RawModule) -> Result<()> {
        self.modules.destroy(module.0)
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.launch(launch, stream) }
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.begin_capture(stream)
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.capture_status(stream)
    }

    fn stream_id(&self, stream: RawStream) -> Result<Option<u64>> {
        self.stream_id(stream)
    }

    fn pool_usage(&self) -> Result<PoolUsage> {
        self.pool_usage()
    }

    fn trim_pool(&self, keep: u64) -> Result<()> {
        self.trim_pool(keep)
    }

    fn trim_graph_memory(&self) -> Result<()> {
        self.trim_graph_memory()
    }

    fn can_access_peer(&self, peer: u32) -> Result<bool> {
        self.can_access_peer(peer)
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        self.end_capture(stream)
    }

    fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        self.launch_graph(graph, stream)
    }

    fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        self.graphs.destroy(graph.0)
    }
}
