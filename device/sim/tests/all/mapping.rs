//! The rules of physical memory, reservations and mappings.

use aquifer_device::{
    Attribute, Code, DevicePtr, Driver, ErrorKind, HandleKind, NewBlock, PhysicalOptions, RawPhysical,
};
use aquifer_sim::{SimConfig, SimDriver, ViolationKind};

use crate::common::{GRANULE, Short, code, device, unchecked};

#[test]
fn data_stays_with_physical_memory_when_it_moves() {
    let driver = device(0);
    let (stream, (first, physical)) = (driver.stream(), driver.mapped());
    driver.put(first.offset(5), b"here", stream).unwrap();
    driver.synchronize().unwrap();
    driver.unmap(first, GRANULE).unwrap();
    let second = driver.reserve(2 * GRANULE, 0).unwrap();
    driver.map(second.offset(GRANULE), GRANULE, physical).unwrap();
    driver.set_access(second.offset(GRANULE), GRANULE, &[0]).unwrap();
    assert_eq!(driver.get(second.offset(GRANULE + 5), 4, stream).unwrap(), b"here");
    assert_eq!(driver.violations(), []);
}

#[test]
fn work_may_span_neighbouring_mappings() {
    let driver = device(0);
    let stream = driver.stream();
    let memory = driver.reserve(2 * GRANULE, 0).unwrap();
    for place in [memory.offset(GRANULE), memory] {
        driver.map(place, GRANULE, driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap()).unwrap();
    }
    driver.set_access(memory, 2 * GRANULE, &[0]).unwrap();
    driver.put(memory.offset(GRANULE - 2), b"span", stream).unwrap();
    assert_eq!(driver.get(memory.offset(GRANULE - 2), 4, stream).unwrap(), b"span");
    assert_eq!(driver.violations(), []);
}

#[test]
fn maps_that_break_a_rule_are_refused_and_change_nothing() {
    let driver = device(0);
    let (memory, physical) = (
        driver.reserve(3 * GRANULE, 0).unwrap(),
        driver.create_physical(2 * GRANULE, PhysicalOptions::default()).unwrap(),
    );
    let refused = |offset: u64, bytes, physical| code(driver.map(memory.offset(offset), bytes, physical));
    assert_eq!(refused(0, GRANULE, physical), Code::INVALID_VALUE, "not the whole handle");
    assert_eq!(refused(2 * GRANULE, 2 * GRANULE, physical), Code::INVALID_VALUE, "past the reservation");
    assert_eq!(refused(512, 2 * GRANULE, physical), Code::INVALID_VALUE, "not aligned");
    assert_eq!(refused(0, GRANULE, RawPhysical(99)), Code::INVALID_HANDLE);
    driver.map(memory, 2 * GRANULE, physical).unwrap();
    assert_eq!(refused(0, 2 * GRANULE, physical), Code::INVALID_VALUE, "mapped already");
    let other = driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
    assert_eq!(refused(GRANULE, GRANULE, other), Code::INVALID_VALUE, "overlaps");
    let plain = driver.alloc(2 * GRANULE).unwrap();
    assert_eq!(code(driver.map(plain, GRANULE, other)), Code::INVALID_VALUE, "no reservation");
    driver.map(memory.offset(2 * GRANULE), GRANULE, other).unwrap();
}

