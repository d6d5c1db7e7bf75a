//! Streams: the driver's default ones, our own, and those of other libraries.

use std::ffi::{c_int, c_ulonglong};
use std::ptr;
use std::sync::{Arc, OnceLock};

use aquifer_device::{CaptureStatus, Code, DeviceError, Operation, RawStream, Result, StreamFlags};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstream;

use crate::captures;
use crate::context::RelaxedMode;
use crate::gpu::Gpu;
use crate::handles::{Kind, OwnedObject, dead};
use crate::installation::check;
use crate::objects::{Lent, LiveStream, StreamEntry, Streams};
use crate::raw::{handle, pointer};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// Whether a handle stands for one of the default streams, which always live.
pub(crate) fn is_default(stream: RawStream) -> bool {
    stream.is_legacy() || stream == RawStream::PER_THREAD
}

/// The stream with this handle.
pub(crate) fn live(gpu: &Gpu, operation: Operation, stream: RawStream) -> Result<LiveStream> {
    if is_default(stream) {
        return Ok(LiveStream { raw: pointer(stream.0), _entry: None });
    }
    let entry = gpu.streams.get(stream.0).ok_or_else(|| dead(operation, Streams::NAME, stream.0))?;
    Ok(LiveStream { raw: pointer(stream.0), _entry: Some(entry) })
}

/// The driver's number of the stream, if it has one: not while it captures, which the question
/// would break.
fn identity(gpu: &Gpu, operation: Operation, raw: CUstream) -> Result<Option<u64>> {
    let Some(ask) = gpu.context.functions().cuStreamGetId else { return Ok(None) };
    if captures::status(gpu, operation, raw)? != CaptureStatus::None {
        return Ok(None);
    }
    let mut id: c_ulonglong = 0;
    // SAFETY: the number outlives the call, and the stream lives (L1, F1).
    gpu.context.call(operation, |_| unsafe { ask(raw, &raw mut id) })?;
    Ok(Some(id))
}

impl Gpu {
    pub(crate) fn stream_id(&self, stream: RawStream) -> Result<Option<u64>> {
        let live = live(self, Operation::StreamId, stream)?;
        captures::forbid_capture(self, Operation::StreamId, &live, "asking for its identity would break that")?;
        identity(self, Operation::StreamId, live.raw)
    }

    pub(crate) fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        destroy_lent(self);
        let mut raw = ptr::null_mut();
        let non_blocking = if flags.non_blocking { NON_BLOCKING } else { 0 };
        let priority: c_int = flags.priority;
        // SAFETY: the handle outlives the call (F1).
        self.context.call(Operation::CreateStream, |functions| unsafe {
            (functions.cuStreamCreateWithPriority)(&raw mut raw, non_blocking, priority)
        })?;
        let raw = handle(raw);
        // An adopted stream that had this handle was destroyed by its owner.
        release(self, RawStream(raw));
        // SAFETY: just created, and known only here.
        let object = unsafe { OwnedObject::new(&self.context, raw, Lent::default()) };
        self.streams.insert(raw, StreamEntry::Owned(object));
        Ok(RawStream(raw))
    }

    /// Destroys a stream, after the end of its capture if it has one. A stream whose object is lent to
    /// cudarc is destroyed once cudarc has given that back.
    pub(crate) fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let operation = Operation::DestroyStream;
        if is_default(stream) {
            return Err(DeviceError::refused(operation, Code::INVALID_HANDLE)
                .with_detail("a default stream cannot be destroyed"));
        }
        let owned = self.streams.take_if(stream.0, |entry| matches!(entry, StreamEntry::Owned(_)));
        let entry = owned.ok_or_else(|| dead(operation, Streams::NAME, stream.0))?;
        let mut entry = match Arc::try_unwrap(entry) {
            Ok(entry) => entry,
            Err(entry) => {
                // In use on another thread: the last user's drop destroys it (L1), unless it is lent to
                // cudarc.
                if entry.is_lent() {
                    self.lent.lock().push(entry);
                }
                return Ok(());
            }
        };
        if !entry.take_back() {
            self.lent.lock().push(Arc::new(entry));
            return Ok(());
        }
        let StreamEntry::Owned(object) = &mut entry else { return Ok(()) };
        let destroyed = object.destroy();
        if destroyed.is_err() {
            self.streams.insert(stream.0, entry);
        }
        destroyed
    }

    pub(crate) fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let operation = Operation::SynchronizeStream;
        let live = live(self, operation, stream)?;
        captures::forbid_capture(self, operation, &live, "its work does not run, so it cannot be waited for")?;
        // SAFETY: the stream lives (L1, F1).
        self.context.call(operation, |functions| unsafe { (functions.cuStreamSynchronize)(live.raw) })
    }

    pub(crate) fn query_stream(&self, stream: RawStream) -> Result<bool> {
        let operation = Operation::QueryStream;
        let live = live(self, operation, stream)?;
        captures::forbid_capture(self, operation, &live, "its work does not run, so it is neither idle nor busy")?;
        let _current = self.context.enter_relaxed(operation)?;
        // SAFETY: the stream lives (L1, F1).
        done(operation, unsafe { (self.context.functions().cuStreamQuery)(live.raw) })
    }
}

/// Destroys the streams that were lent out when they should have been destroyed and were given back
/// since.
fn destroy_lent(gpu: &Gpu) {
    let mut lent = gpu.lent.lock();
    let is_back = |entry: &mut Arc<StreamEntry>| Arc::get_mut(entry).is_some_and(StreamEntry::take_back);
    let back: Vec<_> = lent.extract_if(.., is_back).collect();
    drop(lent);
    drop(back);
}

/// Keeps a stream of cudarc's alive as long as it is adopted. False if it is neither adopted nor
/// one of ours.
pub(crate) fn keep(gpu: &Gpu, stream: RawStream, object: &Arc<CudaStream>) -> bool {
    let entry = gpu.streams.get(stream.0);
    if let Some(StreamEntry::Adopted(adopted)) = entry.as_deref() {
        adopted.get_or_init(|| object.clone());
    }
    entry.is_some()
}

/// Lets calls name a stream that another library owns. A stream of this driver has its entry
/// already.
pub(crate) fn adopt(gpu: &Gpu, stream: RawStream) {
    let is_ours = || gpu.streams.get(stream.0).is_some_and(|entry| matches!(*entry, StreamEntry::Owned(_)));
    if is_default(stream) || is_ours() {
        return;
    }
    // The earlier stream of this handle was destroyed without being released.
    release(gpu, stream);
    gpu.streams.insert(stream.0, StreamEntry::Adopted(OnceLock::new()));
}

/// Forgets a stream of [`adopt`].
pub(crate) fn release(gpu: &Gpu, stream: RawStream) {
    let entry = gpu.streams.take_if(stream.0, |entry| matches!(entry, StreamEntry::Adopted(_)));
    let Some(entry) = entry else { return };
    // A capture that was begun here and goes on is its owner's to end: no call can name the stream
    // here any more.
    gpu.context.shared.end(stream);
    // Outside of the table's lock, because the last reference to cudarc's stream may destroy it,
    // with the context current.
    let _current = gpu.context.enter(Operation::DestroyStream).ok();
    let _mode = RelaxedMode::enter(gpu.context.functions(), Operation::DestroyStream).ok();
    drop(entry);
}

/// The result of a query.
pub(crate) fn done(operation: Operation, code: u32) -> Result<bool> {
    if Code(code) == Code::NOT_READY { Ok(false) } else { check(operation, code).map(|()| true) }
}
