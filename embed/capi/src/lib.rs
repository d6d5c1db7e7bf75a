//! The C interface to Aquifer: `include/aquifer.h`, which `ci/header` writes from this file.
//!
//! Memory is that of the process's allocator of each device ([`Allocator::of`](aquifer::Allocator::of)), so a program that also uses
//! Aquifer from Rust shares it. The README says how PyTorch, ONNX Runtime and C programs use it.
//!
//! No panic leaves a function: it becomes [`AQUIFER_PANIC`].

mod failure;
mod gpu;
mod ort;
mod pools;

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use aquifer::device::DevicePtr;
use aquifer::memory::{Config, Contents, PoolOptions, TagScope};
use failure::{Failure, guarded, printed, status};
use gpu::Gpu;

/// The version of this interface. Functions are added without a change of it.
pub const AQUIFER_VERSION: c_int = 1;

/// The call succeeded.
pub const AQUIFER_OK: c_int = 0;
/// The caller gave a wrong argument, or the environment a wrong configuration.
pub const AQUIFER_INVALID: c_int = 1;
/// There was not enough memory. Freeing some may help.
pub const AQUIFER_OUT_OF_MEMORY: c_int = 2;
/// A driver call failed, or was refused because a stream captures.
pub const AQUIFER_DEVICE_ERROR: c_int = 3;
/// This process was forked from one that had opened a device.
pub const AQUIFER_FORKED: c_int = 4;
/// Aquifer has a bug: the text says where.
pub const AQUIFER_PANIC: c_int = 5;

/// A function that gets the report of an allocation that found no memory, and the data that was registered with it.
#[allow(non_camel_case_types)]
pub type aquifer_oom_callback = Option<unsafe extern "C" fn(report: *const c_char, data: *mut c_void)>;

type OomCallback = unsafe extern "C" fn(*const c_char, *mut c_void);

/// The version of the library's interface, to be compared with `AQUIFER_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_version() -> c_int {
    AQUIFER_VERSION
}

/// Status of the last call of this thread that failed.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_last_status() -> c_int {
    failure::last_status()
}

/// Text of the last call of this thread that failed; for `AQUIFER_OUT_OF_MEMORY`, the report. It is valid until the next failure of this
/// thread. Empty if no call failed.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_last_error() -> *const c_char {
    failure::last_text()
}

/// Allocates memory that is ready for work of `stream`. Returns NULL for `size` 0, and after an error.
///
/// `stream` is a live `cudaStream_t` or `CUstream` of the device's primary context; 0 and 1 are the legacy default stream, 2 is that of the
/// calling thread. Before its owner destroys it, call `aquifer_forget_stream`.
///
/// While `stream` captures, its memory must come from a pool: call `aquifer_graph_begin` before, or
/// `aquifer_pool_malloc`. A request that cached memory serves does not ask the driver whether the stream
/// captures, and others would get the graph's memory.
///
/// This function, `aquifer_free` and `aquifer_record_stream` have the signatures that `torch.cuda.memory.CUDAPluggableAllocator` takes.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void {
    guarded(null_mut(), || {
        let gpu = Gpu::of(device)?;
        let ptr = gpu.with_stream(stream, |stream| gpu.memory.alloc_raw(size as u64, stream))??;
        Ok(ptr.0 as *mut c_void)
    })
}

/// Allocates memory that work of every stream may use, as `cudaMalloc` does. The host waits only before memory would run out. Returns NULL for
/// `size` 0, and after an error.
///
/// Before `aquifer_free`, wait for all work that uses the memory, as `cudaFree` does. `aquifer_free_on` frees in the order of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_malloc_ready(size: usize, device: c_int) -> *mut c_void {
    guarded(null_mut(), || Ok(Gpu::of(device)?.memory.alloc_raw_ready(size as u64)?.0 as *mut c_void))
}

/// Frees memory from this library. It may be called while work that uses the memory is enqueued: the memory is reused after that work. Work on
/// other streams than that of the allocation counts if `aquifer_record_stream` was called.
///
/// `size` and `stream` are not used: PyTorch passes the stream of the allocation, which may have been destroyed. `aquifer_free_on` frees in the
/// order of another stream. NULL is ignored. With `device` -1, the device is found by the pointer. Errors go to stderr.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_free(ptr: *mut c_void, size: usize, device: c_int, stream: *mut c_void) {
    let _ = (size, stream);
    printed("aquifer_free", || match device {
        _ if ptr.is_null() => Ok(()),
        -1 => free(device_ptr(ptr)),
        device => Ok(Gpu::of(device)?.memory.free_raw(device_ptr(ptr))?),
    });
}

