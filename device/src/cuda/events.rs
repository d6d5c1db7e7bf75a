//! Events. A host that waits for one sleeps: all are made with `CU_EVENT_BLOCKING_SYNC`, for waiting threads must not take the
//! processor from those that feed the GPU.

use std::ptr;
use std::sync::Arc;

use super::context::Core;
use super::driver::CudaDriver;
use super::handles::{Kind, Object};
use super::installation::check;
use super::raw::{handle, pointer};
use super::streams::done;
use crate::driver::{RawEvent, RawStream};
use crate::error::{Operation, Result};

/// `CU_EVENT_BLOCKING_SYNC`.
const BLOCKING_SYNC: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

#[derive(Debug)]
pub(super) enum Events {}

impl Kind for Events {
    const NAME: &'static str = "event";
    const DESTROY: Operation = Operation::DestroyEvent;
    type Extra = ();

    unsafe fn destroy(core: &Core, raw: u64) -> Result<()> {
        // SAFETY: the caller vouches for the event (F1).
        check(Self::DESTROY, unsafe { (core.functions().cuEventDestroy_v2)(pointer(raw)) })
    }
}

impl CudaDriver {
    pub(super) fn event(&self, operation: Operation, event: RawEvent) -> Result<Arc<Object<Events>>> {
        self.events.find(operation, event.0)
    }

    pub(super) fn create_event(&self, timing: bool) -> Result<RawEvent> {
        let _current = self.core.enter_relaxed(Operation::CreateEvent)?;
        let mut raw = ptr::null_mut();
        let flags = BLOCKING_SYNC | if timing { 0 } else { DISABLE_TIMING };
        // SAFETY: the handle outlives the call (F1).
        check(Operation::CreateEvent, unsafe { (self.core.functions().cuEventCreate)(&raw mut raw, flags) })?;
        let raw = handle(raw);
        // SAFETY: just created, and nobody else knows it.
        self.events.insert(raw, unsafe { Object::new(&self.core, raw, ()) });
        Ok(RawEvent(raw))
    }

    pub(super) fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let operation = Operation::Record;
        let (event, stream) = (self.event(operation, event)?, self.stream(operation, stream)?);
        let _current = self.core.enter(operation)?;
        // SAFETY: event and stream live (L1, F1).
        check(operation, unsafe { (self.core.functions().cuEventRecord)(pointer(event.raw()), stream.raw) })
    }

    pub(super) fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let operation = Operation::Wait;
        let (event, stream) = (self.event(operation, event)?, self.stream(operation, stream)?);
        let _current = self.core.enter(operation)?;
        // SAFETY: event and stream live (L1, F1); 0 are the only flags.
        check(operation, unsafe { (self.core.functions().cuStreamWaitEvent)(stream.raw, pointer(event.raw()), 0) })
    }

    pub(super) fn query_event(&self, event: RawEvent) -> Result<bool> {
        let operation = Operation::QueryEvent;
        let event = self.event(operation, event)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the event lives (L1, F1).
        done(operation, unsafe { (self.core.functions().cuEventQuery)(pointer(event.raw())) })
    }

    pub(super) fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        let operation = Operation::SynchronizeEvent;
        let event = self.event(operation, event)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the event lives (L1, F1).
        check(operation, unsafe { (self.core.functions().cuEventSynchronize)(pointer(event.raw())) })
    }

    pub(super) fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        let operation = Operation::ElapsedTime;
        let elapsed = self.optional(operation, self.core.functions().cuEventElapsedTime)?;
        let (start, end) = (self.event(operation, start)?, self.event(operation, end)?);
        let _current = self.core.enter_relaxed(operation)?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: the number outlives the call, and the events live (L1, F1).
        let code = unsafe { elapsed(&raw mut milliseconds, pointer(start.raw()), pointer(end.raw())) };
        check(operation, code).map(|()| milliseconds.into())
    }
}
