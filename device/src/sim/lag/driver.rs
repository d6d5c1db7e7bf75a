//! [`Driver`] for a device that lags: answers calls about order by the position, checks memory that
//! goes away, and forwards all calls.

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

impl Lagging {
    fn below(&self) -> &dyn Driver {
        &*self.inner
    }

    fn call<T>(&self, _: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        make(&*self.inner)
    }

    /// Length of the plain allocation at an address.
    fn bytes_at(&self, ptr: DevicePtr) -> u64 {
        self.inner.allocation_at(ptr).map_or(0, |range| range.end - range.start)
    }

    /// Whether work is done that was enqueued at `event`, asking the simulator once the device has
    /// reached it. Asking has its price before that, too.
    fn answer(&self, operation: Operation, event: u64, done: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if self.has_reached(event) { done() } else { self.inner.ask(operation).map(|()| false) }
    }
}

impl Driver for Lagging {
    // The simulator answers `wait_peer` at once, at any position of the peer: only the host's
    // knowledge lags.
    crate::forward_calls! {
        info as_any capturing_streams adopt_stream release_stream host_access checks
        memory_info attribute alloc alloc_async reserve unreserve create_physical release_physical map set_access
        host_alloc host_free host_register create_stream destroy_stream stream_id create_event wait wait_peer
        copy_to_device copy_to_host copy_on_device copy_peer copy_2d copy_batch memset load_module unload_module launch
        begin_capture capture_status end_capture launch_graph destroy_graph
        pool_usage trim_pool trim_graph_memory can_access_peer
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.wait_for(self.now());
        let bytes = self.bytes_at(ptr);
        self.inner.free(ptr)?;
        self.taken_away(Operation::Free.name(), ptr, bytes, self.position());
        Ok(())
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        let bytes = self.bytes_at(ptr);
        self.inner.free_async(ptr, stream)?;
        // The stream gets there after its own uses, at any position of the device.
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

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        self.wait_for(self.now());
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        unsafe { self.inner.host_unregister(ptr) }
    }

    fn take_violation(&self) -> Option<String> {
        let hazard = self.state.lock().hazards.pop_front();
        hazard.or_else(|| self.inner.take_violation())
    }
}