#[test]
fn only_whole_mappings_are_unmapped_or_given_access() {
    let driver = device(0);
    let memory = driver.reserve(4 * GRANULE, 0).unwrap();
    driver.map(memory, 2 * GRANULE, driver.create_physical(2 * GRANULE, PhysicalOptions::default()).unwrap()).unwrap();
    driver
        .map(memory.offset(2 * GRANULE), GRANULE, driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap())
        .unwrap();
    for (offset, granules) in [(0, 1), (1, 1), (1, 2), (0, 4), (3, 1), (0, 0)] {
        let (ptr, bytes) = (memory.offset(offset * GRANULE), granules * GRANULE);
        assert_eq!(code(driver.unmap(ptr, bytes)), Code::INVALID_VALUE, "{granules} granules at {offset}");
        assert_eq!(code(driver.set_access(ptr, bytes, &[0])), Code::INVALID_VALUE, "{granules} granules at {offset}");
    }
    assert_eq!(code(driver.set_access(memory, 2 * GRANULE, &[])), Code::INVALID_VALUE);
    assert_eq!(code(driver.unreserve(memory, 4 * GRANULE)), Code::INVALID_VALUE, "something is mapped");
    driver.unmap(memory, 3 * GRANULE).unwrap();
    assert_eq!(code(driver.unreserve(memory, GRANULE)), Code::INVALID_VALUE, "not the whole reservation");
    driver.unreserve(memory, 4 * GRANULE).unwrap();
    assert_eq!(code(driver.unreserve(memory, 4 * GRANULE)), Code::INVALID_VALUE);
}

#[test]
fn new_mappings_have_no_access_until_it_is_given_to_this_device() {
    for devices in [vec![], vec![1]] {
        let (driver, _peer) = (device(0), SimDriver::new(SimConfig::default().ordinal(1)));
        let (stream, memory) = (driver.stream(), driver.reserve(GRANULE, 0).unwrap());
        driver.map(memory, GRANULE, driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap()).unwrap();
        if !devices.is_empty() {
            driver.set_access(memory, GRANULE, &devices).unwrap();
        }
        driver.memset(memory, 0, 8, stream).unwrap();
        assert_eq!(driver.violations()[0].kind, ViolationKind::NoAccess);
        assert_eq!(code(driver.synchronize()), Code::ILLEGAL_ADDRESS);
    }
}

#[test]
fn use_of_unmapped_memory_names_the_call_that_unmapped_it() {
    let driver = device(0);
    let (stream, (memory, _)) = (driver.stream(), driver.mapped());
    driver.unmap(memory, GRANULE).unwrap();
    driver.memset(memory, 0, 8, stream).unwrap();
    let found = driver.violations()[0].to_string();
    assert!(found.contains("use after free") && found.contains("taken away by 'cuMemUnmap #1'"), "{found}");
}

#[test]
fn released_memory_lives_as_long_as_its_mapping() {
    let driver = device(0);
    let (memory, physical) = driver.mapped();
    let free = || driver.memory_info().unwrap().free;
    let before = free();
    driver.release_physical(physical).unwrap();
    assert_eq!(code(driver.release_physical(physical)), Code::INVALID_HANDLE);
    assert_eq!(free(), before);
    let stream = driver.stream();
    driver.memset(memory, 1, GRANULE, stream).unwrap();
    driver.synchronize().unwrap();
    driver.unmap(memory, GRANULE).unwrap();
    assert_eq!(free(), before + GRANULE);
    assert_eq!(driver.violations(), []);
    assert_eq!(driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap(), physical, "handles come back");
}

#[test]
fn mapping_calls_do_not_wait_for_work() {
    let driver = device(0);
    let (stream, (memory, _)) = (driver.stream(), driver.mapped());
    driver.memset(memory, 1, GRANULE, stream).unwrap();
    driver.stall(stream, std::time::Duration::from_secs(1)).unwrap();
    driver.unmap(memory, GRANULE).unwrap();
    let other = driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
    driver.map(memory, GRANULE, other).unwrap();
    driver.release_physical(other).unwrap();
    assert!(driver.now_ns() < 10_000_000);
    assert!(!driver.query_stream(stream).unwrap());
}

#[test]
fn addresses_are_finite_and_their_exhaustion_is_its_own_error() {
    let driver = unchecked();
    let all = driver.reserve(64 << 30, 0).unwrap();
    let error = driver.reserve(GRANULE, 0).unwrap_err();
    assert_eq!((error.code, error.kind), (Code::OUT_OF_MEMORY, ErrorKind::OutOfAddresses));
    assert!(!error.is_out_of_memory());
    driver.unreserve(all, 64 << 30).unwrap();
    assert_eq!(driver.reserve(GRANULE, 0).unwrap(), all);
    assert_eq!(code(driver.reserve(1, 0)), Code::INVALID_VALUE);
    assert_eq!(driver.reserve(u64::MAX - GRANULE + 1, 0).unwrap_err().kind, ErrorKind::OutOfAddresses);
}