/// As `aquifer_free`, in the order of a live stream, as `cudaFreeAsync` does: work enqueued on `stream` until now also counts. `stream` need not
/// be that of the allocation. The device is found by the pointer.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_free_on(ptr: *mut c_void, stream: *mut c_void) {
    printed("aquifer_free_on", || {
        with_owner(ptr, |gpu, ptr| Ok(gpu.with_stream(stream, |stream| gpu.memory.free_raw_on(ptr, stream))??))
    });
}

/// Notes that `stream` uses memory from another stream. Call it after that use was enqueued and before `aquifer_free`. The device is found by
/// the pointer. Errors go to stderr.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    printed("aquifer_record_stream", || {
        with_owner(ptr, |gpu, ptr| Ok(gpu.with_stream(stream, |stream| gpu.memory.record_stream_raw(ptr, stream))??))
    });
}

/// Lets a stream go. Call it before the stream is destroyed; no other thread may use the stream with this library meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_forget_stream(device: c_int, stream: *mut c_void) -> c_int {
    status(|| Gpu::of(device)?.forget_stream(stream))
}

/// Gives unused memory back to the device, or with `device` -1 to all that are open. Pools keep what a
/// graph may use.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_empty_cache(device: c_int) -> c_int {
    status(|| {
        if device == -1 {
            return Gpu::all().try_for_each(|gpu| Ok(gpu.memory.empty_cache().map(drop)?));
        }
        Ok(Gpu::of(device)?.memory.empty_cache().map(drop)?)
    })
}

/// As `aquifer_empty_cache`, but only until at most `bytes` are held from the device.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_trim_to(device: c_int, bytes: u64) -> c_int {
    status(|| Ok(Gpu::of(device)?.memory.trim_to(bytes).map(drop)?))
}

/// Limits the bytes held from the device. `UINT64_MAX` removes the limit.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_set_limit(device: c_int, bytes: u64) -> c_int {
    status(|| {
        Gpu::of(device)?.memory.set_limit((bytes != u64::MAX).then_some(bytes));
        Ok(())
    })
}

/// Limits the bytes held to a share of the device's memory, from 0 to 1. 1 removes the limit.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_set_memory_fraction(device: c_int, fraction: f64) -> c_int {
    status(|| Ok(Gpu::of(device)?.memory.set_memory_fraction(fraction)?))
}

/// The share of the device's memory to which the options limit the bytes held; 1 if they do not, 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_memory_fraction(device: c_int) -> f64 {
    guarded(0.0, || Ok(Gpu::of(device)?.memory.config().per_process_memory_fraction))
}

/// Checks the options in the environment, before any device is opened.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_check_options() -> c_int {
    status(|| Config::from_env().map(drop).map_err(|error| Failure::invalid(error.to_string())))
}

/// Names what the calling thread allocates from now on, in snapshots and reports. NULL or an empty name ends that.
///
/// # Safety
/// `name` must be NULL or a string in UTF-8 with a closing NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_set_tag(name: *const c_char) -> c_int {
    thread_local! {
        static TAG: RefCell<Option<TagScope>> = const { RefCell::new(None) };
    }
    status(|| {
        // SAFETY: passed on to the caller.
        let name = if name.is_null() { Ok("") } else { unsafe { CStr::from_ptr(name) }.to_str() };
        let name = name.map_err(|_| Failure::invalid("the name is not UTF-8"))?;
        // A thread that ends has lost its list of scopes.
        let _ = TAG.try_with(|tag| *tag.borrow_mut() = (!name.is_empty()).then(|| TagScope::new(name)));
        Ok(())
    })
}

/// Bytes in live allocations, rounded up as they are; 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_memory_allocated(device: c_int) -> u64 {
    guarded(0, || Ok(Gpu::of(device)?.memory.memory_allocated()))
}

