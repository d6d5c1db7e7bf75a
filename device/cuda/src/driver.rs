//! [`Driver`] for a real GPU: each call delegates to the file of its family.

use std::any::Any;
use std::sync::Arc;

use aquifer_device::{
    AccessKind, Attribute, CaptureStatus, CapturingStreams, Copy2d, CopyPart, DeviceInfo, DevicePtr, Driver, HostPtr,
    Launch, MemoryInfo, Operation, PhysicalOptions, PoolUsage, RawEvent, RawGraph, RawModule, RawPhysical, RawStream,
    Result, StreamFlags, fork, forward_calls,
};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUdevice_attribute as Attr;

use crate::context::{GpuContext, persistently};
use crate::functions::{CALLED_BY_CUDARC, Functions};
use crate::gpu::Gpu;
use crate::installation::{Installation, bad_value};
use crate::objects::Locked;
use crate::{captures, copies, events, mappings, memory, peers, streams};

/// A real GPU, through NVIDIA's driver. See the [module documentation](super).
///
/// What is still alive when it is dropped, memory included, is given back then.
#[derive(Debug)]
pub struct CudaDriver {
    pub(crate) gpu: Gpu,
}

impl CudaDriver {
    pub(crate) fn new(context: Arc<GpuContext>, ordinal: u32) -> Result<Arc<CudaDriver>> {
        Ok(Arc::new(CudaDriver { gpu: Gpu::new(context, ordinal)? }))
    }

    /// Opens a GPU in its primary context, the one that the CUDA runtime and most libraries use.
    ///
    /// # Errors
    /// When no driver or no such GPU can be used; the error says why and gives advice.
    pub fn open(ordinal: u32) -> Result<Arc<CudaDriver>> {
        Self::open_in(Installation::find()?, ordinal)
    }

    /// As [`CudaDriver::open`], as if the driver lacked functions: for tests with an older driver.
    ///
    /// # Errors
    /// As [`CudaDriver::open`].
    #[doc(hidden)]
    pub fn open_without(ordinal: u32, missing: &[&str]) -> Result<Arc<CudaDriver>> {
        Self::open_in(Installation::find_without(missing)?, ordinal)
    }

    /// Names of the driver's functions without which nothing works, and of those whose absence
    /// turns a capability off: for tests of [`CudaDriver::open_without`].
    #[doc(hidden)]
    pub fn functions() -> (Vec<&'static str>, &'static [&'static str]) {
        (Functions::REQUIRED.iter().chain(&CALLED_BY_CUDARC).copied().collect(), Functions::OPTIONAL)
    }

    fn open_in(installation: Installation, ordinal: u32) -> Result<Arc<CudaDriver>> {
        Self::new(GpuContext::primary(installation, ordinal)?, ordinal)
    }

    /// Drives a GPU in a context that the caller made with cudarc. The context is kept as long as
    /// the driver.
    ///
    /// # Errors
    /// When the context's GPU cannot be asked about.
    pub fn from_context(context: Arc<CudaContext>) -> Result<Arc<CudaDriver>> {
        let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
        Self::new(GpuContext::shared(Installation::find()?, context), ordinal)
    }

    /// Makes a call on the GPU, for [`forward_calls`].
    fn call<T>(&self, _: Operation, make: impl FnOnce(&Gpu) -> Result<T>) -> Result<T> {
        make(&self.gpu)
    }

    /// Gives back all memory and mappings that are left. Objects with handles follow, when their
    /// tables are dropped.
    fn give_everything_back(&self) -> Result<()> {
        let gpu = &self.gpu;
        // Unmapping and freeing pinned memory do not wait for work.
        let mut outcome = persistently(|| gpu.synchronize());
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
                // SAFETY: holders of this driver's memory keep the driver, so there are none; the
                // context was waited for, or is lost. A call that failed did not free it.
                Locked::Allocated { skipped } => unsafe { memory::host_free_raw(gpu, start - skipped) },
                // SAFETY: holders of registered memory keep the driver, so there are none; the
                // context was waited for, or is lost. A call that failed did not unregister it.
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
        self.gpu.context.shared.known.clone()
    }

    fn attribute(&self, attribute: Attribute) -> Result<u64> {
        let ask = |attribute| self.gpu.context.installation.attribute(self.gpu.context.device, attribute);
        match attribute {
            Attribute::ComputeCapabilityMajor => ask(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            Attribute::ComputeCapabilityMinor => ask(Attr::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            Attribute::MultiprocessorCount => ask(Attr::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            Attribute::AsyncEngineCount => ask(Attr::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
            Attribute::VirtualMemoryManagement => Ok(self.gpu.info.granularity_bytes.is_some().into()),
            Attribute::MemoryPools if !self.gpu.context.functions().has_pool() => Ok(0),
            Attribute::MemoryPools => ask(Attr::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
            Attribute::GpuDirectRdmaWithVmm => Ok(self.gpu.facts.rdma.into()),
            Attribute::PosixFdHandles => Ok(self.gpu.facts.posix_fd.into()),
            Attribute::BatchedCopies => Ok(copies::has_batches(self.gpu.context.functions()).into()),
        }
    }

    #[cfg(feature = "nvml")]
    fn memory_users(&self) -> aquifer_device::MemoryUsers {
        crate::nvml::memory_users(&self.gpu)
    }

    fn host_access(&self, _ptr: HostPtr, _bytes: usize, _kind: AccessKind) -> Result<()> {
        Ok(())
    }

    unsafe fn adopt_stream(&self, stream: RawStream) {
        streams::adopt(&self.gpu, stream);
    }

    fn release_stream(&self, stream: RawStream) {
        streams::release(&self.gpu, stream);
    }

    fn take_kept(&self) -> Vec<Arc<dyn Any + Send + Sync>> {
        captures::take_kept(&self.gpu)
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.gpu.events.destroy(event.0)
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        events::wait_peer(&self.gpu, stream, gpu_of(Operation::Wait, peer)?, event)
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

    fn unload_module(&self, module: RawModule) -> Result<()> {
        self.gpu.modules.destroy(module.0)
    }

    fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        self.gpu.graphs.destroy(graph.0)
    }

    forward_calls! {
        memory_info alloc free alloc_async free_async
        reserve unreserve create_physical release_physical map unmap set_access
        host_alloc host_free host_register host_unregister
        create_stream destroy_stream synchronize_stream query_stream stream_id
        create_event record wait query_event synchronize_event elapsed_ms synchronize
        copy_to_device copy_to_host copy_on_device copy_2d copy_batch memset load_module launch
        begin_capture capture_status capture_number keep_for_graph end_capture launch_graph
        pool_usage trim_pool trim_graph_memory can_access_peer
    }
}
