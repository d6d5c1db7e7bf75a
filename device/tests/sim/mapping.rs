//! The rules of physical memory, reservations and mappings.

use aquifer_device::sim::{SimConfig, SimDriver, ViolationKind};
use aquifer_device::{Attribute, Code, Driver, ErrorKind, RawPhysical};

use crate::common::{GRANULE, Short, code, device};

#[test]
fn data_stays_with_physical_memory_when_it_moves() {
    let driver = device(0);
    let (stream, (first, physical)) = (driver.stream(), driver.mapped());
    driver.put(first.offset(5), b"here", stream).unwrap();
    driver.synchronize().unwrap();
    driver.unmap(first, GRANULE).unwrap();
    let second = driver.reserve(2 * GRANULE).unwrap();
    driver.map(second.offset(GRANULE), GRANULE, physical).unwrap();
    driver.set_access(second.offset(GRANULE), GRANULE, &[0]).unwrap();
    assert_eq!(driver.get(second.offset(GRANULE + 5), 4, stream).unwrap(), b"here");
    assert_eq!(driver.violations(), []);
}

#[test]
fn work_may_span_neighbouring_mappings() {
    let driver = device(0);
    let stream = driver.stream();
    let memory = driver.reserve(2 * GRANULE).unwrap();
    for place in [memory.offset(GRANULE), memory] {
        driver.map(place, GRANULE, driver.create_physical(GRANULE).unwrap()).unwrap();
    }
    driver.set_access(memory, 2 * GRANULE, &[0]).unwrap();
    driver.put(memory.offset(GRANULE - 2), b"span", stream).unwrap();
    assert_eq!(driver.get(memory.offset(GRANULE - 2), 4, stream).unwrap(), b"span");
    assert_eq!(driver.violations(), []);
}

#[test]
fn maps_that_break_a_rule_are_refused_and_change_nothing() {
    let driver = device(0);
    let (memory, physical) = (driver.reserve(3 * GRANULE).unwrap(), driver.create_physical(2 * GRANULE).unwrap());
    let refused = |offset: u64, bytes, physical| code(driver.map(memory.offset(offset), bytes, physical));
    assert_eq!(refused(0, GRANULE, physical), Code::INVALID_VALUE, "not the whole handle");
    assert_eq!(refused(2 * GRANULE, 2 * GRANULE, physical), Code::INVALID_VALUE, "past the reservation");
    assert_eq!(refused(512, 2 * GRANULE, physical), Code::INVALID_VALUE, "not aligned");
    assert_eq!(refused(0, GRANULE, RawPhysical(99)), Code::INVALID_HANDLE);
    driver.map(memory, 2 * GRANULE, physical).unwrap();
    assert_eq!(refused(0, 2 * GRANULE, physical), Code::INVALID_VALUE, "mapped already");
    let other = driver.create_physical(GRANULE).unwrap();
    assert_eq!(refused(GRANULE, GRANULE, other), Code::INVALID_VALUE, "overlaps");
    let plain = driver.alloc(2 * GRANULE).unwrap();
    assert_eq!(code(driver.map(plain, GRANULE, other)), Code::INVALID_VALUE, "no reservation");
    driver.map(memory.offset(2 * GRANULE), GRANULE, other).unwrap();
}

#[test]
fn only_whole_mappings_are_unmapped_or_given_access() {
    let driver = device(0);
    let memory = driver.reserve(4 * GRANULE).unwrap();
    driver.map(memory, 2 * GRANULE, driver.create_physical(2 * GRANULE).unwrap()).unwrap();
    driver.map(memory.offset(2 * GRANULE), GRANULE, driver.create_physical(GRANULE).unwrap()).unwrap();
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
        let driver = device(0);
        let (stream, memory) = (driver.stream(), driver.reserve(GRANULE).unwrap());
        driver.map(memory, GRANULE, driver.create_physical(GRANULE).unwrap()).unwrap();
        if !devices.is_empty() {
            driver.set_access(memory, GRANULE, &devices).unwrap();
        }
        driver.memset(memory, 0, 8, stream).unwrap();
        assert_eq!(driver.violations()[0].kind, ViolationKind::NoAccess);
        assert_eq!(code(driver.synchronize()), Code::ILLEGAL_ADDRESS);
    }
}

#[test]
fn unmapped_memory_is_named_with_who_unmapped_it() {
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
    assert_eq!(driver.create_physical(GRANULE).unwrap(), physical, "handles come back");
}

#[test]
fn mapping_calls_do_not_wait_for_work() {
    let driver = device(0);
    let (stream, (memory, _)) = (driver.stream(), driver.mapped());
    driver.memset(memory, 1, GRANULE, stream).unwrap();
    driver.stall(stream, std::time::Duration::from_secs(1)).unwrap();
    driver.unmap(memory, GRANULE).unwrap();
    let other = driver.create_physical(GRANULE).unwrap();
    driver.map(memory, GRANULE, other).unwrap();
    driver.release_physical(other).unwrap();
    assert!(driver.now_ns() < 10_000_000);
    assert!(!driver.query_stream(stream).unwrap());
}

#[test]
fn addresses_are_finite_and_their_exhaustion_is_its_own_error() {
    let driver = device(0);
    let all = driver.reserve(4 << 30).unwrap();
    let error = driver.reserve(GRANULE).unwrap_err();
    assert_eq!((error.code, error.kind), (Code::OUT_OF_MEMORY, ErrorKind::OutOfAddresses));
    assert!(!error.is_out_of_memory());
    driver.unreserve(all, 4 << 30).unwrap();
    assert_eq!(driver.reserve(GRANULE).unwrap(), all);
    assert_eq!(code(driver.reserve(1)), Code::INVALID_VALUE);
    assert_eq!(driver.reserve(u64::MAX - GRANULE + 1).unwrap_err().kind, ErrorKind::OutOfAddresses);
}

#[test]
fn physical_memory_comes_from_the_same_capacity() {
    let driver = device(0);
    driver.alloc((1 << 30) - GRANULE).unwrap();
    let last = driver.create_physical(GRANULE).unwrap();
    assert!(driver.create_physical(GRANULE).unwrap_err().is_out_of_memory());
    driver.release_physical(last).unwrap();
    assert_eq!(code(driver.create_physical(GRANULE + 1)), Code::INVALID_VALUE);
    driver.create_physical(GRANULE).unwrap();
}

#[test]
fn devices_that_cannot_map_say_so() {
    let driver = SimDriver::new(SimConfig::parse("h100,vmm=off").unwrap());
    assert_eq!(driver.info().granularity_bytes, None);
    assert_eq!(driver.attribute(Attribute::VirtualMemoryManagement).unwrap(), 0);
    assert_eq!(driver.reserve(GRANULE).unwrap_err().kind, ErrorKind::Unsupported);
    assert_eq!(driver.create_physical(GRANULE).unwrap_err().kind, ErrorKind::Unsupported);
}
