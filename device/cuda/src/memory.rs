//! Plain device memory, the driver's stream-ordered pool, and pinned host memory.

use std::ffi::{c_uint, c_void};
use std::ptr;

use aquifer_device::{Code, DeviceError, DevicePtr, HostPtr, MemoryInfo, Operation, PoolUsage, RawStream, Result};
use cudarc::driver::sys::{
    CUgraphMem_attribute, CUmemPool_attribute as PoolAttr, CUmemoryPool, CUpointer_attribute as PointerAttr,
};

use crate::context::GpuContext;
use crate::gpu::Gpu;
use crate::installation::{bad_value, check, check_function};
use crate::objects::{Locked, Source};
use crate::raw::{handle, pointer, size};
use crate::{captures, host_memory, streams};

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
/// Never write-combined, which would make reading it back many times slower.
const PORTABLE: c_uint = 1;

/// `CU_MEMORYTYPE_DEVICE`, as the driver reports it for a pointer.
const DEVICE_MEMORY: u64 = 2;

const NOT_REGISTERED: Code = Code(713);

/// Alignment of pinned memory, in bytes.
const PAGE: u64 = 4096;

/// Frees pinned memory, from where the driver's allocation starts.
///
/// # Safety
/// It was allocated, not freed, and nothing uses it any more. The context is current.
unsafe fn free_host(context: &GpuContext, start: u64) -> Result<()> {
    // SAFETY: it was allocated and not freed (F1).
    check(Operation::HostFree, unsafe { (context.functions().cuMemFreeHost)(pointer(start)) })
}

impl Gpu {
    pub(crate) fn memory_info(&self) -> Result<MemoryInfo> {
        let operation = Operation::MemoryInfo;
        let (mut free, mut total) = (0, 0);
        self.context
            // SAFETY: the numbers outlive the call (F1).
            .call(operation, |functions| unsafe { (functions.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        let (mut free, total) = (free as u64, total as u64);
        if self.info.shares_host_memory {
            // The driver leaves out the page cache, and knows no limit of a control group.
            free = host_memory::available().unwrap_or(free).min(total);
        }
        Ok(MemoryInfo { free, total })
    }

    pub(crate) fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let operation = Operation::Alloc;
        let mut ptr = 0;
        self.context
            // SAFETY: the address outlives the call (F1).
            .call(operation, |functions| unsafe { (functions.cuMemAlloc_v2)(&raw mut ptr, size(bytes)) })
            .map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
        self.memory.insert(ptr, bytes, Source::Plain);
        Ok(DevicePtr(ptr))
    }

    pub(crate) fn free(&self, ptr: DevicePtr) -> Result<()> {
        let operation = Operation::Free;
        captures::forbid_device_wait(self, operation)?;
        let freed = self.memory.give_back(ptr.0, |_| true, |_| free_raw(self, ptr.0));
        freed.unwrap_or_else(|| Err(bad_value(operation, format!("no live allocation starts at {ptr}"))))
    }

    pub(crate) fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        let operation = Operation::AllocAsync;
        let alloc = self.optional(operation, self.context.functions().cuMemAllocAsync)?;
        // Memory that is given out has to come back.
        self.optional(operation, self.context.functions().cuMemFreeAsync)?;
        let stream = streams::live(self, operation, stream)?;
        captures::forbid_capture(self, operation, &stream, "the driver's pool cannot be used in a capture here")?;
        let mut ptr = 0;
        self.context
            // SAFETY: the address outlives the call, and the stream lives (L1, F1).
            .call(operation, |_| unsafe { alloc(&raw mut ptr, size(bytes), stream.raw) })
            .map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
        self.memory.insert(ptr, bytes, Source::Pool);
        Ok(DevicePtr(ptr))
    }

    pub(crate) fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        let operation = Operation::FreeAsync;
        let free = self.optional(operation, self.context.functions().cuMemFreeAsync)?;
        let stream = streams::live(self, operation, stream)?;
        captures::forbid_capture(self, operation, &stream, "the driver's pool cannot be used in a capture here")?;
        let freed = self.memory.give_back(
            ptr.0,
            |source| source == Source::Pool,
            |_| {
                // SAFETY: the memory is live (it was in the table), and so is the stream (L1, F1).
                self.context.call(operation, |_| unsafe { free(ptr.0, stream.raw) })
            },
        );
        let no_such = || bad_value(operation, format!("no live allocation of the driver's pool starts at {ptr}"));
        freed.unwrap_or_else(|| Err(no_such()))
    }

