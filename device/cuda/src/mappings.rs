//! Physical memory, reserved addresses, and mappings of physical memory there.
//!
//! The driver's demands on its callers (whole mappings, a reservation that is empty when it goes
//! back) are checked here first. The lock of `rules` is held across the driver's calls on mappings,
//! so that two threads cannot disagree about the mappings; it is taken before a table's.

use std::ffi::c_int;

use aquifer_device::{Code, DeviceError, DevicePtr, Operation, PhysicalOptions, RawPhysical, Result};

use crate::gpu::Gpu;
use crate::handles::OwnedObject;
use crate::installation::{bad_value, check};
use crate::raw::size;
use crate::shapes::{AccessDescription, AllocationProperties};

/// Refuses mapping where the device or the driver cannot.
fn can_map(gpu: &Gpu, operation: Operation) -> Result<()> {
    match gpu.info.granularity_bytes {
        Some(_) => Ok(()),
        None => Err(DeviceError::refused(operation, Code::NOT_SUPPORTED)
            .with_detail("this device, or its driver, cannot map memory")),
    }
}

pub(crate) fn reserve(gpu: &Gpu, bytes: u64, alignment: u64) -> Result<DevicePtr> {
    let operation = Operation::Reserve;
    can_map(gpu, operation)?;
    let reserve = gpu.optional(operation, gpu.context.functions().cuMemAddressReserve)?;
    let _current = gpu.context.enter_relaxed(operation)?;
    let mut ptr = 0;
    // The driver aligns to its granularity anyway.
    let more = if Some(alignment) > gpu.info.granularity_bytes { alignment } else { 0 };
    // SAFETY: the address outlives the call; 0 leaves the place to the driver, and the alignment,
    // too (F1).
    let code = unsafe { reserve(&raw mut ptr, size(bytes), size(more), 0, 0) };
    check(operation, code).map_err(|error| error.with_detail(format!("{bytes} bytes of addresses asked for")))?;
    gpu.reserved.insert(ptr, bytes, ());
    Ok(DevicePtr(ptr))
}

pub(crate) fn unreserve(gpu: &Gpu, ptr: DevicePtr, bytes: u64) -> Result<()> {
    let operation = Operation::Unreserve;
    can_map(gpu, operation)?;
    let _rules = gpu.rules.lock();
    if gpu.mapped.any_in(ptr.0, bytes) {
        return Err(bad_value(operation, format!("memory is mapped in the {bytes} bytes at {ptr}")));
    }
    if gpu.reserved.bytes_from(ptr.0) != Some(bytes) {
        return Err(bad_value(operation, format!("{bytes} bytes at {ptr} are no whole reservation")));
    }
    gpu.reserved.give_back(ptr.0, |()| true, |()| unreserve_raw(gpu, ptr.0, bytes)).unwrap_or(Ok(()))
}

/// Gives addresses back that the table does not know any more.
pub(crate) fn unreserve_raw(gpu: &Gpu, ptr: u64, bytes: u64) -> Result<()> {
    let operation = Operation::Unreserve;
    let free = gpu.optional(operation, gpu.context.functions().cuMemAddressFree)?;
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: a whole reservation with nothing mapped in it (F1).
    check(operation, unsafe { free(ptr, size(bytes)) })
}

pub(crate) fn create_physical(gpu: &Gpu, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
    let operation = Operation::CreatePhysical;
    can_map(gpu, operation)?;
    let create = gpu.optional(operation, gpu.context.functions().cuMemCreate)?;
    check_options(gpu, options)?;
    let _current = gpu.context.enter_relaxed(operation)?;
    let properties = AllocationProperties::new(gpu.context.device, options);
    let mut raw = 0;
    // SAFETY: handle and properties outlive the call; 0 are the only flags (F1).
    let code = unsafe { create(&raw mut raw, size(bytes), &raw const properties, 0) };
    check(operation, code).map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
    // SAFETY: just created, and known only here.
    gpu.physicals.insert(raw, unsafe { OwnedObject::new(&gpu.context, raw, bytes) });
    Ok(RawPhysical(raw))
}

/// Refuses properties that the device lacks, which drivers else ignore.
fn check_options(gpu: &Gpu, options: PhysicalOptions) -> Result<()> {
    let lacking = |what: &str| {
        let detail = format!("this device has no memory {what}");
        Err(DeviceError::refused(Operation::CreatePhysical, Code::NOT_SUPPORTED).with_detail(detail))
    };
    if options.rdma && !gpu.facts.rdma {
        return lacking("for RDMA");
    }
    if options.exportable.is_some() && !gpu.facts.posix_fd {
        return lacking("that can be exported");
    }
    Ok(())
}

