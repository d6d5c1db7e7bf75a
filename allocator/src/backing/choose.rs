//! Chooses where an allocator's memory comes from: whether the device can map memory, and whether
//! at several addresses at once.

use aquifer_device::{Attribute, Device, DeviceError, DevicePtr, ErrorKind, PhysicalOptions, RawPhysical, Reservation};

use crate::backing::paged::carry_out::{release, unless_capturing};
use crate::config::{Backing, Config, GRANULE_MIN, MemoryFirst};
use crate::core::paged::granules::{Ability, Paged};
use crate::core::policy::Weights;
use crate::error::{AllocError, WhySegments};

/// The state of the paged backing; or why memory comes in segments.
pub(crate) fn choose(device: &Device, config: &Config) -> Result<Result<Paged, WhySegments>, AllocError> {
    if config.backing != Backing::Paged {
        return Ok(Err(WhySegments::Chosen));
    }
    if config.no_cache {
        return Ok(Err(WhySegments::NoCache));
    }
    let tried = try_paged(device, config);
    match &tried {
        Err(WhySegments::Failed(error)) if error.kind == ErrorKind::DeviceLost => Err(error.clone().into()),
        Err(why) => {
            tracing::warn!("memory comes in segments and not in mapped granules: {why}");
            Ok(tried)
        }
        Ok(_) => Ok(tried),
    }
}

/// Most granules that the memory of a device is divided into, unless the configuration says how
/// large they are. Each takes some hundred bytes of host memory.
const GRANULES_MAX: u64 = 1 << 18;

fn try_paged(device: &Device, config: &Config) -> Result<Paged, WhySegments> {
    let total = device.info().total_bytes;
    let granularity = device.info().granularity_bytes.filter(|&bytes| bytes > 0).ok_or(WhySegments::DeviceCannot)?;
    let wanted = config.granule.unwrap_or_else(|| total.div_ceil(GRANULES_MAX).max(GRANULE_MIN));
    let granule = wanted.max(granularity).checked_next_power_of_two();
    let fits = granule.filter(|&bytes| bytes <= total).ok_or(WhySegments::GranuleTooLarge { granule, total })?;
    let ability = probe(device, fits).map_err(WhySegments::Failed)?;
    let weights = if config.memory_first == MemoryFirst::On { Weights::MEMORY } else { Weights::TIME };
    Ok(Paged::new(weights, fits, config.frame.map(|bytes| bytes.min(total)), ability, device.info().ordinal))
}