#[test]
fn physical_memory_comes_from_the_same_capacity() {
    let driver = device(0);
    driver.alloc((1 << 30) - GRANULE).unwrap();
    let last = driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
    assert!(driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap_err().is_out_of_memory());
    driver.release_physical(last).unwrap();
    assert_eq!(code(driver.create_physical(GRANULE + 1, PhysicalOptions::default())), Code::INVALID_VALUE);
    driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
}

#[test]
fn devices_that_cannot_map_refuse_mapping_calls() {
    let driver = SimDriver::new(SimConfig::parse("h100,vmm=off").unwrap());
    assert_eq!(driver.info().granularity_bytes, None);
    assert_eq!(driver.attribute(Attribute::VirtualMemoryManagement).unwrap(), 0);
    assert_eq!(driver.reserve(GRANULE, 0).unwrap_err().kind, ErrorKind::Unsupported);
    assert_eq!(driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap_err().kind, ErrorKind::Unsupported);
}

#[test]
fn physical_memory_keeps_the_properties_it_was_created_with() {
    let driver = device(0);
    assert_eq!(driver.attribute(Attribute::GpuDirectRdmaWithVmm).unwrap(), 1);
    assert_eq!(driver.attribute(Attribute::PosixFdHandles).unwrap(), 1);
    let options = PhysicalOptions::default().rdma(true).exportable(HandleKind::PosixFd);
    let (memory, physical) =
        (driver.reserve(2 * GRANULE, 0).unwrap(), driver.create_physical(GRANULE, options).unwrap());
    assert_eq!(driver.mapping_at(memory), None);
    driver.map(memory, GRANULE, physical).unwrap();
    let plain = driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
    driver.map(memory.offset(GRANULE), GRANULE, plain).unwrap();
    let found = |at| driver.mapping_at(memory.offset(at)).map(|mapped| (mapped.ptr, mapped.bytes, mapped.options));
    assert_eq!(found(GRANULE - 1), Some((memory, GRANULE, options)));
    assert_eq!(found(GRANULE), Some((memory.offset(GRANULE), GRANULE, PhysicalOptions::default())));
    driver.unmap(memory, GRANULE).unwrap();
    driver.map(memory, GRANULE, physical).unwrap();
    assert_eq!(found(0), Some((memory, GRANULE, options)), "they move with the memory");
    assert_eq!(driver.mapping_at(driver.alloc(GRANULE).unwrap()), None, "a plain allocation is no mapping");
}

#[test]
fn memory_for_export_is_refused_where_there_is_none() {
    let driver = SimDriver::new(SimConfig::parse("h100,export=off").unwrap());
    assert_eq!(driver.attribute(Attribute::PosixFdHandles).unwrap(), 0);
    let options = PhysicalOptions::default().exportable(HandleKind::PosixFd);
    assert_eq!(driver.create_physical(GRANULE, options).unwrap_err().kind, ErrorKind::Unsupported);
    driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
}

#[test]
fn memory_for_rdma_is_refused_where_there_is_none() {
    let driver = SimDriver::new(SimConfig::parse("rtx4090").unwrap());
    assert_eq!(driver.attribute(Attribute::GpuDirectRdmaWithVmm).unwrap(), 0);
    let free = driver.memory_info().unwrap().free;
    let refused = driver.create_physical(GRANULE, PhysicalOptions::default().rdma(true)).unwrap_err();
    assert_eq!((refused.code, refused.kind), (Code::NOT_SUPPORTED, ErrorKind::Unsupported));
    assert_eq!(driver.memory_info().unwrap().free, free);
    driver.create_physical(GRANULE, PhysicalOptions::default().exportable(HandleKind::PosixFd)).unwrap();
}

