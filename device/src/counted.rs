//! The driver in front of every device's own: it counts calls, and completes errors with the
//! device's name and the error by which the device was lost.

use std::any::Any;
use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::{Arc, OnceLock};

use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, MemoryUsers, PoolUsage, RawEvent,
    RawGraph, RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{DeviceError, Operation, Result};
use crate::executor;
use crate::fork;
use crate::label::DeviceLabel;
use crate::launch::{AccessKind, Launch};
use crate::physical::PhysicalOptions;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::witness::Witness;

/// How often each driver call was made. Its `Debug` names those that were made:
/// `{cuMemCreate: 2, cuMemMap: 3}`.
#[derive(Clone, PartialEq, Eq)]
pub struct CallCounts(Vec<u64>);

impl CallCounts {
    /// Calls of one operation.
    pub fn of(&self, operation: Operation) -> u64 {
        self.0.get(operation as usize).copied().unwrap_or(0)
    }

    /// The operations that were called at all, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, u64)> + '_ {
        Operation::ALL.iter().map(|&operation| (operation, self.of(operation))).filter(|&(_, count)| count > 0)
    }

    /// Calls of all operations.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Calls made since `earlier` was taken from the same device.
    #[must_use]
    pub fn since(&self, earlier: &CallCounts) -> CallCounts {
        CallCounts(self.0.iter().zip(&earlier.0).map(|(now, then)| now - then).collect())
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut calls = f.debug_map();
        for (operation, count) in self.iter() {
            calls.entry(&format_args!("{operation}"), &count);
        }
        calls.finish()
    }
}

/// See [`on_loss`].
static ON_LOSS: OnceLock<fn(u32)> = OnceLock::new();

/// Has `note` called with the number of each device that is lost, once for each. That may be under
/// the lock of a timeline, so `note` makes no driver call. Only the first `note` counts.
pub fn on_loss(note: fn(u32)) {
    ON_LOSS.get_or_init(|| note);
}

/// Counts every call, failed ones included, and passes it on.
#[derive(Debug)]
pub(crate) struct Counted {
    device_id: u32,
    inner: Arc<dyn Driver>,
    calls: Vec<AtomicU64>,
    /// The first error that reported the device as lost.
    lost: OnceLock<DeviceError>,
    label: DeviceLabel,
    capturing: Arc<CapturingStreams>,
}

// A driver is usable after a panic: one that reports an error of the program by a panic has taken
// note of it before, and holds no lock.
impl UnwindSafe for Counted {}
impl RefUnwindSafe for Counted {}

impl Counted {
    /// `capturing` are those of the driver's context.
    pub(crate) fn new(device_id: u32, inner: Arc<dyn Driver>, capturing: Arc<CapturingStreams>) -> Self {
        let (calls, label) =
            (Operation::ALL.iter().map(|_| AtomicU64::new(0)).collect(), DeviceLabel::from(inner.info()));
        Counted { device_id, inner, calls, lost: OnceLock::new(), label, capturing }
    }

    pub(crate) fn counts(&self) -> CallCounts {
        CallCounts(self.calls.iter().map(|calls| calls.load(Ordering::Relaxed)).collect())
    }

    fn below(&self) -> &dyn Driver {
        &*self.inner
    }

    fn call<T>(&self, operation: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        let answer = self.count(operation, make)?;
        self.complete(answer)
    }

    /// Counts a call and makes it.
    fn count<T>(&self, operation: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<Result<T>> {
        fork::check(operation).map_err(|error| error.of_device(&self.label))?;
        self.calls[operation as usize].fetch_add(1, Ordering::Relaxed);
        executor::yield_now();
        Ok(make(&*self.inner))
    }

    /// Completes the result of a call: errors name the device and, if it is lost, the error by
    /// which it was lost.
    #[inline]
    pub(crate) fn complete<T>(&self, answer: Result<T>) -> Result<T> {
        answer.map_err(|error| {
            let error = error.of_device(&self.label);
            self.capturing.note_refused(&error);
            if error.is_device_lost() { self.note_lost(error) } else { error }
        })
    }

    /// As [`Counted::complete`], for a call with a peer, which may be the device that is lost.
    fn complete_with_peer<T>(&self, answer: Result<T>) -> Result<T> {
        answer.map_err(|error| {
            let error = error.of_device(&self.label);
            if error.is_device_lost() && self.is_lost() { self.note_lost(error) } else { error }
        })
    }

    /// The first error that reported the device as lost, if any did.
    pub(crate) fn lost(&self) -> Option<&DeviceError> {
        self.lost.get()
    }

    /// Remembers an error of this device, which is lost, if it is the first. A later one then names
    /// the first, which says most: the driver reports failed work at the first call afterwards, and
    /// at all calls from then on.
    #[cold]
    pub(crate) fn note_lost(&self, error: DeviceError) -> DeviceError {
        let mut is_first = false;
        let first = self.lost.get_or_init(|| {
            is_first = true;
            error.clone()
        });
        if is_first {
            ON_LOSS.get().inspect(|note| note(self.device_id));
            return error;
        }
        let (label, operation, code) = (&self.label, first.operation, first.code.name());
        error.with_more(format_args!("{label} was lost before: {operation} reported {code}"))
    }

    /// Whether the device is lost. Asks the driver if no error reported it yet. That call is not
    /// counted, because it is made only after one that failed.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost().is_some() || self.inner.memory_info().is_err_and(|error| error.is_device_lost())
    }
}

impl Driver for Counted {
    crate::forward_calls! {
        info as_any capturing_streams witness take_violation
        memory_info attribute alloc free alloc_async free_async
        reserve unreserve create_physical release_physical map unmap set_access
        host_alloc host_free host_register host_unregister
        create_stream destroy_stream synchronize_stream query_stream stream_id
        create_event destroy_event record wait query_event synchronize_event elapsed_ms synchronize
        copy_to_device copy_to_host copy_on_device copy_2d copy_batch memset load_module unload_module launch
        begin_capture capture_status capture_number keep_for_graph take_kept end_capture launch_graph destroy_graph
        pool_usage trim_pool trim_graph_memory can_access_peer
    }

    fn memory_users(&self) -> MemoryUsers {
        if fork::is_child() { MemoryUsers::default() } else { self.inner.memory_users() }
    }

    unsafe fn adopt_stream(&self, stream: RawStream) {
        if !fork::is_child() {
            // SAFETY: the caller's promise about the stream is passed on unchanged.
            unsafe { self.inner.adopt_stream(stream) }
        }
    }

    fn release_stream(&self, stream: RawStream) {
        if !fork::is_child() {
            self.inner.release_stream(stream);
        }
    }

    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()> {
        fork::check(Operation::CopyToHost)?;
        self.complete(self.inner.host_access(ptr, bytes, kind))
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.complete_with_peer(self.count(Operation::Wait, |below| below.wait_peer(stream, peer, event))?)
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        self.complete_with_peer(
            self.count(Operation::CopyPeer, |below| below.copy_peer(dst, peer, src, bytes, stream))?,
        )
    }
}
