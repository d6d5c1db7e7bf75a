//! Physical memory mapped at reserved addresses. The rules are the simulated device's.
//!
//! CUDA names a device in each property and description; here it must be the current context's,
//! except that access may be given to others. CUDA documents no need of a current context for these
//! calls; this library asks for one, so that code which relies on one being there by chance is
//! found.

use std::ffi::c_void;

use aquifer_device::{Code, DevicePtr, Driver as _, HandleKind, PhysicalOptions, RawPhysical};

use crate::abi::{Answer, Call, Handle, In, Out, abi, array, code, needed};
use crate::process::Life;

/// `CUmemLocation`: what kind of place, and which.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    kind: u32,
    id: i32,
}

const ON_DEVICE: u32 = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32_meta_data: u64,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

const _: () = assert!(size_of::<Properties>() == 32, "the size that CUDA gives it");

const PINNED: u32 = 1;
const POSIX_FD: u32 = 1;

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDescription {
    location: Location,
    flags: u32,
}

const READ_WRITE: u32 = 3;

impl Properties {
    /// The device that the memory is to be on.
    fn ordinal(&self) -> Answer<i32> {
        if self.kind == PINNED && self.location.kind == ON_DEVICE {
            Ok(self.location.id)
        } else {
            Err(Code::INVALID_VALUE)
        }
    }

    fn options(&self) -> Answer<PhysicalOptions> {
        if self.compression != 0 || self.usage != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let options = PhysicalOptions::default().rdma(self.rdma != 0);
        match self.handle_types {
            0 => Ok(options),
            POSIX_FD => Ok(options.exportable(HandleKind::PosixFd)),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
}

/// Refuses what CUDA keeps for later versions.
fn no_flags(flags: u64) -> Answer {
    if flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// The device to which access is given.
fn receiver(call: &Call, description: &AccessDescription) -> Answer<u32> {
    if description.location.kind != ON_DEVICE {
        return Err(Code::INVALID_VALUE);
    }
    // Access for reading alone, and taking access away, are things that the simulated device does
    // not know.
    match description.flags {
        READ_WRITE => call.device(description.location.id).map(|device| device.ordinal),
        0 | 1 => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

impl Life {
    /// Refuses properties of memory on another device.
    fn check_own(&self, ordinal: i32) -> Answer {
        if i32::try_from(self.ordinal) == Ok(ordinal) { Ok(()) } else { Err(Code::INVALID_DEVICE) }
    }
}

abi! {
    /// Reserves addresses. A hint is not followed.
    10020 cuMemAddressReserve(call, ptr: Out<'_, u64>, bytes: usize, alignment: usize, _hint: u64, flags: u64) {
        let life = call.life()?;
        no_flags(flags)?;
        let out = needed(ptr)?;
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(Code::INVALID_VALUE);
        }
        let reserved = life.sim.reserve(bytes as u64, alignment as u64).map_err(code)?;
        out.write(reserved.0);
        Ok(())
    }

    /// Gives a reservation back.
    10020 cuMemAddressFree(call, ptr: u64, bytes: usize) {
        call.life()?.sim.unreserve(DevicePtr(ptr), bytes as u64).map_err(code)
    }

    /// Creates physical memory.
    10020 cuMemCreate(call, handle: Out<'_, Handle>, bytes: usize, properties: In<'_, Properties>, flags: u64) {
        let life = call.life()?;
        no_flags(flags)?;
        let out = needed(handle)?;
        let properties = needed(properties)?;
        life.check_own(properties.ordinal()?)?;
        out.write(life.sim.create_physical(bytes as u64, properties.options()?).map_err(code)?.0);
        Ok(())
    }

    /// Releases physical memory; it is given back when it is not mapped any more.
    10020 cuMemRelease(call, handle: Handle) {
        call.life()?.sim.release_physical(RawPhysical(handle)).map_err(code)
    }

    /// Maps all of a piece of physical memory. A part of one cannot be mapped.
    10020 cuMemMap(call, ptr: u64, bytes: usize, offset: usize, handle: Handle, flags: u64) {
        let life = call.life()?;
        no_flags(flags)?;
        if offset != 0 {
            return Err(Code::INVALID_VALUE);
        }
        life.sim.map(DevicePtr(ptr), bytes as u64, RawPhysical(handle)).map_err(code)
    }

    /// Unmaps whole mappings.
    10020 cuMemUnmap(call, ptr: u64, bytes: usize) {
        call.life()?.sim.unmap(DevicePtr(ptr), bytes as u64).map_err(code)
    }

    /// Gives devices access to whole mappings.
    10020 cuMemSetAccess(call, ptr: u64, bytes: usize, descriptions: *const AccessDescription, count: usize) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the array.
        let descriptions = unsafe { array(descriptions, count) }?;
        let devices = descriptions.iter().map(|description| receiver(call, description)).collect::<Answer<Vec<_>>>()?;
        life.sim.set_access(DevicePtr(ptr), bytes as u64, &devices).map_err(code)
    }

    /// The access that a device has to a mapping: 3 for reading and writing, 0 for none.
    10020 cuMemGetAccess(call, flags: Out<'_, u64>, location: In<'_, Location>, ptr: u64) {
        let life = call.life()?;
        let (out, location) = (needed(flags)?, needed(location)?);
        if location.kind != ON_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        let device = call.device(location.id)?.ordinal;
        let mapped = life.sim.mapping_at(DevicePtr(ptr)).ok_or(Code::INVALID_VALUE)?;
        out.write(if mapped.devices.contains(&device) { READ_WRITE.into() } else { 0 });
        Ok(())
    }

    /// Granularity of physical memory and mappings, in bytes.
    10020 cuMemGetAllocationGranularity(
        call, granularity: Out<'_, usize>, properties: In<'_, Properties>, option: u32,
    ) {
        let out = needed(granularity)?;
        let properties = needed(properties)?;
        if option > 1 {
            return Err(Code::INVALID_VALUE);
        }
        let life = call.device(properties.ordinal()?)?.life();
        let bytes = life.sim.info().granularity_bytes.ok_or(Code::NOT_SUPPORTED)?;
        out.write(usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE)?);
        Ok(())
    }

    /// Refused: memory can be created fit for export here, but there is no other process that could
    /// take it.
    10020 cuMemExportToShareableHandle(call, out: *mut c_void, _handle: Handle, _kind: u32, flags: u64) {
        call.life()?;
        no_flags(flags)?;
        if out.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        Err(Code::NOT_SUPPORTED)
    }
}
