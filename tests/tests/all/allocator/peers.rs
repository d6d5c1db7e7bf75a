//! Peers: access to every mapping, present and future, whatever moves or fails meanwhile. On one
//! GPU there are none, and nothing to test.

use std::thread;

use aquifer_tests::prelude::*;

const CAPACITY: u64 = 256 * MIB;

/// Ordinals of devices, ascending.
fn ordinals<'a, I: IntoIterator<Item = &'a Subject>>(devices: I) -> Vec<u32> {
    let mut ordinals: Vec<_> = devices.into_iter().map(Subject::ordinal).collect();
    ordinals.sort_unstable();
    ordinals
}

/// The devices that may touch all granules of the allocator's segments.
fn devices_with_access(driver: &Subject, allocator: &Allocator) -> Vec<Vec<u32>> {
    let segments = allocator.snapshot().segments;
    let granules =
        segments.iter().flat_map(|segment| (0..segment.total_size).step_by(2 << 20).map(|at| segment.address + at));
    granules.map(|at| driver.mapping_at(DevicePtr(at)).unwrap().devices).collect()
}

/// Live blocks with free ones in between.
fn fragments(allocator: &Allocator) -> Vec<Allocation> {
    let stream = allocator.device().default_stream();
    let blocks: Vec<_> = (0..20).map(|_| allocator.alloc_bytes(10 * MIB, stream).unwrap()).collect();
    blocks.into_iter().enumerate().filter(|(at, _)| at % 2 == 0).map(|(_, block)| block).collect()
}

#[test]
fn all_mappings_are_accessible_now_and_later() {
    let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "");
    let peers = Subject::peers(2);
    let [first, second] = &peers[..] else { return };
    let live = fragments(allocator);
    allocator.enable_peer_access(first.ordinal()).unwrap();
    let both = ordinals([driver, first]);
    assert!(devices_with_access(driver, allocator).iter().all(|devices| *devices == both));
    let moved = allocator.alloc_bytes(80 * MIB, device.default_stream()).unwrap();
    assert!(allocator.stats().remaps > 0);
    allocator.enable_peer_access(second.ordinal()).unwrap();
    drop(live);
    allocator.empty_cache().unwrap();
    let grown = allocator.alloc_bytes(100 * MIB, device.default_stream()).unwrap();
    let all = ordinals([driver, first, second]);
    assert!(devices_with_access(driver, allocator).iter().all(|devices| *devices == all));
    let calls = driver.calls_made();
    for ordinal in all {
        allocator.enable_peer_access(ordinal).unwrap();
    }
    assert_eq!(driver.calls_made(), calls, "again is nothing");
    drop((moved, grown));
}

#[test]
fn memory_whose_frame_was_split_stays_accessible() {
    let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "frame_mb:16,split_frames:on");
    let [peer] = &Subject::peers(1)[..] else { return };
    allocator.enable_peer_access(peer.ordinal()).unwrap();
    let stream = device.default_stream();
    drop(allocator.alloc_bytes(64 * MIB, stream).unwrap());
    allocator.set_limit(Some(allocator.memory_reserved() + 2 * MIB));
    let blocks: Vec<_> = (0..32).map(|_| allocator.alloc_bytes(2 * MIB, stream).unwrap()).collect();
    let live: Vec<_> = blocks.into_iter().step_by(8).collect();
    let large = allocator.alloc_bytes(56 * MIB, stream).unwrap();
    assert!(allocator.stats().frames_split > 0);
    let both = ordinals([driver, peer]);
    assert!(devices_with_access(driver, allocator).iter().all(|devices| *devices == both));
    drop((live, large));
}

#[test]
fn a_failure_leaves_it_off_and_can_be_tried_again() {
    let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "");
    let peers = Subject::peers(1);
    let [peer] = &peers[..] else { return };
    let live = fragments(allocator);
    driver.inject(Fault::Nth { operation: Some(Operation::SetAccess), nth: 1, code: Code(217) });
    assert!(matches!(allocator.enable_peer_access(peer.ordinal()), Err(AllocError::Device(_))));
    drop(live);
    allocator.empty_cache().unwrap();
    let block = allocator.alloc_bytes(MIB, device.default_stream()).unwrap();
    assert_eq!(driver.mapping_at(block.ptr()).unwrap().devices, [driver.ordinal()]);
    allocator.enable_peer_access(peer.ordinal()).unwrap();
    assert_eq!(driver.mapping_at(block.ptr()).unwrap().devices, ordinals([driver, peer]));
}

