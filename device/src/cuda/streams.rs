//! Streams: the driver's default ones, our own, and those that somebody else owns.

use std::ffi::{c_int, c_ulonglong};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstream;

use super::captures::end_before_destruction;
use super::context::{Core, RelaxedMode};
use super::driver::CudaDriver;
use super::handles::{Kind, Object, dead};
use super::installation::check;
use super::raw::{handle, pointer};
use crate::driver::{CaptureStatus, RawStream, StreamFlags};
use crate::error::{Code, DeviceError, Operation, Result};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A live stream.
#[derive(Debug)]
pub(super) enum Entry {
    /// Created here.
    Owned(Object<Streams>),
    /// Somebody else's.
    Adopted(Adopted),
}

impl Entry {
    /// Whether cudarc's object of it was asked for, and not taken back since.
    fn is_lent(&self) -> bool {
        matches!(self, Entry::Owned(object) if object.extra.0.get().is_some())
    }

    /// Takes that object back; false while somebody else has it.
    fn take_back(&mut self) -> bool {
        match self {
            Entry::Owned(object) => Streams::release(&mut object.extra),
            Entry::Adopted(_) => true,
        }
    }
}

/// Streams created here.
#[derive(Debug)]
pub(super) enum Streams {}

/// cudarc's object of a stream of ours, once somebody asked for one.
#[derive(Debug, Default)]
pub(super) struct Lent(pub(super) OnceLock<Arc<CudaStream>>);

impl Lent {
    /// Takes the object back; false while somebody else has it.
    fn take_back(&mut self) -> bool {
        let Some(lent) = self.0.take() else { return true };
        match Arc::try_unwrap(lent) {
            // The object does not own the stream: dropping it makes no call.
            Ok(_) => true,
            Err(lent) => {
                self.0 = OnceLock::from(lent);
                false
            }
        }
    }
}

impl Kind for Streams {
    const NAME: &'static str = "stream";
    const DESTROY: Operation = Operation::DestroyStream;
    type Extra = Lent;

    fn release(lent: &mut Lent) -> bool {
        lent.take_back()
    }

    unsafe fn destroy(core: &Core, raw: u64) -> Result<()> {
        // SAFETY: the caller vouches for the stream.
        unsafe { end_before_destruction(core, pointer(raw)) }?;
        // SAFETY: the caller vouches for the stream (F1).
        check(Self::DESTROY, unsafe { (core.functions().cuStreamDestroy_v2)(pointer(raw)) })?;
        core.ongoing.end(RawStream(raw));
        Ok(())
    }
}

/// A stream that somebody else owns.
#[derive(Debug)]
pub(super) struct Adopted {
    /// What the driver called it when it was adopted: unlike the handle, never used again. Only in debug builds.
    id: Option<u64>,
    /// What keeps it alive, where its owner is cudarc.
    pub(super) keep: OnceLock<Arc<CudaStream>>,
}

/// A stream that is alive as long as this, for use in one call.
#[derive(Debug)]
pub(super) struct LiveStream {
    pub(super) raw: CUstream,
    _entry: Option<Arc<Entry>>,
}

/// Whether a handle stands for one of the default streams, which always live.
pub(super) fn is_default(stream: RawStream) -> bool {
    stream.is_legacy() || stream == RawStream::PER_THREAD
}

impl CudaDriver {
    /// The stream with this handle. In debug builds, a handle that means another stream than the one adopted is an error.
    pub(super) fn stream(&self, operation: Operation, stream: RawStream) -> Result<LiveStream> {
        if is_default(stream) {
            return Ok(LiveStream { raw: pointer(stream.0), _entry: None });
        }
        let entry = self.streams.get(stream.0).ok_or_else(|| dead(operation, Streams::NAME, stream.0))?;
        if cfg!(debug_assertions)
            && let Entry::Adopted(Adopted { id: Some(id), .. }) = *entry
        {
            self.check_identity(operation, stream, id)?;
        }
        Ok(LiveStream { raw: pointer(stream.0), _entry: Some(entry) })
    }

    fn check_identity(&self, operation: Operation, stream: RawStream, adopted: u64) -> Result<()> {
        let now = self.identity(operation, pointer(stream.0))?;
        if now.is_none_or(|now| now == adopted) {
            return Ok(());
        }
        Err(DeviceError::refused(operation, Code::INVALID_HANDLE).with_detail(format!(
            "the adopted stream {:#x} was destroyed by its owner, and the driver gave its handle to another stream; release an \
             adopted stream before its owner destroys it",
            stream.0
        )))
    }

    /// What the driver calls the stream, where it tells: not while it captures, which the question would break.
    fn identity(&self, operation: Operation, raw: CUstream) -> Result<Option<u64>> {
        let Some(ask) = self.core.functions().cuStreamGetId else { return Ok(None) };
        if self.status(operation, raw)? != CaptureStatus::None {
            return Ok(None);
        }
        let _current = self.core.enter_relaxed(operation)?;
        let mut id: c_ulonglong = 0;
        // SAFETY: the number outlives the call, and the stream lives (L1, F1).
        check(operation, unsafe { ask(raw, &raw mut id) })?;
        Ok(Some(id))
    }

