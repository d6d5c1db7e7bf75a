//! Memory: allocations, frees, and how much of it there is.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use aquifer_allocator::{AllocError, empty_caches};
use aquifer_device::DevicePtr;

use crate::answer::{Instead, Served, answer, check};
use crate::driver::{Handle, OUT_OF_MEMORY, PEER_ACCESS_ALREADY_ENABLED, PoolAccess, driver};
use crate::gpu::{self, Gpu};
use crate::options::{Family, options};
use crate::report::{self, Why};

/// The legacy default stream is 0; in functions whose names end in `_ptsz`, 0 is the calling
/// thread's, which elsewhere is 2.
fn per_thread(stream: Handle) -> Handle {
    if stream == 0 { 2 } else { stream }
}

/// Serves an allocation, or has the driver make it. If the driver lacks memory, it gets what is
/// cached here, and is asked again.
fn allocate(
    family: Family,
    out: *mut u64,
    bytes: usize,
    serve: impl FnOnce(u64) -> Served<DevicePtr>,
    driver: impl Fn() -> u32,
) -> u32 {
    report::at_exit();
    let serve = || {
        if options().passes(family) {
            return Err(Instead::Driver(Why::Option));
        }
        // The driver refuses these.
        if out.is_null() || bytes == 0 {
            return Err(Instead::Driver(Why::Invalid));
        }
        let ptr = serve(bytes as u64)?;
        // SAFETY: not null, and the program vouches for it.
        unsafe { out.write(ptr.0) };
        Ok(())
    };
    answer(serve, |why| {
        report::passed(why);
        let code = driver();
        if code != OUT_OF_MEMORY {
            return code;
        }
        let emptied = answer(|| gpu::served().try_for_each(|gpu| Ok(empty_caches(&gpu.device).map(|_| ())?)), |_| code);
        if emptied == 0 { driver() } else { code }
    })
}

fn allocate_ready(bytes: u64) -> Served<DevicePtr> {
    Ok(gpu::of_context(gpu::current()?)?.allocator.alloc_raw_ready(bytes)?)
}

fn allocate_async(out: *mut u64, bytes: usize, stream: Handle) -> u32 {
    let serve = |bytes| {
        let (gpu, stream) = gpu::stream(stream)?;
        if gpu.has_other_pool() {
            return Err(Instead::Driver(Why::Pool));
        }
        Ok(gpu.allocator.alloc_raw(bytes, &stream)?)
    };
    // SAFETY: passed on to the program.
    allocate(Family::Async, out, bytes, serve, || unsafe { driver().cuMemAllocAsync(out, bytes, stream) })
}

fn allocate_from_pool(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) -> u32 {
    let serve = |bytes| {
        let (gpu, stream) = gpu::stream(stream)?;
        if gpu.pool != Some(pool) {
            return Err(Instead::Driver(Why::Pool));
        }
        Ok(gpu.allocator.alloc_raw(bytes, &stream)?)
    };
    allocate(Family::FromPool, out, bytes, serve, || {
        // SAFETY: passed on to the program.
        unsafe { driver().cuMemAllocFromPoolAsync(out, bytes, pool, stream) }
    })
}

fn free_async(ptr: u64, raw: Handle) -> u32 {
    let serve = || {
        let owner = gpu::owner(ptr)?;
        match gpu::stream(raw) {
            Ok((gpu, stream)) if gpu.ordinal == owner.ordinal => {
                owner.allocator.free_raw_on(DevicePtr(ptr), &stream)?;
            }
            Err(Instead::Driver(Why::Capture)) => return Err(Instead::Driver(Why::Capture)),
            // A stream of another GPU or context, whose order the owner does not know.
            _ => {
                gpu::refuse_capture(raw)?;
                // SAFETY: passed on to the program.
                check(unsafe { driver().cuStreamSynchronize(raw) })?;
                owner.allocator.free_raw(DevicePtr(ptr))?;
            }
        }
        Ok(())
    };
    // SAFETY: passed on to the program.
    answer(serve, |_| unsafe { driver().cuMemFreeAsync(ptr, raw) })
}

/// What the program can allocate: what the device has free, and what is cached here unused, within
/// the limit of the options.
fn free_bytes(gpu: &Gpu, free: u64) -> u64 {
    let (allocated, reserved) = (gpu.allocator.memory_allocated(), gpu.allocator.memory_reserved());
    let free = free + reserved.saturating_sub(allocated);
    gpu.allocator.limit().map_or(free, |limit| free.min(limit.saturating_sub(allocated)))
}

/// Allocates memory that is ready for every stream.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(ptr: *mut u64, bytes: usize) -> u32 {
    // SAFETY: passed on to the program.
    allocate(Family::Plain, ptr, bytes, allocate_ready, || unsafe { driver().cuMemAlloc_v2(ptr, bytes) })
}

/// Allocates rows of a multiple of 512 bytes each, as the driver does.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocPitch_v2(
    ptr: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: u32,
) -> u32 {
    let valid = matches!(element, 4 | 8 | 16) && !pitch.is_null();
    let row = width.checked_next_multiple_of(512).filter(|_| valid);
    let bytes = row.and_then(|row| row.checked_mul(height)).unwrap_or(0);
    let serve = |bytes| {
        let allocated = allocate_ready(bytes)?;
        // SAFETY: not null, and the program vouches for it.
        unsafe { pitch.write(row.unwrap_or(0)) };
        Ok(allocated)
    };
    allocate(Family::Pitch, ptr, bytes, serve, || {
        // SAFETY: passed on to the program.
        unsafe { driver().cuMemAllocPitch_v2(ptr, pitch, width, height, element) }
    })
}

/// Allocates in the order of a stream.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocAsync(ptr: *mut u64, bytes: usize, stream: Handle) -> u32 {
    allocate_async(ptr, bytes, stream)
}