pub(crate) fn release_physical(gpu: &Gpu, physical: RawPhysical) -> Result<()> {
    can_map(gpu, Operation::ReleasePhysical)?;
    gpu.physicals.destroy(physical.0)
}

pub(crate) fn map(gpu: &Gpu, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
    let operation = Operation::Map;
    can_map(gpu, operation)?;
    let map = gpu.optional(operation, gpu.context.functions().cuMemMap)?;
    let memory = gpu.physicals.find(operation, physical.0)?;
    if memory.extra != bytes {
        let detail = format!("the physical memory has {} bytes, not the {bytes} that are to be mapped", memory.extra);
        return Err(bad_value(operation, detail));
    }
    let _rules = gpu.rules.lock();
    if !gpu.reserved.hold(ptr.0, bytes) {
        return Err(bad_value(operation, format!("{bytes} bytes at {ptr} are not all reserved")));
    }
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: the addresses are reserved and the memory lives (L1, F1); its offset and the flags
    // must be 0.
    check(operation, unsafe { map(ptr.0, size(bytes), 0, memory.raw(), 0) })?;
    gpu.mapped.insert(ptr.0, bytes, ());
    Ok(())
}

pub(crate) fn unmap(gpu: &Gpu, ptr: DevicePtr, bytes: u64) -> Result<()> {
    let operation = Operation::Unmap;
    can_map(gpu, operation)?;
    let _rules = gpu.rules.lock();
    let tiles = tiles(gpu, operation, ptr, bytes)?;
    for &(start, ..) in &tiles {
        gpu.mapped.take_if(start, |()| true);
    }
    let unmapped = unmap_raw(gpu, ptr.0, bytes);
    if unmapped.is_err() {
        tiles.into_iter().for_each(|(start, bytes, ())| gpu.mapped.insert(start, bytes, ()));
    }
    unmapped
}

/// Unmaps whole mappings that the table does not know any more.
pub(crate) fn unmap_raw(gpu: &Gpu, ptr: u64, bytes: u64) -> Result<()> {
    let operation = Operation::Unmap;
    let unmap = gpu.optional(operation, gpu.context.functions().cuMemUnmap)?;
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: whole mappings (F1).
    check(operation, unsafe { unmap(ptr, size(bytes)) })
}

fn tiles(gpu: &Gpu, operation: Operation, ptr: DevicePtr, bytes: u64) -> Result<Vec<(u64, u64, ())>> {
    let no_tiles = || bad_value(operation, format!("whole mappings do not tile the {bytes} bytes at {ptr}"));
    gpu.mapped.tiling(ptr.0, bytes).ok_or_else(no_tiles)
}

pub(crate) fn set_access(gpu: &Gpu, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
    let operation = Operation::SetAccess;
    can_map(gpu, operation)?;
    let set = gpu.optional(operation, gpu.context.functions().cuMemSetAccess)?;
    let no_device = |ordinal: u32| {
        DeviceError::refused(operation, Code::INVALID_DEVICE).with_detail(format!("there is no GPU {ordinal}"))
    };
    let description =
        |&ordinal: &u32| c_int::try_from(ordinal).map(AccessDescription::read_write).map_err(|_| no_device(ordinal));
    let descriptions = devices.iter().map(description).collect::<Result<Vec<_>>>()?;
    let _rules = gpu.rules.lock();
    tiles(gpu, operation, ptr, bytes)?;
    if descriptions.is_empty() {
        return Ok(());
    }
    let _current = gpu.context.enter_relaxed(operation)?;
    // SAFETY: the descriptions outlive the call, and their number is right; the range is mapped
    // (F1).
    check(operation, unsafe { set(ptr.0, size(bytes), descriptions.as_ptr(), descriptions.len()) })
}

pub(crate) fn can_access_peer(gpu: &Gpu, peer: u32) -> Result<bool> {
    let operation = Operation::CanAccessPeer;
    let ask = gpu.optional(operation, gpu.context.functions().cuDeviceCanAccessPeer)?;
    let peer = gpu.context.installation.device(operation, peer)?;
    let mut can: c_int = 0;
    // SAFETY: the number outlives the call (F1).
    check(operation, unsafe { ask(&raw mut can, gpu.context.device, peer) })?;
    Ok(can != 0)
}
