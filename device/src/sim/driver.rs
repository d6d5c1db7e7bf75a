//! [`Driver`] for the simulated device: each call names its operation and delegates.

use std::any::Any;
use std::sync::Arc;

use super::SimDriver;
use super::checks::Checks;
use super::refused::{Answer, Refused};
use super::{host, made};
use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, PoolUsage, RawEvent, RawGraph,
    RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{Code, Operation, Result};
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;

impl SimDriver {
    /// Refuses mapping calls where the device is configured not to map.
    fn can_map(&self) -> Answer<()> {
        if self.vmm { Ok(()) } else { Err(Refused::new(Code::NOT_SUPPORTED, "this device cannot map memory")) }
    }

    fn can_rdma(&self) -> bool {
        self.vmm && self.card.rdma
    }
}

impl Driver for SimDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        self.capturing.clone()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.call(Operation::MemoryInfo, 0, |machine| {
            Ok(MemoryInfo { free: machine.memory.free(), total: machine.memory.total() })
        })
    }

    fn attribute(&self, attribute: Attribute) -> Result<u64> {
        self.call(Operation::Attribute, 0, |_| {
            Ok(match attribute {
                Attribute::ComputeCapabilityMajor => self.card.capability.0,
                Attribute::ComputeCapabilityMinor => self.card.capability.1,
                Attribute::MultiprocessorCount => self.card.multiprocessors,
                Attribute::AsyncEngineCount => self.card.copy_engines,
                Attribute::VirtualMemoryManagement => self.vmm.into(),
                Attribute::MemoryPools => 1,
                Attribute::GpuDirectRdmaWithVmm => self.can_rdma().into(),
                Attribute::PosixFdHandles => self.export.into(),
                Attribute::BatchedCopies => 1,
            })
        })
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        self.call(Operation::Alloc, bytes, |machine| machine.alloc(bytes))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.call(Operation::Free, 0, |machine| machine.free(ptr))
    }

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        self.call(Operation::AllocAsync, bytes, |machine| machine.alloc_async(bytes, stream))
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        self.call(Operation::FreeAsync, 0, |machine| machine.free_async(ptr, stream))
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr> {
        self.call(Operation::Reserve, bytes, |machine| {
            self.can_map()?;
            machine.address.reserve(bytes, alignment).map(DevicePtr)
        })
    }

    fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Operation::Unreserve, bytes, |machine| {
            self.can_map()?;
            machine.unreserve(ptr, bytes)
        })
    }

    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        self.call(Operation::CreatePhysical, bytes, |machine| {
            self.can_map()?;
            if options.rdma && !self.can_rdma() {
                return Err(Refused::new(Code::NOT_SUPPORTED, "this device has no memory for RDMA"));
            }
            if options.exportable.is_some() && !self.export {
                return Err(Refused::new(Code::NOT_SUPPORTED, "this device has no memory that can be exported"));
            }
            machine.create_physical(bytes, options)
        })
    }

    fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        self.call(Operation::ReleasePhysical, 0, |machine| {
            self.can_map()?;
            machine.release_physical(physical)
        })
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        self.call(Operation::Map, bytes, |machine| {
            self.can_map()?;
            machine.map(ptr, bytes, physical)
        })
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call(Operation::Unmap, bytes, |machine| {
            self.can_map()?;
            machine.unmap(ptr, bytes)
        })
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        self.call(Operation::SetAccess, bytes, |machine| {
            self.can_map()?;
            devices.iter().try_for_each(|&ordinal| made::check(ordinal))?;
            machine.set_access(ptr, bytes, devices)
        })
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        self.call(Operation::HostAlloc, bytes as u64, |machine| machine.host.alloc(bytes).map(HostPtr))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        self.call(Operation::HostFree, 0, |machine| machine.host_free(ptr))
    }

    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()> {
        // No driver call: it is not counted, takes no time, and works on a lost device too.
        self.machine.lock().host_access(ptr, bytes, kind);
        Ok(())
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        self.call(Operation::HostRegister, bytes as u64, |machine| machine.host.register(ptr, bytes).map(HostPtr))
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        self.call(Operation::HostUnregister, 0, |machine| machine.host_unregister(ptr))
    }

    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        self.call(Operation::CreateStream, 0, |machine| Ok(machine.create_stream(flags)))
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.call(Operation::DestroyStream, 0, |machine| machine.destroy_stream(stream))
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.call(Operation::SynchronizeStream, 0, |machine| machine.synchronize_stream(stream))
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.call(Operation::QueryStream, 0, |machine| machine.query_stream(stream))
    }

    fn create_event(&self, timing: bool) -> Result<RawEvent> {
        self.call(Operation::CreateEvent, 0, |machine| Ok(machine.create_event(timing)))
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.call(Operation::DestroyEvent, 0, |machine| machine.destroy_event(event))
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.call(Operation::Record, 0, |machine| machine.record(event, stream))
    }

    fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.call(Operation::Wait, 0, |machine| machine.wait(stream, event))
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.wait_for_event_of(peer, stream, event)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.call(Operation::QueryEvent, 0, |machine| machine.query_event(event))
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.call(Operation::SynchronizeEvent, 0, |machine| machine.synchronize_event(event))
    }

    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        self.call(Operation::ElapsedTime, 0, |machine| machine.elapsed_ms(start, end))
    }

    fn synchronize(&self) -> Result<()> {
        self.call(Operation::Synchronize, 0, |machine| machine.synchronize())
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        self.call(Operation::CopyToDevice, 0, |machine| {
            // SAFETY: the caller vouches that the source is readable during this call.
            let take = || unsafe { host::take(src, bytes) };
            machine.copy_to_device(dst, src.addr(), bytes, stream, take)
        })
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        self.call(Operation::CopyToHost, 0, |machine| {
            // SAFETY: the caller vouches that the target is writable during this call, for as many bytes as are given.
            let give = |taken: &[u8]| unsafe { host::give(dst, taken) };
            machine.copy_to_host(dst.addr(), src, bytes, stream, give)
        })
    }

    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
        self.call(Operation::CopyOnDevice, 0, |machine| {
            machine.copy_on_device(Operation::CopyOnDevice, dst, src, bytes, stream)
        })
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        self.copy_from(peer, dst, src, bytes, stream)
    }

    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        self.call(Operation::Copy2d, 0, |machine| machine.copy_2d(copy, stream))
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        self.call(Operation::CopyBatch, 0, |machine| machine.copy_batch(copies, stream))
    }

    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
        self.call(Operation::Memset, 0, |machine| machine.memset(ptr, value, bytes, stream))
    }

    fn load_module(&self, ptx: &str) -> Result<RawModule> {
        self.call(Operation::LoadModule, 0, |machine| machine.load_module(ptx, self.card.capability))
    }

    fn unload_module(&self, module: RawModule) -> Result<()> {
        self.call(Operation::UnloadModule, 0, |machine| machine.unload_module(module))
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        self.call(Operation::Launch, 0, |machine| machine.launch(launch, stream))
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.call(Operation::BeginCapture, 0, |machine| machine.begin_capture(stream))
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.call(Operation::CaptureStatus, 0, |machine| machine.capture_status(stream))
    }

    fn stream_id(&self, stream: RawStream) -> Result<Option<u64>> {
        self.call(Operation::StreamId, 0, |machine| machine.streams.find(stream).map(|id| Some(id.into())))
    }

    fn pool_usage(&self) -> Result<PoolUsage> {
        self.call(Operation::PoolUsage, 0, |machine| {
            let reserved = machine.pool.reserved.saturating_add(machine.memory.kept.pool);
            Ok(PoolUsage { reserved, reserved_peak: machine.pool.reserved_peak.max(reserved), ..machine.pool })
        })
    }

    fn trim_pool(&self, keep: u64) -> Result<()> {
        self.call(Operation::TrimPool, 0, |machine| {
            let kept = keep.saturating_sub(machine.pool.used).min(machine.memory.kept.pool);
            machine.memory.kept.pool = kept;
            Ok(())
        })
    }

    fn trim_graph_memory(&self) -> Result<()> {
        self.call(Operation::TrimGraphMemory, 0, |machine| {
            machine.memory.kept.graphs = 0;
            Ok(())
        })
    }

    fn can_access_peer(&self, peer: u32) -> Result<bool> {
        self.call(Operation::CanAccessPeer, 0, |_| made::check(peer).map(|()| peer != self.info.ordinal))
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        self.call(Operation::EndCapture, 0, |machine| machine.end_capture(stream))
    }

    fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        self.call(Operation::LaunchGraph, 0, |machine| machine.launch_graph(graph, stream))
    }

    fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        self.call(Operation::DestroyGraph, 0, |machine| machine.destroy_graph(graph))
    }

    fn checks(&self) -> Option<Arc<Checks>> {
        self.machine.lock().checks().cloned()
    }

    fn take_violation(&self) -> Option<String> {
        self.machine.lock().detector.take_first().map(|violation| violation.to_string())
    }
}
