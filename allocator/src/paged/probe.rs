//! Whether the device can map memory at all.

use aquifer_device::{Attribute, Device, DeviceError, PhysicalOptions, RawPhysical};

/// How granules of `granule` bytes are created on the device; or why they cannot be. Maps one and takes it back. A device that
/// is just full is taken to be able.
pub(crate) fn probe(device: &Device, granule: u64) -> Result<PhysicalOptions, DeviceError> {
    let rdma = device.driver().attribute(Attribute::GpuDirectRdmaWithVmm)? != 0;
    let options = PhysicalOptions::default().rdma(rdma);
    match try_mapping(device, granule, options, &[device.info().ordinal]) {
        Err(error) if !error.is_out_of_memory() => Err(error),
        _ => Ok(options),
    }
}

/// Maps a granule for these devices and takes it back.
pub(crate) fn try_mapping(
    device: &Device,
    granule: u64,
    options: PhysicalOptions,
    devices: &[u32],
) -> Result<(), DeviceError> {
    let physical = device.driver().create_physical(granule, options)?;
    let mapped = map_one(device, granule, physical, devices);
    if device.driver().release_physical(physical).is_err() {
        device.release_later(physical);
    }
    mapped
}

fn map_one(device: &Device, granule: u64, physical: RawPhysical, devices: &[u32]) -> Result<(), DeviceError> {
    let driver = device.driver();
    let ptr = driver.reserve(granule)?;
    let mapped = driver.map(ptr, granule, physical).and_then(|()| {
        let accessed = driver.set_access(ptr, granule, devices);
        let unmapped = driver.unmap(ptr, granule);
        accessed.and(unmapped)
    });
    let unreserved = driver.unreserve(ptr, granule);
    mapped.and(unreserved)
}
