//! The GPUs whose memory is served, and the streams of the program.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_allocator::{Allocator, HistoryOptions};
use aquifer_cuda as cuda;
use aquifer_device::fork::Mutex;
use aquifer_device::{Device, DevicePtr, RawStream, Stream};

use crate::answer::{Instead, Served, check};
use crate::driver::{Handle, INVALID_VALUE, NAME, driver};
use crate::live;
use crate::report::{self, Why};

/// A GPU whose memory is served: that of its primary context.
pub(crate) struct Gpu {
    pub(crate) context: Handle,
    pub(crate) ordinal: u32,
    pub(crate) device: Device,
    pub(crate) allocator: Allocator,
    /// The device's default pool, where it has pools.
    pub(crate) pool: Option<Handle>,
    /// The program reset the context, and all memory with it.
    pub(crate) is_reset: AtomicBool,
}

/// As many as `OTHER_POOLS` has bits.
const GPUS_MAX: usize = 64;
/// By ordinal. They are never closed: the driver may be gone when the process ends.
static GPUS: [OnceLock<Gpu>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];
static OPENING: Mutex<()> = Mutex::new(());
/// Aquifer was told which library is the driver.
static IS_CHOSEN: AtomicBool = AtomicBool::new(false);
/// The devices for which the program chose another pool than the default one, by bit.
static OTHER_POOLS: AtomicU64 = AtomicU64::new(0);

/// All that were opened.
pub(crate) fn opened() -> impl Iterator<Item = &'static Gpu> {
    GPUS.iter().filter_map(OnceLock::get)
}

/// Those that are served.
pub(crate) fn served() -> impl Iterator<Item = &'static Gpu> {
    opened().filter(|gpu| !gpu.is_reset.load(Ordering::Acquire))
}

/// The GPU of a live allocation that was served, by its first address.
pub(crate) fn owner(ptr: u64) -> Served<&'static Gpu> {
    let owns = |gpu: &&Gpu| gpu.allocator.size_of_raw(DevicePtr(ptr)).is_ok();
    match served().find(owns) {
        Some(gpu) if ptr != 0 => Ok(gpu),
        _ if served().any(|gpu| gpu.has_in_segment(ptr)) => Err(Instead::Code(INVALID_VALUE)),
        _ => Err(Instead::Driver(Why::Foreign)),
    }
}

/// The calling thread's current context.
pub(crate) fn current() -> Served<Handle> {
    let mut context = 0;
    // SAFETY: the handle outlives the call.
    check(unsafe { driver().cuCtxGetCurrent(&raw mut context) })?;
    Ok(context)
}

/// The GPU of a context, which is opened if it is its primary one.
pub(crate) fn of_context(context: Handle) -> Served<&'static Gpu> {
    let known = || opened().find(|gpu| gpu.context == context);
    let gpu = match known() {
        Some(gpu) => gpu,
        None => open(context)?,
    };
    if gpu.is_reset.load(Ordering::Acquire) { Err(Instead::Driver(Why::Context)) } else { Ok(gpu) }
}

#[cold]
fn open(context: Handle) -> Served<&'static Gpu> {
    let device = device_of(context)?;
    let place = usize::try_from(device).ok().and_then(|place| GPUS.get(place));
    let (Some(place), true) = (place, is_primary(context, device)?) else {
        return Err(Instead::Driver(Why::Context));
    };
    let _alone = OPENING.lock();
    if let Some(gpu) = place.get() {
        return Ok(gpu);
    }
    if !IS_CHOSEN.load(Ordering::Relaxed) {
        // SAFETY: the library of this name is the driver that the program would have without this
        // one.
        unsafe { cuda::set_library(NAME) }?;
        IS_CHOSEN.store(true, Ordering::Relaxed);
    }
    let ordinal = u32::try_from(device).map_err(|_| Instead::Code(INVALID_VALUE))?;
    let opened = cuda::shared(ordinal)?;
    let allocator = Allocator::of(&opened)?;
    if report::snapshot_file().is_some() && allocator.config().history == 0 {
        allocator.record_history(HistoryOptions { entries: 1_000_000, ..HistoryOptions::default() });
    }
    let (pool, is_reset) = (default_pool(device), AtomicBool::new(false));
    let gpu = place.get_or_init(|| Gpu { context, ordinal, device: opened, allocator, pool, is_reset });
    live::begin();
    Ok(gpu)
}

