//! Registered memory, and registered slabs.

use std::num::NonZeroUsize;

use aquifer_device::{Code, Operation, RequestError};
use aquifer_sim::Fault;

use super::*;

fn failing(operation: Operation, code: Code) -> Fault {
    Fault::Rate { operation: Some(operation), rate: 1.0, code }
}

#[test]
fn registered_memory_is_copied_in_place_and_given_back_when_idle() {
    let bench = Bench::new(PinnedConfig::default());
    bench.stream.fill(bench.memory, 6, 1 << 20).unwrap();
    let own = vec![0_u8; 1 << 20];
    let start = own.as_ptr();
    let mut buffer = bench.pool.register(own).unwrap();
    assert_eq!(address(&buffer), start.addr());
    bench.download(&mut buffer).unwrap();
    let own = buffer.into_vec::<u8>(1 << 20).unwrap();
    assert_eq!((own.as_ptr(), own[123_456]), (start, 6));
    assert_eq!(bench.pool.stats().num_waits, 1);
    assert_eq!(bench.pool.stats().active_bytes.current, 0);
    bench.check_over();
}

#[test]
fn a_registered_buffer_that_is_dropped_keeps_its_memory_until_the_device_is_done() {
    let bench = Bench::new(PinnedConfig::default());
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
    let bench = Bench::new(PinnedConfig::default());
    bench.sim.inject(failing(Operation::HostRegister, Code(712)));
    let (memory, error) = bench.pool.register(vec![7_u32; 5]).unwrap_err();
    assert!(matches!(error, TransferError::AlreadyPinned { bytes: 20, .. }), "{error}");
    assert_eq!(memory, [7; 5]);
    bench.sim.clear_faults();
    bench.pool.register(memory).unwrap();
    bench.check_over();
}

#[test]
fn memory_that_cannot_be_unregistered_stays_a_buffer() {
    let bench = Bench::new(PinnedConfig::default());
    let buffer = bench.pool.register(vec![7_u32; 5]).unwrap();
    bench.sim.inject(failing(Operation::HostUnregister, Code(999)));
    let (mut buffer, _) = buffer.into_vec::<u32>(5).unwrap_err();
    buffer.write().unwrap()[..4].copy_from_slice(&1_u32.to_ne_bytes());
    bench.sim.clear_faults();
    assert_eq!(buffer.into_vec::<u32>(5).unwrap(), [1, 7, 7, 7, 7]);
    bench.check_over();
}

#[test]
fn other_buffers_become_vectors_by_a_copy_and_empty_memory_can_be_registered() {
    let bench = Bench::new(PinnedConfig::default());
    assert_eq!(bench.pool.alloc_from(&[1, 2, 3], 1).unwrap().into_vec::<u8>(2).unwrap(), [1, 2]);
    // The values of a registered vector are not those of another type, and a block has no more than
    // its bytes.
    let registered = bench.pool.register(vec![5_u8; 8]).unwrap();
    let (registered, error) = registered.into_vec::<u64>(2).unwrap_err();
    assert!(matches!(error, TransferError::Request(RequestError::OutOfBounds { end: 16, len: 8, .. })), "{error}");
    assert_eq!(registered.into_vec::<u64>(1).unwrap(), [0x0505_0505_0505_0505]);
    let nothing = bench.pool.register(Vec::<u8>::with_capacity(10)).unwrap();
    assert!(nothing.into_vec::<u8>(0).unwrap().is_empty());
    bench.check_over();
}

#[test]
fn slabs_can_be_registered_memory() {
    let threads = NonZeroUsize::new(4).unwrap();
    let bench = Bench::new(PinnedConfig::default().register_threads(threads));
    let mut large = bench.pool.alloc(40 << 20, 1).unwrap();
    assert!(large.read().unwrap().iter().all(|&byte| byte == 0));
    assert!(address(&large).is_multiple_of(2 << 20), "it starts at a huge page");
    large.write().unwrap().fill(3);
    bench.upload(&large).unwrap();
    drop(large);
    let small = bench.pool.alloc(100, 1).unwrap();
    bench.stream.synchronize().unwrap();
    assert_eq!(bench.pool.empty_cache().unwrap(), 40 << 20);
    let calls = bench.device.driver_calls();
    assert_eq!((calls.of(Operation::HostAlloc), calls.of(Operation::HostRegister)), (0, 2));
    assert_eq!(calls.of(Operation::HostUnregister), 1);
    drop(small);
    bench.check_over();
}

#[test]
fn a_slab_that_cannot_be_registered_is_released() {
    let threads = NonZeroUsize::MIN;
    let bench = Bench::new(PinnedConfig::default().register_threads(threads));
    bench.sim.inject(failing(Operation::HostRegister, Code::OUT_OF_MEMORY));
    let error = bench.pool.alloc(100, 1).unwrap_err();
    assert!(matches!(&error, TransferError::OutOfPinned { source: Some(_), reserved: 0, .. }), "{error}");
    bench.sim.clear_faults();
    drop(bench.pool.alloc(100, 1).unwrap());
    bench.sim.inject(failing(Operation::HostUnregister, Code(999)));
    assert!(bench.pool.empty_cache().is_err());
    assert_eq!(bench.pool.stats().allocated_bytes.current, 2 << 20, "it stays in the pool");
    bench.sim.clear_faults();
    bench.check_over();
}
