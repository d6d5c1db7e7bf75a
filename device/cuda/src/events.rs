//! Events. A host that waits for one sleeps: all are made with `CU_EVENT_BLOCKING_SYNC`, for
//! waiting threads must not take the processor from those that feed the GPU.

use std::ptr;
use std::sync::Arc;

use aquifer_device::{Operation, RawEvent, RawStream, Result};

use crate::gpu::Gpu;
use crate::handles::OwnedObject;
use crate::installation::check;
use crate::objects::Events;
use crate::raw::{handle, pointer};
use crate::streams;
use crate::streams::done;

/// `CU_EVENT_BLOCKING_SYNC`.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

fn find(gpu: &Gpu, operation: Operation, event: RawEvent) -> Result<Arc<OwnedObject<Events>>> {
    gpu.events.find(operation, event.0)
}

impl Gpu {
    pub(crate) fn create_event(&self, timing: bool) -> Result<RawEvent> {
        let mut raw = ptr::null_mut();
        let flags = BLOCKING_SYNC | if timing { 0 } else { DISABLE_TIMING };
        self.context
            // SAFETY: the handle outlives the call (F1).
            .call(Operation::CreateEvent, |functions| unsafe { (functions.cuEventCreate)(&raw mut raw, flags) })?;
        let raw = handle(raw);
        // SAFETY: just created, and known only here.
        self.events.insert(raw, unsafe { OwnedObject::new(&self.context, raw, ()) });
        Ok(RawEvent(raw))
    }

    pub(crate) fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let operation = Operation::Record;
        let (event, stream) = (find(self, operation, event)?, streams::live(self, operation, stream)?);
        let _current = self.context.enter(operation)?;
        // SAFETY: event and stream live (L1, F1).
        check(operation, unsafe { (self.context.functions().cuEventRecord)(pointer(event.raw()), stream.raw) })
    }

    pub(crate) fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        wait_peer(self, stream, self, event)
    }

    pub(crate) fn query_event(&self, event: RawEvent) -> Result<bool> {
        let operation = Operation::QueryEvent;
        let event = find(self, operation, event)?;
        let _current = self.context.enter_relaxed(operation)?;
        // SAFETY: the event lives (L1, F1).
        done(operation, unsafe { (self.context.functions().cuEventQuery)(pointer(event.raw())) })
    }

    pub(crate) fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        let operation = Operation::SynchronizeEvent;
        let event = find(self, operation, event)?;
        // SAFETY: the event lives (L1, F1).
        self.context.call(operation, |functions| unsafe { (functions.cuEventSynchronize)(pointer(event.raw())) })
    }

    pub(crate) fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        let operation = Operation::ElapsedTime;
        let elapsed = self.optional(operation, self.context.functions().cuEventElapsedTime)?;
        let (start, end) = (find(self, operation, start)?, find(self, operation, end)?);
        let mut milliseconds = 0.0_f32;
        self.context
            // SAFETY: the number outlives the call, and the events live (L1, F1).
            .call(operation, |_| unsafe { elapsed(&raw mut milliseconds, pointer(start.raw()), pointer(end.raw())) })
            .map(|()| milliseconds.into())
    }
}

/// Makes a stream wait for an event of this or another GPU.
pub(crate) fn wait_peer(gpu: &Gpu, stream: RawStream, peer: &Gpu, event: RawEvent) -> Result<()> {
    let operation = Operation::Wait;
    let (event, stream) = (find(peer, operation, event)?, streams::live(gpu, operation, stream)?);
    let _current = gpu.context.enter(operation)?;
    // SAFETY: event and stream live (L1, F1), and an event may be of another context; 0 are the
    // only flags.
    check(operation, unsafe { (gpu.context.functions().cuStreamWaitEvent)(stream.raw, pointer(event.raw()), 0) })
}
