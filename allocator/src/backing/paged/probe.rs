//! Whether the device can map memory at all, and whether at several addresses at once.

use aquifer_device::{Attribute, Device, DeviceError, DevicePtr, ErrorKind, PhysicalOptions, RawPhysical, Reservation};

use crate::backing::paged::carry_out::unless_capturing;
use crate::core::paged::granules::Ability;

/// Returns how granules of `granule` bytes are mapped on the device, or why they cannot be. Maps one
/// and gives it back. A device that is full counts as able.
///
/// A driver may announce memory for RDMA and refuse to create it, for example in a virtual machine;
/// such a device gets granules without RDMA.
pub(crate) fn probe(device: &Device, granule: u64) -> Result<Ability, DeviceError> {
    let works = |options: PhysicalOptions| match try_mapping(device, granule, options, &[device.info().ordinal]) {
        Ok(may_alias) => Ok(Ability { options, may_alias }),
        Err(error) if error.is_out_of_memory() => Ok(Ability { options, may_alias: false }),
        Err(error) => Err(error),
    };
    let plain = PhysicalOptions::default();
    if device.driver().attribute(Attribute::GpuDirectRdmaWithVmm)? == 0 {
        return works(plain);
    }
    match works(plain.rdma(true)) {
        Err(refused) if refused.kind != ErrorKind::DeviceLost => {
            let ability = works(plain)?;
            tracing::warn!(%refused, "memory is mapped without RDMA, which the driver announces but refuses");
            Ok(ability)
        }
        other => other,
    }
}

/// Maps a granule for these devices and takes it back; what cannot be taken back now goes back
/// later. Returns true if the granule could also be mapped at a second address.
pub(crate) fn try_mapping(
    device: &Device,
    granule: u64,
    options: PhysicalOptions,
    devices: &[u32],
) -> Result<bool, DeviceError> {
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
) -> Result<bool, DeviceError> {
    let driver = device.driver();
    let ptr = driver.reserve(2 * granule, granule)?;
    let mut reservation = Reservation { ptr, bytes: 2 * granule, mapped: Vec::new() };
    let mapped = driver.map(ptr, granule, physical).and_then(|()| {
        reservation.mapped.push((ptr, granule, Some(physical)));
        let accessed = driver.set_access(ptr, granule, devices);
        let may_alias = accessed.is_ok() && map_again(device, &mut reservation, granule, physical, devices);
        let unmapped = device.unmap(ptr, reservation.mapped.len() as u64 * granule);
        if unmapped.is_err() {
            *still_mapped = true;
        } else {
            reservation.mapped.clear();
        }
        // While a stream captures, it goes back later.
        accessed.and(unless_capturing(unmapped)).map(|()| may_alias)
    });
    let unreserved = if *still_mapped { Ok(()) } else { driver.unreserve(ptr, 2 * granule) };
    if *still_mapped || unreserved.is_err() {
        device.unreserve_later(reservation);
    }
    mapped.and_then(|may_alias| unreserved.map(|()| may_alias))
}

/// Maps a granule at the second address of a reservation. Returns true if that succeeds.
fn map_again(
    device: &Device,
    reservation: &mut Reservation,
    granule: u64,
    physical: RawPhysical,
    devices: &[u32],
) -> bool {
    let second = DevicePtr(reservation.ptr.0 + granule);
    let tried = device.driver().map(second, granule, physical).and_then(|()| {
        reservation.mapped.push((second, granule, None));
        device.driver().set_access(second, granule, devices)
    });
    if let Err(refused) = &tried {
        tracing::debug!(%refused, "memory is used at another address only once the device is done with it");
    }
    tried.is_ok()
}
