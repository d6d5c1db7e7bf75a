//! Physical memory, reserved addresses, and mappings of the one at the other.
//!
//! What the driver demands of whoever calls it (whole mappings, a reservation that is empty when it goes back) is checked here
//! first. The lock of `rules` is held across the driver's calls on mappings, so that two threads cannot disagree about what is
//! mapped; it is taken before a table's.

use std::ffi::c_int;

use super::context::Core;
use super::driver::CudaDriver;
use super::handles::{Kind, Object};
use super::installation::check;
use super::memory::bad_value;
use super::raw::size;
use super::shapes::{AccessDescription, AllocationProperties};
use crate::driver::{DevicePtr, RawPhysical};
use crate::error::{Code, DeviceError, ErrorKind, Operation, Result};
use crate::physical::PhysicalOptions;

#[derive(Debug)]
pub(super) enum Physicals {}

impl Kind for Physicals {
    const NAME: &'static str = "physical memory";
    const DESTROY: Operation = Operation::ReleasePhysical;
    /// Length in bytes.
    type Extra = u64;

    unsafe fn destroy(core: &Core, raw: u64) -> Result<()> {
        match core.functions().cuMemRelease {
            // SAFETY: the caller vouches for the memory (F1).
            Some(release) => check(Self::DESTROY, unsafe { release(raw) }),
            // Nothing was created then.
            None => Ok(()),
        }
    }
}

impl CudaDriver {
    /// Refuses mapping where the device or the driver cannot.
    fn can_map(&self, operation: Operation) -> Result<()> {
        match self.info.granularity_bytes {
            Some(_) => Ok(()),
            None => Err(DeviceError::refused(operation, Code::NOT_SUPPORTED)
                .with_detail("this device, or its driver, cannot map memory")),
        }
    }

    pub(super) fn reserve(&self, bytes: u64, alignment: u64) -> Result<DevicePtr> {
        let operation = Operation::Reserve;
        self.can_map(operation)?;
        let reserve = self.optional(operation, self.core.functions().cuMemAddressReserve)?;
        let _current = self.core.enter_relaxed(operation)?;
        let mut ptr = 0;
        // The driver aligns to its granularity anyway.
        let more = if Some(alignment) > self.info.granularity_bytes { alignment } else { 0 };
        // SAFETY: the address outlives the call; 0 leaves the place to the driver, and the alignment, too (F1).
        let code = unsafe { reserve(&raw mut ptr, size(bytes), size(more), 0, 0) };
        check(operation, code).map_err(|error| {
            let kind = if error.is_out_of_memory() { ErrorKind::OutOfAddresses } else { error.kind };
            error.with_kind(kind).with_detail(format!("{bytes} bytes of addresses asked for"))
        })?;
        self.reserved.insert(ptr, bytes, ());
        Ok(DevicePtr(ptr))
    }

    pub(super) fn unreserve(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let operation = Operation::Unreserve;
        self.can_map(operation)?;
        let _rules = self.rules.lock();
        if self.mapped.any_in(ptr.0, bytes) {
            return Err(bad_value(operation, format!("memory is mapped in the {bytes} bytes at {ptr}")));
        }
        match self.reserved.take_if(ptr.0, |()| true) {
            Some((reserved, ())) if reserved == bytes => {}
            other => {
                if let Some((reserved, ())) = other {
                    self.reserved.insert(ptr.0, reserved, ());
                }
                return Err(bad_value(operation, format!("{bytes} bytes at {ptr} are no whole reservation")));
            }
        }
        let freed = self.unreserve_raw(ptr.0, bytes);
        if freed.is_err() {
            self.reserved.insert(ptr.0, bytes, ());
        }
        freed
    }

    /// Gives addresses back that the table does not know any more.
    pub(super) fn unreserve_raw(&self, ptr: u64, bytes: u64) -> Result<()> {
        let operation = Operation::Unreserve;
        let free = self.optional(operation, self.core.functions().cuMemAddressFree)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: a whole reservation with nothing mapped in it (F1).
        check(operation, unsafe { free(ptr, size(bytes)) })
    }