    pub(super) fn stream_id(&self, stream: RawStream) -> Result<Option<u64>> {
        let live = self.stream(Operation::StreamId, stream)?;
        self.forbid_capture(Operation::StreamId, &live, "asking for its identity would break that")?;
        self.identity(Operation::StreamId, live.raw)
    }

    pub(super) fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        self.destroy_lent();
        self.core.destroy_left();
        let _current = self.core.enter_relaxed(Operation::CreateStream)?;
        let mut raw = ptr::null_mut();
        let non_blocking = if flags.non_blocking { NON_BLOCKING } else { 0 };
        let priority: c_int = flags.priority;
        // SAFETY: the handle outlives the call (F1).
        let code = unsafe { (self.core.functions().cuStreamCreateWithPriority)(&raw mut raw, non_blocking, priority) };
        check(Operation::CreateStream, code)?;
        let raw = handle(raw);
        // An adopted stream that had this handle was destroyed by its owner.
        self.release(RawStream(raw));
        // SAFETY: just created, and nobody else knows it.
        let object = unsafe { Object::new(&self.core, raw, Lent::default()) };
        self.streams.insert(raw, Entry::Owned(object));
        Ok(RawStream(raw))
    }

    /// Destroys a stream, after the end of its capture if it has one. A stream whose object is lent to cudarc is destroyed once cudarc has
    /// given that back.
    pub(super) fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let operation = Operation::DestroyStream;
        if is_default(stream) {
            return Err(DeviceError::refused(operation, Code::INVALID_HANDLE)
                .with_detail("a default stream cannot be destroyed"));
        }
        let owned = self.streams.take_if(stream.0, |entry| matches!(entry, Entry::Owned(_)));
        let entry = owned.ok_or_else(|| dead(operation, Streams::NAME, stream.0))?;
        let mut entry = match Arc::try_unwrap(entry) {
            Ok(entry) => entry,
            Err(entry) => {
                // In use on another thread: the last user's drop destroys it (L1), which nobody would do who still has it lent.
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
        let Entry::Owned(object) = &mut entry else { return Ok(()) };
        let destroyed = object.destroy();
        if destroyed.is_err() {
            self.streams.insert(stream.0, entry);
        }
        destroyed
    }

    /// Destroys the streams that were lent out when they should have been destroyed and were given back since.
    fn destroy_lent(&self) {
        let mut lent = self.lent.lock();
        let is_back = |entry: &mut Arc<Entry>| Arc::get_mut(entry).is_some_and(Entry::take_back);
        let back: Vec<_> = lent.extract_if(.., is_back).collect();
        drop(lent);
        drop(back);
    }

    /// Keeps a stream of cudarc's alive as long as it is adopted. False if it is neither adopted nor one of ours.
    pub(super) fn keep(&self, stream: RawStream, object: &Arc<CudaStream>) -> bool {
        let entry = self.streams.get(stream.0);
        if let Some(Entry::Adopted(adopted)) = entry.as_deref() {
            adopted.keep.get_or_init(|| object.clone());
        }
        entry.is_some()
    }

    /// Lets calls name a stream that another library owns. A stream of this driver has its entry already.
    pub(super) fn adopt(&self, stream: RawStream) {
        let is_ours = || self.streams.get(stream.0).is_some_and(|entry| matches!(*entry, Entry::Owned(_)));
        if is_default(stream) || is_ours() {
            return;
        }
        // What an owner destroyed without releasing it.
        self.release(stream);
        let id = if cfg!(debug_assertions) { self.identity(Operation::StreamId, pointer(stream.0)) } else { Ok(None) };
        let adopted = Adopted { id: id.unwrap_or(None), keep: OnceLock::new() };
        self.streams.insert(stream.0, Entry::Adopted(adopted));
    }

    /// Ends what [`CudaDriver::adopt`] began.
    pub(super) fn release(&self, stream: RawStream) {
        let entry = self.streams.take_if(stream.0, |entry| matches!(entry, Entry::Adopted(_)));
        let Some(entry) = entry else { return };
        // A capture that was begun here and goes on is its owner's to end: nobody can name the stream here any more.
        self.core.ongoing.end(stream);
        // Outside of the table's lock, because the last reference to cudarc's stream may destroy it, with the context current.
        let _current = self.core.enter(Operation::DestroyStream).ok();
        let _mode = RelaxedMode::enter(self.core.functions(), Operation::DestroyStream).ok();
        drop(entry);
    }

    pub(super) fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let operation = Operation::SynchronizeStream;
        let live = self.stream(operation, stream)?;
        self.forbid_capture(operation, &live, "its work does not run, so it cannot be waited for")?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the stream lives (L1, F1).
        check(operation, unsafe { (self.core.functions().cuStreamSynchronize)(live.raw) })
    }

    pub(super) fn query_stream(&self, stream: RawStream) -> Result<bool> {
        let operation = Operation::QueryStream;
        let live = self.stream(operation, stream)?;
        self.forbid_capture(operation, &live, "its work does not run, so it is neither idle nor busy")?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the stream lives (L1, F1).
        done(operation, unsafe { (self.core.functions().cuStreamQuery)(live.raw) })
    }
}

/// The result of a query.
pub(super) fn done(operation: Operation, code: u32) -> Result<bool> {
    if Code(code) == Code::NOT_READY { Ok(false) } else { check(operation, code).map(|()| true) }
}
