//! [`Driver`] for the simulated device: each call goes to the machine.

use std::any::Any;
use std::sync::Arc;

use aquifer_device::{
    AccessKind, Attribute, CaptureStatus, CapturingStreams, Copy2d, CopyPart, DeviceInfo, DevicePtr, Driver, HostPtr,
    Launch, MemoryInfo, MemoryUsers, Operation, PhysicalOptions, PoolUsage, RawEvent, RawGraph, RawModule, RawPhysical,
    RawStream, Result, StreamFlags, Witness,
};

use crate::SimDriver;
use crate::checks::Unchecked;
use crate::host;

impl Driver for SimDriver {
    aquifer_device::forward_calls! {
        memory_info attribute free alloc_async free_async reserve unreserve release_physical map
        create_stream destroy_stream synchronize_stream query_stream stream_id
        create_event destroy_event record wait query_event synchronize_event elapsed_ms synchronize
        copy_on_device memset load_module unload_module
        begin_capture capture_status end_capture launch_graph destroy_graph
        pool_usage trim_pool trim_graph_memory can_access_peer
    }

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        self.capturing.clone()
    }

    fn memory_users(&self) -> MemoryUsers {
        self.machine.lock().memory.users()
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        self.call_about(Operation::Alloc, bytes, |machine| machine.alloc(bytes))
    }

    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        self.call_about(Operation::CreatePhysical, bytes, |machine| machine.create_physical(bytes, options))
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.call_about(Operation::Unmap, bytes, |machine| machine.unmap(ptr, bytes))
    }

    fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        self.call_about(Operation::SetAccess, bytes, |machine| machine.set_access(ptr, bytes, devices))
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        self.call_about(Operation::HostAlloc, bytes as u64, |machine| machine.host.alloc(bytes).map(HostPtr))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        self.call(Operation::HostFree, |machine| machine.host_free(ptr))
    }

    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()> {
        // No driver call: it is not counted, takes no time, and works on a lost device too.
        self.machine.lock().host_access(ptr, bytes, kind);
        Ok(())
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        self.call_about(Operation::HostRegister, bytes as u64, |machine| machine.host.register(ptr, bytes).map(HostPtr))
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        self.call(Operation::HostUnregister, |machine| machine.host_unregister(ptr))
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.wait_for_event_of(peer, stream, event)
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        self.call(Operation::CopyToDevice, |machine| {
            // SAFETY: the caller vouches that the source is readable during this call.
            let take = || unsafe { host::take(src, bytes) };
            machine.copy_to_device(dst, src.addr(), bytes, stream, take)
        })
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        self.call(Operation::CopyToHost, |machine| {
            // SAFETY: the caller vouches that the target is writable during this call, for as many
            // bytes as are given.
            let give = |taken: &[u8]| unsafe { host::give(dst, taken) };
            machine.copy_to_host(dst.addr(), src, bytes, stream, give)
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
        self.call(Operation::Copy2d, |machine| machine.copy_2d(copy, stream))
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        self.call(Operation::CopyBatch, |machine| machine.copy_batch(copies, stream))
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        self.call(Operation::Launch, |machine| machine.launch(launch, stream))
    }

    fn witness(&self) -> Option<Arc<dyn Witness>> {
        match self.machine.lock().checks() {
            Some(checks) => Some(checks.clone()),
            None => Some(Arc::new(Unchecked)),
        }
    }

    fn take_violation(&self) -> Option<String> {
        self.machine.lock().detector.take_first().map(|violation| violation.to_string())
    }
}