/// As [`cuMemAllocAsync`], where 0 is the calling thread's default stream.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocAsync_ptsz(ptr: *mut u64, bytes: usize, stream: Handle) -> u32 {
    allocate_async(ptr, bytes, per_thread(stream))
}

/// As [`cuMemAllocAsync`] for the default pool. The program's own pools have properties that only
/// the driver knows.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocFromPoolAsync(
    ptr: *mut u64,
    bytes: usize,
    pool: Handle,
    stream: Handle,
) -> u32 {
    allocate_from_pool(ptr, bytes, pool, stream)
}

/// As [`cuMemAllocFromPoolAsync`], where 0 is the calling thread's default stream.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocFromPoolAsync_ptsz(
    ptr: *mut u64,
    bytes: usize,
    pool: Handle,
    stream: Handle,
) -> u32 {
    allocate_from_pool(ptr, bytes, pool, per_thread(stream))
}

/// Frees memory once all work of its context is done, which this waits for, as the driver does.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(ptr: u64) -> u32 {
    let serve = || {
        let owner = gpu::owner(ptr)?;
        owner.device.synchronize()?;
        Ok(owner.allocator.free_raw(DevicePtr(ptr))?)
    };
    // SAFETY: passed on to the program.
    answer(serve, |_| unsafe { driver().cuMemFree_v2(ptr) })
}

/// Frees memory in the order of a stream.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeAsync(ptr: u64, stream: Handle) -> u32 {
    free_async(ptr, stream)
}

/// As [`cuMemFreeAsync`], where 0 is the calling thread's default stream.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeAsync_ptsz(ptr: u64, stream: Handle) -> u32 {
    free_async(ptr, per_thread(stream))
}

/// How much memory the program can have, and how much the device has.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    // SAFETY: passed on to the program.
    let ask = || unsafe { driver().cuMemGetInfo_v2(free, total) };
    let serve = || {
        check(ask())?;
        let context = gpu::current()?;
        if let Some(gpu) = gpu::served().find(|gpu| gpu.context == context && !free.is_null()) {
            // SAFETY: the driver has just written it.
            let device = unsafe { free.read() };
            let all = usize::try_from(free_bytes(gpu, device as u64)).unwrap_or(usize::MAX);
            // SAFETY: as above.
            unsafe { free.write(all) };
        }
        Ok(())
    };
    answer(serve, |_| ask())
}

/// Destroys a stream. Its work still runs, and memory that was allocated on it stays.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamDestroy_v2(stream: Handle) -> u32 {
    // SAFETY: passed on to the program.
    let destroy = || unsafe { driver().cuStreamDestroy_v2(stream) };
    let serve = || {
        // The driver says what is wrong with a stream that it does not know.
        let _ = gpu::forget(stream);
        check(destroy())
    };
    answer(serve, |_| destroy())
}

/// Resets a primary context, and all its memory. From then on the driver serves the device.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(device: c_int) -> u32 {
    // SAFETY: passed on to the program.
    let reset = || unsafe { driver().cuDevicePrimaryCtxReset_v2(device) };
    let serve = || {
        if let Some(gpu) = of_device(device) {
            gpu.is_reset.store(true, Ordering::Release);
        }
        check(reset())
    };
    answer(serve, |_| reset())
}

/// Chooses the pool that `cuMemAllocAsync` allocates from.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceSetMemPool(device: c_int, pool: Handle) -> u32 {
    // SAFETY: passed on to the program.
    let choose = || unsafe { driver().cuDeviceSetMemPool(device, pool) };
    let serve = || {
        check(choose())?;
        gpu::choose_pool(device, pool);
        Ok(())
    };
    answer(serve, |_| choose())
}

/// Lets the current context's device reach all memory of another one.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) -> u32 {
    // SAFETY: passed on to the program.
    let enable = || unsafe { driver().cuCtxEnablePeerAccess(peer, flags) };
    let serve = || {
        let code = enable();
        if matches!(code, 0 | PEER_ACCESS_ALREADY_ENABLED) {
            let_in(gpu::of_context(peer), gpu::device_of(gpu::current()?)?)?;
        }
        check(code)
    };
    answer(serve, |_| enable())
}

/// Lets other devices reach the memory of a pool.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolSetAccess(pool: Handle, accesses: *const PoolAccess, count: usize) -> u32 {
    // SAFETY: passed on to the program.
    let set = || unsafe { driver().cuMemPoolSetAccess(pool, accesses, count) };
    let serve = || {
        check(set())?;
        if accesses.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and the driver has accepted the array.
        let accesses = unsafe { std::slice::from_raw_parts(accesses, count) };
        let granted = accesses.iter().filter(|access| access.location == 1 && access.flags != 0);
        granted.into_iter().try_for_each(|access| let_in(gpu::of_pool(pool), access.ordinal))
    };
    answer(serve, |_| set())
}

fn of_device(device: c_int) -> Option<&'static Gpu> {
    gpu::opened().find(|gpu| c_int::try_from(gpu.ordinal) == Ok(device))
}

/// Lets a device reach a GPU's memory, if that is served. Memory in segments comes from the driver,
/// which lets it in by itself.
fn let_in(gpu: Served<&'static Gpu>, device: c_int) -> Served {
    let gpu = match gpu {
        Err(Instead::Driver(_)) => return Ok(()),
        gpu => gpu?,
    };
    let Ok(ordinal) = u32::try_from(device) else { return Ok(()) };
    if ordinal == gpu.ordinal {
        return Ok(());
    }
    match gpu.allocator.enable_peer_access(ordinal) {
        Err(AllocError::NotMapped { .. }) => Ok(()),
        granted => Ok(granted?),
    }
}
