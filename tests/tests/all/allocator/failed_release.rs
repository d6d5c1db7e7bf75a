//! Segments that the driver refuses to take back stay what they were: cached, and in order.

use std::time::Duration;

use aquifer::device::sim::Fault;
use aquifer::memory::Config;
use aquifer::{Allocator, Device};
use aquifer_device::{Code, Operation};
use aquifer_tests::Subject;

fn setup() -> (Subject, Device, Allocator) {
    let driver = Subject::new(1 << 30);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::parse("history:100,backing:segments").unwrap()).unwrap();
    // As while another thread captures a graph: refused, without waiting for the device.
    driver.inject(Fault::Rate { operation: Some(Operation::Free), rate: 1.0, code: Code::CAPTURE_IMPLICIT });
    (driver, device, allocator)
}

#[test]
fn other_streams_still_wait_for_its_last_use() {
    let (driver, device, allocator) = setup();
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    driver.stall(&one, Duration::from_secs(1)).unwrap();
    let first = allocator.alloc_bytes(40 << 20, &one).unwrap();
    one.fill(first.ptr(), 1, 64).unwrap();
    drop(first);
    assert_eq!(allocator.empty_cache().unwrap(), 0, "nothing goes while somebody captures");
    driver.clear_faults();
    assert_eq!(allocator.memory_reserved(), 40 << 20);
    // Something of another stream that must be asked for makes the search look at every stream's
    // blocks.
    let three = device.stream().unwrap();
    driver.stall(&three, Duration::from_secs(1)).unwrap();
    drop(allocator.alloc_bytes(60 << 20, &three).unwrap());
    let second = allocator.alloc_bytes(40 << 20, &two).unwrap();
    two.fill(second.ptr(), 2, 64).unwrap();
    driver.assert_no_violation();
}

#[test]
fn it_still_belongs_to_the_stream_that_used_it_last() {
    let (driver, device, allocator) = setup();
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    driver.stall(&two, Duration::from_secs(1)).unwrap();
    let first = allocator.alloc_bytes(40 << 20, &one).unwrap();
    two.wait_for(&one.tick()).unwrap();
    two.fill(first.ptr(), 1, 64).unwrap();
    first.drop_on(&two).unwrap();
    assert_eq!(allocator.empty_cache().unwrap(), 0, "nothing goes while somebody captures");
    driver.clear_faults();
    let second = allocator.alloc_bytes(40 << 20, &one).unwrap();
    one.fill(second.ptr(), 2, 64).unwrap();
    driver.assert_no_violation();
}

#[test]
fn statistics_and_snapshot_count_it() {
    let (driver, device, allocator) = setup();
    drop(allocator.alloc_bytes(40 << 20, device.default_stream()).unwrap());
    drop(allocator.alloc_bytes(1000, device.default_stream()).unwrap());
    assert_eq!(allocator.empty_cache().unwrap(), 0, "nothing goes while somebody captures");
    driver.clear_faults();
    let stats = allocator.stats();
    let totals = allocator.snapshot().totals().all;
    assert_eq!((totals.segment, totals.reserved_bytes), (2, 42 << 20));
    assert_eq!((stats.segment.all.current, stats.reserved_bytes.all.current), (2, 42 << 20));
    assert_eq!(allocator.empty_cache().unwrap(), 42 << 20);
}
