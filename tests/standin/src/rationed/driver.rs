//! [`Driver`] for a ration: each call enters, and what changes the ration is noted.

use std::any::Any;
use std::sync::Arc;

use aquifer_device::{
    AccessKind, Attribute, CaptureStatus, CapturingStreams, Code, Copy2d, CopyPart, DeviceError, DeviceInfo, DevicePtr,
    Driver, HostPtr, Launch, MemoryInfo, Operation, PhysicalOptions, PoolUsage, RawEvent, RawGraph, RawModule,
    RawPhysical, RawStream, Result, StreamFlags,
};

use super::{ADDRESSES_FOR_MEMORY, Physical, Rationed, RationedMapping};

impl Driver for Rationed {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    aquifer_device::forward_calls! {
        as_any capturing_streams adopt_stream release_stream host_access
        synchronize_stream query_stream stream_id record wait wait_peer query_event synchronize_event elapsed_ms
        synchronize copy_to_device copy_to_host copy_on_device copy_peer copy_2d copy_batch memset launch
        capture_status launch_graph pool_usage trim_pool trim_graph_memory can_access_peer
    }

    fn attribute(&self, attribute: Attribute) -> Result<u64> {
        let below = self.enter(Operation::Attribute)?;
        match attribute {
            Attribute::VirtualMemoryManagement if self.info.granularity_bytes.is_none() => Ok(0),
            Attribute::GpuDirectRdmaWithVmm if !self.rdma => Ok(0),
            Attribute::PosixFdHandles if !self.export => Ok(0),
            _ => below.attribute(attribute),
        }
    }

    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        self.make(Operation::CreateStream, |made| &mut made.streams, |below| below.create_stream(flags))
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.end(Operation::DestroyStream, |made| &mut made.streams, stream, |below| below.destroy_stream(stream))
    }

    fn create_event(&self, timing: bool) -> Result<RawEvent> {
        self.make(Operation::CreateEvent, |made| &mut made.events, |below| below.create_event(timing))
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.end(Operation::DestroyEvent, |made| &mut made.events, event, |below| below.destroy_event(event))
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.enter(Operation::BeginCapture)?.begin_capture(stream)?;
        self.state.lock().unreturned.capturing.insert(stream);
        Ok(())
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        let graph = self.make(Operation::EndCapture, |made| &mut made.graphs, |below| below.end_capture(stream))?;
        self.state.lock().unreturned.capturing.remove(&stream);
        Ok(graph)
    }

    fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        self.end(Operation::DestroyGraph, |made| &mut made.graphs, graph, |below| below.destroy_graph(graph))
    }

    fn load_module(&self, ptx: &str) -> Result<RawModule> {
        self.make(Operation::LoadModule, |made| &mut made.modules, |below| below.load_module(ptx))
    }

    fn unload_module(&self, module: RawModule) -> Result<()> {
        self.end(Operation::UnloadModule, |made| &mut made.modules, module, |below| below.unload_module(module))
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        self.make(Operation::HostAlloc, |made| &mut made.host, |below| below.host_alloc(bytes))
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.enter(Operation::MemoryInfo)?;
        let free = self.left(&self.state.lock());
        Ok(MemoryInfo { free, total: self.info.total_bytes })
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        self.take_plain(Operation::Alloc, bytes, |below| below.alloc(bytes))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.give(Operation::Free, |below| below.free(ptr), |state| state.forget(ptr))
    }

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        self.take_plain(Operation::AllocAsync, bytes, |below| below.alloc_async(bytes, stream))
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        self.give(Operation::FreeAsync, |below| below.free_async(ptr, stream), |state| state.forget(ptr))
    }

    fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr> {
        let below = self.enter(Operation::Reserve)?;
        self.can_map(Operation::Reserve)?;
        let granularity = self.info.granularity_bytes.unwrap_or(1);
        let most = ADDRESSES_FOR_MEMORY.saturating_mul(self.info.total_bytes.next_multiple_of(granularity));
        let mut state = self.state.lock();
        if bytes > most.saturating_sub(state.reserved) {
            return Err(DeviceError::new(Operation::Reserve, Code::OUT_OF_MEMORY));
        }
        let ptr = below.reserve(bytes, alignment)?;
        state.reserved += bytes;
        state.unreturned.reserved.insert(ptr, bytes);
        Ok(ptr)
    }

    fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.give(
            Operation::Unreserve,
            |below| below.unreserve(ptr, bytes),
            |state| {
                state.reserved -= bytes;
                state.unreturned.reserved.remove(&ptr);
            },
        )
    }

    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        let create = |below: &dyn Driver| {
            self.can_map(Operation::CreatePhysical)?;
            let lacking = match options {
                PhysicalOptions { rdma: true, .. } if !self.rdma => "for RDMA",
                PhysicalOptions { exportable: Some(_), .. } if !self.export => "that can be exported",
                _ => return below.create_physical(bytes, options),
            };
            let refused = DeviceError::new(Operation::CreatePhysical, Code::NOT_SUPPORTED);
            Err(refused.with_detail(format!("this device has no memory {lacking}")))
        };
        self.take(Operation::CreatePhysical, bytes, create, |state, handle| {
            state.created += 1;
            state.handles.insert(handle, state.created);
            state.physical.insert(state.created, Physical { bytes, options, mappings: 0, released: false });
        })
    }

    fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        self.give(
            Operation::ReleasePhysical,
            |below| below.release_physical(physical),
            |state| {
                let Some(number) = state.handles.remove(&physical) else { return };
                if let Some(known) = state.physical.get_mut(&number) {
                    known.released = true;
                }
                state.settle(number);
            },
        )
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        self.give(
            Operation::Map,
            |below| below.map(ptr, bytes, physical),
            |state| {
                let Some(&number) = state.handles.get(&physical) else { return };
                let Some(known) = state.physical.get_mut(&number) else { return };
                known.mappings += 1;
                let mapping = RationedMapping { bytes, options: known.options, devices: Vec::new(), physical: number };
                state.mapped.insert(ptr, mapping);
            },
        )
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.give(
            Operation::Unmap,
            |below| below.unmap(ptr, bytes),
            |state| {
                for at in state.mapped_within(ptr.range(bytes)) {
                    let Some(RationedMapping { physical, .. }) = state.mapped.remove(&at) else { continue };
                    if let Some(known) = state.physical.get_mut(&physical) {
                        known.mappings -= 1;
                    }
                    state.settle(physical);
                }
            },
        )
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        self.give(
            Operation::SetAccess,
            |below| below.set_access(ptr, bytes, devices),
            |state| {
                for at in state.mapped_within(ptr.range(bytes)) {
                    let Some(mapping) = state.mapped.get_mut(&at) else { continue };
                    mapping.devices.extend(devices);
                    mapping.devices.sort_unstable();
                    mapping.devices.dedup();
                }
            },
        )
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        let register = |below: &dyn Driver| unsafe { below.host_register(ptr, bytes) };
        self.make(Operation::HostRegister, |made| &mut made.registered, register)
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        let free = |below: &dyn Driver| unsafe { below.host_free(ptr) };
        self.end(Operation::HostFree, |made| &mut made.host, ptr, free)
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        let unregister = |below: &dyn Driver| unsafe { below.host_unregister(ptr) };
        self.end(Operation::HostUnregister, |made| &mut made.registered, ptr, unregister)
    }
}
