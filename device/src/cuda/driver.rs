//! [`Driver`] for a real GPU: each call delegates to the file of its family.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUdevice_attribute as Attr;

use super::context::{Core, persistently};
use super::functions::{CALLED_BY_CUDARC, Functions};
use super::gpu::Gpu;
use super::installation::{Installation, bad_value};
use super::objects::Locked;
use super::{batch, captures, copies, copy_rows, events, mappings, memory, modules, peers, streams};
use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, PoolUsage, RawEvent, RawGraph,
    RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{Operation, Result};
use crate::fork;
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;

/// A real GPU, through NVIDIA's driver. See the [module documentation](super).
///
/// What is still alive when it is dropped, memory included, is given back then.
#[derive(Debug)]
pub struct CudaDriver {
    pub(super) gpu: Gpu,
}

impl CudaDriver {
    pub(super) fn new(core: Arc<Core>, ordinal: u32) -> Result<Arc<CudaDriver>> {
        Ok(Arc::new(CudaDriver { gpu: Gpu::new(core, ordinal)? }))
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

    /// Gives back what is still alive. Objects with handles follow, when their tables are dropped.
    fn give_everything_back(&self) -> Result<()> {
        let gpu = &self.gpu;
        // Unmapping and freeing page-locked memory do not wait for work.
        let mut outcome = persistently(|| captures::synchronize(gpu));
        if outcome.as_ref().is_err_and(|error| !error.is_device_lost()) {
            self.leak_everything();
            return outcome;
        }
        let mut attempt = |call: &dyn Fn() -> Result<()>| {
            outcome = std::mem::replace(&mut outcome, Ok(())).and(persistently(call));
        };
        gpu.memory.drain().into_iter().for_each(|(ptr, ..)| attempt(&|| memory::free_raw(gpu, ptr)));
        gpu.mapped.drain().into_iter().for_each(|(ptr, bytes, ())| attempt(&|| mappings::unmap_raw(gpu, ptr, bytes)));
        gpu.reserved
            .drain()
            .into_iter()
            .for_each(|(ptr, bytes, ())| attempt(&|| mappings::unreserve_raw(gpu, ptr, bytes)));
        for (start, _, locked) in gpu.host.drain() {
            attempt(&|| match locked {
                // SAFETY: holders of this driver's memory keep the driver, so there are none; the context was waited for, or is
                // lost. A call that failed did not free it.
                Locked::Allocated { skipped } => unsafe { memory::host_free_raw(gpu, start - skipped) },
                // SAFETY: holders of registered memory keep the driver, so there are none; the context was waited for, or is
                // lost. A call that failed did not unregister it.
                Locked::Registered => unsafe { memory::host_unregister_raw(gpu, start) },
            });
        }
        outcome
    }

    /// Leaves everything that work may still use to the context, for as long as that lives.
    fn leak_everything(&self) {
        let gpu = &self.gpu;
        gpu.modules.forget_all();
        let ranges = [gpu.memory.drain().len(), gpu.mapped.drain().len(), gpu.host.drain().len()];
        let ranges = ranges.iter().sum::<usize>();
        gpu.reserved.drain();
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

/// The GPU behind a peer of the same kind.
fn gpu_of(operation: Operation, peer: &dyn Driver) -> Result<&Gpu> {
    let driver = peer.as_any().and_then(|driver| driver.downcast_ref::<CudaDriver>());
    driver.map(|driver| &driver.gpu).ok_or_else(|| {
        let detail = "the peer is not driven by CUDA; devices of two kinds share nothing: go through the host";
        bad_value(operation, detail)
    })
}

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.gpu.info
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        self.gpu.core.ongoing.known.clone()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        memory::memory_info(&self.gpu)
    }

    fn attribute(&self, attribute: Attribute) -> Result<u64> {
        let ask = |attribute| self.gpu.core.installation.attribute(self.gpu.core.device, attribute);
        match attribute {
            Attribute::ComputeCapabilityMajor => ask(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            Attribute::ComputeCapabilityMinor => ask(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            Attribute::MultiprocessorCount => ask(Attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            Attribute::AsyncEngineCount => ask(Attr::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
            Attribute::VirtualMemoryManagement => Ok(self.gpu.info.granularity_bytes.is_some().into()),
            Attribute::MemoryPools if !self.gpu.core.functions().has_pool() => Ok(0),
            Attribute::MemoryPools => ask(Attr::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            Attribute::GpuDirectRdmaWithVmm => Ok(self.gpu.facts.rdma.into()),
            Attribute::PosixFdHandles => Ok(self.gpu.facts.posix_fd.into()),
            Attribute::BatchedCopies => Ok(batch::has_batches(self.gpu.core.functions()).into()),
        }
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        memory::alloc(&self.gpu, bytes)
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        memory::free(&self.gpu, ptr)
    }

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        memory::alloc_async(&self.gpu, bytes, stream)
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        memory::free_async(&self.gpu, ptr, stream)
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr> {
        mappings::reserve(&self.gpu, bytes, alignment)
    }

    fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        mappings::unreserve(&self.gpu, ptr, bytes)
    }

    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        mappings::create_physical(&self.gpu, bytes, options)
    }

    fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        mappings::release_physical(&self.gpu, physical)
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        mappings::map(&self.gpu, ptr, bytes, physical)
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        mappings::unmap(&self.gpu, ptr, bytes)
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        mappings::set_access(&self.gpu, ptr, bytes, devices)
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        memory::host_alloc(&self.gpu, bytes)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { memory::host_free(&self.gpu, ptr) }
    }

    fn host_access(&self, _ptr: HostPtr, _bytes: usize, _kind: AccessKind) -> Result<()> {
        Ok(())
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        // SAFETY: passed on to the caller.
        unsafe { memory::host_register(&self.gpu, ptr, bytes) }
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { memory::host_unregister(&self.gpu, ptr) }
    }

    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        streams::create_stream(&self.gpu, flags)
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        streams::destroy_stream(&self.gpu, stream)
    }

    unsafe fn adopt_stream(&self, stream: RawStream) {
        streams::adopt(&self.gpu, stream);
    }

    fn release_stream(&self, stream: RawStream) {
        streams::release(&self.gpu, stream);
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        streams::synchronize_stream(&self.gpu, stream)
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        streams::query_stream(&self.gpu, stream)
    }

    fn create_event(&self, timing: bool) -> Result<RawEvent> {
        events::create_event(&self.gpu, timing)
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.gpu.events.destroy(event.0)
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        events::record(&self.gpu, event, stream)
    }

    fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        events::wait(&self.gpu, stream, event)
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        peers::wait_peer(&self.gpu, stream, gpu_of(Operation::Wait, peer)?, event)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        events::query_event(&self.gpu, event)
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        events::synchronize_event(&self.gpu, event)
    }

    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        events::elapsed_ms(&self.gpu, start, end)
    }

