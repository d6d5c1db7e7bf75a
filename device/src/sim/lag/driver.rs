//! [`Driver`] for a device that lags: calls about order are answered by the position, memory that goes is checked, and
//! everything is passed on.

use std::any::Any;
use std::sync::Arc;

use super::Lagging;
use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, PoolUsage, RawEvent, RawGraph,
    RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;
use crate::sim::Checks;

/// Methods that are passed on unchanged.
macro_rules! pass_on {
    ($($method:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $method(&self, $($arg: $type),*) -> Result<$result> {
            self.inner.$method($($arg),*)
        }
    )*};
}

impl Lagging {
    /// Whether work is done that was enqueued at `event`, asking the simulator once the device has reached it. Asking has its
    /// price before that, too.
    fn answer(&self, operation: Operation, event: u64, done: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if self.has_reached(event) { done() } else { self.inner.ask(operation).map(|()| false) }
    }
}

impl Driver for Lagging {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn as_any(&self) -> Option<&dyn Any> {
        self.inner.as_any()
    }

    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        self.inner.capturing_streams()
    }

    /// The simulator answers at once, whatever the peer's position is: what lags is what the host is told.
    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.inner.wait_peer(stream, peer, event)
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        self.inner.copy_peer(dst, peer, src, bytes, stream)
    }

    pass_on! {
        memory_info() -> MemoryInfo;
        attribute(attribute: Attribute) -> u64;
        reserve(bytes: u64, alignment: u64) -> DevicePtr;
        unreserve(ptr: DevicePtr, bytes: u64) -> ();
        create_physical(bytes: u64, options: PhysicalOptions) -> RawPhysical;
        release_physical(physical: RawPhysical) -> ();
        map(ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> ();
        set_access(ptr: DevicePtr, bytes: u64, devices: &[u32]) -> ();
        host_alloc(bytes: usize) -> HostPtr;
        host_access(ptr: HostPtr, bytes: usize, kind: AccessKind) -> ();
        create_stream(flags: StreamFlags) -> RawStream;
        destroy_stream(stream: RawStream) -> ();
        create_event(timing: bool) -> RawEvent;
        wait(stream: RawStream, event: RawEvent) -> ();
        copy_on_device(dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> ();
        memset(ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> ();
        begin_capture(stream: RawStream) -> ();
        end_capture(stream: RawStream) -> RawGraph;
        launch_graph(graph: RawGraph, stream: RawStream) -> ();
        destroy_graph(graph: RawGraph) -> ();
        load_module(ptx: &str) -> RawModule;
        unload_module(module: RawModule) -> ();
        capture_status(stream: RawStream) -> CaptureStatus;
        stream_id(stream: RawStream) -> Option<u64>;
        pool_usage() -> PoolUsage;
        trim_pool(keep: u64) -> ();
        trim_graph_memory() -> ();
        can_access_peer(peer: u32) -> bool;
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let ptr = self.inner.alloc(bytes)?;
        self.state.lock().plain.insert(ptr, bytes);
        Ok(ptr)
    }

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        let ptr = self.inner.alloc_async(bytes, stream)?;
        self.state.lock().plain.insert(ptr, bytes);
        Ok(ptr)
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.wait_for(self.now());
        self.inner.free(ptr)?;
        let bytes = self.state.lock().plain.remove(&ptr).unwrap_or(0);
        self.taken_away(Operation::Free.name(), ptr, bytes, self.position());
        Ok(())
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        self.inner.free_async(ptr, stream)?;
        let bytes = self.state.lock().plain.remove(&ptr).unwrap_or(0);
        // The stream gets there after its own uses, whatever the position is now.
        self.taken_away(Operation::FreeAsync.name(), ptr, bytes, self.now());
        Ok(())
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let position = self.position();
        self.inner.unmap(ptr, bytes)?;
        self.taken_away(Operation::Unmap.name(), ptr, bytes, position);
        Ok(())
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.inner.record(event, stream)?;
        self.state.lock().recorded.insert(event, self.now());
        Ok(())
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.inner.destroy_event(event)?;
        self.state.lock().recorded.remove(&event);
        Ok(())
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.answer(Operation::QueryEvent, self.recorded(event), || self.inner.query_event(event))
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.wait_for(self.recorded(event));
        self.inner.synchronize_event(event)
    }

    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        if [start, end].into_iter().all(|event| self.has_reached(self.recorded(event))) {
            return self.inner.elapsed_ms(start, end);
        }
        self.inner.ask(Operation::ElapsedTime)?;
        Err(DeviceError::new(Operation::ElapsedTime, Code::NOT_READY)
            .with_detail("the lagging device has not reached the event"))
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.answer(Operation::QueryStream, self.now(), || self.inner.query_stream(stream))
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.wait_for(self.now());
        self.inner.synchronize_stream(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.wait_for(self.now());
        self.inner.synchronize()
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about `src` is passed on unchanged.
        unsafe { self.inner.copy_to_device(dst, src, bytes, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about `dst` is passed on unchanged.
        unsafe { self.inner.copy_to_host(dst, src, bytes, stream) }
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        unsafe { self.inner.host_register(ptr, bytes) }
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        unsafe { self.inner.host_free(ptr) }
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        self.wait_for(self.now());
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        unsafe { self.inner.host_unregister(ptr) }
    }

    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about host memory is passed on unchanged.
        unsafe { self.inner.copy_2d(copy, stream) }
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about host memory is passed on unchanged.
        unsafe { self.inner.copy_batch(copies, stream) }
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about the kernel is passed on unchanged.
        unsafe { self.inner.launch(launch, stream) }
    }

    fn checks(&self) -> Option<Arc<Checks>> {
        self.inner.checks()
    }

    fn take_violation(&self) -> Option<String> {
        let hazard = self.state.lock().hazards.pop_front();
        hazard.or_else(|| self.inner.take_violation())
    }
}
