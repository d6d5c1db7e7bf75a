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

impl Gpu {
    pub(crate) fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr> {
        let operation = Operation::Reserve;
        can_map(self, operation)?;
        let reserve = self.optional(operation, self.context.functions().cuMemAddressReserve)?;
        let mut ptr = 0;
        // The driver aligns to its granularity anyway.
        let more = if Some(alignment) > self.info.granularity_bytes { alignment } else { 0 };
        self.context
            // SAFETY: the address outlives the call; 0 leaves the place to the driver, and the alignment,
            // too (F1).
            .call(operation, |_| unsafe { reserve(&raw mut ptr, size(bytes), size(more), 0, 0) })
            .map_err(|error| error.with_detail(format!("{bytes} bytes of addresses asked for")))?;
        self.reserved.insert(ptr, bytes, ());
        Ok(DevicePtr(ptr))
    }

    pub(crate) fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let operation = Operation::Unreserve;
        can_map(self, operation)?;
        let _rules = self.rules.lock();
        if self.mapped.any_in(ptr.0, bytes) {
            return Err(bad_value(operation, format!("memory is mapped in the {bytes} bytes at {ptr}")));
        }
        if self.reserved.bytes_from(ptr.0) != Some(bytes) {
            return Err(bad_value(operation, format!("{bytes} bytes at {ptr} are no whole reservation")));
        }
        self.reserved.give_back(ptr.0, |()| true, |()| unreserve_raw(self, ptr.0, bytes)).unwrap_or(Ok(()))
    }

    pub(crate) fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        let operation = Operation::CreatePhysical;
        can_map(self, operation)?;
        let create = self.optional(operation, self.context.functions().cuMemCreate)?;
        check_options(self, options)?;
        let properties = AllocationProperties::new(self.context.device, options);
        let mut raw = 0;
        self.context
            // SAFETY: handle and properties outlive the call; 0 are the only flags (F1).
            .call(operation, |_| unsafe { create(&raw mut raw, size(bytes), &raw const properties, 0) })
            .map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
        // SAFETY: just created, and known only here.
        self.physicals.insert(raw, unsafe { OwnedObject::new(&self.context, raw, bytes) });
        Ok(RawPhysical(raw))
    }

    pub(crate) fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        can_map(self, Operation::ReleasePhysical)?;
        self.physicals.destroy(physical.0)
    }

    pub(crate) fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        let operation = Operation::Map;
        can_map(self, operation)?;
        let map = self.optional(operation, self.context.functions().cuMemMap)?;
        let memory = self.physicals.find(operation, physical.0)?;
        if memory.extra != bytes {
            let detail =
                format!("the physical memory has {} bytes, not the {bytes} that are to be mapped", memory.extra);
            return Err(bad_value(operation, detail));
        }
        let _rules = self.rules.lock();
        if !self.reserved.hold(ptr.0, bytes) {
            return Err(bad_value(operation, format!("{bytes} bytes at {ptr} are not all reserved")));
        }
        // SAFETY: the addresses are reserved and the memory lives (L1, F1); its offset and the flags
        // must be 0.
        self.context.call(operation, |_| unsafe { map(ptr.0, size(bytes), 0, memory.raw(), 0) })?;
        self.mapped.insert(ptr.0, bytes, ());
        Ok(())
    }

    pub(crate) fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let operation = Operation::Unmap;
        can_map(self, operation)?;
        let _rules = self.rules.lock();
        let tiles = tiles(self, operation, ptr, bytes)?;
        for &(start, ..) in &tiles {
            self.mapped.take_if(start, |()| true);
        }
        let unmapped = unmap_raw(self, ptr.0, bytes);
        if unmapped.is_err() {
            tiles.into_iter().for_each(|(start, bytes, ())| self.mapped.insert(start, bytes, ()));
        }
        unmapped
    }

    pub(crate) fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        let operation = Operation::SetAccess;
        can_map(self, operation)?;
        let set = self.optional(operation, self.context.functions().cuMemSetAccess)?;
        let no_device = |ordinal: u32| {
            DeviceError::refused(operation, Code::INVALID_DEVICE).with_detail(format!("there is no GPU {ordinal}"))
        };
        let description = |&ordinal: &u32| {
            c_int::try_from(ordinal).map(AccessDescription::read_write).map_err(|_| no_device(ordinal))
        };
        let descriptions = devices.iter().map(description).collect::<Result<Vec<_>>>()?;
        let _rules = self.rules.lock();
        tiles(self, operation, ptr, bytes)?;
        if descriptions.is_empty() {
            return Ok(());
        }
        // SAFETY: the descriptions outlive the call, and their number is right; the range is mapped
        // (F1).
        self.context.call(operation, |_| unsafe { set(ptr.0, size(bytes), descriptions.as_ptr(), descriptions.len()) })
    }

    pub(crate) fn can_access_peer(&self, peer: u32) -> Result<bool> {
        let operation = Operation::CanAccessPeer;
        let ask = self.optional(operation, self.context.functions().cuDeviceCanAccessPeer)?;
        let peer = self.context.installation.device(operation, peer)?;
        let mut can: c_int = 0;
        // SAFETY: the number outlives the call (F1).
        check(operation, unsafe { ask(&raw mut can, self.context.device, peer) })?;
        Ok(can != 0)
    }
}

/// Gives addresses back that the table does not know any more.
pub(crate) fn unreserve_raw(gpu: &Gpu, ptr: u64, bytes: u64) -> Result<()> {
    let operation = Operation::Unreserve;
    let free = gpu.optional(operation, gpu.context.functions().cuMemAddressFree)?;
    // SAFETY: a whole reservation with nothing mapped in it (F1).
    gpu.context.call(operation, |_| unsafe { free(ptr, size(bytes)) })
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

/// Unmaps whole mappings that the table does not know any more.
pub(crate) fn unmap_raw(gpu: &Gpu, ptr: u64, bytes: u64) -> Result<()> {
    let operation = Operation::Unmap;
    let unmap = gpu.optional(operation, gpu.context.functions().cuMemUnmap)?;
    // SAFETY: whole mappings (F1).
    gpu.context.call(operation, |_| unsafe { unmap(ptr, size(bytes)) })
}

fn tiles(gpu: &Gpu, operation: Operation, ptr: DevicePtr, bytes: u64) -> Result<Vec<(u64, u64, ())>> {
    let no_tiles = || bad_value(operation, format!("whole mappings do not tile the {bytes} bytes at {ptr}"));
    gpu.mapped.tiling(ptr.0, bytes).ok_or_else(no_tiles)
}
