//! The devices that the process opened, and their streams by handle.
//!
//! Devices are in statics, which are never dropped: memory may be freed at any time while the process exits. Streams are looked up in a small
//! cache of each thread first, because finding an adopted stream takes a lock and a driver call. [`forget_stream`] invalidates all caches.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use aquifer::device::{DevicePtr, cuda};
use aquifer::memory::{AllocError, OomReport, Registration};
use aquifer::{Allocator, Device, Stream};
use aquifer_device::RawStream;

use crate::OomCallback;
use crate::failure::Failure;

/// A device that the process opened.
pub(crate) struct Gpu {
    pub(crate) ordinal: c_int,
    pub(crate) device: Device,
    pub(crate) memory: Allocator,
    _on_oom: Registration,
}

/// More than any machine has.
const DEVICES: usize = 128;

/// The last ordinal of an open device, and 1.
static END: AtomicUsize = AtomicUsize::new(0);

static GPUS: [OnceLock<Gpu>; DEVICES] = [const { OnceLock::new() }; DEVICES];

static ON_OOM: Mutex<Option<(OomCallback, usize)>> = Mutex::new(None);

/// Invalidates streams that threads cached before.
static GENERATION: AtomicU64 = AtomicU64::new(0);

struct Cached {
    ordinal: c_int,
    handle: u64,
    generation: u64,
    stream: Stream,
}

const CACHED: usize = 8;

thread_local! {
    static CACHE: RefCell<[Option<Cached>; CACHED]> = const { RefCell::new([const { None }; CACHED]) };
}

impl Gpu {
    /// The device with this ordinal, which is opened the first time.
    pub(crate) fn of(ordinal: c_int) -> Result<&'static Gpu, Failure> {
        let slot = usize::try_from(ordinal).ok().and_then(|ordinal| GPUS.get(ordinal));
        let slot = slot.ok_or_else(|| Failure::invalid(format!("{ordinal} is not the ordinal of a device")))?;
        slot.get().map_or_else(|| open(ordinal, slot), Ok)
    }

    /// The devices that are open.
    pub(crate) fn all() -> impl Iterator<Item = &'static Gpu> {
        GPUS[..END.load(Ordering::Acquire)].iter().filter_map(OnceLock::get)
    }

    /// Finds the device that a pointer belongs to: the first one whose allocator knows it.
    pub(crate) fn find<R>(
        ptr: DevicePtr,
        request: impl Fn(&'static Gpu) -> Result<R, AllocError>,
    ) -> Result<R, Failure> {
        let unknown = AllocError::InvalidPointer { ptr: ptr.0 };
        let mut devices = Gpu::all().map(request);
        let answer = devices.find(|answer| !matches!(answer, Err(AllocError::InvalidPointer { .. })));
        Ok(answer.unwrap_or(Err(unknown))?)
    }

    /// Calls `request` with the stream of this handle: 0 and 1 are the legacy default stream, 2 is that of the calling thread.
    pub(crate) fn with_stream<R>(&self, handle: *mut c_void, request: impl Fn(&Stream) -> R) -> Result<R, Failure> {
        let address = handle.addr();
        let handle = address as u64;
        if handle <= 1 {
            return Ok(request(self.device.default_stream()));
        }
        let generation = GENERATION.load(Ordering::Acquire);
        let place = (address >> 4 ^ address >> 12 ^ self.ordinal.unsigned_abs() as usize) % CACHED;
        let is_it = |cached: &&Cached| {
            cached.handle == handle && cached.ordinal == self.ordinal && cached.generation == generation
        };
        // The borrow is shared, because the request may run a callback that comes here again.
        let served = CACHE.try_with(|cache| {
            let cache = cache.try_borrow().ok()?;
            cache[place].as_ref().filter(is_it).map(|cached| request(&cached.stream))
        });
        if let Ok(Some(served)) = served {
            return Ok(served);
        }
        let stream = self.find_stream(handle)?;
        let cached = Cached { ordinal: self.ordinal, handle, generation, stream: stream.clone() };
        // Within a callback the cache is borrowed, and while the thread ends it is gone. Both can do without.
        let old =
            CACHE.try_with(|cache| cache.try_borrow_mut().ok().and_then(|mut cache| cache[place].replace(cached)));
        drop(old);
        Ok(request(&stream))
    }

    #[cold]
    fn find_stream(&self, handle: u64) -> Result<Stream, Failure> {
        if RawStream(handle) == RawStream::PER_THREAD {
            return Ok(self.device.per_thread_stream());
        }
        // SAFETY: the interface asks callers for live streams of this device, and to forget those that end.
        Ok(unsafe { self.device.stream_from_raw(RawStream(handle)) }?)
    }

    /// Lets a stream go, before its owner destroys it.
    pub(crate) fn forget_stream(&self, handle: *mut c_void) -> Result<(), Failure> {
        let forgotten = self.device.forget_stream(RawStream(handle.addr() as u64));
        // After the stream was let go: a thread that finds the old one until then must not cache it under the new generation.
        GENERATION.fetch_add(1, Ordering::Release);
        Ok(forgotten?)
    }
}

/// Opens a device. Threads that meet here get the same handles, so none of them needs a lock, which a fork could leave locked.
#[cold]
fn open(ordinal: c_int, slot: &'static OnceLock<Gpu>) -> Result<&'static Gpu, Failure> {
    let device = cuda::shared(ordinal.unsigned_abs())?;
    let memory = Allocator::of(&device)?;
    let _on_oom = memory.observe_oom(on_oom);
    let gpu = slot.get_or_init(|| Gpu { ordinal, device, memory, _on_oom });
    END.fetch_max(ordinal.unsigned_abs() as usize + 1, Ordering::Release);
    Ok(gpu)
}

/// Sets or removes the callback for requests that find no memory.
pub(crate) fn set_on_oom(callback: Option<OomCallback>, data: *mut c_void) {
    *ON_OOM.lock().unwrap_or_else(PoisonError::into_inner) =
        callback.map(|callback| (callback, data.expose_provenance()));
}

fn on_oom(report: &OomReport) {
    let registered = *ON_OOM.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((callback, data)) = registered
        && let Ok(text) = std::ffi::CString::new(report.to_string())
    {
        // SAFETY: the caller of `aquifer_on_oom` gave a function that may be called with these, and the text outlives the call.
        unsafe { callback(text.as_ptr(), std::ptr::with_exposed_provenance_mut(data)) };
    }
}