/// Bytes of a live allocation of this library, rounded up as they are, and the ordinal of its device unless `device` is NULL; 0 after an
/// error.
///
/// # Safety
/// `device` must be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_allocation_size(ptr: *mut c_void, device: *mut c_int) -> u64 {
    guarded(0, || {
        let ptr = device_ptr(ptr);
        let (ordinal, bytes) = Gpu::find(ptr, |gpu| gpu.memory.size_of_raw(ptr).map(|bytes| (gpu.ordinal, bytes)))?;
        if !device.is_null() {
            // SAFETY: not null, and the caller vouches for it.
            unsafe { device.write(ordinal) };
        }
        Ok(bytes)
    })
}

/// Bytes held from the device; 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_memory_reserved(device: c_int) -> u64 {
    guarded(0, || Ok(Gpu::of(device)?.memory.memory_reserved()))
}

/// Bytes that can still be allocated, in all, once a graph keeps `graph_bytes`; 0 after an error. For engines that size a cache by what is left,
/// as `cudaMemGetInfo` leaves out the unused memory held here. 0 for `graph_bytes` gives what can be allocated now.
///
/// What a capture will keep is known from a pass of its work outside of the capture: call `aquifer_reset_peak` and `aquifer_memory_allocated`
/// before, `aquifer_max_memory_allocated` afterwards, and subtract. Call `aquifer_empty_cache` before the capture, during which cached memory
/// does not move.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_available_after(device: c_int, graph_bytes: u64) -> u64 {
    guarded(0, || Ok(Gpu::of(device)?.memory.available()?.saturating_sub(graph_bytes)))
}

/// Peak of `aquifer_memory_allocated` since the start, or the last `aquifer_reset_peak`; 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_max_memory_allocated(device: c_int) -> u64 {
    guarded(0, || Ok(Gpu::of(device)?.memory.max_memory_allocated()))
}

/// Peak of `aquifer_memory_reserved` since the start, or the last `aquifer_reset_peak`; 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_max_memory_reserved(device: c_int) -> u64 {
    guarded(0, || Ok(Gpu::of(device)?.memory.max_memory_reserved()))
}

/// Makes peaks start from now.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_reset_peak(device: c_int) -> c_int {
    status(|| {
        Gpu::of(device)?.memory.reset_peak_stats();
        Ok(())
    })
}

/// Makes counts of what happened start from 0.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_reset_accumulated(device: c_int) -> c_int {
    status(|| {
        Gpu::of(device)?.memory.reset_accumulated_stats();
        Ok(())
    })
}

/// Writes the statistics as a JSON object, under the names of PyTorch's `memory_stats()`.
///
/// As much as fits goes into `buffer`, with a closing NUL. Returns the length of the whole text without it, or 0 after an error: a result of
/// at least `capacity` means that the text was cut. `buffer` must be writable for `capacity` bytes; it may be NULL if that is 0.
///
/// # Safety
/// As above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_stats_json(device: c_int, buffer: *mut c_char, capacity: usize) -> usize {
    guarded(0, || {
        let text = json(&Gpu::of(device)?.memory.stats().to_map())?;
        // SAFETY: passed on to the caller.
        Ok(unsafe { put(text, buffer, capacity) })
    })
}

/// Writes a snapshot of all blocks as JSON, in the form of PyTorch's `memory_snapshot()`, as `aquifer_stats_json` does.
///
/// # Safety
/// As `aquifer_stats_json`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_snapshot_json(device: c_int, buffer: *mut c_char, capacity: usize) -> usize {
    guarded(0, || {
        let text = json(&Gpu::of(device)?.memory.snapshot())?;
        // SAFETY: passed on to the caller.
        Ok(unsafe { put(text, buffer, capacity) })
    })
}

/// Saves a snapshot for PyTorch's memory viewer as a file whose name, in UTF-8, ends in .pickle, .pkl or .json.
///
/// # Safety
/// `path` must be a string with a closing NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_save_snapshot(device: c_int, path: *const c_char) -> c_int {
    status(|| {
        if path.is_null() {
            return Err(Failure::invalid("the path is NULL"));
        }
        // SAFETY: passed on to the caller.
        let path = unsafe { CStr::from_ptr(path) }.to_str().map_err(|error| Failure::invalid(error.to_string()))?;
        Ok(Gpu::of(device)?.memory.snapshot().save(path)?)
    })
}

