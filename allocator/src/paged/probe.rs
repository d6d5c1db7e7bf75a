//! Whether the device can map memory at all.

use aquifer_device::{Attribute, Device, DeviceError, PhysicalOptions};

/// How granules of `granule` bytes are created on the device; or why they cannot be. Maps one and takes it back. A device that
/// is just full is taken to be able.
pub(crate) fn probe(device: &Device, granule: u64) -> Result<PhysicalOptions, DeviceError> {
    let rdma = device.driver().attribute(Attribute::GpuDirectRdmaWithVmm)? != 0;
    let options = PhysicalOptions::default().rdma(rdma);
    let driver = device.driver();
    let full = |error: &DeviceError| error.is_out_of_memory();
    let physical = match driver.create_physical(granule, options) {
        Ok(physical) => physical,
        Err(error) if full(&error) => return Ok(options),
        Err(error) => return Err(error),
    };
    let mapped = map_one(device, granule, physical);
    if driver.release_physical(physical).is_err() {
        device.release_later(physical);
    }
    match mapped {
        Err(error) if !full(&error) => Err(error),
        _ => Ok(options),
    }
}

fn map_one(device: &Device, granule: u64, physical: aquifer_device::RawPhysical) -> Result<(), DeviceError> {
    let driver = device.driver();
    let ptr = driver.reserve(granule)?;
    let mapped = driver.map(ptr, granule, physical).and_then(|()| {
        let accessed = driver.set_access(ptr, granule, &[device.info().ordinal]);
        let unmapped = driver.unmap(ptr, granule);
        accessed.and(unmapped)
    });
    let unreserved = driver.unreserve(ptr, granule);
    mapped.and(unreserved)
}
