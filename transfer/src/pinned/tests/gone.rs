//! The memory of pools and registered buffers that were dropped.

use std::time::Duration;

use aquifer_device::Code;
use aquifer_sim::Fault;

use super::*;

impl Bench {
    /// Slabs and registered memory that the system has not got back.
    fn page_locked(&self) -> u64 {
        let calls = self.device.driver_calls();
        let locked = calls.of(Operation::HostAlloc) + calls.of(Operation::HostRegister);
        locked - calls.of(Operation::HostFree) - calls.of(Operation::HostUnregister)
    }

    /// Work on the stream that the device is not done with for long.
    fn keep_busy(&self) {
        self.sim.stall(self.stream.raw(), Duration::from_secs(1)).unwrap();
    }

    fn new_pool(&self) -> PinnedPool {
        PinnedPool::new(&self.device)
    }
}

#[test]
fn the_pool_outlives_its_handles_and_releases_finished_memory() {
    let mut bench = Bench::new();
    let (done, held) = (bench.pool.alloc_zeroed::<u8>(16 << 20).unwrap(), bench.pool.alloc::<u8>(1 << 20).unwrap());
    bench.upload(&done).unwrap();
    bench.stream.synchronize().unwrap();
    drop(done);
    bench.pool = bench.new_pool();
    assert_eq!(bench.page_locked(), 2, "a buffer is left");
    let calls = bench.calls_in(|| drop(held));
    assert_eq!((bench.page_locked(), calls.of(Operation::Synchronize)), (0, 0));
    bench.check_over();
}

#[test]
fn memory_in_flight_stays_with_the_device_until_a_pool_needs_memory() {
    let mut bench = Bench::new();
    let buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    bench.keep_busy();
    bench.upload(&buffer).unwrap();
    bench.pool = bench.new_pool();
    let calls = bench.calls_in(|| drop(buffer));
    assert_eq!((bench.page_locked(), calls.of(Operation::SynchronizeEvent)), (1, 0), "nothing is waited for");
    let calls = bench.calls_in(|| drop(bench.pool.alloc::<u8>(16 << 20).unwrap()));
    assert_eq!((bench.page_locked(), calls.of(Operation::Synchronize)), (2, 0), "it is in flight still");
    bench.stream.synchronize().unwrap();
    let calls = bench.calls_in(|| drop(bench.pool.alloc::<u8>(32 << 20).unwrap()));
    assert_eq!((bench.page_locked(), calls.of(Operation::Synchronize)), (2, 0), "one came and one went");
    bench.check_over();
    assert_eq!(bench.page_locked(), 0);
}

#[test]
fn pools_that_are_made_and_dropped_do_not_add_up() {
    let mut bench = Bench::new();
    for round in 0..100 {
        let buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
        bench.upload(&buffer).unwrap();
        drop(buffer);
        if round % 2 == 0 {
            bench.stream.synchronize().unwrap();
        }
        bench.pool = bench.new_pool();
        assert!(bench.page_locked() <= 2, "round {round}: {} slabs", bench.page_locked());
    }
    bench.check_over();
}

#[test]
fn dropped_registered_memory_is_bounded_and_its_drop_does_not_wait() {
    let mut bench = Bench::new();
    for round in 0..60 {
        bench.pool = bench.new_pool();
        drop(bench.pool.alloc::<u8>(1 << 20).unwrap());
        let buffer = bench.pool.register(vec![0_u8; 3 << 20]).unwrap();
        bench.upload(&buffer).unwrap();
        bench.stream.synchronize().unwrap();
        assert_eq!(bench.calls_in(|| drop(buffer)).total(), 0);
        let none = bench.new_pool();
        let pool = std::mem::replace(&mut bench.pool, none);
        assert_eq!(bench.calls_in(|| drop(pool)).of(Operation::HostUnregister), 0);
        assert!(bench.page_locked() <= 30, "round {round}: {} pieces", bench.page_locked());
    }
    bench.check_over();
    assert_eq!(bench.page_locked(), 0);
}

#[test]
fn no_memory_is_released_while_a_stream_captures() {
    let mut bench = Bench::new();
    drop(bench.pool.alloc::<u8>(1 << 20).unwrap());
    let other = bench.device.stream().unwrap();
    let capture = other.begin_capture().unwrap();
    let none = bench.new_pool();
    let pool = std::mem::replace(&mut bench.pool, none);
    assert_eq!(bench.calls_in(|| drop(pool)).total(), 0);
    let buffer = bench.pool.alloc::<u8>(1 << 20).unwrap();
    assert_eq!(bench.page_locked(), 2);
    drop(capture.end().unwrap());
    drop((bench.pool.alloc::<u8>(16 << 20).unwrap(), buffer));
    assert_eq!(bench.page_locked(), 2);
    bench.check_over();
}

#[test]
fn a_system_without_memory_gets_memory_in_flight_back() {
    let mut bench = Bench::new();
    let buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    bench.keep_busy();
    bench.upload(&buffer).unwrap();
    bench.pool = bench.new_pool();
    drop(buffer);
    bench.sim.inject(Fault::Nth { operation: Some(Operation::HostAlloc), nth: 1, code: Code::OUT_OF_MEMORY });
    drop(bench.pool.alloc::<u8>(1 << 20).unwrap());
    assert_eq!(bench.page_locked(), 2, "the refused call is counted: one slab is left");
    bench.check_over();
}