    fn synchronize(&self) -> Result<()> {
        captures::synchronize(&self.gpu)
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { copies::copy_to_device(&self.gpu, dst, src, bytes, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { copies::copy_to_host(&self.gpu, dst, src, bytes, stream) }
    }

    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
        copies::copy_on_device(&self.gpu, dst, src, bytes, stream)
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        peers::copy_peer(&self.gpu, dst, gpu_of(Operation::CopyPeer, peer)?, src, bytes, stream)
    }

    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { copy_rows::copy_2d(&self.gpu, copy, stream) }
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { batch::copy_batch(&self.gpu, copies, stream) }
    }

    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
        copies::memset(&self.gpu, ptr, value, bytes, stream)
    }

    fn load_module(&self, ptx: &str) -> Result<RawModule> {
        modules::load_module(&self.gpu, ptx)
    }

    fn unload_module(&self, module: RawModule) -> Result<()> {
        self.gpu.modules.destroy(module.0)
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { modules::launch(&self.gpu, launch, stream) }
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        captures::begin_capture(&self.gpu, stream)
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        captures::capture_status(&self.gpu, stream)
    }

    fn stream_id(&self, stream: RawStream) -> Result<Option<u64>> {
        streams::stream_id(&self.gpu, stream)
    }

    fn pool_usage(&self) -> Result<PoolUsage> {
        memory::pool_usage(&self.gpu)
    }

    fn trim_pool(&self, keep: u64) -> Result<()> {
        memory::trim_pool(&self.gpu, keep)
    }

    fn trim_graph_memory(&self) -> Result<()> {
        memory::trim_graph_memory(&self.gpu)
    }

    fn can_access_peer(&self, peer: u32) -> Result<bool> {
        mappings::can_access_peer(&self.gpu, peer)
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        captures::end_capture(&self.gpu, stream)
    }

    fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        captures::launch_graph(&self.gpu, graph, stream)
    }

    fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        self.gpu.graphs.destroy(graph.0)
    }
}
