//! Exportable memory: physical memory of its own that goes back once it is done, on every backing,
//! and after every failure.

use aquifer_device::PhysicalOptions;
use aquifer_tests::prelude::*;

const FD: HandleKind = HandleKind::PosixFd;
const CAPACITY: u64 = 128 * MIB;

#[test]
fn it_is_one_piece_of_physical_memory_created_for_export() {
    let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "");
    let peers = Subject::peers(2);
    let with = |peers: &[Subject]| {
        let mut devices: Vec<_> = [&driver].into_iter().chain(peers).map(Subject::ordinal).collect();
        devices.sort_unstable();
        devices
    };
    peers.iter().skip(1).for_each(|peer| allocator.enable_peer_access(peer.ordinal()).unwrap());
    let shared = allocator.alloc_exportable(5 * MIB, FD, device.default_stream()).unwrap();
    let mapped = driver.mapping_at(shared.ptr()).unwrap();
    assert_eq!(
        (mapped.ptr, mapped.bytes, mapped.devices),
        (shared.ptr(), 6 * MIB, with(peers.get(1..).unwrap_or_default()))
    );
    assert_eq!(mapped.options, PhysicalOptions::default().rdma(mapped.options.rdma).exportable(FD));
    assert!(shared.handle().is_some());
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (6 * MIB, 6 * MIB));
    let segment = &allocator.snapshot().segments[0];
    assert_eq!((segment.address, segment.total_size, segment.active_size), (shared.ptr().0, 6 * MIB, 6 * MIB));
    peers.iter().for_each(|peer| allocator.enable_peer_access(peer.ordinal()).unwrap());
    assert_eq!(driver.mapping_at(shared.ptr()).unwrap().devices, with(&peers));
}

#[test]
fn it_goes_back_once_the_streams_that_used_it_are_done() {
    let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "");
    let (stream, side) = (device.stream().unwrap(), device.stream().unwrap());
    let shared = allocator.alloc_exportable(40 * MIB, FD, &stream).unwrap();
    let ptr = shared.ptr();
    driver.stall(&side, Duration::from_secs(1)).unwrap();
    side.wait_for(&stream.tick()).unwrap();
    shared.record_stream(&side).unwrap();
    side.fill(ptr, 1, 40 * MIB).unwrap();
    let calls = driver.calls_made();
    drop(shared);
    assert_eq!(driver.calls_made(), calls, "dropping it makes no driver call");
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 40 * MIB));
    assert!(driver.mapping_at(ptr).is_some(), "its last use is not done");
    let other = allocator.alloc_bytes(80 * MIB, &stream).unwrap();
    // Only its memory makes room for this.
    let more = allocator.alloc_bytes(20 * MIB, &stream).unwrap();
    assert!(driver.mapping_at(ptr).is_none());
    assert_eq!(allocator.memory_reserved(), 100 * MIB);
    drop((other, more));
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_reserved(), device.memory_info().unwrap().free), (0, 128 * MIB));
    driver.assert_no_violation();
}

#[test]
fn it_makes_room_like_any_other_request() {
    let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "limit_mb:100");
    let stream = device.default_stream();
    drop(allocator.alloc_bytes(90 * MIB, stream).unwrap());
    let shared = allocator.alloc_exportable(60 * MIB, FD, stream).unwrap();
    assert!(allocator.memory_reserved() <= 100 * MIB);
    let error = allocator.alloc_exportable(50 * MIB, FD, stream).unwrap_err();
    assert_eq!(error.report().unwrap().requested, 50 * MIB);
    let held = Mutex::new(Some(shared));
    let _reclaimer =
        allocator.register_reclaimer(0, "drop it", move |_| held.lock().unwrap().take().map_or(0, |old| old.bytes()));
    drop(allocator.alloc_exportable(50 * MIB, FD, stream).unwrap());
    driver.assert_no_violation();
}

#[test]
fn a_device_without_handles_says_what_is_missing() {
    let device = Subject::open(&SimConfig::parse("128MiB,export=off").unwrap()).device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let error = allocator.alloc_exportable(MIB, FD, device.default_stream()).unwrap_err();
    assert!(
        matches!(error, AllocError::Request(RequestError::Unsupported { what }) if what.contains("POSIX file descriptors")),
        "{error}"
    );
    assert_eq!(allocator.memory_reserved(), 0);
}

