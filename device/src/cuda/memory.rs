//! Plain device memory, the driver's stream-ordered pool, and page-locked host memory.

use std::ffi::{c_uint, c_void};
use std::ptr;

use cudarc::driver::sys::{CUmemPool_attribute as PoolAttr, CUmemoryPool, CUpointer_attribute as PointerAttr};

use super::context::Core;
use super::driver::CudaDriver;
use super::installation::{check, check_function};
use super::raw::{handle, pointer, size};
use crate::driver::{DevicePtr, HostPtr, MemoryInfo, PoolUsage, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`: page-locked for every context. Never write-combined, which
/// would make reading it back many times slower.
const PORTABLE: c_uint = 1;

/// `CU_MEMORYTYPE_DEVICE`, as the driver tells it of a pointer.
const DEVICE_MEMORY: u64 = 2;

const NOT_REGISTERED: Code = Code(713);

/// Which call gave device memory out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Plain,
    Pool,
}

/// What page-locked memory is aligned to, in bytes.
const PAGE: u64 = 4096;

/// How host memory became page-locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locked {
    /// So many bytes behind where the driver's allocation starts.
    Allocated {
        skipped: u64,
    },
    Registered,
}

/// A bad argument.
#[cold]
pub(super) fn bad_value(operation: Operation, detail: impl Into<String>) -> DeviceError {
    DeviceError::refused(operation, Code::INVALID_VALUE).with_detail(detail)
}

/// Frees page-locked memory, from where the driver's allocation starts.
///
/// # Safety
/// It was allocated, not freed, and nobody uses it any more. The context is current.
unsafe fn host_free_raw(core: &Core, start: u64) -> Result<()> {
    // SAFETY: it was allocated and not freed (F1).
    check(Operation::HostFree, unsafe { (core.functions().cuMemFreeHost)(pointer(start)) })
}

impl CudaDriver {
    pub(super) fn memory_info(&self) -> Result<MemoryInfo> {
        let operation = Operation::MemoryInfo;
        let _current = self.core.enter_relaxed(operation)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the numbers outlive the call (F1).
        check(operation, unsafe { (self.core.functions().cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    pub(super) fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let operation = Operation::Alloc;
        let _current = self.core.enter_relaxed(operation)?;
        let mut ptr = 0;
        // SAFETY: the address outlives the call (F1).
        let code = unsafe { (self.core.functions().cuMemAlloc_v2)(&raw mut ptr, size(bytes)) };
        check(operation, code).map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
        self.memory.insert(ptr, bytes, Source::Plain);
        Ok(DevicePtr(ptr))
    }

    pub(super) fn free(&self, ptr: DevicePtr) -> Result<()> {
        let operation = Operation::Free;
        self.forbid_device_wait(operation)?;
        // Out of the table first: the driver may give the address to another thread as soon as it is free.
        let taken = self.memory.take_if(ptr.0, |_| true);
        let (bytes, source) =
            taken.ok_or_else(|| bad_value(operation, format!("no live allocation starts at {ptr}")))?;
        let freed = self.free_raw(ptr.0);
        if freed.is_err() {
            self.memory.insert(ptr.0, bytes, source);
        }
        freed
    }

    /// Frees memory that the table does not know any more.
    pub(super) fn free_raw(&self, ptr: u64) -> Result<()> {
        let _current = self.core.enter_relaxed(Operation::Free)?;
        // SAFETY: passed on to the caller (F1).
        check(Operation::Free, unsafe { (self.core.functions().cuMemFree_v2)(ptr) })
    }

    pub(super) fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        let operation = Operation::AllocAsync;
        let alloc = self.optional(operation, self.core.functions().cuMemAllocAsync)?;
        // What is given out has to come back.
        self.optional(operation, self.core.functions().cuMemFreeAsync)?;
        let stream = self.stream(operation, stream)?;
        self.forbid_capture(operation, &stream, "the driver's pool cannot be used in a capture here")?;
        let _current = self.core.enter_relaxed(operation)?;
        let mut ptr = 0;
        // SAFETY: the address outlives the call, and the stream lives (L1, F1).
        let code = unsafe { alloc(&raw mut ptr, size(bytes), stream.raw) };
        check(operation, code).map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
        self.memory.insert(ptr, bytes, Source::Pool);
        Ok(DevicePtr(ptr))
    }

    pub(super) fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        let operation = Operation::FreeAsync;
        let free = self.optional(operation, self.core.functions().cuMemFreeAsync)?;
        let stream = self.stream(operation, stream)?;
        self.forbid_capture(operation, &stream, "the driver's pool cannot be used in a capture here")?;
        let taken = self.memory.take_if(ptr.0, |source| source == Source::Pool);
        let no_such = || bad_value(operation, format!("no live allocation of the driver's pool starts at {ptr}"));
        let (bytes, source) = taken.ok_or_else(no_such)?;
        let freed = self.core.enter_relaxed(operation).and_then(|_current| {
            // SAFETY: the memory is live (it was in the table), and so is the stream (L1, F1).
            check(operation, unsafe { free(ptr.0, stream.raw) })
        });
        if freed.is_err() {
            self.memory.insert(ptr.0, bytes, source);
        }
        freed
    }

    /// The pool that the driver's stream-ordered allocations come from, which others in the process may have set.
    fn pool(&self, operation: Operation) -> Result<CUmemoryPool> {
        let find = self.optional(operation, self.core.functions().cuDeviceGetMemPool)?;
        let mut pool = ptr::null_mut();
        // SAFETY: the handle outlives the call (F1).
        let code = unsafe { find(&raw mut pool, self.core.device) };
        check_function(operation, "cuDeviceGetMemPool", code)?;
        Ok(pool)
    }

    pub(super) fn pool_usage(&self) -> Result<PoolUsage> {
        let operation = Operation::PoolUsage;
        let ask = self.optional(operation, self.core.functions().cuMemPoolGetAttribute)?;
        let _current = self.core.enter_relaxed(operation)?;
        let pool = self.pool(operation)?;
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
        })
    }

    pub(super) fn trim_pool(&self, keep: u64) -> Result<()> {
        let operation = Operation::TrimPool;
        let trim = self.optional(operation, self.core.functions().cuMemPoolTrimTo)?;
        let _current = self.core.enter_relaxed(operation)?;
        let pool = self.pool(operation)?;
        // SAFETY: the pool is the device's current one, which lives as long as it is that (F1).
        check(operation, unsafe { trim(pool, size(keep)) })
    }

    pub(super) fn trim_graph_memory(&self) -> Result<()> {
        let operation = Operation::TrimGraphMemory;
        // Drivers without it are from before graphs could allocate.
        let Some(trim) = self.core.functions().cuDeviceGraphMemTrim else { return Ok(()) };
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the device is the driver's number of this one (F1).
        check(operation, unsafe { trim(self.core.device) })
    }

    /// Refuses a range that is not all live device memory, so that the driver cannot take it for the host's.
    pub(super) fn check_memory(&self, operation: Operation, ptr: DevicePtr, bytes: u64) -> Result<()> {
        if self.memory.hold(ptr.0, bytes) || self.mapped.hold(ptr.0, bytes) || self.driver_holds(operation, ptr, bytes)
        {
            return Ok(());
        }
        Err(bad_value(operation, format!("{bytes} bytes at {ptr} are not all live device memory")))
    }

    /// Whether the driver says that memory which was not allocated here is memory of this device, in one piece.
    ///
    /// To the driver a reservation is one piece, whether or not anything is mapped in it, and it knows the memory of every device. Work that
    /// touched what is not mapped, or what another device has, would lose this one.
    fn driver_holds(&self, operation: Operation, ptr: DevicePtr, bytes: u64) -> bool {
        let functions = self.core.functions();
        let (Some(ask), Some(range)) = (functions.cuPointerGetAttribute, functions.cuMemGetAddressRange_v2) else {
            return false;
        };
        let (Some(end), Ok(_current)) = (ptr.0.checked_add(bytes), self.core.enter_relaxed(operation)) else {
            return false;
        };
        let number = |attribute: PointerAttr, at: u64| {
            let mut value = 0_u64;
            // SAFETY: the number outlives the call; these attributes have at most 64 bits, and smaller ones set the lowest,
            // because the machines that CUDA runs on are little-endian. Any address may be asked about (F1).
            let code = unsafe { ask((&raw mut value).cast::<c_void>(), attribute as c_uint, at) };
            (code == 0).then_some(value)
        };
        let is_ours = |at| {
            number(PointerAttr::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at) == Some(DEVICE_MEMORY)
                && number(PointerAttr::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at) == u64::try_from(self.core.device).ok()
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

    pub(super) fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        let first = self.host_alloc_raw(bytes)?;
        if first.is_multiple_of(PAGE) {
            return Ok(self.note_allocated(first, bytes, 0));
        }
        // Small pieces come from within pages that the driver shares out. What is a page longer has a page's border in it.
        // SAFETY: just allocated, and nobody else knows it.
        unsafe { self.core.destroy_or_keep("page-locked memory at", first, host_free_raw) };
        let length = bytes
            .checked_add(size(PAGE))
            .ok_or_else(|| DeviceError::refused(Operation::HostAlloc, Code::OUT_OF_MEMORY))?;
        let start = self.host_alloc_raw(length)?;
        Ok(self.note_allocated(start, bytes, start.next_multiple_of(PAGE) - start))
    }

    fn note_allocated(&self, start: u64, bytes: usize, skipped: u64) -> HostPtr {
        self.host.insert(start + skipped, bytes as u64, Locked::Allocated { skipped });
        HostPtr(size(start + skipped))
    }

    fn host_alloc_raw(&self, bytes: usize) -> Result<u64> {
        let operation = Operation::HostAlloc;
        let _current = self.core.enter_relaxed(operation)?;
        let mut start = ptr::null_mut();
        // SAFETY: the address outlives the call (F1).
        let code = unsafe { (self.core.functions().cuMemHostAlloc)(&raw mut start, bytes, PORTABLE) };
        let detail = || format!("{bytes} bytes of page-locked memory asked for");
        check(operation, code).map_err(|error| error.with_more(detail()))?;
        Ok(handle(start))
    }

    /// Frees page-locked memory.
    ///
    /// # Safety
    /// As for [`crate::Driver::host_free`].
    pub(super) unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        let operation = Operation::HostFree;
        let taken = self.host.take_if(ptr.0 as u64, |locked| matches!(locked, Locked::Allocated { .. }));
        let no_such = || bad_value(operation, format!("no page-locked allocation starts at {:#x}", ptr.0));
        let (bytes, locked) = taken.ok_or_else(no_such)?;
        let skipped = if let Locked::Allocated { skipped } = locked { skipped } else { 0 };
        // SAFETY: passed on to the caller; it was in the table, so it is an allocation, and it is freed once.
        let freed = unsafe { self.host_free_raw(ptr.0 as u64 - skipped) };
        if freed.is_err() {
            self.host.insert(ptr.0 as u64, bytes, locked);
        }
        freed
    }

    /// Frees page-locked memory that the table does not know, from where the driver's allocation starts.
    ///
    /// # Safety
    /// It was allocated, not freed, and nobody uses it any more.
    pub(super) unsafe fn host_free_raw(&self, start: u64) -> Result<()> {
        let _current = self.core.enter_relaxed(Operation::HostFree)?;
        // SAFETY: passed on to the caller.
        unsafe { host_free_raw(&self.core, start) }
    }

    /// Page-locks the caller's memory.
    ///
    /// # Safety
    /// As for [`crate::Driver::host_register`].
    pub(super) unsafe fn host_register(&self, start: *mut u8, bytes: usize) -> Result<HostPtr> {
        let operation = Operation::HostRegister;
        let register = self.optional(operation, self.core.functions().cuMemHostRegister_v2)?;
        // What is registered could not be freed without.
        self.optional(operation, self.core.functions().cuMemHostUnregister)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the caller vouches for the memory (F1).
        check(operation, unsafe { register(start.cast(), bytes, PORTABLE) })?;
        let address = handle(start);
        self.host.insert(address, bytes as u64, Locked::Registered);
        Ok(HostPtr(size(address)))
    }

    /// Waits for the device first: pending work must not meet memory that its owner takes back.
    ///
    /// # Safety
    /// As for [`crate::Driver::host_unregister`].
    pub(super) unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        let operation = Operation::HostUnregister;
        self.optional(operation, self.core.functions().cuMemHostUnregister)?;
        self.forbid_device_wait(operation)?;
        let taken = self.host.take_if(ptr.0 as u64, |locked| locked == Locked::Registered);
        let no_such = || {
            DeviceError::refused(operation, NOT_REGISTERED)
                .with_detail(format!("no registered memory starts at {:#x}", ptr.0))
        };
        let (bytes, locked) = taken.ok_or_else(no_such)?;
        // SAFETY: passed on to the caller; it was in the table, so it is registered, and it is unregistered once.
        let unregister = || unsafe { self.host_unregister_raw(ptr.0 as u64) };
        let done = self.synchronize().and_then(|()| unregister());
        if done.is_err() {
            self.host.insert(ptr.0 as u64, bytes, locked);
        }
        done
    }

    /// Unregisters memory that the table does not know any more.
    ///
    /// # Safety
    /// It was registered, not unregistered, and nobody counts on its being page-locked any more.
    pub(super) unsafe fn host_unregister_raw(&self, start: u64) -> Result<()> {
        let operation = Operation::HostUnregister;
        let unregister = self.optional(operation, self.core.functions().cuMemHostUnregister)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: passed on to the caller (F1).
        check(operation, unsafe { unregister(pointer(start)) })
    }

    /// Refuses a copy to or from the legacy stream where the driver takes none.
    pub(super) fn refuse_legacy(&self, operation: Operation, stream: RawStream) -> Result<()> {
        if !stream.is_legacy() {
            return Ok(());
        }
        Err(DeviceError::refused(operation, Code::NOT_SUPPORTED)
            .with_detail("the driver takes no batches on the legacy default stream; use another stream"))
    }
}
