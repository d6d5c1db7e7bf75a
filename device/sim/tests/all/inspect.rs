//! What can be asked without a driver call.

use aquifer_device::{CaptureStatus, Code, DevicePtr, Driver, RawGraph, RawStream};

use crate::common::{MIB, Short, code, device};

#[test]
fn allocations_are_found_by_any_address_in_them() {
    let driver = device(1);
    let stream = driver.stream();
    let (plain, pool) = (driver.alloc(MIB).unwrap(), driver.alloc_async(MIB, stream).unwrap());
    let calls = driver.calls_made();
    for ptr in [plain, pool] {
        assert_eq!(driver.allocation_at(ptr.offset(MIB - 1)), Some(ptr.range(MIB)));
        assert_eq!(driver.allocation_at(ptr.offset(MIB)), None);
    }
    assert_eq!((driver.held_bytes(), driver.calls_made()), (2 * MIB, calls), "nothing was called");
    driver.set_other_process_bytes(MIB);
    assert_eq!(driver.held_bytes(), 2 * MIB, "memory of other processes does not count");
    driver.free_async(pool, stream).unwrap();
    assert_eq!(driver.allocation_at(pool), None, "the program gave it back, whatever the stream has reached");
    assert_eq!(driver.allocation_at(DevicePtr(0)), None);
}

#[test]
fn captures_are_seen_numbered_and_broken() {
    let driver = device(1);
    let (stream, side) = (driver.stream(), driver.stream());
    assert_eq!(driver.capture_of(stream), None);
    driver.begin_capture(stream).unwrap();
    driver.begin_capture(side).unwrap();
    let numbers = [stream, side].map(|stream| driver.capture_of(stream).unwrap().number);
    assert_ne!(numbers[0], numbers[1]);
    driver.break_capture(stream);
    assert!(driver.capture_of(stream).unwrap().broken && !driver.capture_of(side).unwrap().broken);
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::Invalidated);
    assert_eq!(code(driver.end_capture(stream)), Code::CAPTURE_INVALIDATED);
    let memory = driver.alloc_async(MIB, driver.stream()).unwrap();
    driver.memset(memory, 1, MIB, side).unwrap();
    let graph = driver.end_capture(side).unwrap();
    assert_eq!((driver.graph_len(graph), driver.graph_len(RawGraph(7))), (Some(1), None));
    driver.break_capture(RawStream(7));
    assert_eq!(driver.capture_of(RawStream(7)), None);
}
