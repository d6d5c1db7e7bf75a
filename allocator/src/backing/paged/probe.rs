//! Whether the device can map memory at all.

use aquifer_device::internal::Reservation;
use aquifer_device::{Attribute, Device, DeviceError, ErrorKind, PhysicalOptions, RawPhysical};

use crate::backing::paged::carry_out::unless_capturing;

/// Returns how granules of `granule` bytes are created on the device, or why they cannot be. Maps
/// one and gives it back. A device that is full counts as able.
///
/// A driver may announce memory for RDMA and refuse to create it, for example in a virtual machine;
/// such a device gets granules without RDMA.
pub(crate) fn probe(device: &Device, granule: u64) -> Result<PhysicalOptions, DeviceError> {
    let works = |options: PhysicalOptions| match try_mapping(device, granule, options, &[device.info().ordinal]) {
        Err(error) if !error.is_out_of_memory() => Err(error),
        _ => Ok(options),
    };
    let plain = PhysicalOptions::default();
    if device.driver().attribute(Attribute::GpuDirectRdmaWithVmm)? == 0 {
        return works(plain);
    }
    match works(plain.rdma(true)) {
        Err(refused) if refused.kind != ErrorKind::DeviceLost => {
            let options = works(plain)?;
            tracing::warn!(%refused, "memory is mapped without RDMA, which the driver announces but refuses");
            Ok(options)
        }
        other => other,
    }
}

/// Maps a granule for these devices and takes it back; what cannot be taken back now goes back
/// later.
pub(crate) fn try_mapping(
    device: &Device,
    granule: u64,
    options: PhysicalOptions,
    devices: &[u32],
) -> Result<(), DeviceError> {
    let physical = device.driver().create_physical(granule, options)?;
    let mut still_mapped = false;
    let outcome = map_one(device, granule, physical, devices, &mut still_mapped);
    if !still_mapped && device.driver().release_physical(physical).is_err() {
        device.release_later(physical);
    }
    outcome
}

fn map_one(
    device: &Device,
    granule: u64,
    physical: RawPhysical,
    devices: &[u32],
    still_mapped: &mut bool,
) -> Result<(), DeviceError> {
    let driver = device.driver();
    let ptr = driver.reserve(granule, granule)?;
    let mut reservation = Reservation { ptr, bytes: granule, mapped: Vec::new() };
    let mapped = driver.map(ptr, granule, physical).and_then(|()| {
        let accessed = driver.set_access(ptr, granule, devices);
        let unmapped = device.unmap(ptr, granule);
        if unmapped.is_err() {
            *still_mapped = true;
            reservation.mapped.push((ptr, granule, Some(physical)));
        }
        // While a stream captures, it goes back later.
        accessed.and(unless_capturing(unmapped))
    });
    let unreserved = if *still_mapped { Ok(()) } else { driver.unreserve(ptr, granule) };
    if *still_mapped || unreserved.is_err() {
        device.unreserve_later(reservation);
    }
    mapped.and(unreserved)
}