/// The device of a context.
pub(crate) fn device_of(context: Handle) -> Served<c_int> {
    let (mut device, mut popped) = (0, 0);
    if context == 0 {
        return Err(Instead::Driver(Why::Context));
    }
    // SAFETY: the driver gave this handle, or the program vouches for it.
    check(unsafe { driver().cuCtxPushCurrent_v2(context) })?;
    // SAFETY: the number outlives the call.
    let told = check(unsafe { driver().cuCtxGetDevice(&raw mut device) });
    // SAFETY: the handle outlives the call; this removes what was pushed above.
    check(unsafe { driver().cuCtxPopCurrent_v2(&raw mut popped) })?;
    told.map(|()| device)
}

fn is_primary(context: Handle, device: c_int) -> Served<bool> {
    Ok(primary(device)? == Some(context))
}

/// The primary context of a device, if it is active.
fn primary(device: c_int) -> Served<Option<Handle>> {
    let (mut flags, mut active, mut context) = (0, 0, 0);
    // SAFETY: the numbers outlive the call.
    check(unsafe { driver().cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active) })?;
    if active == 0 {
        return Ok(None);
    }
    // SAFETY: the handle outlives the call.
    check(unsafe { driver().cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
    // SAFETY: this releases what was retained above.
    check(unsafe { driver().cuDevicePrimaryCtxRelease_v2(device) })?;
    Ok(Some(context))
}

fn default_pool(device: c_int) -> Option<Handle> {
    let mut pool = 0;
    // SAFETY: the handle outlives the call.
    let code = unsafe { driver().cuDeviceGetDefaultMemPool(&raw mut pool, device) };
    (code == 0).then_some(pool)
}

/// The GPU whose default pool this is.
pub(crate) fn of_pool(pool: Handle) -> Served<&'static Gpu> {
    let device = (0..64).find(|&device| default_pool(device) == Some(pool)).ok_or(Instead::Driver(Why::Pool))?;
    of_context(primary(device)?.unwrap_or(0))
}

/// Notes which pool `cuMemAllocAsync` is to allocate from.
pub(crate) fn choose_pool(device: c_int, pool: Handle) {
    let bit = u32::try_from(device).ok().and_then(|ordinal| 1_u64.checked_shl(ordinal)).unwrap_or(0);
    if default_pool(device) == Some(pool) {
        OTHER_POOLS.fetch_and(!bit, Ordering::AcqRel);
    } else {
        OTHER_POOLS.fetch_or(bit, Ordering::AcqRel);
    }
}

impl Gpu {
    /// Whether an address is in a segment that the allocator holds. The driver knows these as
    /// allocations: a block that the program frees twice must not reach it.
    fn has_in_segment(&self, ptr: u64) -> bool {
        let holds = || {
            let segments = self.allocator.snapshot().segments;
            segments.iter().any(|segment| (segment.address..segment.address + segment.total_size).contains(&ptr))
        };
        self.allocator.why_segments().is_some() && holds()
    }

    /// Whether the program chose another pool than the default one.
    pub(crate) fn has_other_pool(&self) -> bool {
        OTHER_POOLS.load(Ordering::Acquire) >> self.ordinal & 1 != 0
    }
}

/// The GPU of a stream, and Aquifer's stream for it. The driver is to answer for a stream that
/// captures: what is allocated and freed then becomes part of the graph. It also answers for a
/// handle that it does not know.
pub(crate) fn stream(raw: Handle) -> Served<(&'static Gpu, Stream)> {
    let gpu = of_context(context_of(raw)?)?;
    refuse_capture(raw)?;
    // SAFETY: the driver knows the stream, which the program keeps alive during the call; `forget`
    // comes before its end.
    Ok((gpu, unsafe { gpu.device.stream_from_raw(RawStream(raw)) }?))
}

fn context_of(stream: Handle) -> Served<Handle> {
    let mut context = 0;
    // SAFETY: the handle outlives the call; the program vouches for the stream.
    match unsafe { driver().cuStreamGetCtx(stream, &raw mut context) } {
        0 => Ok(context),
        _ => Err(Instead::Driver(Why::Stream)),
    }
}

/// Leaves calls on a stream that captures to the driver.
pub(crate) fn refuse_capture(stream: Handle) -> Served {
    let mut status = 0;
    // SAFETY: the number outlives the call; the program vouches for the stream.
    let code = unsafe { driver().cuStreamIsCapturing(stream, &raw mut status) };
    if (code, status) == (0, 0) { Ok(()) } else { Err(Instead::Driver(Why::Capture)) }
}

/// Lets go of a stream that the program destroys.
pub(crate) fn forget(raw: Handle) -> Served {
    let context = context_of(raw)?;
    if let Some(gpu) = served().find(|gpu| gpu.context == context) {
        // A stream that captures stays adopted. The driver's number of a later stream with this
        // handle tells that it is another one.
        let _ = gpu.device.forget_stream(RawStream(raw));
    }
    Ok(())
}