#[test]
fn an_unreachable_peer_is_found_out_before_anything_is_mapped() {
    let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "");
    let peers = Subject::peers(1);
    let [peer] = &peers[..] else { return };
    let free = device.memory_info().unwrap().free;
    driver.inject(Fault::Nth { operation: Some(Operation::SetAccess), nth: 1, code: Code(217) });
    assert!(
        matches!(allocator.enable_peer_access(peer.ordinal()), Err(AllocError::Device(error)) if error.operation == Operation::SetAccess)
    );
    assert_eq!(device.memory_info().unwrap().free, free);
    allocator.enable_peer_access(peer.ordinal()).unwrap();
    let block = allocator.alloc_bytes(MIB, device.default_stream()).unwrap();
    assert_eq!(driver.mapping_at(block.ptr()).unwrap().devices, ordinals([driver, peer]));
}

#[test]
fn a_device_that_does_not_exist_is_no_peer() {
    let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "");
    for live in [false, true] {
        let block = live.then(|| allocator.alloc_bytes(MIB, device.default_stream()).unwrap());
        for ordinal in [77, u32::MAX] {
            let error = allocator.enable_peer_access(ordinal).unwrap_err();
            assert!(matches!(&error, AllocError::Device(error) if error.operation == Operation::SetAccess), "{error}");
        }
        let later = allocator.alloc_bytes(30 * MIB, device.default_stream()).unwrap();
        assert_eq!(driver.mapping_at(later.ptr()).unwrap().devices, [driver.ordinal()]);
        drop((block, later));
    }
}

#[test]
fn remaps_meanwhile_are_not_missed() {
    let peers = Subject::peers(1);
    let [peer] = &peers[..] else { return };
    for round in 0..20 {
        let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "");
        let streams: Vec<_> = (0..2).map(|_| device.stream().unwrap()).collect();
        thread::scope(|scope| {
            for stream in &streams {
                scope.spawn(move || {
                    let mut held = Vec::new();
                    for step in 0..60_u64 {
                        held.extend(allocator.alloc_bytes((1 + (step * 7 + round) % 23) * MIB, stream));
                        if step % 3 == 0 {
                            drop(held.remove(0));
                        }
                        if held.len() > 8 {
                            drop(held.swap_remove(3));
                            drop(held.pop());
                        }
                    }
                });
            }
            scope.spawn(|| allocator.enable_peer_access(peer.ordinal()).unwrap());
        });
        let (all, both) = (allocator.alloc_bytes(64 * MIB, &streams[0]).unwrap(), ordinals([driver, peer]));
        assert!(devices_with_access(driver, allocator).iter().all(|devices| *devices == both), "round {round}");
        drop(all);
        driver.assert_no_violation();
    }
}

#[test]
fn a_device_that_is_just_full_may_have_peers() {
    let Bench { driver, device, allocator, .. } = &Bench::new(CAPACITY, "");
    let peers = Subject::peers(1);
    let [peer] = &peers[..] else { return };
    let stream = device.default_stream();
    let mut cache = allocator.growable(256 * MIB, stream).unwrap();
    cache.grow_to(256 * MIB, stream).unwrap();
    cache.shrink_to(0, stream).unwrap();
    stream.synchronize().unwrap();
    // All memory is this allocator's, and mapped nowhere.
    let other = allocator.growable(MIB, stream).unwrap();
    allocator.enable_peer_access(peer.ordinal()).unwrap();
    drop((cache, other));
    let block = allocator.alloc_bytes(10 * MIB, stream).unwrap();
    assert_eq!(driver.mapping_at(block.ptr()).unwrap().devices, ordinals([driver, peer]));
}
