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

/// Implements calls that the machine answers.
macro_rules! by_machine {
    ($($operation:ident => $method:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $method(&self, $($arg: $type),*) -> Result<$result> {
            self.call(Operation::$operation, 0, |machine| machine.$method($($arg),*))
        }
    )*};
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

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        self.call(Operation::AllocAsync, bytes, |machine| machine.alloc_async(bytes, stream))
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

    fn create_event(&self, timing: bool) -> Result<RawEvent> {
        self.call(Operation::CreateEvent, 0, |machine| Ok(machine.create_event(timing)))
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.wait_for_event_of(peer, stream, event)
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
            // SAFETY: the caller vouches that the target is writable during this call, for as many
            // bytes as are given.
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

    fn load_module(&self, ptx: &str) -> Result<RawModule> {
        self.call(Operation::LoadModule, 0, |machine| machine.load_module(ptx, self.card.capability))
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        self.call(Operation::Launch, 0, |machine| machine.launch(launch, stream))
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

    fn checks(&self) -> Option<Arc<Checks>> {
        self.machine.lock().checks().cloned()
    }

    fn take_violation(&self) -> Option<String> {
        self.machine.lock().detector.take_first().map(|violation| violation.to_string())
    }

    by_machine! {
        Free => free(ptr: DevicePtr) -> ();
        FreeAsync => free_async(ptr: DevicePtr, stream: RawStream) -> ();
        DestroyStream => destroy_stream(stream: RawStream) -> ();
        SynchronizeStream => synchronize_stream(stream: RawStream) -> ();
        QueryStream => query_stream(stream: RawStream) -> bool;
        DestroyEvent => destroy_event(event: RawEvent) -> ();
        Record => record(event: RawEvent, stream: RawStream) -> ();
        Wait => wait(stream: RawStream, event: RawEvent) -> ();
        QueryEvent => query_event(event: RawEvent) -> bool;
        SynchronizeEvent => synchronize_event(event: RawEvent) -> ();
        ElapsedTime => elapsed_ms(start: RawEvent, end: RawEvent) -> f64;
        Synchronize => synchronize() -> ();
        Memset => memset(ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> ();
        UnloadModule => unload_module(module: RawModule) -> ();
        BeginCapture => begin_capture(stream: RawStream) -> ();
        CaptureStatus => capture_status(stream: RawStream) -> CaptureStatus;
        EndCapture => end_capture(stream: RawStream) -> RawGraph;
        LaunchGraph => launch_graph(graph: RawGraph, stream: RawStream) -> ();
        DestroyGraph => destroy_graph(graph: RawGraph) -> ();
    }
}