/// Returns how granules of `granule` bytes are mapped on the device, or why they cannot be. Maps
/// one and gives it back. A device that is full counts as able; one that gives no addresses does
/// not.
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
    if !still_mapped {
        release(device, physical);
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

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use std::sync::Arc;

    use aquifer_device::{Code, Operation};
    use aquifer_sim::{Fault, SimConfig, SimDriver};

    use super::*;
    use crate::allocator::Allocator;
    use crate::{Advice, Refusal};

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn granules_are_larger_where_there_would_be_too_many() {
        let granule = |capacity: u64, options: &str| {
            let device = Device::new(SimDriver::new(SimConfig::new(capacity)));
            Allocator::new(&device, Config::parse(options).unwrap()).unwrap().granule_bytes()
        };
        for (capacity, mib) in [(GIB, 2), (192 * GIB, 2), (512 * GIB, 2), (513 * GIB, 4), (1 << 46, 256)] {
            assert_eq!(granule(capacity, ""), Some(mib * MIB), "{capacity}");
        }
        assert_eq!(granule(1 << 46, "granule_mb:2"), Some(2 * MIB));
        assert_eq!(granule(1 << 46, "backing:segments"), None);
    }

    fn opened(device: &str) -> (Arc<SimDriver>, Allocator) {
        let sim = SimDriver::new(SimConfig::parse(device).unwrap());
        let allocator = Allocator::new(&Device::new(sim.clone()), "").unwrap();
        (sim, allocator)
    }

    fn segments(allocator: &Allocator) -> (usize, usize) {
        let all = allocator.snapshot().segments;
        let mapped = all.iter().filter(|segment| segment.is_expandable).count();
        (mapped, all.len() - mapped)
    }

    #[test]
    fn memory_comes_in_segments_where_no_addresses_can_be_reserved() {
        for device in ["1GiB,addresses=0", "1GiB,fault_rate=cuMemAddressReserve:1.0:out_of_memory"] {
            let (_, allocator) = opened(device);
            assert_eq!(allocator.backing(), Backing::Segments);
            let why = allocator.why_segments();
            assert!(
                matches!(why, Some(WhySegments::Failed(error)) if error.kind == ErrorKind::OutOfAddresses),
                "{why:?}"
            );
            let _block = allocator.alloc_bytes(10 * MIB, allocator.device().default_stream()).unwrap();
            assert_eq!(segments(&allocator), (0, 1));
        }
    }

    #[test]
    fn a_smaller_reservation_serves_where_a_large_one_is_refused() {
        let (_, allocator) = opened("1GiB,addresses=64MiB");
        let _block = allocator.alloc_bytes(50 * MIB, allocator.device().default_stream()).unwrap();
        assert_eq!((segments(&allocator), allocator.why_segments()), ((1, 0), None));
    }

    #[test]
    fn requests_that_find_no_addresses_get_segments() {
        let (sim, allocator) = opened("1GiB,addresses=520MiB");
        let (one, two) = (allocator.device().stream().unwrap(), allocator.device().stream().unwrap());
        for _ in 0..3 {
            let mapped = allocator.alloc_bytes(500 * MIB, &one).unwrap();
            let blocks = [1000, 3 * MIB, 150 * MIB].map(|bytes| allocator.alloc_bytes(bytes, &two).unwrap());
            assert_eq!(segments(&allocator), (2, 2));
            let why = allocator.why_segments();
            assert!(matches!(why, Some(WhySegments::NoAddresses(_))), "{why:?}");
            assert_eq!(allocator.backing(), Backing::Paged);
            blocks.iter().for_each(|block| two.fill(block.ptr(), 1, block.bytes()).unwrap());
            two.synchronize().unwrap();
            drop((mapped, blocks));
            // Mapped memory goes back for a segment, and segments for another one.
            let large = allocator.alloc_bytes(700 * MIB, &two).unwrap();
            assert_eq!(segments(&allocator), (0, 1));
            drop(large);
            allocator.empty_cache().unwrap();
            assert_eq!((allocator.memory_reserved(), sim.held_bytes()), (0, 0));
        }
    }

    #[test]
    fn a_request_that_lacks_addresses_waits_for_nothing() {
        let (_, allocator) = opened("1GiB,addresses=64MiB");
        let stream = allocator.device().stream().unwrap();
        let [used, free] = [40, 10].map(|mib| allocator.alloc_bytes(mib * MIB, &stream).unwrap());
        stream.fill(used.ptr(), 1, used.bytes()).unwrap();
        stream.fill(free.ptr(), 1, free.bytes()).unwrap();
        drop(free);
        let _segment = allocator.alloc_bytes(100 * MIB, &stream).unwrap();
        let calls = allocator.device().driver_calls();
        let waits = [Operation::Synchronize, Operation::SynchronizeStream, Operation::SynchronizeEvent];
        assert_eq!(waits.map(|wait| calls.of(wait)), [0; 3], "{calls:?}");
    }

    #[test]
    fn peers_have_access_to_all_memory_or_to_none() {
        let _peer = SimDriver::new(SimConfig::parse("1GiB,ordinal=1").unwrap());
        let [(_, with), (_, without)] = [0; 2].map(|_| opened("1GiB,addresses=64MiB"));
        let large = |allocator: &Allocator| allocator.alloc_bytes(100 * MIB, allocator.device().default_stream());
        with.enable_peer_access(1).unwrap();
        assert_eq!(large(&with).unwrap_err().report().unwrap().refusal, Some(Refusal::Addresses));
        with.enable_peer_access(1).unwrap();
        let _segment = large(&without).unwrap();
        let error = without.enable_peer_access(1).unwrap_err();
        assert!(matches!(error, AllocError::NotMapped { .. }), "{error}");
    }

    #[test]
    fn a_refusal_for_lack_of_addresses_names_them() {
        let (sim, allocator) = opened("1GiB,addresses=64MiB");
        let stream = allocator.device().default_stream();
        sim.inject(Fault::Rate { operation: Some(Operation::Alloc), rate: 1.0, code: Code::OUT_OF_MEMORY });
        let error = allocator.alloc_bytes(100 * MIB, stream).unwrap_err();
        let report = error.report().unwrap();
        assert_eq!(report.refusal, Some(Refusal::Addresses), "{report}");
        assert_eq!(report.advice, [Advice::UseSegments], "{report}");
        sim.clear_faults();
        let _segment = allocator.alloc_bytes(100 * MIB, stream).unwrap();
    }
}
