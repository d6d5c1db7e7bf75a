//! What is pinned stays where it is: it is not moved, trimmed or released, whatever becomes of the
//! allocation.

use aquifer::memory::{AllocError, Allocation, Config};
use aquifer::{Allocator, Device};
use aquifer_tests::{MIB, Subject};

fn setup(options: &str) -> (Subject, Device, Allocator) {
    let driver = Subject::new(128 * MIB);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    (driver, device, allocator)
}

fn alloc(allocator: &Allocator, bytes: u64) -> Result<Allocation, AllocError> {
    allocator.alloc_bytes(bytes, allocator.device().default_stream())
}

#[test]
fn pinned_granules_do_not_move() {
    let (driver, _, allocator) = setup("");
    let blocks: Vec<Allocation> = (0..12).map(|_| alloc(&allocator, 10 * MIB).unwrap()).collect();
    let pins: Vec<_> = blocks.iter().map(|block| allocator.pin_mapping(block).unwrap()).collect();
    let (freed, live): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    drop(freed);
    // 68 MiB are free, but only 8 of them may move or come from the device.
    assert!(alloc(&allocator, 40 * MIB).unwrap_err().is_out_of_memory());
    assert!(pins.iter().all(|pin| driver.is_mapped(pin.range())));
    assert_eq!(allocator.stats().remaps, 0);
    drop(pins);
    let moved = alloc(&allocator, 40 * MIB).unwrap();
    assert!(allocator.stats().remaps > 0);
    drop((live, moved));
    driver.assert_no_violation();
}

#[test]
fn pinned_granules_are_not_trimmed_but_handed_out_again() {
    let (driver, _, allocator) = setup("");
    let block = alloc(&allocator, 9 * MIB).unwrap();
    let (ptr, pin) = (block.ptr(), allocator.pin_mapping(&block).unwrap());
    let again = allocator.pin_mapping(&block).unwrap();
    assert_eq!(pin.range(), ptr.0..ptr.0 + 10 * MIB);
    drop(block);
    drop(pin); // `again` still pins them
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.memory_reserved(), 10 * MIB);
    assert!(driver.is_mapped(again.range()));
    assert_eq!(alloc(&allocator, 9 * MIB).unwrap().ptr(), ptr);
    drop(again);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.memory_reserved(), 0);
}

#[test]
fn a_pinned_segment_is_not_released() {
    for options in [
        "backing:segments",
        "backing:segments,max_split_size_mb:20",
        "backing:segments,garbage_collection_threshold:0.1",
    ] {
        let (driver, _, allocator) = setup(options);
        let block = alloc(&allocator, 40 * MIB).unwrap();
        let (ptr, pin) = (block.ptr(), allocator.pin_mapping(&block).unwrap());
        assert_eq!(pin.range(), ptr.0..ptr.0 + 40 * MIB);
        drop(block);
        assert!(alloc(&allocator, 100 * MIB).unwrap_err().is_out_of_memory(), "{options}");
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.memory_reserved(), 40 * MIB, "{options}");
        drop(pin);
        drop(alloc(&allocator, 100 * MIB).unwrap());
        driver.assert_no_violation();
    }
}

#[test]
fn a_pin_keeps_the_allocator_open_and_is_refused_to_strangers() {
    let (driver, device, allocator) = setup("");
    let other = Allocator::new(&device, Config::default()).unwrap();
    let block = alloc(&allocator, MIB).unwrap();
    assert!(matches!(other.pin_mapping(&block), Err(AllocError::WrongAllocator { what: "allocation", .. })));
    let nothing = allocator.pin_mapping(&alloc(&allocator, 0).unwrap()).unwrap();
    assert_eq!(nothing.range(), 0..0);
    let pin = allocator.pin_mapping(&block).unwrap();
    drop((block, nothing, allocator));
    device.settle();
    assert!(driver.is_mapped(pin.range()));
    let range = pin.range();
    drop(pin);
    device.settle();
    assert!(!driver.is_mapped(range));
}