/// Registers a function that is called with the report before an allocation fails for lack of memory, on its thread. It may free memory. It
/// replaces the one before; NULL removes it.
///
/// # Safety
/// Any thread may call it with `data`, until another one is registered and the calls under way have returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_on_oom(callback: aquifer_oom_callback, data: *mut c_void) {
    guarded((), || {
        gpu::set_on_oom(callback, data);
        Ok(())
    });
}

/// Lets another device access the memory of this one, now and later.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_enable_peer_access(device: c_int, peer: c_int) -> c_int {
    status(|| {
        let gpu = Gpu::of(device)?;
        let peer =
            u32::try_from(peer).map_err(|_| Failure::invalid(format!("{peer} is not the ordinal of a device")))?;
        Ok(gpu.memory.enable_peer_access(peer)?)
    })
}

/// Contents are lost: the memory is uninitialised after waking up.
pub const AQUIFER_SLEEP_DISCARD: c_int = 0;
/// Contents are kept in pinned host memory and restored.
pub const AQUIFER_SLEEP_SAVE: c_int = 1;
/// All bytes are 0 after waking up.
pub const AQUIFER_SLEEP_ZERO: c_int = 2;

fn contents(contents: c_int) -> Result<Contents, Failure> {
    match contents {
        AQUIFER_SLEEP_DISCARD => Ok(Contents::Discard),
        AQUIFER_SLEEP_SAVE => Ok(Contents::SaveToHost),
        AQUIFER_SLEEP_ZERO => Ok(Contents::Zero),
        other => Err(Failure::invalid(format!("unknown fate of contents: {other}"))),
    }
}

/// Gives all memory of a device back to it until `aquifer_wake`, with `AQUIFER_SLEEP_DISCARD`,
/// `AQUIFER_SLEEP_SAVE` or `AQUIFER_SLEEP_ZERO`. Live allocations keep their addresses, and may be freed. Waits for
/// the device. Until they wake up, no work may use them, and allocations fail with `AQUIFER_INVALID`. It needs mapped
/// memory, and fails at once while an access guard or a transfer uses some.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_sleep(device: c_int, contents: c_int) -> c_int {
    status(|| Ok(Gpu::of(device)?.memory.sleep(self::contents(contents)?).map(drop)?))
}

/// Ends `aquifer_sleep`, and `aquifer_pool_sleep` of all pools of the device. If the device lacks memory, everything
/// sleeps on, and this can be tried again.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_wake(device: c_int) -> c_int {
    status(|| Ok(Gpu::of(device)?.memory.wake()?))
}

/// As `aquifer_sleep`, for the allocations that a pool has now and for what its graphs use. All other memory can be
/// used meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_pool_sleep(pool: u64, contents: c_int) -> c_int {
    status(|| pools::sleep(pool, self::contents(contents)?))
}

/// Ends `aquifer_pool_sleep`. After `aquifer_sleep`, the pool and later allocations can be used, and the rest sleeps on.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_pool_wake(pool: u64) -> c_int {
    status(|| pools::wake(pool))
}

/// Other requests may take free memory of the pool rather than fail.
pub const AQUIFER_POOL_USE_ON_OOM: c_int = 1;
/// Each allocation of the pool has a segment of its own.
pub const AQUIFER_POOL_NO_SPLIT: c_int = 2;

/// Creates a pool of memory that is kept apart, with `AQUIFER_POOL_USE_ON_OOM`, `AQUIFER_POOL_NO_SPLIT`, both or 0 as options. Returns its
/// number, or 0 after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_pool_create(device: c_int, options: c_int) -> u64 {
    guarded(0, || {
        let use_on_oom = options & AQUIFER_POOL_USE_ON_OOM != 0;
        let no_split = options & AQUIFER_POOL_NO_SPLIT != 0;
        if options & !(AQUIFER_POOL_USE_ON_OOM | AQUIFER_POOL_NO_SPLIT) != 0 {
            return Err(Failure::invalid(format!("unknown options of a pool: {options}")));
        }
        pools::create(Gpu::of(device)?, PoolOptions { use_on_oom, no_split, ..PoolOptions::default() })
    })
}

/// As `aquifer_malloc`, from a pool. The stream may be capturing: the memory is then the graph's, and stays in the pool until that is released.
/// Free it with `aquifer_free`.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_pool_malloc(pool: u64, size: usize, stream: *mut c_void) -> *mut c_void {
    guarded(null_mut(), || Ok(pools::alloc(pool, size as u64, stream)?.0 as *mut c_void))
}