#[test]
fn devices_that_were_never_made_do_not_exist() {
    let driver = device(0);
    let memory = driver.reserve(GRANULE, 0).unwrap();
    driver.map(memory, GRANULE, driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap()).unwrap();
    for ordinal in [900, u32::MAX] {
        assert_eq!(code(driver.can_access_peer(ordinal)), Code::INVALID_DEVICE);
        assert_eq!(code(driver.set_access(memory, GRANULE, &[0, ordinal])), Code::INVALID_DEVICE);
    }
    assert_eq!(driver.mapping_at(memory).unwrap().devices, [], "all or none");
    drop(SimDriver::new(SimConfig::default().ordinal(900)));
    assert!(driver.can_access_peer(900).unwrap(), "it is not open, but it exists");
    driver.set_access(memory, GRANULE, &[0, 900]).unwrap();
    assert_eq!(driver.mapping_at(memory).unwrap().devices, [0, 900]);
}

#[test]
fn each_mapping_has_its_own_list_of_devices() {
    let (driver, _peers) = (device(0), [1, 3].map(|ordinal| SimDriver::new(SimConfig::default().ordinal(ordinal))));
    let (stream, memory) = (driver.stream(), driver.reserve(2 * GRANULE, 0).unwrap());
    let new = || driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
    driver.map(memory, GRANULE, new()).unwrap();
    driver.set_access(memory, GRANULE, &[0]).unwrap();
    let devices = |at| driver.mapping_at(memory.offset(at)).unwrap().devices;
    assert_eq!(devices(0), [0]);
    driver.set_access(memory, GRANULE, &[3, 1]).unwrap();
    assert_eq!(devices(0), [0, 1, 3], "those that had access keep it");
    driver.map(memory.offset(GRANULE), GRANULE, new()).unwrap();
    assert_eq!(devices(GRANULE), [], "no device may touch a new mapping, even next to one that peers may touch");
    driver.set_access(memory.offset(GRANULE), GRANULE, &[1]).unwrap();
    driver.memset(memory, 1, GRANULE, stream).unwrap();
    assert_eq!(driver.violations(), []);
    driver.memset(memory, 1, 2 * GRANULE, stream).unwrap();
    assert_eq!(driver.violations()[0].kind, ViolationKind::NoAccess, "a peer's access is not the device's own");
}

#[test]
fn other_devices_fault_on_memory_that_they_have_no_access_to() {
    let [first, second] = [0, 1].map(|ordinal| SimDriver::new(SimConfig::new(1 << 30).ordinal(ordinal)));
    let (memory, _) = first.mapped();
    let stream = second.stream();
    second.memset(memory, 1, 8, stream).unwrap();
    assert_eq!(second.violations()[0].kind, ViolationKind::NotAllocated);
    assert_eq!(code(second.synchronize()), Code::ILLEGAL_ADDRESS);
    assert_eq!(first.violations(), []);
}

#[test]
fn costs_of_calls_grow_with_the_mappings_that_they_cover() {
    let driver = device(0);
    let cost = |call: &dyn Fn()| {
        let before = driver.time_in_calls_ns();
        call();
        driver.time_in_calls_ns() - before
    };
    let memory = driver.reserve(20 * GRANULE, 0).unwrap();
    let map = |from: DevicePtr, pieces: u64, bytes: u64| {
        for piece in 0..pieces {
            let physical = driver.create_physical(bytes, PhysicalOptions::default()).unwrap();
            driver.map(from.offset(piece * bytes), bytes, physical).unwrap();
        }
    };
    let many = memory.offset(10 * GRANULE);
    let created = [cost(&|| map(memory, 1, 10 * GRANULE)), cost(&|| map(many, 10, GRANULE))];
    let access = [memory, many].map(|from| cost(&|| driver.set_access(from, 10 * GRANULE, &[0]).unwrap()));
    let unmapped = [memory, many].map(|from| cost(&|| driver.unmap(from, 10 * GRANULE).unwrap()));
    for [one, ten] in [created, access, unmapped] {
        assert!((5 * one..=10 * one).contains(&ten), "one piece: {one} ns, ten pieces: {ten} ns");
    }
}

