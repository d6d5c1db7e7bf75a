//! Registered memory.

use aquifer_device::{Code, Operation};
use aquifer_sim::Fault;

use super::*;

fn failing(operation: Operation, code: Code) -> Fault {
    Fault::Rate { operation: Some(operation), rate: 1.0, code }
}

#[test]
fn registered_memory_is_copied_in_place_and_given_back_when_idle() {
    let bench = Bench::new();
    bench.stream.fill(bench.memory, 6, 1 << 20).unwrap();
    let own = vec![0_u8; 1 << 20];
    let start = own.as_ptr();
    let mut buffer = bench.pool.register(own).unwrap();
    assert_eq!(address(&buffer), start.addr());
    bench.download(&mut buffer).unwrap();
    let own = buffer.into_vec().unwrap();
    assert_eq!((own.as_ptr(), own[123_456]), (start, 6));
    assert_eq!(bench.pool.stats().num_waits, 1);
    assert_eq!(bench.pool.stats().active_bytes.current, 0);
    bench.check_over();
}

#[test]
fn a_registered_buffer_that_is_dropped_keeps_its_memory_until_the_device_is_done() {
    let bench = Bench::new();
    let buffer = bench.pool.register(vec![1_u8; 1 << 20]).unwrap();
    bench.upload(&buffer).unwrap();
    assert_eq!(bench.calls_in(|| drop(buffer)).total(), 0);
    let calls = bench.calls_in(|| bench.device.settle());
    assert_eq!(calls.of(Operation::HostUnregister), 1);
    let mut bytes = [0; 4];
    bench.stream.download_blocking(&mut bytes, bench.memory).unwrap();
    assert_eq!(bytes, [1; 4]);
    bench.check_over();
}

#[test]
fn memory_in_a_locked_page_is_refused_and_returned() {
    let bench = Bench::new();
    bench.sim.inject(failing(Operation::HostRegister, Code(712)));
    let Returned { memory, error } = *bench.pool.register(vec![7_u32; 5]).unwrap_err();
    assert!(matches!(error, TransferError::AlreadyPinned { bytes: 20, .. }), "{error}");
    assert_eq!(memory, [7; 5]);
    bench.sim.clear_faults();
    bench.pool.register(memory).unwrap();
    bench.check_over();
}

#[test]
fn memory_that_cannot_be_unregistered_stays_a_buffer() {
    let bench = Bench::new();
    let buffer = bench.pool.register(vec![7_u32; 5]).unwrap();
    bench.sim.inject(failing(Operation::HostUnregister, Code(999)));
    let Returned { memory: mut buffer, .. } = *buffer.into_vec().unwrap_err();
    buffer.write().unwrap()[0] = 1;
    bench.sim.clear_faults();
    assert_eq!(buffer.into_vec().unwrap(), [1, 7, 7, 7, 7]);
    bench.check_over();
}

#[test]
fn other_buffers_become_vectors_by_a_copy_and_empty_memory_can_be_registered() {
    let bench = Bench::new();
    assert_eq!(bench.pool.alloc_from(&[1, 2, 3]).unwrap().into_vec().unwrap(), [1, 2, 3]);
    let nothing = bench.pool.register(Vec::<u8>::with_capacity(10)).unwrap();
    assert!(nothing.into_vec().unwrap().is_empty());
    bench.check_over();
}