/// Sends the calling thread's allocations on the pool's device to the pool while a graph is captured:
/// call it after the program began to capture `stream`, and `aquifer_graph_end` on the same thread
/// once it has ended that. No request outside of captures gets memory of the graph until the pool is
/// released. What the capture frees serves its later allocations, and other captures of the pool. So
/// the program must launch graphs that share a pool one after the other, and allocate what lives on,
/// such as outputs, before.
///
/// Another thread that allocates for the same capture calls it, too. Captures of several streams may
/// go on at a time: the thread's allocations come from the pool of the last one that it began.
///
/// Fails with `AQUIFER_INVALID` if there is no such pool, or if this thread began a graph on the
/// stream and did not end it; with `AQUIFER_DEVICE_ERROR` if the stream does not capture, as the
/// default stream 0 never does, if an earlier call broke the capture, or if the stream is not of the
/// pool's device. Allocations are then as before.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_graph_begin(pool: u64, stream: *mut c_void) -> c_int {
    status(|| pools::begin_graph(pool, stream))
}

/// Ends `aquifer_graph_begin` for the stream, whether or not the capture succeeded. Fails with
/// `AQUIFER_INVALID` if this thread began no graph on the stream.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_graph_end(stream: *mut c_void) -> c_int {
    status(|| pools::end_graph(stream))
}

/// Notes that captures that allocated from a pool have ended: those whose streams capture no more.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_pool_end_captures(pool: u64) -> c_int {
    status(|| pools::end_captures(pool))
}

/// Releases a pool. Its live allocations stay valid. Graphs that use its memory must not be launched any more.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_pool_release(pool: u64) -> c_int {
    status(|| pools::release(pool))
}

/// Sets the device and the stream of the three functions below, for the process: those of ONNX Runtime's CUDA provider have neither. Sessions
/// that use them must compute on this stream (`user_compute_stream`).
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_ort_bind(device: c_int, stream: *mut c_void) -> c_int {
    status(|| ort::bind(device, stream))
}

/// For the option `gpu_external_alloc`. NULL after an error.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_ort_alloc(size: usize) -> *mut c_void {
    guarded(null_mut(), || {
        let (gpu, stream) = ort::bound()?;
        let ptr = gpu.with_stream(stream, |stream| gpu.memory.alloc_raw(size as u64, stream))??;
        Ok(ptr.0 as *mut c_void)
    })
}

/// For the option `gpu_external_free`. Errors go to stderr.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_ort_free(ptr: *mut c_void) {
    printed("aquifer_ort_free", || free(device_ptr(ptr)));
}

/// For the option `gpu_external_empty_cache`. Errors go to stderr.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_ort_empty_cache() {
    printed("aquifer_ort_empty_cache", || Ok(ort::bound()?.0.memory.empty_cache().map(drop)?));
}

/// Calls `request` with the device of a pointer, unless that is NULL.
fn with_owner(
    ptr: *mut c_void,
    request: impl FnOnce(&'static Gpu, DevicePtr) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if ptr.is_null() {
        return Ok(());
    }
    let ptr = device_ptr(ptr);
    request(Gpu::find(ptr, |gpu| gpu.memory.size_of_raw(ptr).map(|_| gpu))?, ptr)
}

/// Frees memory of whichever device.
fn free(ptr: DevicePtr) -> Result<(), Failure> {
    if ptr.0 == 0 { Ok(()) } else { Gpu::find(ptr, |gpu| gpu.memory.free_raw(ptr)) }
}

fn device_ptr(ptr: *mut c_void) -> DevicePtr {
    DevicePtr(ptr.addr() as u64)
}

fn json(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value).map_err(|error| Failure::invalid(error.to_string()))
}

/// Copies as much of a text as fits, and a NUL. Returns the length of the whole text.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes.
unsafe fn put(text: String, buffer: *mut c_char, capacity: usize) -> usize {
    let length = text.len();
    if !buffer.is_null() && capacity > 0 {
        let mut bytes = text.into_bytes();
        bytes.truncate(capacity - 1);
        bytes.push(0);
        // SAFETY: at most `capacity` bytes, and the caller's buffer is not the text.
        unsafe { buffer.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
    length
}