    pub(crate) fn pool_usage(&self) -> Result<PoolUsage> {
        let operation = Operation::PoolUsage;
        let ask = self.optional(operation, self.context.functions().cuMemPoolGetAttribute)?;
        let _current = self.context.enter_relaxed(operation)?;
        let pool = pool(self, operation)?;
        let number = |attribute: PoolAttr| -> Result<u64> {
            let mut value = 0_u64;
            // SAFETY: the number outlives the call, and these attributes have 64 bits (F1).
            check(operation, unsafe { ask(pool, attribute as c_uint, (&raw mut value).cast()) })?;
            Ok(value)
        };
        Ok(PoolUsage {
            used: number(PoolAttr::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            used_peak: number(PoolAttr::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
            reserved: number(PoolAttr::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            reserved_peak: number(PoolAttr::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            graphs: graph_memory(self, operation)?,
        })
    }

    pub(crate) fn trim_pool(&self, keep: u64) -> Result<()> {
        let operation = Operation::TrimPool;
        let trim = self.optional(operation, self.context.functions().cuMemPoolTrimTo)?;
        let _current = self.context.enter_relaxed(operation)?;
        let pool = pool(self, operation)?;
        // SAFETY: the pool is the device's current one, which lives as long as it is that (F1).
        check(operation, unsafe { trim(pool, size(keep)) })
    }

    pub(crate) fn trim_graph_memory(&self) -> Result<()> {
        let operation = Operation::TrimGraphMemory;
        // Drivers without it are from before graphs could allocate.
        let Some(trim) = self.context.functions().cuDeviceGraphMemTrim else { return Ok(()) };
        // SAFETY: the device is the driver's number of this one (F1).
        self.context.call(operation, |_| unsafe { trim(self.context.device) })
    }

    pub(crate) fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        let first = host_alloc_raw(self, bytes)?;
        if first.is_multiple_of(PAGE) {
            return Ok(note_allocated(self, first, bytes, 0));
        }
        // Small pieces come from within pages that the driver shares out. An allocation that is a page
        // longer has a page's border in it. SAFETY: just allocated, and known only here.
        unsafe { self.context.destroy_or_leak("pinned memory at", first, free_host) };
        let length = bytes
            .checked_add(size(PAGE))
            .ok_or_else(|| DeviceError::refused(Operation::HostAlloc, Code::OUT_OF_MEMORY))?;
        let start = host_alloc_raw(self, length)?;
        Ok(note_allocated(self, start, bytes, start.next_multiple_of(PAGE) - start))
    }

    /// Frees pinned memory.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::host_free`].
    pub(crate) unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let operation = Operation::HostFree;
        let start = ptr.0 as u64;
        let free = |locked| {
            let skipped = if let Locked::Allocated { skipped } = locked { skipped } else { 0 };
            // SAFETY: passed on to the caller; it was in the table, so it is an allocation, and it is
            // freed once.
            unsafe { host_free_raw(self, start - skipped) }
        };
        let freed = self.host.give_back(start, |locked| matches!(locked, Locked::Allocated { .. }), free);
        freed.unwrap_or_else(|| Err(bad_value(operation, format!("no pinned allocation starts at {start:#x}"))))
    }

    /// Pins the caller's memory.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::host_register`].
    pub(crate) unsafe fn host_register(&self, start: *mut u8, bytes: usize) -> Result<HostPtr> {
        let operation = Operation::HostRegister;
        let register = self.optional(operation, self.context.functions().cuMemHostRegister_v2)?;
        // Registered memory could not be freed without it.
        self.optional(operation, self.context.functions().cuMemHostUnregister)?;
        // SAFETY: the caller vouches for the memory (F1).
        self.context.call(operation, |_| unsafe { register(start.cast(), bytes, PORTABLE) })?;
        let address = handle(start);
        self.host.insert(address, bytes as u64, Locked::Registered);
        Ok(HostPtr(size(address)))
    }

    /// Waits for the device first: pending work must not meet memory that its owner takes back.
    ///
    /// # Safety
    /// As for [`aquifer_device::Driver::host_unregister`].
    pub(crate) unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        let operation = Operation::HostUnregister;
        self.optional(operation, self.context.functions().cuMemHostUnregister)?;
        captures::forbid_device_wait(self, operation)?;
        let start = ptr.0 as u64;
        let unregister = |_| {
            self.synchronize()?;
            // SAFETY: passed on to the caller; it was in the table, so it is registered, and it is
            // unregistered once.
            unsafe { host_unregister_raw(self, start) }
        };
        let done = self.host.give_back(start, |locked| locked == Locked::Registered, unregister);
        done.unwrap_or_else(|| {
            Err(DeviceError::refused(operation, NOT_REGISTERED)
                .with_detail(format!("no registered memory starts at {start:#x}")))
        })
    }
}

/// Frees memory that the table does not know any more.
pub(crate) fn free_raw(gpu: &Gpu, ptr: u64) -> Result<()> {
    // SAFETY: passed on to the caller (F1).
    gpu.context.call(Operation::Free, |functions| unsafe { (functions.cuMemFree_v2)(ptr) })
}

/// The pool that the driver's stream-ordered allocations come from, which others in the process may
/// have set.
fn pool(gpu: &Gpu, operation: Operation) -> Result<CUmemoryPool> {
    let find = gpu.optional(operation, gpu.context.functions().cuDeviceGetMemPool)?;
    let mut pool = ptr::null_mut();
    // SAFETY: the handle outlives the call (F1).
    let code = unsafe { find(&raw mut pool, gpu.context.device) };
    check_function(operation, "cuDeviceGetMemPool", code)?;
    Ok(pool)
}

/// Bytes that the driver holds for graphs with allocations of their own.
fn graph_memory(gpu: &Gpu, operation: Operation) -> Result<u64> {
    // Drivers without it are from before graphs could allocate.
    let Some(ask) = gpu.context.functions().cuDeviceGetGraphMemAttribute else { return Ok(0) };
    let (attribute, mut value) = (CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, 0_u64);
    // SAFETY: the number outlives the call, and this attribute has 64 bits (F1).
    let code = unsafe { ask(gpu.context.device, attribute as c_uint, (&raw mut value).cast()) };
    check_function(operation, "cuDeviceGetGraphMemAttribute", code)?;
    Ok(value)
}

/// Refuses a range that is not all live device memory, so that the driver cannot take it for the
/// host's.
pub(crate) fn check_memory(gpu: &Gpu, operation: Operation, ptr: DevicePtr, bytes: u64) -> Result<()> {
    if gpu.memory.hold(ptr.0, bytes) || gpu.mapped.hold(ptr.0, bytes) || driver_holds(gpu, operation, ptr, bytes) {
        return Ok(());
    }
    Err(bad_value(operation, format!("{bytes} bytes at {ptr} are not all live device memory")))
}

/// Whether the driver says that memory which was not allocated here is memory of this device, in
/// one piece.
///
/// To the driver a reservation is one piece, whether or not anything is mapped in it, and it knows
/// the memory of every device. Work that touched unmapped addresses, or memory of another device,
/// would lose this one.
fn driver_holds(gpu: &Gpu, operation: Operation, ptr: DevicePtr, bytes: u64) -> bool {
    let functions = gpu.context.functions();
    let (Some(ask), Some(range)) = (functions.cuPointerGetAttribute, functions.cuMemGetAddressRange_v2) else {
        return false;
    };
    let (Some(end), Ok(_current)) = (ptr.0.checked_add(bytes), gpu.context.enter_relaxed(operation)) else {
        return false;
    };
    let number = |attribute: PointerAttr, at: u64| {
        let mut value = 0_u64;
        // SAFETY: the number outlives the call; these attributes have at most 64 bits, and smaller
        // ones set the lowest, because the machines that CUDA runs on are little-endian. Any
        // address may be asked about (F1).
        let code = unsafe { ask((&raw mut value).cast::<c_void>(), attribute as c_uint, at) };
        (code == 0).then_some(value)
    };
    let is_ours = |at| {
        number(PointerAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == Some(DEVICE_MEMORY)
            && number(PointerAttr::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) == u64::try_from(gpu.context.device).ok()
    };
    // Where the allocation or mapping ends that holds an address.
    let mapped_to = |at: u64| {
        let (mut start, mut length) = (0, 0);
        // SAFETY: the numbers outlive the call, and any address may be asked about (F1).
        let code = unsafe { range(&raw mut start, &raw mut length, at) };
        let mapped_to = u64::checked_add(start, length as u64).filter(|_| code == 0);
        mapped_to.filter(|&mapped_to| mapped_to > at && is_ours(at))
    };
    let in_one_piece = || {
        let start = number(PointerAttr::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ptr.0)?;
        let length = number(PointerAttr::CU_POINTER_ATTRIBUTE_RANGE_SIZE, ptr.0)?;
        Some(end <= start.checked_add(length)?)
    };
    match mapped_to(ptr.0) {
        None => false,
        Some(at) if at >= end => true,
        // Several mappings, side by side in a reservation.
        Some(mut at) => {
            while at < end {
                let Some(next) = mapped_to(at) else { return false };
                at = next;
            }
            in_one_piece() == Some(true)
        }
    }
}

fn note_allocated(gpu: &Gpu, start: u64, bytes: usize, skipped: u64) -> HostPtr {
    gpu.host.insert(start + skipped, bytes as u64, Locked::Allocated { skipped });
    HostPtr(size(start + skipped))
}

fn host_alloc_raw(gpu: &Gpu, bytes: usize) -> Result<u64> {
    let operation = Operation::HostAlloc;
    let _current = gpu.context.enter_relaxed(operation)?;
    let mut start = ptr::null_mut();
    // SAFETY: the address outlives the call (F1).
    let code = unsafe { (gpu.context.functions().cuMemHostAlloc)(&raw mut start, bytes, PORTABLE) };
    let detail = || format!("{bytes} bytes of pinned memory asked for");
    check(operation, code).map_err(|error| error.with_more(detail()))?;
    Ok(handle(start))
}

/// Frees pinned memory that the table does not know, from where the driver's allocation
/// starts.
///
/// # Safety
/// It was allocated, not freed, and nothing uses it any more.
pub(crate) unsafe fn host_free_raw(gpu: &Gpu, start: u64) -> Result<()> {
    let _current = gpu.context.enter_relaxed(Operation::HostFree)?;
    // SAFETY: passed on to the caller.
    unsafe { free_host(&gpu.context, start) }
}

/// Unregisters memory that the table does not know any more.
///
/// # Safety
/// It was registered, not unregistered, and nothing relies on its being pinned any more.
pub(crate) unsafe fn host_unregister_raw(gpu: &Gpu, start: u64) -> Result<()> {
    let operation = Operation::HostUnregister;
    let unregister = gpu.optional(operation, gpu.context.functions().cuMemHostUnregister)?;
    // SAFETY: passed on to the caller (F1).
    gpu.context.call(operation, |_| unsafe { unregister(pointer(start)) })
}