#[test]
fn segments_give_it_one_of_its_own() {
    let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "backing:segments");
    let stream = device.default_stream();
    let shared = allocator.alloc_exportable(5 * MIB, FD, stream).unwrap();
    let beside = allocator.alloc_bytes(5 * MIB, stream).unwrap();
    assert_eq!((shared.handle(), allocator.snapshot().segments.len()), (None, 2));
    drop(shared);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.snapshot().segments.len(), 1);
    drop(beside);
    assert!(allocator.alloc_exportable(0, FD, stream).unwrap().range().is_empty());
    driver.assert_no_violation();
}

#[test]
fn it_outlives_every_other_handle_of_the_allocator() {
    let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "");
    let shared = allocator.alloc_exportable(5 * MIB, FD, device.default_stream()).unwrap();
    let ptr = shared.ptr();
    drop(allocator);
    device.settle();
    assert!(driver.mapping_at(ptr).is_some());
    drop(shared);
    device.settle();
    assert_eq!(device.memory_info().unwrap().free, 128 * MIB);
}

#[test]
fn every_failing_call_is_rolled_back() {
    let operations = [
        Operation::Attribute,
        Operation::CreatePhysical,
        Operation::Reserve,
        Operation::Map,
        Operation::SetAccess,
        Operation::Unmap,
        Operation::ReleasePhysical,
        Operation::Unreserve,
    ];
    for (operation, code) in
        operations.into_iter().flat_map(|operation| [(operation, Code(999)), (operation, Code::OUT_OF_MEMORY)])
    {
        let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "");
        let stream = device.default_stream();
        driver.inject(Fault::Nth { operation: Some(operation), nth: 1, code });
        let first = allocator.alloc_exportable(30 * MIB, FD, stream);
        let at_first = first.is_err();
        drop(first);
        let emptied = allocator.empty_cache();
        driver.clear_faults();
        assert_eq!((allocator.memory_allocated(), allocator.limit()), (0, None), "{operation:?}");
        let second = allocator.alloc_exportable(90 * MIB, FD, stream).unwrap();
        assert_eq!(allocator.memory_allocated(), 90 * MIB, "{operation:?} {at_first} {emptied:?}");
        drop(second);
        allocator.empty_cache().unwrap();
        device.settle();
        let left = (allocator.memory_reserved(), device.memory_info().unwrap().free);
        assert_eq!(left, (0, 128 * MIB), "{operation:?} {code:?}");
        driver.assert_no_violation();
    }
}

#[test]
fn it_gets_addresses_that_cached_memory_holds() {
    let Bench { driver, device, allocator, .. } = Bench::new(CAPACITY, "");
    let stream = device.default_stream();
    drop(allocator.alloc_bytes(64 * MIB, stream).unwrap());
    let all = driver.addresses().unwrap();
    let wide = allocator.growable(all - allocator.fragmentation(0).address_bytes, stream).unwrap();
    let shared = allocator.alloc_exportable(2 * MIB, FD, stream).unwrap();
    drop((wide, shared));
    driver.assert_no_violation();
}

/// After the limit was lowered, and after others took their headroom: as much goes back as is in
/// the way, not as much as is asked for.
#[test]
fn all_that_is_cached_may_go_for_it() {
    for backing in BACKINGS {
        let full = |options: &str| {
            let bench = Bench::new(256 * MIB, &on(backing, options));
            drop((0..9).map(|_| bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap()).collect::<Vec<_>>());
            bench
        };
        let limited = full("");
        limited.allocator.set_limit(Some(100 * MIB));
        drop(limited.allocator.alloc_exportable(20 * MIB, FD, &limited.stream).unwrap());
        let crowded = full("headroom_mb:60");
        crowded.driver.set_other_process_bytes(60 * MIB);
        drop(crowded.allocator.alloc_exportable(20 * MIB, FD, &crowded.stream).unwrap());
    }
}