    pub(super) fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        let operation = Operation::CreatePhysical;
        self.can_map(operation)?;
        let create = self.optional(operation, self.core.functions().cuMemCreate)?;
        self.check_options(options)?;
        let _current = self.core.enter_relaxed(operation)?;
        let properties = AllocationProperties::new(self.core.device, options);
        let mut raw = 0;
        // SAFETY: handle and properties outlive the call; 0 are the only flags (F1).
        let code = unsafe { create(&raw mut raw, size(bytes), &raw const properties, 0) };
        check(operation, code).map_err(|error| error.with_more(format!("{bytes} bytes asked for")))?;
        // SAFETY: just created, and nobody else knows it.
        self.physicals.insert(raw, unsafe { Object::new(&self.core, raw, bytes) });
        Ok(RawPhysical(raw))
    }

    /// Refuses properties that the device lacks, which drivers else ignore.
    fn check_options(&self, options: PhysicalOptions) -> Result<()> {
        let lacking = |what: &str| {
            let detail = format!("this device has no memory {what}");
            Err(DeviceError::refused(Operation::CreatePhysical, Code::NOT_SUPPORTED).with_detail(detail))
        };
        if options.rdma && !self.facts.rdma {
            return lacking("for RDMA");
        }
        if options.exportable.is_some() && !self.facts.posix_fd {
            return lacking("that can be exported");
        }
        Ok(())
    }

    pub(super) fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        self.can_map(Operation::ReleasePhysical)?;
        self.physicals.destroy(physical.0)
    }

    pub(super) fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        let operation = Operation::Map;
        self.can_map(operation)?;
        let map = self.optional(operation, self.core.functions().cuMemMap)?;
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
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the addresses are reserved and the memory lives (L1, F1); its offset and the flags must be 0.
        check(operation, unsafe { map(ptr.0, size(bytes), 0, memory.raw(), 0) })?;
        self.mapped.insert(ptr.0, bytes, ());
        Ok(())
    }

    pub(super) fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        let operation = Operation::Unmap;
        self.can_map(operation)?;
        let _rules = self.rules.lock();
        let tiles = self.tiles(operation, ptr, bytes)?;
        for &(start, ..) in &tiles {
            self.mapped.take_if(start, |()| true);
        }
        let unmapped = self.unmap_raw(ptr.0, bytes);
        if unmapped.is_err() {
            tiles.into_iter().for_each(|(start, bytes, ())| self.mapped.insert(start, bytes, ()));
        }
        unmapped
    }

    /// Unmaps whole mappings that the table does not know any more.
    pub(super) fn unmap_raw(&self, ptr: u64, bytes: u64) -> Result<()> {
        let operation = Operation::Unmap;
        let unmap = self.optional(operation, self.core.functions().cuMemUnmap)?;
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: whole mappings (F1).
        check(operation, unsafe { unmap(ptr, size(bytes)) })
    }

    fn tiles(&self, operation: Operation, ptr: DevicePtr, bytes: u64) -> Result<Vec<(u64, u64, ())>> {
        let no_tiles = || bad_value(operation, format!("whole mappings do not tile the {bytes} bytes at {ptr}"));
        self.mapped.tiling(ptr.0, bytes).ok_or_else(no_tiles)
    }

    pub(super) fn set_access(&self, ptr: DevicePtr, bytes: u64, devices: &[u32]) -> Result<()> {
        let operation = Operation::SetAccess;
        self.can_map(operation)?;
        let set = self.optional(operation, self.core.functions().cuMemSetAccess)?;
        let no_device = |ordinal: u32| {
            DeviceError::refused(operation, Code::INVALID_DEVICE).with_detail(format!("there is no GPU {ordinal}"))
        };
        let description = |&ordinal: &u32| {
            c_int::try_from(ordinal).map(AccessDescription::read_write).map_err(|_| no_device(ordinal))
        };
        let descriptions = devices.iter().map(description).collect::<Result<Vec<_>>>()?;
        let _rules = self.rules.lock();
        self.tiles(operation, ptr, bytes)?;
        if descriptions.is_empty() {
            return Ok(());
        }
        let _current = self.core.enter_relaxed(operation)?;
        // SAFETY: the descriptions outlive the call and are as many as is told; the range is mapped (F1).
        check(operation, unsafe { set(ptr.0, size(bytes), descriptions.as_ptr(), descriptions.len()) })
    }

    pub(super) fn can_access_peer(&self, peer: u32) -> Result<bool> {
        let operation = Operation::CanAccessPeer;
        let ask = self.optional(operation, self.core.functions().cuDeviceCanAccessPeer)?;
        let peer = self.core.installation.device(operation, peer)?;
        let mut can: c_int = 0;
        // SAFETY: the number outlives the call (F1).
        check(operation, unsafe { ask(&raw mut can, self.core.device, peer) })?;
        Ok(can != 0)
    }
}
