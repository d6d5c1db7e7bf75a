//! What a pointer means. The driver would describe served memory as part of the whole range of
//! addresses that Aquifer reserved.

use std::ffi::c_void;
use std::sync::Once;

use aquifer_allocator::{RawOwner, owner_of};
use aquifer_device::DevicePtr;

use crate::answer::{Instead, Served, answer, check};
use crate::driver::{Handle, NOT_SUPPORTED, driver};
use crate::gpu;
use crate::report::Why;

/// `CU_POINTER_ATTRIBUTE_CONTEXT`, `…_IS_LEGACY_CUDA_IPC_CAPABLE`, `…_RANGE_START_ADDR` and
/// `…_RANGE_SIZE`.
const CONTEXT: u32 = 1;
const IPC_CAPABLE: u32 = 10;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;

/// The served allocation that holds an address, and the context of its GPU.
fn find(ptr: u64) -> Served<(RawOwner, Handle)> {
    let owner = owner_of(DevicePtr(ptr)).ok_or(Instead::Driver(Why::Foreign))?;
    let device = owner.allocator.device().id();
    let gpu = gpu::served().find(|gpu| gpu.device.id() == device).ok_or(Instead::Driver(Why::Foreign))?;
    Ok((owner, gpu.context))
}

/// Replaces the driver's answer about an attribute where it is not that of the allocation.
///
/// # Safety
/// `data` must be null or writable for a value of this attribute.
unsafe fn correct(attribute: u32, data: *mut c_void, owner: &RawOwner, context: Handle) {
    if data.is_null() {
        return;
    }
    let value = match attribute {
        CONTEXT => context,
        RANGE_START => owner.ptr.0,
        RANGE_SIZE => owner.bytes,
        IPC_CAPABLE => {
            // SAFETY: not null, and the caller vouches for a `bool`.
            unsafe { data.cast::<bool>().write(false) };
            return;
        }
        _ => return,
    };
    // SAFETY: not null, and for these attributes the caller vouches for 8 bytes.
    unsafe { data.cast::<u64>().write(value) };
}

/// The allocation that an address is part of.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, ptr: u64) -> u32 {
    let serve = || {
        let (owner, _) = find(ptr)?;
        if !start.is_null() {
            // SAFETY: not null, and the program vouches for it.
            unsafe { start.write(owner.ptr.0) };
        }
        if !bytes.is_null() {
            // SAFETY: as above.
            unsafe { bytes.write(usize::try_from(owner.bytes).unwrap_or(usize::MAX)) };
        }
        Ok(())
    };
    // SAFETY: passed on to the program.
    answer(serve, |_| unsafe { driver().cuMemGetAddressRange_v2(start, bytes, ptr) })
}

/// A fact about an address.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, ptr: u64) -> u32 {
    // SAFETY: passed on to the program.
    let ask = || unsafe { driver().cuPointerGetAttribute(data, attribute, ptr) };
    let serve = || {
        let code = ask();
        let is_corrected = matches!(attribute, CONTEXT | IPC_CAPABLE | RANGE_START | RANGE_SIZE);
        if !is_corrected || data.is_null() {
            return check(code);
        }
        let Ok((owner, context)) = find(ptr) else { return check(code) };
        // SAFETY: passed on to the program.
        unsafe { correct(attribute, data, &owner, context) };
        Ok(())
    };
    answer(serve, |_| ask())
}

/// Several facts about an address.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttributes(
    count: u32,
    attributes: *mut u32,
    data: *mut *mut c_void,
    ptr: u64,
) -> u32 {
    // SAFETY: passed on to the program.
    let ask = || unsafe { driver().cuPointerGetAttributes(count, attributes, data, ptr) };
    let serve = || {
        check(ask())?;
        let Ok((owner, context)) = find(ptr) else { return Ok(()) };
        if attributes.is_null() || data.is_null() {
            return Ok(());
        }
        // SAFETY: not null, and the driver has accepted the array.
        let attributes = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
        // SAFETY: as above.
        let data = unsafe { std::slice::from_raw_parts(data, count as usize) };
        for (&attribute, &data) in attributes.iter().zip(data) {
            // SAFETY: passed on to the program.
            unsafe { correct(attribute, data, &owner, context) };
        }
        Ok(())
    };
    answer(serve, |_| ask())
}

/// A handle with which another process opens memory: refused for served memory, which is mapped, or
/// part of a larger allocation.
///
/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut c_void, ptr: u64) -> u32 {
    let serve = || {
        find(ptr)?;
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            eprintln!(
                "aquifer: cuIpcGetMemHandle: memory that Aquifer serves cannot be shared with other processes; AQUIFER_PASS=cuMemAlloc \
                 (aquifer-stress run --pass cuMemAlloc) leaves cuMemAlloc to the driver"
            );
        });
        Err(Instead::Code(NOT_SUPPORTED))
    };
    // SAFETY: passed on to the program.
    answer(serve, |_| unsafe { driver().cuIpcGetMemHandle(handle, ptr) })
}