#[test]
fn waiting_is_not_time_in_calls() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(GRANULE).unwrap());
    let before = (driver.now_ns(), driver.time_in_calls_ns());
    driver.memset(memory, 1, GRANULE, stream).unwrap();
    driver.stall(stream, std::time::Duration::from_secs(1)).unwrap();
    driver.free(memory).unwrap();
    assert!(driver.now_ns() - before.0 >= 1_000_000_000);
    assert!((50_000..1_000_000).contains(&(driver.time_in_calls_ns() - before.1)));
}

/// Two mappings of one granule, both with access.
fn mapped_twice(driver: &SimDriver) -> [DevicePtr; 2] {
    let (first, physical) = driver.mapped();
    let second = driver.reserve(GRANULE, 0).unwrap();
    driver.map(second, GRANULE, physical).unwrap();
    driver.set_access(second, GRANULE, &[0]).unwrap();
    [first, second]
}

#[test]
fn work_at_two_addresses_of_the_same_memory_must_be_ordered() {
    for ordered in [false, true] {
        let driver = device(0);
        let ([first, second], one, two) = (mapped_twice(&driver), driver.stream(), driver.stream());
        driver.memset(first, 1, GRANULE, one).unwrap();
        if ordered {
            driver.order(one, two);
        }
        driver.memset(second.offset(64), 2, 64, two).unwrap();
        let found: Vec<_> = driver.take_violations().into_iter().map(|found| (found.kind, found.range)).collect();
        let met = (first.0 + 64)..(first.0 + 128);
        let expected = if ordered { Vec::new() } else { vec![(ViolationKind::WriteWrite, met)] };
        assert_eq!(found, expected);
        assert_eq!(driver.get(first.offset(64), 1, two).unwrap(), [2], "one piece of memory");
    }
}

#[test]
fn an_address_may_go_while_work_uses_the_memory_at_another_one() {
    let driver = device(0);
    let ([first, second], one, two) = (mapped_twice(&driver), driver.stream(), driver.stream());
    driver.memset(first, 1, GRANULE, one).unwrap();
    driver.synchronize_stream(one).unwrap();
    driver.memset(second, 2, GRANULE, one).unwrap();
    driver.unmap(first, GRANULE).unwrap();
    assert_eq!(driver.take_violations(), []);
    driver.memset(second, 3, GRANULE, two).unwrap();
    assert_eq!(driver.take_violations().len(), 1);
}

#[test]
fn unordered_work_of_one_graph_at_two_addresses_is_found() {
    let driver = device(0);
    let ([first, second], one, two) = (mapped_twice(&driver), driver.stream(), driver.stream());
    driver.begin_capture(one).unwrap();
    driver.order(one, two);
    driver.memset(first, 1, GRANULE, one).unwrap();
    driver.memset(second, 2, GRANULE, two).unwrap();
    assert_eq!(driver.take_violations().len(), 1);
}

#[test]
fn live_blocks_share_no_physical_memory() {
    let driver = device(0);
    let ([first, second], stream) = (mapped_twice(&driver), driver.stream());
    let checks = driver.witness().unwrap();
    let block = |ptr| NewBlock { ptr, bytes: 64, tag: None, is_for_graphs: false, at: None };
    [first, second].into_iter().for_each(|ptr| checks.managed(ptr.range(GRANULE)));
    checks.begins(block(first));
    checks.ends(first, None);
    checks.begins(block(second));
    driver.memset(second, 1, 64, stream).unwrap();
    assert_eq!(driver.take_violations(), []);
    checks.begins(block(first));
    driver.memset(second, 1, 64, stream).unwrap();
    let found: Vec<ViolationKind> = driver.take_violations().into_iter().map(|found| found.kind).collect();
    assert_eq!(found, [ViolationKind::Aliased]);
}
