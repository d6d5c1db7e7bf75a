//! Pinned memory is not moved, trimmed or released, even after its allocation is dropped.

use aquifer_tests::prelude::*;

#[test]
fn pinned_granules_do_not_move() {
    let bench = Bench::new(128 * MIB, "");
    let blocks: Vec<Allocation> = (0..12).map(|_| bench.alloc(10 * MIB)).collect();
    let pins: Vec<_> = blocks.iter().map(|block| bench.allocator.pin_mapping(block).unwrap()).collect();
    let (freed, live): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    drop(freed);
    // 68 MiB are free, but only 8 of them may move or come from the device.
    assert!(bench.refused(40 * MIB).is_out_of_memory());
    assert!(pins.iter().all(|pin| bench.driver.is_mapped(pin.range())));
    assert_eq!(bench.allocator.stats().remaps, 0);
    drop(pins);
    let moved = bench.alloc(40 * MIB);
    assert!(bench.allocator.stats().remaps > 0);
    drop((live, moved));
    bench.driver.assert_no_violation();
}

#[test]
fn pinned_granules_are_not_trimmed_but_handed_out_again() {
    let bench = Bench::new(128 * MIB, "");
    let block = bench.alloc(9 * MIB);
    let (ptr, pin) = (block.ptr(), bench.allocator.pin_mapping(&block).unwrap());
    let again = bench.allocator.pin_mapping(&block).unwrap();
    assert_eq!(pin.range(), ptr.0..ptr.0 + 10 * MIB);
    drop(block);
    drop(pin); // `again` still pins them
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.allocator.memory_reserved(), 10 * MIB);
    assert!(bench.driver.is_mapped(again.range()));
    assert_eq!(bench.alloc(9 * MIB).ptr(), ptr);
    drop(again);
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.allocator.memory_reserved(), 0);
}

#[test]
fn a_pinned_segment_is_not_released() {
    let bench = Bench::new(128 * MIB, "backing:segments");
    let block = bench.alloc(40 * MIB);
    let (ptr, pin) = (block.ptr(), bench.allocator.pin_mapping(&block).unwrap());
    assert_eq!(pin.range(), ptr.0..ptr.0 + 40 * MIB);
    drop(block);
    assert!(bench.refused(100 * MIB).is_out_of_memory());
    bench.allocator.empty_cache().unwrap();
    assert_eq!(bench.allocator.memory_reserved(), 40 * MIB);
    drop(pin);
    drop(bench.alloc(100 * MIB));
    bench.driver.assert_no_violation();
}

#[test]
fn a_pin_keeps_the_allocator_open_and_is_refused_to_strangers() {
    let bench = Bench::new(128 * MIB, "");
    let other = Allocator::new(&bench.device, Config::default()).unwrap();
    let block = bench.alloc(MIB);
    assert!(matches!(other.pin_mapping(&block), Err(AllocError::WrongAllocator { what: "allocation", .. })));
    let nothing = bench.allocator.pin_mapping(&bench.alloc(0)).unwrap();
    assert_eq!(nothing.range(), 0..0);
    let pin = bench.allocator.pin_mapping(&block).unwrap();
    let Bench { driver, device, allocator, .. } = bench;
    drop((block, nothing, allocator));
    device.settle();
    assert!(driver.is_mapped(pin.range()));
    let range = pin.range();
    drop(pin);
    device.settle();
    assert!(!driver.is_mapped(range));
}
